//! A directory of manifests while it changes: each save arrives soon and as a whole, and nothing else arrives.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use penstock_policy::model::{Object, ObjectChange, ObjectRef};
use penstock_sources::convert::ConversionSettings;
use penstock_sources::directory::{DirectoryChanges, DirectoryError, ManifestDirectory, unread_manifest};
use penstock_sources::manifest::{Options, read_manifests};
use tempfile::TempDir;

/// A batch arrives within this time, also on a busy machine.
const SOON: Duration = Duration::from_secs(5);
/// If no batch arrives within this time, none will.
const QUIET: Duration = Duration::from_millis(300);

struct Watched {
    // The order matters: the watcher ends before the directory is deleted.
    source: ManifestDirectory,
    runtime: tokio::runtime::Runtime,
    directory: PathBuf,
    _parent: TempDir,
}

impl Watched {
    fn open(files: &[(&str, &str)]) -> Self {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("manifests");
        fs::create_dir(&directory).unwrap();
        let namespace = "{apiVersion: v1, kind: Namespace, metadata: {name: default}}";
        fs::write(directory.join("default.yaml"), namespace).unwrap();
        for (name, text) in files {
            fs::write(directory.join(name), text).unwrap();
        }
        Self::open_directory(parent, directory.clone(), &directory)
    }

    /// Opens it under another path of the same directory.
    fn open_directory(parent: TempDir, directory: PathBuf, name: &Path) -> Self {
        let (source, _) = ManifestDirectory::open(name, ConversionSettings::default()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        Self { source, runtime, directory, _parent: parent }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn next_within(&mut self, time: Duration) -> Option<DirectoryChanges> {
        let next = async { tokio::time::timeout(time, self.source.next()).await };
        self.runtime.block_on(next).ok().map(|batch| batch.expect("the watcher runs"))
    }

    fn next(&mut self) -> DirectoryChanges {
        self.next_within(SOON).expect("a batch comes")
    }

    fn assert_quiet(&mut self) {
        let batch = self.next_within(QUIET);
        assert!(batch.is_none(), "{batch:?}");
    }
}

fn pod(name: &str, address: &str) -> String {
    format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nstatus: {{podIPs: [{{ip: {address}}}]}}\n---\n")
}

/// `+name address` and `-name`, in order.
fn described(batch: &DirectoryChanges) -> Vec<String> {
    let describe = |change: &ObjectChange| match change {
        ObjectChange::Set(Object::Pod(pod)) => format!("+{} {}", pod.key.name, pod.addresses[0]),
        ObjectChange::Delete(ObjectRef::Pod(key)) => format!("-{}", key.name),
        other => panic!("{other:?}"),
    };
    batch.changes.iter().map(describe).collect()
}

fn replace_by_rename(path: &Path, text: &str) {
    let draft = path.with_extension("draft");
    fs::write(&draft, text).unwrap();
    fs::rename(draft, path).unwrap();
}

#[test]
fn existing_files_are_the_first_state() {
    let parent = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("b.yaml", pod("b", "10.0.0.2")),
        ("a.yml", pod("a", "10.0.0.1")),
        ("c.json", r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "c"}}"#.to_owned()),
        (".hidden.yaml", "a: [".to_owned()),
        ("notes.txt", "a: [".to_owned()),
    ] {
        fs::write(parent.path().join(name), text).unwrap();
    }
    fs::create_dir_all(parent.path().join("deeper.yaml/deepest")).unwrap();
    fs::create_dir(parent.path().join(".git")).unwrap();
    fs::write(parent.path().join("deeper.yaml/deepest/d.YAML"), pod("d", "10.0.0.4")).unwrap();
    fs::write(parent.path().join(".git/e.yaml"), "a: [").unwrap();
    // A link back to a directory above is not followed for ever.
    std::os::unix::fs::symlink("..", parent.path().join("deeper.yaml/up")).unwrap();
    let (source, objects) = ManifestDirectory::open(parent.path(), ConversionSettings::default()).unwrap();
    let names: Vec<_> = objects.iter().map(|object| object.reference().to_string()).collect();
    assert_eq!(names, ["Namespace default", "Pod default/a", "Pod default/b", "Pod default/c", "Pod default/d"]);
    assert_eq!(source.unread_files(), [parent.path().join("notes.txt")]);
}

