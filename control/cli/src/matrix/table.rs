//! The matrix as a table for a terminal.

use penstock_policy::model::ObjectKey;

use super::rows::{Cell, Matrix};
use crate::style;

/// A row for equal pods, by namespaces; columns are the same by their numbers. Where pods are chosen: for each of them a table of
/// all pods, with a column for each direction.
pub(super) fn render(matrix: &mut Matrix) -> String {
    let mut text = match matrix.rows.iter().all(|row| row.is_chosen) {
        true => square(matrix),
        false => of_chosen(matrix),
    };
    text += &equal_pods(matrix);
    for (ObjectKey { namespace, name }, why) in &matrix.unseen {
        text += &style::faint(format!("not shown: {namespace}/{name} {why}"));
        text += "\n";
    }
    text
}

fn square(matrix: &mut Matrix) -> String {
    let columns: Vec<usize> = (0..matrix.rows.len()).collect();
    let digits = columns.len().to_string().len();
    let numbers: Vec<String> = columns.iter().map(|column| format!("{:>digits$}", column + 1)).collect();
    let head = format!("From each pod (row) to each pod (column) on {}:\n\n", ports(matrix));
    let (body, is_partly) =
        table(matrix, &numbers, |matrix, row| columns.iter().map(|column| matrix.cell(row, *column)).collect());
    head + &body + &legend(matrix.ports.len(), is_partly)
}

fn of_chosen(matrix: &mut Matrix) -> String {
    let chosen: Vec<usize> = (0..matrix.rows.len()).filter(|row| matrix.rows[*row].is_chosen).collect();
    let columns = ["reached".to_owned(), "reaches".to_owned()];
    let (mut text, mut is_partly) = (String::new(), false);
    for row in chosen {
        let name = format!("{}/{}", matrix.rows[row].namespace(), matrix.rows[row].name());
        let head = format!("Pods that {name} reaches, and that reach it, on {}:", ports(matrix));
        let (body, partly) =
            table(matrix, &columns, |matrix, other| vec![matrix.cell(row, other), matrix.cell(other, row)]);
        text += &format!("{head}\n\n{body}\n");
        is_partly |= partly;
    }
    text.pop();
    text + &legend(matrix.ports.len(), is_partly)
}

fn ports(matrix: &Matrix) -> String {
    matrix.ports.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A line for each row with these cells, and whether one of them is allowed in part.
fn table(matrix: &mut Matrix, columns: &[String], cells: impl Fn(&mut Matrix, usize) -> Vec<Cell>) -> (String, bool) {
    let digits = matrix.rows.len().to_string().len();
    let width = matrix.rows.iter().map(|row| row.name().len()).max().unwrap_or(0);
    let head: String = columns.iter().map(|column| format!("  {column}")).collect();
    let mut text = format!("{}{}\n", " ".repeat(2 + digits + 1 + width), style::faint(head));
    let (mut namespace, mut is_partly) = (None, false);
    for row in 0..matrix.rows.len() {
        let own = matrix.rows[row].namespace().to_owned();
        if namespace.as_ref() != Some(&own) {
            text += &format!("{}\n", style::strong(&own));
            namespace = Some(own);
        }
        let found = cells(matrix, row);
        is_partly |= found.contains(&Cell::Some);
        let found = found.into_iter().zip(columns);
        let found: String =
            found.map(|(cell, column)| format!("  {}{}", " ".repeat(column.len() - 1), symbol(cell))).collect();
        text += &format!("  {:>digits$} {:width$}{found}\n", row + 1, matrix.rows[row].name());
    }
    (text, is_partly)
}

fn legend(ports: usize, partly: bool) -> String {
    let (every, some, no) = (symbol(Cell::Every), symbol(Cell::Some), symbol(Cell::No));
    match ports {
        1 if partly => format!("\n{every} allowed  {some} in one address family  {no} denied  = itself\n"),
        1 => format!("\n{every} allowed  {no} denied  = itself\n"),
        _ => format!(
            "\n{every} all ports allowed  {some} some  {no} none  = itself   (--port PORT/PROTOCOL for one of them)\n"
        ),
    }
}

/// Says that there are rows of several pods, where there are.
pub(super) fn equal_pods(matrix: &Matrix) -> String {
    match matrix.rows.iter().any(|row| row.pods.len() > 1) {
        true => {
            "(N): N pods with equal labels that policy does not tell apart, under the name of the first\n".to_owned()
        }
        false => String::new(),
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
