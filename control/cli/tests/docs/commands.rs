//! Commands that the pages show, run as they stand there.
//!
//! A block marked `console` has commands behind `$ `, each with its output below it. In the output a line `...` stands
//! for any lines, and `[..]` within a line for any text. A block's commands run in one shell, in a directory that has what
//! the repository has; a command that fails is followed by `echo $?`. With `UPDATE_EXPECTED=1` in the environment output that
//! differs is written into the page.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use snapbox::{Assert, IntoData};
use tempfile::TempDir;

use crate::pages::{self, Page};

/// The shell prints this behind each command: a character that no command prints, then its exit code.
const MARK: char = '\u{1e}';

/// A command and its output.
#[derive(Debug, PartialEq)]
struct Step<'a> {
    command: String,
    output: &'a str,
    /// Where the output is in the block.
    range: Range<usize>,
}

/// The commands of a block. A line that ends in a backslash goes on with the next.
fn steps(block: &str) -> Vec<Step<'_>> {
    let mut steps: Vec<Step<'_>> = Vec::new();
    let mut offset = 0;
    let mut goes_on = false;
    for line in block.split_inclusive('\n') {
        offset += line.len();
        let text = line.trim_end_matches('\n');
        match (steps.last_mut(), text.strip_prefix("$ ")) {
            (Some(last), _) if goes_on => {
                last.command.push('\n');
                last.command.push_str(text);
                last.range = offset..offset;
            }
            (_, Some(command)) => steps.push(Step { command: command.to_owned(), output: "", range: offset..offset }),
            (Some(last), None) => {
                last.range.end = offset;
                last.output = &block[last.range.clone()];
                continue;
            }
            (None, None) => panic!("a block begins with a command behind \"$ \", not with {text:?}"),
        }
        goes_on = text.ends_with('\\');
    }
    steps
}

/// A directory with everything that the top of the repository has, to run commands in that write files.
fn workspace() -> TempDir {
    let directory = TempDir::new().unwrap();
    for entry in fs::read_dir(pages::root()).unwrap() {
        let entry = entry.unwrap();
        symlink(entry.path(), directory.path().join(entry.file_name())).unwrap();
    }
    directory
}

/// Runs the commands in one shell: the output and exit code of each.
fn run(steps: &[Step<'_>], directory: &Path) -> Vec<(String, i32)> {
    let mut script = "exec 2>&1\n".to_owned();
    for step in steps {
        script += &step.command;
        script += "\n__code=$?; printf '\\036%d\\n' $__code; (exit $__code)\n";
    }
    let binary = Path::new(env!("CARGO_BIN_EXE_penstock")).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new("bash");
    command
        .args(["-c", &script])
        .current_dir(directory)
        .env("PATH", path)
        .env("NO_COLOR", "1")
        .env_remove("FORCE_COLOR");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("PENSTOCK_")) {
            command.env_remove(name);
        }
    }
    let output = String::from_utf8(command.output().unwrap().stdout).unwrap();
    let mut rest = output.as_str();
    let mut results = Vec::new();
    while let Some((text, behind)) = rest.split_once(MARK) {
        let (code, next) = behind.split_once('\n').expect("the mark's line is whole");
        results.push((text.to_owned(), code.parse().expect("a mark is followed by an exit code")));
        rest = next;
    }
    assert_eq!(results.len(), steps.len(), "the shell ended early: {rest:?}");
    results
}

/// How found output differs from what is shown, if it does.
fn difference(shown: &str, found: &str) -> Option<String> {
    let assert = Assert::new().normalize_paths(false);
    // Only the text counts, not whether its last line ends.
    let (shown, found) = (format!("{}\n", shown.trim_end()), format!("{}\n", found.trim_end()));
    assert.try_eq(None, found.into_data(), shown.into_data()).err().map(|error| error.to_string())
}

