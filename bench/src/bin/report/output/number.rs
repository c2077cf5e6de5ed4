//! Numbers as a report shows them.

/// A number with a comma at each thousand.
pub(crate) fn number(value: f64, digits: usize) -> String {
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

pub(super) fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        for (value, digits, expected) in
            [(0.5, 2, "0.50"), (999.0, 0, "999"), (1000.0, 0, "1,000"), (-1234567.0, 1, "-1,234,567.0")]
        {
            assert_eq!(number(value, digits), expected);
        }
        assert_eq!([short(0.92), short(200.0), short(1.5), short(0.0)], ["0.92", "200", "1.5", "0"]);
    }
}
