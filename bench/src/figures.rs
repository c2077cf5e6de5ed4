//! Figures of several rounds, and the tables that show them.

use std::fmt::Write;

/// Values of one figure, in the order of measurement.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    fn sorted(&self) -> Vec<f64> {
        let mut values = self.0.clone();
        values.sort_by(f64::total_cmp);
        values
    }

    /// The middle value; of an even number, the mean of the middle two.
    pub fn median(&self) -> Option<f64> {
        let sorted = self.sorted();
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => None,
            odd if odd % 2 == 1 => Some(sorted[middle]),
            _ => Some(sorted[middle - 1].midpoint(sorted[middle])),
        }
    }

    pub fn lowest(&self) -> Option<f64> {
        self.sorted().first().copied()
    }

    pub fn highest(&self) -> Option<f64> {
        self.sorted().last().copied()
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// In the order of measurement.
    pub fn values(&self) -> &[f64] {
        &self.0
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

/// A number with a comma at each thousand.
pub fn number(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |whole| ("-", whole));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{sign}{grouped}{rest}")
}

/// A table in Markdown, which reads well in a terminal, too. The first row is the header; the first column is text, the others are
/// figures.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        for (column, width) in widths.iter().enumerate() {
            let cell = row.get(column).map_or("", String::as_str).replace('|', "\\|");
            // Writing to a string does not fail.
            let _ = if column == 0 { write!(text, "| {cell:width$} ") } else { write!(text, "| {cell:>width$} ") };
        }
        text.push_str("|\n");
        if index == 0 {
            for (column, width) in widths.iter().enumerate() {
                let end = if column == 0 { '-' } else { ':' };
                let _ = write!(text, "|{:-<1$}{end}", "", width + 1);
            }
            text.push_str("|\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_lists() {
        for (values, expected) in [
            (vec![5.0], Some(5.0)),
            (vec![3.0, 1.0, 2.0], Some(2.0)),
            (vec![4.0, 1.0, 2.0, 3.0], Some(2.5)),
            (vec![], None),
        ] {
            assert_eq!(Samples(values).median(), expected);
        }
    }

    #[test]
    fn thousands_are_separated() {
        for (value, digits, expected) in
            [(0.5, 2, "0.50"), (999.0, 0, "999"), (1000.0, 0, "1,000"), (-1234567.0, 1, "-1,234,567.0")]
        {
            assert_eq!(number(value, digits), expected);
        }
    }

    #[test]
    fn columns_of_a_table_have_one_width_and_bars_are_escaped() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        let text = table(&[row(["what", "is"]), row(["a|b", "1,000"])]);
        assert_eq!(text, "| what |    is |\n|------|------:|\n| a\\|b | 1,000 |\n");
    }
}
