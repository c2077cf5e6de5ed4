//! The matrix as a table for a terminal.

use penstock_policy::engine::Engine;
use penstock_policy::model::ObjectKey;

use super::Matrix;
use crate::style;

/// The combined verdict of a cell for all ports.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cell {
    Every,
    Some,
    No,
    /// The same pod.
    Itself,
    /// No such flow.
    Nothing,
}

/// A row a pod, by namespaces; columns are the same pods by their numbers.
pub(super) fn render(engine: &Engine, matrix: &Matrix) -> String {
    let digits = matrix.pods.len().to_string().len();
    let width = matrix.pods.iter().map(|pod| pod.name.len()).max().unwrap_or(0);
    let margin = " ".repeat(2 + digits + 1 + width);
    let numbers = (1..=matrix.pods.len()).map(|number| format!("  {number:>digits$}")).collect::<String>();
    let services = matrix.services.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let mut text = format!("From each pod (row) to each pod (column) on {services}:\n\n");
    text += &format!("{margin}{}\n", style::faint(&numbers));
    let (mut namespace, mut partly) = (None, false);
    for (row, pod) in matrix.pods.iter().enumerate() {
        if namespace != Some(&pod.namespace) {
            namespace = Some(&pod.namespace);
            text += &format!("{}\n", style::strong(&pod.namespace));
        }
        let cells: Vec<Cell> = (0..matrix.pods.len()).map(|column| cell(engine, matrix, row, column)).collect();
        partly |= cells.contains(&Cell::Some);
        let cells: String =
            cells.into_iter().map(|cell| format!("  {}{}", " ".repeat(digits - 1), symbol(cell))).collect();
        text += &format!("  {:>digits$} {:width$}{cells}\n", row + 1, pod.name);
    }
    text += &legend(matrix.services.len(), partly);
    for (pod, why) in &matrix.unseen {
        let ObjectKey { namespace, name } = pod;
        text += &style::faint(format!("not shown: {namespace}/{name} {why}"));
        text += "\n";
    }
    text
}

fn legend(services: usize, partly: bool) -> String {
    let (every, some, no) = (symbol(Cell::Every), symbol(Cell::Some), symbol(Cell::No));
    match services {
        1 if partly => format!("\n{every} allowed  {some} in one address family  {no} denied  = itself\n"),
        1 => format!("\n{every} allowed  {no} denied  = itself\n"),
        _ => format!(
            "\n{every} all ports allowed  {some} some  {no} none  = itself   (--port PORT/PROTOCOL for one of them)\n"
        ),
    }
}

fn cell(engine: &Engine, matrix: &Matrix, row: usize, column: usize) -> Cell {
    if row == column {
        return Cell::Itself;
    }
    let flows = matrix.services.iter().flat_map(|service| matrix.flows(engine, row, column, service));
    let (mut allowed, mut denied) = (false, false);
    for flow in flows {
        match engine.evaluate(&flow).is_allowed() {
            true => allowed = true,
            false => denied = true,
        }
    }
    match (allowed, denied) {
        (true, false) => Cell::Every,
        (true, true) => Cell::Some,
        (false, true) => Cell::No,
        (false, false) => Cell::Nothing,
    }
}

fn symbol(cell: Cell) -> String {
    match cell {
        Cell::Every => style::good("+"),
        Cell::Some => style::mixed("~"),
        Cell::No => style::bad("."),
        Cell::Itself => style::faint("="),
        Cell::Nothing => " ".to_owned(),
    }
}
