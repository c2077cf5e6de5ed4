//! `penstock dump`: a support bundle.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;
use penstock_admin::types::{Dump, DumpFile};
use penstock_text::arguments::new_file;

use super::Failure;
use super::daemon::DaemonArgs;

/// Write a support bundle of a running daemon
///
/// A tar.gz with the configuration, versions, status, policy tables, connections, metrics, the checks of `penstock check` and
/// the last lines of the log. It contains no secrets, but names and addresses of pods and nodes.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  written
  1  the file cannot be written in full, or the daemon sent no valid answer
  2  bad input: a file that exists or cannot be created, a terminal, or no daemon listens at the socket

Examples:
  penstock dump penstock.tar.gz
  penstock dump - > penstock.tar.gz
  penstock dump /tmp/node-1.tar.gz --socket /run/penstock/admin.sock && tar tzf /tmp/node-1.tar.gz")]
pub(super) struct Args {
    /// The file to write, or - for standard output; an existing file is not overwritten
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    if args.file == Path::new("-") {
        let mut stdout = io::stdout();
        if stdout.is_terminal() {
            return Err(Failure::bad_input(
                "standard output is a terminal: write the bundle to a file (penstock dump - > FILE)",
            ));
        }
        return write(&args.daemon.get("/v1/dump", &())?, &mut stdout).or_else(Failure::from_output);
    }
    let dump: Dump = args.daemon.get("/v1/dump", &())?;
    let file = new_file(&args.file)?;
    let written = write(&dump, file);
    written.with_context(|| format!("cannot write {}", args.file.display()))?;
    let answer = format!("{}: {} files\n", args.file.display(), dump.files.len());
    Failure::print(answer)
}

fn write(dump: &Dump, to: impl Write) -> io::Result<()> {
    let mut archive = tar::Builder::new(GzEncoder::new(to, Compression::default()));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    for DumpFile { name, content } in &dump.files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(now);
        archive.append_data(&mut header, Path::new("penstock-dump").join(name), content.as_bytes())?;
    }
    archive.into_inner()?.finish()?.flush()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn a_bundle_contains_every_answer() {
        let file = |name: &str, content: &str| DumpFile { name: name.to_owned(), content: content.to_owned() };
        let dump = Dump { files: vec![file("config.toml", "node = \"a\"\n"), file("log.txt", "")] };
        let mut bytes = Vec::new();
        write(&dump, &mut bytes).unwrap();
        let mut archive = tar::Archive::new(GzDecoder::new(bytes.as_slice()));
        let mut found = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let (name, mut content) = (entry.path().unwrap().display().to_string(), String::new());
            entry.read_to_string(&mut content).unwrap();
            found.push((name, content));
        }
        let expected = [("penstock-dump/config.toml", "node = \"a\"\n"), ("penstock-dump/log.txt", "")];
        assert_eq!(found, expected.map(|(name, content)| (name.to_owned(), content.to_owned())));
    }
}