#[test]
fn subdirectories_are_followed() {
    let mut watched = Watched::open(&[]);
    fs::create_dir_all(watched.path("deeper/deepest")).unwrap();
    watched.write("deeper/deepest/a.yaml", &pod("x", "10.0.0.1"));
    assert_eq!(described(&watched.next()), ["+x 10.0.0.1"]);
    let mut times = Vec::new();
    for last in 2..8 {
        watched.write("deeper/deepest/a.yaml", &pod("x", &format!("10.0.0.{last}")));
        let saved = Instant::now();
        assert_eq!(described(&watched.next()), [format!("+x 10.0.0.{last}")]);
        times.push(saved.elapsed());
    }
    times.sort();
    assert!(times[1] < BY_EVENT, "{times:?}");
    fs::remove_dir_all(watched.path("deeper")).unwrap();
    assert_eq!(described(&watched.next()), ["-x"]);
}

/// As the kubelet mounts a ConfigMap: all names are links through `..data`, which it replaces by a rename.
#[test]
fn a_mounted_config_map_is_followed() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("manifests");
    let version = |name: &str, address: &str| {
        fs::create_dir_all(directory.join(name)).unwrap();
        fs::write(directory.join(name).join("a.yaml"), pod("x", address)).unwrap();
        std::os::unix::fs::symlink(name, directory.join("..data_tmp")).unwrap();
        fs::rename(directory.join("..data_tmp"), directory.join("..data")).unwrap();
    };
    version("..1", "10.0.0.1");
    std::os::unix::fs::symlink("..data/a.yaml", directory.join("a.yaml")).unwrap();
    let mut watched = Watched::open_directory(parent, directory.clone(), &directory);
    version("..2", "10.0.0.2");
    assert_eq!(described(&watched.next()), ["+x 10.0.0.2"]);
    fs::remove_file(directory.join("..data")).unwrap();
    let batch = watched.next();
    assert_eq!((batch.changes.len(), batch.refused), (0, 1), "{batch:?}");
}

#[test]
fn a_refused_file_that_is_deleted_is_refused_no_more() {
    let mut watched = Watched::open(&[]);
    watched.write("a.yaml", "kind: Pod");
    assert_eq!(watched.next().refused, 1);
    fs::remove_file(watched.path("a.yaml")).unwrap();
    assert_eq!(watched.next().refused, 0);
}

#[test]
fn a_directory_that_loses_its_manifests_keeps_all_objects() {
    let mut watched = Watched::open(&[("a.yaml", &pod("x", "10.0.0.1"))]);
    for name in ["a.yaml", "default.yaml"] {
        fs::rename(watched.path(name), watched.path(name).with_extension("away")).unwrap();
    }
    let mut batch = watched.next();
    if batch.unreadable.is_none() {
        // It was read between the two renames.
        assert_eq!(described(&batch), ["-x"]);
        batch = watched.next();
    }
    assert!(batch.changes.is_empty() && batch.unreadable.is_some(), "{batch:?}");
    watched.write("a.yaml", &pod("y", "10.0.0.2"));
    let batch = watched.next();
    assert!(!batch.changes.is_empty() && batch.unreadable.is_none(), "{batch:?}");
    // So does one that is empty at a start.
    let parent = tempfile::tempdir().unwrap();
    fs::write(parent.path().join("a.yaml"), pod("x", "10.0.0.1")).unwrap();
    let open = |last: Option<&Vec<Object>>| {
        ManifestDirectory::open_after(parent.path(), ConversionSettings::default(), &|| last.cloned()).unwrap()
    };
    let (_, last) = open(None);
    fs::remove_file(parent.path().join("a.yaml")).unwrap();
    let (directory, objects) = open(Some(&last));
    assert_eq!((objects.len(), directory.unreadable().is_some()), (last.len(), true));
    let (directory, objects) = open(None);
    assert_eq!((objects.len(), directory.unreadable()), (0, None), "nothing is known to be lost");
}

