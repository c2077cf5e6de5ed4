//! How the demo talks: steps that show while they run, headings, and colour on a terminal alone.

use std::fmt::Display;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use owo_colors::{OwoColorize, Stream};

/// Where a step's time stands.
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

/// Runs a step: says what is done, then how long it took and what came of it.
pub(crate) fn step<T, D: Display>(what: &str, work: impl FnOnce() -> Result<(T, D)>) -> Result<T> {
    print!("  {what:TIME_COLUMN$}");
    // Progress that cannot be shown is no reason to stop.
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

/// A short time, in milliseconds.
pub(crate) fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}