/// Runs a page's commands: what is wrong, the page with the output that was found, and how many commands it has.
fn check(page: &Page) -> (Vec<String>, String, usize) {
    let mut wrong = Vec::new();
    let mut corrected = page.text.clone();
    let mut count = 0;
    let blocks = page.content().blocks;
    // From the last to the first, so that places before a correction stay where they are.
    for block in blocks.iter().rev().filter(|block| block.info == "console") {
        let steps = steps(&page.text[block.range.clone()]);
        let results = run(&steps, workspace().path());
        count += steps.len();
        for (number, (step, (output, code))) in steps.iter().zip(&results).enumerate().rev() {
            let start = block.range.start + step.range.start;
            let place = format!("{}:{}: $ {}", page.path.display(), page.line(start) - 1, step.command);
            let code_is_shown = steps.get(number + 1).is_some_and(|next| next.command == "echo $?");
            if *code != 0 && !code_is_shown {
                wrong.push(format!("{place}\nends with {code}, which no \"echo $?\" behind it shows: {output}"));
            }
            if let Some(difference) = difference(step.output, output) {
                wrong.push(format!("{place}\n{difference}"));
                let behind = if number + 1 < steps.len() && step.output.ends_with("\n\n") { "\n" } else { "" };
                let output = format!("{}{behind}", with_line_end(output));
                corrected.replace_range(start..block.range.start + step.range.end, &output);
            }
        }
    }
    (wrong, corrected, count)
}

fn with_line_end(text: &str) -> String {
    if text.is_empty() || text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") }
}

#[test]
fn commands_print_what_the_pages_show() {
    let update = std::env::var_os("UPDATE_EXPECTED").is_some();
    let mut wrong = Vec::new();
    let mut count = 0;
    for page in pages::all() {
        let (problems, corrected, commands) = check(&page);
        count += commands;
        if update && corrected != page.text {
            fs::write(pages::root().join(&page.path), corrected).unwrap();
        } else {
            wrong.extend(problems);
        }
    }
    assert!(wrong.is_empty(), "UPDATE_EXPECTED=1 writes what is printed into the pages\n\n{}", wrong.join("\n"));
    assert!(count >= 15, "only {count} commands found");
}

#[test]
fn every_block_of_commands_is_run_or_marked_as_captured() {
    for page in pages::all() {
        for block in page.content().blocks {
            let shows_output = page.text[block.range.clone()].lines().any(|line| line.starts_with("$ "));
            let marked = ["console", "console,captured"].contains(&block.info.as_str());
            let place = format!("{}:{}", page.path.display(), page.line(block.range.start));
            assert_eq!(
                shows_output, marked,
                "{place}: a block with commands behind \"$ \" is `console` or `console,captured`"
            );
        }
    }
}

#[test]
fn a_block_is_taken_apart_into_commands_and_their_output() {
    let block = "$ one \\\n    --more\nfirst\n$ two\n$ three\nlast\n";
    let found: Vec<(String, &str)> = steps(block).into_iter().map(|step| (step.command, step.output)).collect();
    let expected = [("one \\\n    --more", "first\n"), ("two", ""), ("three", "last\n")];
    assert_eq!(found, expected.map(|(command, output)| (command.to_owned(), output)));
}

#[test]
fn wrong_output_and_a_hidden_failure_are_found_and_corrected() {
    let page = |text: &str| Page { path: "page.md".into(), text: text.to_owned() };
    let block = |text: &str| format!("before\n\n```console\n{text}```\n\nafter\n");
    for (text, found) in [
        ("$ echo a; echo b\na\nb\n", 0),
        ("$ echo a; echo b\n...\nb\n", 0),
        ("$ echo a b c\na [..] c\n", 0),
        ("$ echo a; echo b\na\n", 1),
        ("$ echo a >&2\n", 1),
        ("$ false\n", 1),
        ("$ false\n$ echo $?\n1\n", 0),
    ] {
        assert_eq!(check(&page(&block(text))).0.len(), found, "{text}");
    }
    let (_, corrected, _) = check(&page(&block("$ echo a\nb\n$ echo c\nd\n")));
    assert_eq!(corrected, block("$ echo a\na\n$ echo c\nc\n"));
}
