//! Colour, where it helps: on a terminal that has it, unless NO_COLOR says no.

use std::fmt::Display;

use owo_colors::{OwoColorize, Stream, Style};
use penstock_policy::explain::TextStyle;

fn styled(text: impl Display, style: Style) -> String {
    text.if_supports_color(Stream::Stdout, |text| text.style(style)).to_string()
}

pub(super) fn good(text: impl Display) -> String {
    styled(text, Style::new().green())
}

pub(super) fn bad(text: impl Display) -> String {
    styled(text, Style::new().red().bold())
}

pub(super) fn mixed(text: impl Display) -> String {
    styled(text, Style::new().yellow())
}

pub(super) fn faint(text: impl Display) -> String {
    styled(text, Style::new().dimmed())
}

pub(super) fn strong(text: impl Display) -> String {
    styled(text, Style::new().bold())
}

/// These styles for texts of [`penstock_policy`].
pub(super) struct ColouredText;

impl TextStyle for ColouredText {
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
