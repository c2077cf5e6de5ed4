//! Text that somebody else has written, as it may go to a terminal, a log or a metric.
//!
//! Names in manifests, of files and of interfaces can have any characters, also those that move a terminal's cursor, begin a
//! line that looks like one of ours, or reorder what is shown.

use std::borrow::Cow;
use std::error::Error;
use std::fmt::{self, Display, Write};

/// Displays as one line: control characters, line breaks, and marks that change the direction of text are escaped, as in a
/// string literal of Rust.
pub struct Printable<T>(pub T);

impl<T: Display> Display for Printable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(f), "{}", self.0)
    }
}

/// The same of a text; most are as they are.
pub fn printable(text: &str) -> Cow<'_, str> {
    if text.contains(is_unprintable) { Printable(text).to_string().into() } else { text.into() }
}

pub struct Escaping<W>(pub W);

impl<W: Write> Write for Escaping<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(is_unprintable) {
            self.0.write_str(&rest[..at])?;
            let mut after = rest[at..].chars();
            after.next().into_iter().flat_map(char::escape_default).try_for_each(|c| self.0.write_char(c))?;
            rest = after.as_str();
        }
        self.0.write_str(rest)
    }
}

/// An error with all its causes, in one line.
pub fn with_causes(error: &dyn Error) -> String {
    let (mut text, mut source) = (error.to_string(), error.source());
    while let Some(cause) = source {
        let said = cause.to_string();
        // Many errors repeat their cause.
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        source = cause.source();
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether a character is none that one sees where it stands. The marks are those of UAX #9, section 2.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_stays_one_line_and_cannot_steer_a_terminal() {
        for (text, expected) in [
            ("shop/web", "shop/web"),
            ("größer, 日本", "größer, 日本"),
            ("a\x1b[31mb\x1b]0;c\x07", r"a\u{1b}[31mb\u{1b}]0;c\u{7}"),
            ("one\r\ntwo\tthree", r"one\r\ntwo\tthree"),
            ("\u{9b}2J \u{202e}txt\u{2066} \u{2028}", r"\u{9b}2J \u{202e}txt\u{2066} \u{2028}"),
        ] {
            assert_eq!(printable(text), expected);
            assert_eq!(Printable(text).to_string(), expected);
        }
    }
}