#[test]
fn opening_needs_a_directory() {
    let parent = tempfile::tempdir().unwrap();
    let missing = parent.path().join("missing");
    let error = ManifestDirectory::open(&missing, ConversionSettings::default()).unwrap_err();
    assert!(matches!(error, DirectoryError::NotADirectory { .. }), "{error}");
    assert!(error.to_string().contains("missing") && !error.to_string().contains('\n'));
    let file = parent.path().join("a.yaml");
    fs::write(&file, pod("a", "10.0.0.1")).unwrap();
    assert!(matches!(
        ManifestDirectory::open(&file, ConversionSettings::default()),
        Err(DirectoryError::NotADirectory { .. })
    ));
    fs::write(&file, pod("a", "10.0.0.999")).unwrap();
    let (directory, _) = ManifestDirectory::open(parent.path(), ConversionSettings::default()).unwrap();
    let error = directory.problems()[0].to_string();
    assert!(error.contains("a.yaml:4: Pod default/a: status.podIPs[0].ip: \"10.0.0.999\""), "{error}");
}

/// Batches that only the check once a second finds are a second apart. The second quickest of many saves shows that,
/// however busy the machine is: the quickest may have come just before a check.
const BY_EVENT: Duration = Duration::from_millis(900);

#[test]
fn a_save_is_reported_by_its_event_not_by_the_periodic_check() {
    let mut watched = Watched::open(&[("a.yaml", &pod("x", "10.0.0.1"))]);
    let mut times = Vec::new();
    for i in 2..42 {
        let text = pod("x", &format!("10.0.0.{i}"));
        match i % 2 {
            0 => watched.write("a.yaml", &text),
            _ => replace_by_rename(&watched.path("a.yaml"), &text),
        }
        let saved = Instant::now();
        assert_eq!(described(&watched.next()), [format!("+x 10.0.0.{i}")]);
        times.push(saved.elapsed());
    }
    times.sort();
    let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
    println!("from save to batch: median {median:.1?}, worst {worst:.1?} of {}", times.len());
    assert!(times[1] < BY_EVENT, "{times:?}");
}

#[test]
fn a_save_in_many_writes_is_one_batch() {
    let mut watched = Watched::open(&[("a.yaml", &(pod("x", "10.0.0.1") + &pod("y", "10.0.0.2")))]);
    // Truncated, then written document by document with pauses longer than events are gathered.
    let mut file = File::create(watched.path("a.yaml")).unwrap();
    for text in [pod("x", "10.0.0.1"), pod("y", "10.0.0.3"), pod("z", "10.0.0.4")] {
        watched.assert_quiet();
        file.write_all(text.as_bytes()).unwrap();
    }
    watched.assert_quiet();
    drop(file);
    assert_eq!(described(&watched.next()), ["+y 10.0.0.3", "+z 10.0.0.4"]);
    watched.assert_quiet();
}

#[test]
fn a_file_being_written_does_not_delay_another() {
    let mut watched = Watched::open(&[("a.yaml", &pod("x", "10.0.0.1"))]);
    let file = File::create(watched.path("a.yaml")).unwrap();
    watched.write("b.yaml", &pod("y", "10.0.0.2"));
    assert_eq!(described(&watched.next()), ["+y 10.0.0.2"]);
    drop(file);
    // Empty, as after a write that failed: what it had stays.
    let batch = watched.next();
    assert_eq!((batch.changes.len(), batch.refused, batch.problems.len()), (0, 1, 1), "{batch:?}");
}

#[test]
fn several_saves_at_once_are_one_batch() {
    let mut watched = Watched::open(&[]);
    for i in 1..6 {
        replace_by_rename(&watched.path(&format!("{i}.yaml")), &pod(&format!("p{i}"), &format!("10.0.0.{i}")));
    }
    let mut seen = described(&watched.next());
    // A busy machine may stop this thread between two saves.
    while seen.len() < 5 {
        seen.extend(described(&watched.next()));
    }
    assert_eq!(seen, ["+p1 10.0.0.1", "+p2 10.0.0.2", "+p3 10.0.0.3", "+p4 10.0.0.4", "+p5 10.0.0.5"]);
    watched.assert_quiet();
}

