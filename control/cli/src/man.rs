//! `penstock man`: manual pages, from what clap knows of the commands.

use std::fs;
use std::io;
use std::path::PathBuf;

use clap::CommandFactory;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};

use super::help::Group;
use super::{Cli, Failure};

/// Write manual pages: penstock.1, and one for each command
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  written
  1  the output cannot be written
  2  bad input: arguments, or a directory that cannot be written

Examples:
  penstock man /usr/local/share/man/man1
  penstock man . && man ./penstock-flows.1")]
pub(super) struct Args {
    /// The directory to write to; it is created if it does not exist, and pages in it are replaced
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
}

pub(super) fn run(args: Args, groups: &[Group]) -> Result<(), Failure> {
    let pages = pages(groups);
    let written = fs::create_dir_all(&args.directory).and_then(|()| {
        pages.iter().try_for_each(|(name, page)| fs::write(args.directory.join(format!("{name}.1")), page))
    });
    written.map_err(|error| {
        let directory = args.directory.display();
        Failure::bad_input(format_args!("{directory}: cannot be written: {error}: name a directory that can"))
    })?;
    let answer = format!("{}: {} pages\n", args.directory.display(), pages.len());
    Failure::print(answer)
}

/// All pages, by name.
fn pages(groups: &[Group]) -> Vec<(String, Vec<u8>)> {
    let mut root = Cli::command();
    root.build();
    let commands = root.get_subcommands().filter(|command| command.get_name() != "help").cloned();
    let named = commands.map(|command| (format!("penstock-{}", command.get_name()), command));
    let named: Vec<_> = std::iter::once(("penstock".to_owned(), root.clone())).chain(named).collect();
    named
        .into_iter()
        .map(|(name, command)| {
            let page = page(&name, command, groups).expect("writing to memory does not fail");
            (name, page)
        })
        .collect()
}

/// A page. Not [`Man::render`]: it has no groups of commands, and no sections but one for all text behind the options.
fn page(name: &str, command: clap::Command, groups: &[Group]) -> io::Result<Vec<u8>> {
    let is_root = command.has_subcommands();
    let sections = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    // The file's name is the page's, but the command's words are what one types.
    let shown = command.display_name(name.to_owned());
    let man = Man::new(shown).manual("Penstock").source(concat!("penstock ", env!("CARGO_PKG_VERSION")));
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if is_root {
        command_groups(groups).to_writer(&mut page)?;
    }
    man.render_options_section(&mut page)?;
    after_options(&sections).to_writer(&mut page)?;
    see_also(is_root).to_writer(&mut page)?;
    Ok(page)
}

fn command_groups(groups: &[Group]) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["COMMANDS"]);
    for Group { heading, commands } in groups {
        roff.control("SS", [*heading]);
        for command in commands {
            roff.control("TP", []);
            roff.text([bold(format!("penstock-{}", command.get_name())), roman("(1)")]);
            roff.text([roman(command.get_about().map(ToString::to_string).unwrap_or_default())]);
        }
    }
    roff
}

/// The sections behind the options, their lines as they are.
fn after_options(text: &str) -> Roff {
    let mut roff = Roff::new();
    for line in text.lines().filter(|line| line.starts_with("  ") || line.ends_with(':')) {
        match line.strip_prefix("  ") {
            Some(line) => roff.text([roman(line)]),
            None => {
                let heading = match line.trim_end_matches(':') {
                    "Exit codes" => "EXIT STATUS".to_owned(),
                    heading => heading.to_uppercase(),
                };
                roff.control("fi", []).control("SH", [heading.as_str()]).control("nf", [])
            }
        };
    }
    roff.control("fi", []);
    roff
}

fn see_also(is_root: bool) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    match is_root {
        true => {
            roff.text([italic("/etc/penstock/penstock.toml"), roman(", the configuration of "), bold("penstock run")])
        }
        false => roff.text([bold("penstock"), roman("(1)")]),
    };
    roff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_manual_page_with_its_options() {
        let pages = pages(&crate::groups::groups());
        let page = |name: &str| {
            let (_, page) = pages.iter().find(|(page, _)| page == name).unwrap_or_else(|| panic!("no page {name}"));
            // As it is read: a hyphen is written \- in roff.
            String::from_utf8(page.clone()).unwrap().replace("\\-", "-")
        };
        let commands: Vec<_> = Cli::command().get_subcommands().cloned().collect();
        assert_eq!(pages.len(), 1 + commands.len());
        let root = page("penstock");
        for command in commands {
            let name = command.get_name();
            assert!(root.contains(&format!("penstock-{name}")), "{name} is not in penstock.1");
            let page = page(&format!("penstock-{name}"));
            for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES"] {
                assert!(page.contains(&format!(".SH {section}\n")), "{name}: {section}\n{page}");
            }
            assert!(page.contains(".SH \"EXIT STATUS\"\n"), "{name}\n{page}");
            for option in command.get_arguments().filter_map(clap::Arg::get_long) {
                assert!(page.contains(&format!("--{option}")), "{name}: --{option}\n{page}");
            }
            let help = command.get_after_help().unwrap().to_string();
            for line in help.lines().filter_map(|line| line.strip_prefix("  penstock ")) {
                let written = line.replace('\\', "\\\\").replace('\'', "\\*(Aq");
                assert!(page.contains(&written) || page.contains(line), "{name}: {line}\n{page}");
            }
        }
    }
}
