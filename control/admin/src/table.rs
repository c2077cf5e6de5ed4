//! Rows of text in aligned columns.

use std::borrow::Cow;

use super::printable::printable;

/// Aligns rows in columns, two spaces apart; numeric columns are right-aligned. The first row is the heading. Cells are made
/// [`printable`].
pub fn align_columns(rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<Cow<'_, str>>> =
        rows.iter().map(|row| row.iter().map(|cell| printable(cell)).collect()).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    let numeric: Vec<bool> = (0..columns)
        .map(|column| {
            let mut cells = rows.iter().skip(1).filter_map(|row| row.get(column)).filter(|cell| !cell.is_empty());
            let number = |cell: &Cow<'_, str>| cell.bytes().all(|byte| byte.is_ascii_digit());
            cells.clone().next().is_some() && cells.all(number)
        })
        .collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            let cell = if numeric[column] { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
            line.push_str(&cell);
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::align_columns;

    #[test]
    fn columns_are_aligned_and_numbers_right_aligned() {
        let rows = [vec!["PORT", "PACKETS", "POD"], vec!["0", "12", ""], vec!["10", "3", "shop/web"]];
        let rows = rows.map(|row| row.into_iter().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(align_columns(&rows), "PORT  PACKETS  POD\n   0       12\n  10        3  shop/web\n");
        assert_eq!(align_columns(&[]), "");
        assert_eq!(
            align_columns(&[vec!["veth\x1b[3x\nforged".to_owned(), "7".to_owned()]]),
            "veth\\u{1b}[3x\\nforged  7\n"
        );
    }
}
