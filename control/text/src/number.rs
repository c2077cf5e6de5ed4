//! Numbers, times and values.

use jiff::Timestamp;
use serde::Serialize;

/// Printed as JSON, for programs.
pub fn json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("strings and numbers are JSON") + "\n"
}

/// A number with a unit's prefix: `999`, `1.2k`, `34M`.
pub fn short(number: f64) -> String {
    let scaled = [("G", 1e9), ("M", 1e6), ("k", 1e3)].into_iter().find(|(_, unit)| number >= *unit * 0.9995);
    match scaled {
        Some((prefix, unit)) if number / unit < 9.995 => format!("{:.1}{prefix}", number / unit),
        Some((prefix, unit)) => format!("{:.0}{prefix}", number / unit),
        None if number.fract() == 0.0 => format!("{number:.0}"),
        None if number < 9.995 => format!("{number:.1}"),
        None => format!("{number:.0}"),
    }
}

/// A share from 0 to 1 in percent.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// How long something has run: `90 s`, `30 min`, `5 h`.
pub fn uptime(seconds: f64) -> String {
    match seconds as u64 {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

/// A time, in seconds of Unix time, as in RFC 3339.
pub fn moment(seconds: i64) -> String {
    Timestamp::from_second(seconds).map_or_else(|_| seconds.to_string(), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn numbers_are_short_and_continuous_across_units() {
        for (number, text) in [
            (0.0, "0"),
            (0.25, "0.2"),
            (9.99, "10.0"),
            (7.0, "7"),
            (12.4, "12"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (1_234.0, "1.2k"),
            (56_789.0, "57k"),
            (2_500_000.0, "2.5M"),
            (3e9, "3.0G"),
        ] {
            assert_eq!(short(number), text, "{number}");
        }
    }
}
