//! The matrix for programs.

use penstock_text::number::json;
use serde::Serialize;

use super::rows::{Cell, Matrix};

#[derive(Serialize)]
struct Answer {
    ports: Vec<String>,
    groups: Vec<Group>,
    unseen: Vec<Unseen>,
}

/// Equal pods, and by their numbers the groups to which all, some or none of the ports are allowed. A group with several pods may be
/// in its own lists: from one of its pods to another.
#[derive(Serialize)]
struct Group {
    number: usize,
    namespace: String,
    pods: Vec<String>,
    all: Vec<usize>,
    some: Vec<usize>,
    none: Vec<usize>,
}

#[derive(Serialize)]
struct Unseen {
    namespace: String,
    pod: String,
    reason: &'static str,
}

pub(super) fn render(matrix: &mut Matrix) -> String {
    let places = 0..matrix.rows.len();
    let mut groups = Vec::new();
    for row in places.clone() {
        let (mut all, mut some, mut none) = (Vec::new(), Vec::new(), Vec::new());
        for column in places.clone() {
            if !(matrix.rows[row].is_chosen || matrix.rows[column].is_chosen) {
                continue;
            }
            match matrix.cell(row, column) {
                Cell::Every => all.push(column + 1),
                Cell::Some => some.push(column + 1),
                Cell::No => none.push(column + 1),
                Cell::Itself | Cell::Nothing => {}
            }
        }
        let of_row = &matrix.rows[row];
        let pods = of_row.pods.iter().map(|pod| pod.name.clone()).collect();
        groups.push(Group { number: row + 1, namespace: of_row.namespace().to_owned(), pods, all, some, none });
    }
    let unseen = matrix.unseen.iter().map(|(pod, reason)| Unseen {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        reason,
    });
    let answer =
        Answer { ports: matrix.ports.iter().map(ToString::to_string).collect(), groups, unseen: unseen.collect() };
    json(&answer)
}
