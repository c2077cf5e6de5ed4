//! `kubectl penstock dump`: the support bundles of all nodes, a folder each.

use std::fs;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::Failure;
use super::ask::{Asking, Output, ask_all, lines, print, succeeded, words};
use super::cluster::{Cluster, Daemon, Problem};
use super::folder;

const MAX_BUNDLE: u64 = 1 << 30;

/// Write the support bundles of all nodes, a folder each
///
/// Each folder has what `penstock dump` writes on that node. `missing.txt` names the nodes that have not answered. The bundles
/// contain no secrets, but names and addresses of pods and nodes.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  all nodes have answered
  1  no node has answered, the API server is away, or a file cannot be written
  2  bad input: a folder with files, the kubeconfig, or rights that the user lacks
  4  some nodes have not answered; they are named

Examples:
  kubectl penstock dump penstock-dump/
  kubectl penstock dump node-1/ --node worker-1 && tar czf node-1.tar.gz node-1/")]
pub(super) struct Args {
    /// The folder to write into; it is created, or is empty
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct BundleFile {
    path: PathBuf,
    content: Vec<u8>,
}

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    let directory = &args.directory;
    folder::create(directory)?;
    let fleet = cluster.daemons().await?;
    super::tell(fleet.note.as_deref());
    let command = |_: &Daemon| words(&["penstock", "dump", "-"]);
    let read = |output: &Output| unpack(succeeded(output, &[0])?);
    let answers = ask_all(cluster, asking, fleet, command, None, read).await;
    let mut text = String::new();
    for (daemon, files) in &answers.answers {
        let folder = directory.join(folder::name_of(&daemon.node).map_err(Failure::bad_input)?);
        write(&folder, files).map_err(|error| cannot_write(&folder, error))?;
        text += &format!("{}: {} files\n", folder.display(), files.len());
    }
    if !answers.missing.is_empty() {
        let path = directory.join("missing.txt");
        fs::write(&path, lines(&answers.missing).join("\n") + "\n").map_err(|error| cannot_write(&path, error))?;
    }
    print(&text, &answers)
}

fn cannot_write(path: &Path, error: io::Error) -> Failure {
    Failure::Failed(anyhow::Error::new(error).context(format!("cannot write {}", path.display())))
}

/// The files of a bundle. What comes from a node stays within its folder.
fn unpack(bundle: &[u8]) -> Result<Vec<BundleFile>, Problem> {
    let garbage = |error: io::Error| Problem::Garbage(format!("a bundle that is no tar.gz: {error}"));
    let mut archive = tar::Archive::new(MultiGzDecoder::new(bundle).take(MAX_BUNDLE));
    let mut files = Vec::new();
    for entry in archive.entries().map_err(garbage)? {
        let mut entry = entry.map_err(garbage)?;
        let path = entry.path().map_err(garbage)?.into_owned();
        let is_inside = path.components().all(|part| matches!(part, Component::Normal(_)));
        if !entry.header().entry_type().is_file() || !is_inside {
            return Err(Problem::Garbage(format!("a bundle with {path:?}, which is no file below it")));
        }
        // All are below one folder there.
        let mut parts = path.components();
        parts.next();
        let below = parts.as_path();
        let path = if below.as_os_str().is_empty() { path } else { below.to_owned() };
        let mut content = Vec::new();
        entry.read_to_end(&mut content).map_err(garbage)?;
        files.push(BundleFile { path, content });
    }
    match files.is_empty() {
        true => Err(Problem::Garbage("a bundle without files".to_owned())),
        false => Ok(files),
    }
}

fn write(folder: &Path, files: &[BundleFile]) -> io::Result<()> {
    fs::create_dir(folder)?;
    for BundleFile { path, content } in files {
        let path = folder.join(path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(path, content)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;
    use crate::fake::{ASKING, FakeCluster, Reply};

    fn bundle(files: &[(&str, &str, tar::EntryType)]) -> Vec<u8> {
        let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        for (name, content, kind) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_entry_type(*kind);
            // The library refuses some of these names, and an attacker does not use it.
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_cksum();
            archive.append(&header, content.as_bytes()).unwrap();
        }
        archive.into_inner().unwrap().finish().unwrap()
    }

    const FILE: tar::EntryType = tar::EntryType::Regular;

    #[tokio::test]
    async fn each_node_has_its_folder_and_missing_ones_are_listed() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("dump");
        let files = [("penstock-dump/config.toml", "node = \"a\"\n", FILE), ("penstock-dump/log/1.txt", "x", FILE)];
        let cluster = FakeCluster::new([
            ("worker-1", vec![Reply::ok(bundle(&files))]),
            ("worker-2", vec![Reply::ok("no archive")]),
        ]);
        let ended = run(&cluster, ASKING, Args { directory: directory.clone() }).await;
        assert!(matches!(&ended, Err(Failure::Partial(lines)) if lines[0].contains("no tar.gz")), "{ended:?}");
        let read = |path: &str| fs::read_to_string(directory.join(path)).unwrap();
        assert_eq!(read("worker-1/config.toml"), "node = \"a\"\n");
        assert_eq!(read("worker-1/log/1.txt"), "x");
        assert!(read("missing.txt").starts_with("node worker-2: sent no valid answer"));
        let again = run(&cluster, ASKING, Args { directory }).await;
        assert!(matches!(&again, Err(Failure::BadInput(lines)) if lines[0].contains("has files already")), "{again:?}");
    }

    #[test]
    fn a_bundle_cannot_write_outside_its_folder() {
        for (name, kind) in [
            ("../etc/passwd", FILE),
            ("/etc/passwd", FILE),
            ("penstock-dump/../../x", FILE),
            ("penstock-dump/link", tar::EntryType::Symlink),
        ] {
            let problem = unpack(&bundle(&[(name, "", kind)])).unwrap_err();
            assert_eq!(problem.name(), "invalid_answer", "{name}");
        }
        for node in ["", "..", ".hidden", "a/b", "a\\b"] {
            assert!(folder::name_of(node).is_err(), "{node}");
        }
        assert_eq!(folder::name_of("worker-1.example.org").unwrap(), "worker-1.example.org");
    }
}
