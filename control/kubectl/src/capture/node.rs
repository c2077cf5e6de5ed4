//! One node's capture: its pcapng stream as packets.

use std::io::{self, Read};
use std::path::Path;
use std::pin::Pin;
use std::thread;

use penstock_replay::capture::CaptureFile;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::sync::{mpsc, oneshot};

use super::super::ask::problem;
use super::super::cluster::{Problem, Reader, Running};

/// Bytes that are read at a time.
const CHUNK: usize = 1 << 16;
/// Most lines of standard error that are kept.
const MAX_LINES: usize = 100;

/// A packet as a node has captured it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Packet {
    /// Nanoseconds since 1970, by the node's clock.
    pub(super) time: u64,
    /// The interface's name, and its number there.
    pub(super) interface: (u32, String),
    /// Bytes on the wire.
    pub(super) original: u32,
    pub(super) frame: Vec<u8>,
    pub(super) comment: String,
}

/// What a daemon says at the end of its capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Counts {
    pub(super) packets: u64,
    pub(super) lost: u64,
}

/// What happens on a node, by its number.
#[derive(Debug)]
pub(super) enum Event {
    /// Packets are captured from now on.
    Began(usize),
    Packet(usize, Packet),
    /// Nothing more comes of it.
    Ended(usize, Result<Counts, Problem>),
}

/// Follows a node's capture to its end.
pub(super) async fn follow(node: usize, running: Running, events: mpsc::Sender<Event>) {
    let Running { stdin: _, stdout, stderr, status } = running;
    let (chunks, received) = mpsc::channel::<Vec<u8>>(16);
    let parsed = parse_on_a_thread(node, received, events.clone());
    let outputs = async { tokio::join!(pass_on(stdout, chunks), read_lines(node, stderr, &events)).1 };
    let ended = tokio::try_join!(async { Ok(outputs.await) }, status);
    let ended = match (ended, parsed.await) {
        (Err(problem), _) => Err(problem),
        (Ok((lines, 0)), Ok(Ok(()))) => Ok(lines.iter().find_map(|line| counts(line)).unwrap_or_default()),
        (Ok((_, 0)), Ok(Err(damage))) => Err(Problem::Garbage(damage)),
        (Ok((_, 0)), Err(_)) => Err(Problem::Garbage("its packets are not read to the end".to_owned())),
        (Ok((lines, code)), _) => Err(problem(code, &lines.join("\n"))),
    };
    // Nobody waits for it if this fails.
    let _ = events.send(Event::Ended(node, ended)).await;
}

/// Passes an output on in pieces, to its end.
async fn pass_on(mut output: Reader, chunks: mpsc::Sender<Vec<u8>>) {
    loop {
        let mut chunk = Vec::with_capacity(CHUNK);
        match output.read_buf(&mut chunk).await {
            Ok(count) if count > 0 && chunks.send(chunk).await.is_ok() => {}
            _ => return,
        }
    }
}

async fn read_lines(node: usize, stderr: Reader, events: &mpsc::Sender<Event>) -> Vec<String> {
    let stderr: Pin<Box<dyn tokio::io::AsyncBufRead + Send>> = Box::pin(BufReader::new(stderr));
    let mut lines = stderr.lines();
    let mut kept = Vec::new();
    while let Ok(Some(line)) = lines.next_line().await {
        if line.starts_with("penstock: capturing on ") {
            let _ = events.send(Event::Began(node)).await;
        } else if kept.len() < MAX_LINES {
            kept.push(line);
        }
    }
    kept
}

/// The numbers of `penstock: 12 packets captured, 3 lost to the capture (interrupted)`.
fn counts(line: &str) -> Option<Counts> {
    let (packets, rest) = line.strip_prefix("penstock: ")?.split_once(" packets captured, ")?;
    let (lost, _) = rest.split_once(" lost to the capture")?;
    Some(Counts { packets: packets.parse().ok()?, lost: lost.parse().ok()? })
}

/// Chunks as a reader, which waits for the next one.
struct ChunkReader {
    chunks: mpsc::Receiver<Vec<u8>>,
    current: io::Cursor<Vec<u8>>,
}

impl Read for ChunkReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = Read::read(&mut self.current, buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            match self.chunks.blocking_recv() {
                Some(chunk) => self.current = io::Cursor::new(chunk),
                None => return Ok(0),
            }
        }
    }
}

/// The parser waits for its input, so it has a thread.
fn parse_on_a_thread(
    node: usize,
    mut chunks: mpsc::Receiver<Vec<u8>>,
    events: mpsc::Sender<Event>,
) -> oneshot::Receiver<Result<(), String>> {
    let (parsed, result) = oneshot::channel();
    let body = move || {
        // A command that is refused prints nothing, which its exit code explains.
        let done = match chunks.blocking_recv() {
            Some(first) => parse(node, ChunkReader { chunks, current: io::Cursor::new(first) }, &events),
            None => Ok(()),
        };
        let _ = parsed.send(done);
    };
    // Without a thread the sender is dropped, which the receiver sees.
    let _ = thread::Builder::new().name(format!("node {node}")).spawn(body);
    result
}

fn parse(node: usize, input: ChunkReader, events: &mpsc::Sender<Event>) -> Result<(), String> {
    let mut interfaces = Vec::new();
    let file = CaptureFile::read(Path::new("its packets"), input, 0, &mut interfaces);
    let mut file = file.map_err(|error| error.to_string())?.with_comments();
    let mut frame = Vec::new();
    while let Some(record) = file.next(&mut frame, &mut interfaces).map_err(|error| error.to_string())? {
        let number = record.interface.0;
        let name = interfaces.get(record.interface.index()).and_then(|interface| interface.name.clone());
        let packet = Packet {
            time: record.time.0,
            interface: (number, name.unwrap_or_else(|| format!("interface {number}"))),
            original: record.original,
            frame: std::mem::take(&mut frame),
            comment: file.comment().to_owned(),
        };
        if events.blocking_send(Event::Packet(node, packet)).is_err() {
            return Ok(());
        }
    }
    match file.truncated_at() {
        Some(offset) => Err(format!("its packets break off inside one, after {offset} bytes")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemons_counts_are_read_from_its_last_line() {
        let line = "penstock: 12 packets captured, 3 lost to the capture (interrupted)";
        assert_eq!(counts(line), Some(Counts { packets: 12, lost: 3 }));
        for line in ["", "penstock: capturing on a", "penstock: x packets captured, 3 lost to the capture"] {
            assert_eq!(counts(line), None, "{line}");
        }
    }
}
