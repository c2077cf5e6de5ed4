//! `make demo`, from start to end, and what README shows of it.

use std::process::Command;

const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");

/// A line without what differs from run to run: numbers, and the widths that follow from them.
fn without_numbers(line: &str) -> String {
    let words = line.split_whitespace().map(|word| {
        let mut digits = false;
        let mut kept = String::new();
        for character in word.chars() {
            if !(digits && (character.is_ascii_digit() || character == '.')) {
                kept.push(if character.is_ascii_digit() { '0' } else { character });
            }
            digits = character.is_ascii_digit() || digits && character == '.';
        }
        kept.replace("MiB", "KiB")
    });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn the_demo_passes_leaves_nothing_and_readme_shows_its_trial() {
    let demo = Command::new(env!("CARGO_BIN_EXE_demo")).env("NO_COLOR", "1").output();
    let demo = demo.unwrap();
    let (output, errors) = (String::from_utf8_lossy(&demo.stdout), String::from_utf8_lossy(&demo.stderr));
    assert!(demo.status.success(), "{}: {output}\n{errors}", demo.status);
    assert!(output.contains("Nothing is left behind"), "{output}");
    let begins = |line: &&str| !line.contains("Staging the edit");
    let ends = |line: &&str| !line.contains("Ending the daemon");
    let shown: Vec<String> = output.lines().skip_while(begins).take_while(ends).map(without_numbers).collect();
    assert!(shown.len() > 7, "{output}");
    let readme = std::fs::read_to_string(README).unwrap();
    let readme: Vec<String> = readme.lines().map(without_numbers).collect();
    assert!(
        readme.windows(shown.len()).any(|lines| lines == shown),
        "README.md shows another trial than this:\n{}",
        shown.join("\n")
    );
}
