//! Replay of captures that come through a pipe: memory, the progress bar, and an interruption.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{SigHandler, Signal, kill, signal};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};

const MANIFESTS: &str = "apiVersion: v1\nkind: Namespace\nmetadata: { name: shop }\n";
/// No test waits longer for anything.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A directory with manifests and a pipe that is to be a capture.
fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("cluster.yaml"), MANIFESTS).unwrap();
    mkfifo(&directory.path().join("pipe.pcap"), Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    directory
}

fn header() -> Vec<u8> {
    [&0xa1b2_c3d4u32.to_le_bytes()[..], &[2, 0, 4, 0], &[0; 8], &[0xff, 0xff, 0, 0, 1, 0, 0, 0]].concat()
}

/// Some packets with this much payload, of flows that are all different.
fn packets(first: u32, count: u32, payload: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for number in first..first + count {
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2([1; 6], [2; 6])
            .ipv4([10, 0, 0, 1], (0x0a01_0000 + number / 50_000).to_be_bytes(), 64)
            .udp((number % 50_000) as u16, 53)
            .write(&mut frame, &vec![0; payload])
            .unwrap();
        let length = frame.len() as u32;
        for word in [1_700_000_000 + number / 10_000, number % 10_000, length, length] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(frame);
    }
    bytes
}

fn replay(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_penstock"));
    command.args(["replay", "--manifests", "cluster.yaml", "--pcap", "pipe.pcap"]).current_dir(directory);
    command
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The pipe's other end, once the command has opened its own.
fn pipe(directory: &Path) -> fs::File {
    let mut open = fs::OpenOptions::new();
    open.write(true).custom_flags(OFlag::O_NONBLOCK.bits());
    let mut pipe = None;
    until("the capture is opened", || {
        pipe = open.open(directory.join("pipe.pcap")).ok();
        pipe.is_some()
    });
    let pipe = pipe.unwrap();
    fcntl(&pipe, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    pipe
}

/// Most memory that the process has had, in KiB.
fn peak(child: &Child) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn memory_does_not_grow_with_the_capture() {
    let directory = directory();
    let mut child = replay(directory.path()).stdout(Stdio::null()).spawn().unwrap();
    let mut pipe = pipe(directory.path());
    pipe.write_all(&header()).unwrap();
    let part = packets(0, 10_000, 1400);
    pipe.write_all(&part).unwrap();
    let early = peak(&child);
    for _ in 0..8 {
        pipe.write_all(&part).unwrap();
    }
    let late = peak(&child);
    drop(pipe);
    assert!(child.wait().unwrap().success());
    // 14 MB were read at the first look, 130 MB at the second.
    assert!(late < early + 10_000, "{early} KiB early, {late} KiB late");
}

#[test]
fn an_interrupted_replay_leaves_no_file() {
    for ending in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGKILL] {
        let directory = directory();
        let mut command = replay(directory.path());
        command.args(["--verdicts", "v.jsonl", "--allowed", "a.pcapng", "--denied", "d.pcapng"]);
        // Whoever runs the tests in the background may ignore SIGINT, and children inherit that.
        let heed = || {
            // SAFETY: the default disposition is no code of ours.
            unsafe { signal(Signal::SIGINT, SigHandler::SigDfl) }.map(|_| ()).map_err(std::io::Error::from)
        };
        // SAFETY: between fork and exec the closure makes one system call; it neither allocates nor takes a lock.
        unsafe { command.pre_exec(heed) };
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        let mut pipe = pipe(directory.path());
        pipe.write_all(&header()).unwrap();
        pipe.write_all(&packets(0, 20_000, 100)).unwrap();
        until("files being written", || {
            let open = fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap();
            open.filter_map(|fd| fs::metadata(fd.unwrap().path()).ok()).any(|file| file.is_file() && file.len() > 0)
        });
        kill(Pid::from_raw(child.id() as i32), ending).unwrap();
        until("ended", || child.try_wait().unwrap().is_some_and(|status| !status.success()));
        let mut names: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["cluster.yaml", "pipe.pcap"], "{ending}");
    }
}

#[test]
fn a_long_replay_shows_progress_only_on_a_terminal() {
    // `script` of util-linux runs the command on a terminal of its own.
    let on_terminal = |directory: &Path| {
        let command = format!("{:?}", replay(directory));
        let mut script = Command::new("script");
        // Not every terminal has a bar: not the one that tests may be told that they run on.
        script.args(["-qec", &command, "/dev/null"]).current_dir(directory).env("TERM", "xterm");
        script
    };
    for (is_terminal, expected) in [(true, true), (false, false)] {
        let directory = directory();
        let mut command = if is_terminal { on_terminal(directory.path()) } else { replay(directory.path()) };
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut pipe = pipe(directory.path());
        pipe.write_all(&header()).unwrap();
        pipe.write_all(&packets(0, 70_000, 0)).unwrap();
        // A bar is worth it once the replay has taken a second.
        thread::sleep(Duration::from_millis(1200));
        pipe.write_all(&packets(70_000, 70_000, 0)).unwrap();
        drop(pipe);
        let mut shown = String::new();
        child.stdout.take().unwrap().read_to_string(&mut shown).unwrap();
        child.stderr.take().unwrap().read_to_string(&mut shown).unwrap();
        assert!(child.wait().unwrap().success(), "{shown}");
        assert!(shown.contains("140,000"), "the summary: {shown}");
        assert_eq!(shown.contains("packets, ") && shown.contains("M/s"), expected, "{shown}");
    }
}
