//! `penstock capture` beside a daemon, and what its file has.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::daemon::penstock_binary;

/// A running `penstock capture`. Dropping it kills it.
pub struct PacketCapture {
    child: Child,
    file: PathBuf,
    lines: Receiver<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CapturedFrame {
    pub interface: String,
    /// Nanoseconds since 1970.
    pub time: u64,
    /// The bytes that were kept.
    pub bytes: Vec<u8>,
    /// Bytes of the whole frame.
    pub length: u32,
    pub comment: String,
}

impl PacketCapture {
    /// Begins to capture into `file`; returns once the workers capture.
    ///
    /// It is killed when the calling *thread* ends.
    pub fn start(socket: &Path, file: &Path, arguments: &[&str]) -> Result<Self> {
        Self::start_with(socket, ("-o", file), file.to_owned(), arguments)
    }

    /// The same into a bundle, which has objects, too.
    pub fn start_bundle(socket: &Path, directory: &Path, arguments: &[&str]) -> Result<Self> {
        Self::start_with(socket, ("--bundle", directory), directory.join("packets.pcapng"), arguments)
    }

    /// The same for a reader that keeps nothing: [`end`](Self::end) returns no packets.
    pub fn start_discarding(socket: &Path, arguments: &[&str]) -> Result<Self> {
        Self::start_with(socket, ("-o", Path::new("-")), PathBuf::from("/dev/null"), arguments)
    }

    fn start_with(socket: &Path, output: (&str, &Path), file: PathBuf, arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new(penstock_binary()?);
        command.arg("capture").args(arguments).arg("--socket").arg(socket).arg(output.0).arg(output.1);
        command.env("NO_COLOR", "1");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // SAFETY: between fork and exec the closure makes one system call; it neither allocates nor takes a lock.
        unsafe { command.pre_exec(|| nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).map_err(std::io::Error::from)) };
        let mut child = command.spawn()?;
        let stderr = child.stderr.take().context("its standard error is a pipe")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(std::io::Result::ok) {
                let _ = sender.send(line);
            }
        });
        let capture = Self { child, file, lines };
        capture.wait_for_line("capturing on ")?;
        Ok(capture)
    }

    fn wait_for_line(&self, text: &str) -> Result<String> {
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut seen = Vec::new();
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            match self.lines.recv_timeout(left) {
                Ok(line) if line.contains(text) => return Ok(line),
                Ok(line) => seen.push(line),
                Err(_) => break,
            }
        }
        bail!("penstock capture printed no {text:?}: {seen:?}")
    }

    pub fn packets(&self) -> Result<Vec<CapturedFrame>> {
        read_packets(&self.file)
    }

    /// Waits until there are so many packets.
    pub fn wait_for(&self, count: usize, limit: Duration) -> Result<Vec<CapturedFrame>> {
        let deadline = Instant::now() + limit;
        loop {
            let packets = self.packets()?;
            if packets.len() >= count {
                return Ok(packets);
            }
            ensure!(Instant::now() < deadline, "{} packets of {count} within {limit:?}: {packets:?}", packets.len());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.child.id() as i32), signal)?)
    }

    /// Ends it with SIGINT. Returns its packets, and its last line.
    pub fn end(self) -> Result<(Vec<CapturedFrame>, String)> {
        self.signal(Signal::SIGINT)?;
        self.wait()
    }

    /// Waits until it has ended without success. Returns its exit code.
    pub fn wait_for_failure(mut self) -> Result<i32> {
        let status = self.child.wait()?;
        status.code().filter(|code| *code != 0).with_context(|| format!("penstock capture ended with {status}"))
    }

    /// Waits until it has ended with success. Returns its packets, and its last line.
    pub fn wait(mut self) -> Result<(Vec<CapturedFrame>, String)> {
        let summary = self.wait_for_line(" lost to the capture ")?;
        let status = self.child.wait()?;
        ensure!(status.success(), "penstock capture ended with {status}");
        Ok((self.packets()?, summary))
    }
}

impl Drop for PacketCapture {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads the whole blocks of a pcapng file with nanoseconds in little-endian order.
pub fn read_packets(file: &Path) -> Result<Vec<CapturedFrame>> {
    let mut bytes = Vec::new();
    File::open(file)?.read_to_end(&mut bytes)?;
    let (mut interfaces, mut packets, mut rest) = (Vec::new(), Vec::new(), bytes.as_slice());
    while rest.len() >= 12 {
        let (kind, length) = (word(rest, 0), word(rest, 4) as usize);
        ensure!(length >= 12 && length.is_multiple_of(4), "a block of {length} bytes");
        if length > rest.len() {
            break;
        }
        let (block, next) = rest.split_at(length);
        ensure!(word(block, length - 4) as usize == length, "both lengths of a block are equal");
        let body = &block[8..length - 4];
        match kind {
            1 => interfaces.push(option(&body[8..], 2)),
            6 => {
                let kept = word(body, 12) as usize;
                packets.push(CapturedFrame {
                    interface: interfaces.get(word(body, 0) as usize).context("a described interface")?.clone(),
                    time: u64::from(word(body, 4)) << 32 | u64::from(word(body, 8)),
                    bytes: body[20..20 + kept].to_vec(),
                    length: word(body, 16),
                    comment: option(&body[20 + kept.next_multiple_of(4)..], 1),
                });
            }
            _ => {}
        }
        rest = next;
    }
    Ok(packets)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The text of an option; empty if there is none.
fn option(mut options: &[u8], wanted: u16) -> String {
    while options.len() >= 4 {
        let (code, length) = (word(options, 0) as u16, (word(options, 0) >> 16) as usize);
        if code == wanted {
            return String::from_utf8_lossy(&options[4..4 + length]).into_owned();
        }
        options = options.get(4 + length.next_multiple_of(4)..).unwrap_or_default();
    }
    String::new()
}