#[test]
fn files_can_be_added_removed_and_renamed() {
    let mut watched = Watched::open(&[("a.yaml", &pod("x", "10.0.0.1")), ("b.yaml", &pod("y", "10.0.0.2"))]);
    fs::remove_file(watched.path("a.yaml")).unwrap();
    assert_eq!(described(&watched.next()), ["-x"]);
    fs::rename(watched.path("b.yaml"), watched.path("c.yaml")).unwrap();
    watched.assert_quiet();
    fs::rename(watched.path("c.yaml"), watched.path("c.off")).unwrap();
    assert_eq!(described(&watched.next()), ["-y"]);
    std::os::unix::fs::symlink("c.off", watched.path("d.yaml")).unwrap();
    assert_eq!(described(&watched.next()), ["+y 10.0.0.2"]);
    watched.write("notes.txt", "nothing to read");
    watched.assert_quiet();
    // A dangling link is a file that cannot be read; without the link, its objects are deleted.
    fs::remove_file(watched.path("c.off")).unwrap();
    let batch = watched.next_within(SOON).expect("found by the look once a second at the latest");
    assert!(batch.changes.is_empty() && batch.problems.len() == 1, "{batch:?}");
    fs::remove_file(watched.path("d.yaml")).unwrap();
    assert_eq!(described(&watched.next()), ["-y"]);
}

#[test]
fn a_broken_save_keeps_the_last_good_state_and_is_reported_once() {
    let mut watched = Watched::open(&[("a.yaml", &pod("x", "10.0.0.1"))]);
    watched.write("a.yaml", &pod("x", "10.0.0.999"));
    let batch = watched.next();
    assert!(batch.changes.is_empty(), "{batch:?}");
    let [problem] = &batch.problems[..] else { panic!("{batch:?}") };
    assert_eq!(problem.origin.line, Some(4));
    assert_eq!(problem.field.to_string(), "status.podIPs[0].ip");
    assert_eq!(&*problem.origin.file, watched.path("a.yaml"));
    watched.write("a.yaml", &pod("x", "10.0.0.999"));
    watched.assert_quiet();
    watched.write("a.yaml", &pod("x", "10.0.0.9"));
    let batch = watched.next();
    assert_eq!((described(&batch), &batch.fixed), (vec!["+x 10.0.0.9".to_owned()], &vec![watched.path("a.yaml")]));
}

#[test]
fn a_removed_directory_keeps_the_state_until_it_returns() {
    let mut watched = Watched::open(&[("a.yaml", &pod("x", "10.0.0.1")), ("b.yaml", &pod("y", "10.0.0.2"))]);
    let away = watched.directory.with_extension("away");
    fs::rename(&watched.directory, &away).unwrap();
    let batch = watched.next();
    assert!(batch.changes.is_empty() && batch.problems.len() == 1, "{batch:?}");
    watched.assert_quiet();
    fs::create_dir(&watched.directory).unwrap();
    fs::copy(away.join("default.yaml"), watched.path("default.yaml")).unwrap();
    watched.write("a.yaml", &pod("x", "10.0.0.7"));
    let made = Instant::now();
    let mut seen = described(&watched.next());
    while seen.len() < 2 {
        seen.extend(described(&watched.next()));
    }
    seen.sort();
    println!("from a directory made anew to its batch: {:.1?}", made.elapsed());
    assert_eq!(seen, ["+x 10.0.0.7", "-y"]);
    // It is watched again, not only checked once a second.
    assert_follows_events(&mut watched);
}

fn assert_follows_events(watched: &mut Watched) {
    let mut times: Vec<Duration> = (1..9)
        .map(|i| {
            watched.write("a.yaml", &pod("x", &format!("10.0.1.{i}")));
            let saved = Instant::now();
            assert_eq!(described(&watched.next()), [format!("+x 10.0.1.{i}")]);
            saved.elapsed()
        })
        .collect();
    times.sort();
    assert!(times[1] < BY_EVENT, "{times:?}");
}

