//! Terminal output of the demo: steps with a spinner, headings, and colour on a terminal only.

use std::fmt::Display;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use owo_colors::{OwoColorize, Stream};

/// Column of a step's duration.
const TIME_COLUMN: usize = 48;

pub(crate) fn heading(text: &str) {
    println!("\n{}", text.if_supports_color(Stream::Stdout, |text| text.bold()));
}

pub(crate) fn good(text: &str) -> String {
    text.if_supports_color(Stream::Stdout, |text| text.green()).to_string()
}

pub(crate) fn bad(text: &str) -> String {
    text.if_supports_color(Stream::Stdout, |text| text.red()).to_string()
}

/// Runs a step: prints its description, then its duration and result.
pub(crate) fn step<T, D: Display>(what: &str, work: impl FnOnce() -> Result<(T, D)>) -> Result<T> {
    print!("  {what:TIME_COLUMN$}");
    // Errors of the progress display are ignored.
    let _ = std::io::stdout().flush();
    let start = Instant::now();
    match work() {
        Ok((value, detail)) => {
            println!("{}  {detail}", good(&seconds(start.elapsed())));
            Ok(value)
        }
        Err(error) => {
            println!("{}", bad("failed"));
            Err(error)
        }
    }
}

fn seconds(time: Duration) -> String {
    format!("{:5.2} s", time.as_secs_f64())
}

/// A short duration in milliseconds.
pub(crate) fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}
