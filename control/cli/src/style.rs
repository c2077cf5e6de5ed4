//! Colour, where it helps: on a terminal that has it, unless NO_COLOR says no.

use std::fmt::Display;

use owo_colors::{OwoColorize, Stream, Style};
use penstock_policy::explain::TextStyle;

fn styled(text: impl Display, style: Style) -> String {
    text.if_supports_color(Stream::Stdout, |text| text.style(style)).to_string()
}

/// What is allowed.
pub(super) fn good(text: impl Display) -> String {
    styled(text, Style::new().green())
}

/// What is denied or wrong.
pub(super) fn bad(text: impl Display) -> String {
    styled(text, Style::new().red().bold())
}

/// What is one thing here and another there, or doubtful.
pub(super) fn mixed(text: impl Display) -> String {
    styled(text, Style::new().yellow())
}

/// What is only there for orientation.
pub(super) fn faint(text: impl Display) -> String {
    styled(text, Style::new().dimmed())
}

/// What the rest is about.
pub(super) fn strong(text: impl Display) -> String {
    styled(text, Style::new().bold())
}

/// The same for what [`penstock_policy`] puts into words.
pub(super) struct Colours;

impl TextStyle for Colours {
    fn good(&self, text: &dyn Display) -> String {
        good(text)
    }

    fn bad(&self, text: &dyn Display) -> String {
        bad(text)
    }

    fn mixed(&self, text: &dyn Display) -> String {
        mixed(text)
    }

    fn strong(&self, text: &dyn Display) -> String {
        strong(text)
    }
}