#[test]
fn a_directory_can_be_a_relative_path() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("manifests");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("default.yaml"), "{apiVersion: v1, kind: Namespace, metadata: {name: default}}").unwrap();
    let up: PathBuf = std::env::current_dir().unwrap().components().skip(1).map(|_| "..").collect();
    let relative = up.join(directory.strip_prefix("/").unwrap());
    let mut watched = Watched::open_directory(parent, directory, &relative);
    assert_follows_events(&mut watched);
}

#[test]
fn a_replaced_directory_is_followed() {
    let mut watched = Watched::open(&[("a.yaml", &pod("x", "10.0.0.1"))]);
    let other = watched.directory.with_extension("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("a.yaml"), pod("x", "10.0.0.2")).unwrap();
    fs::copy(watched.path("default.yaml"), other.join("default.yaml")).unwrap();
    fs::rename(&watched.directory, watched.directory.with_extension("old")).unwrap();
    fs::rename(&other, &watched.directory).unwrap();
    let mut batch = watched.next();
    if batch.changes.is_empty() {
        // It was read between the two renames.
        batch = watched.next();
    }
    assert_eq!(described(&batch), ["+x 10.0.0.2"]);
    watched.write("a.yaml", &pod("x", "10.0.0.3"));
    assert_eq!(described(&watched.next()), ["+x 10.0.0.3"]);
}

#[test]
fn dropping_the_source_ends_its_thread() {
    let watched = Watched::open(&[]);
    // More saves than batches can wait: the thread is sending when its owner is dropped.
    for i in 0..40 {
        watched.write("a.yaml", &pod("x", &format!("10.0.0.{}", i + 1)));
        std::thread::sleep(Duration::from_millis(15));
    }
    let (sender, dropped) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(watched);
        let _ = sender.send(());
    });
    dropped.recv_timeout(Duration::from_secs(60)).expect("it ends");
}

/// Reading it would wait for a writer for ever.
#[test]
fn a_pipe_is_refused_and_hangs_nobody() {
    let mut watched = Watched::open(&[("a.yaml", &pod("x", "10.0.0.1"))]);
    let made = std::process::Command::new("mkfifo").arg(watched.path("pipe.yaml")).status().unwrap();
    assert!(made.success());
    let batch = watched.next();
    assert!(batch.changes.is_empty() && batch.refused == 1, "{batch:?}");
    assert!(batch.problems[0].to_string().contains("not a regular file"), "{batch:?}");
    watched.write("a.yaml", &pod("x", "10.0.0.2"));
    assert_eq!(described(&watched.next()), ["+x 10.0.0.2"]);
    // A user who names a pipe may have it read.
    let error = read_manifests(&[watched.directory.as_path()], &Options::default()).unwrap_err();
    assert!(error.to_string().contains("pipe.yaml: cannot be read: not a regular file"), "{error}");
}

#[test]
fn a_start_with_a_refused_file_takes_the_last_good_objects() {
    let parent = tempfile::tempdir().unwrap();
    fs::write(parent.path().join("a.yaml"), pod("x", "10.0.0.1")).unwrap();
    fs::write(parent.path().join("b.yaml"), pod("y", "10.0.0.2")).unwrap();
    let open = |last: Option<&Vec<Object>>| {
        ManifestDirectory::open_after(parent.path(), ConversionSettings::default(), &|| last.cloned())
    };
    let (_, last) = open(None).unwrap();
    fs::write(parent.path().join("b.yaml"), "a: [").unwrap();
    let (_, closed) = open(None).unwrap();
    assert!(
        closed.iter().any(|object| unread_manifest(&object.reference()).is_some()),
        "nothing is known of what it had"
    );
    let (directory, objects) = open(Some(&last)).unwrap();
    assert_eq!(directory.refused(), 1);
    let names = |objects: &[Object]| {
        let mut names: Vec<_> = objects.iter().map(|object| object.reference().to_string()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&objects), names(&last));
}
