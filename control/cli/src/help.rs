//! The help text of `penstock` itself, with the subcommands in groups.

use std::fmt::Write as _;

use clap::Subcommand;
use clap::builder::{StyledStr, Styles};

/// A group: its heading, and its subcommands as clap has them.
pub(super) struct Group {
    pub(super) heading: &'static str,
    pub(super) commands: Vec<clap::Command>,
}

impl Group {
    pub(super) fn of<T: Subcommand>(heading: &'static str) -> Self {
        let group = T::augment_subcommands(clap::Command::new(heading));
        Self { heading, commands: group.get_subcommands().cloned().collect() }
    }
}

/// The help text of `penstock` itself: clap's own form, with the subcommands in groups.
pub(super) fn template(groups: &[Group]) -> StyledStr {
    let styles = Styles::styled();
    let (header, literal) = (styles.get_header(), styles.get_literal());
    let width = groups.iter().flat_map(|group| &group.commands).map(|command| command.get_name().len()).max();
    let width = width.unwrap_or_default();
    let mut text = "{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for Group { heading, commands } in groups {
        let _ = writeln!(text, "\n{header}{heading}:{header:#}");
        for command in commands {
            let (name, about) = (command.get_name(), command.get_about().cloned().unwrap_or_default());
            let _ = writeln!(text, "  {literal}{name}{literal:#}{:1$}  {about}", "", width - name.len());
        }
    }
    let _ = write!(text, "\n{header}Options:{header:#}\n{{options}}{{after-help}}");
    text.into()
}
