//! Numbers as a report shows them.

pub(crate) use penstock_bench::figures::number;

pub(super) fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_at_the_end_are_left_out() {
        assert_eq!([short(0.92), short(200.0), short(1.5), short(0.0)], ["0.92", "200", "1.5", "0"]);
    }
}
