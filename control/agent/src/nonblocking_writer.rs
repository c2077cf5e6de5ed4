//! A writer that never blocks its caller: a thread writes, and a chunk that finds the queue full (slow disk, unread
//! pipe) is rejected.
//!
//! `tracing_appender::non_blocking` (0.2) does this too, but its guard prints to standard output when the queue is full,
//! so a daemon whose standard output nobody reads never ends. It also hides write errors, and panics without a thread.

use std::io::{self, Write};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::privileges;

/// How long a drop waits for queued chunks: enough for a slow disk.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// The sending end. Dropping it waits up to a second until all is written.
pub(super) struct NonBlockingWriter {
    chunks: Option<SyncSender<Vec<u8>>>,
    thread: JoinHandle<()>,
}

impl Drop for NonBlockingWriter {
    fn drop(&mut self) {
        self.chunks = None;
        let until = Instant::now() + FLUSH_TIME;
        while !self.thread.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl NonBlockingWriter {
    /// Starts the thread. The queue holds `capacity` chunks; `failed` is called with the first error of each row of
    /// errors.
    pub(super) fn new(
        name: &str,
        capacity: usize,
        mut output: impl Write + Send + 'static,
        failed: impl Fn(io::Error) + Send + 'static,
    ) -> io::Result<Self> {
        let (sender, receiver) = sync_channel::<Vec<u8>>(capacity);
        let body = move || {
            privileges::drop_all();
            let mut fails = false;
            while let Ok(chunk) = receiver.recv() {
                let written = output.write_all(&chunk).and_then(|()| output.flush());
                let failed_before = std::mem::replace(&mut fails, written.is_err());
                if let Err(error) = written
                    && !failed_before
                {
                    failed(error);
                }
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(body)?;
        Ok(Self { chunks: Some(sender), thread })
    }

    /// Queues the chunk if there is room. Never waits.
    pub(super) fn try_write(&self, chunk: Vec<u8>) -> bool {
        self.chunks.as_ref().is_some_and(|chunks| chunks.try_send(chunk).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    #[test]
    fn writing_never_waits_and_accepted_chunks_are_written() {
        let (reader, writer) = io::pipe().unwrap();
        let nonblocking_writer = NonBlockingWriter::new("test", 4, writer, |error| panic!("{error}")).unwrap();
        let line = |number: usize| format!("{number} {}\n", "x".repeat(10_000)).into_bytes();
        let taken: Vec<usize> = (0..1000).filter(|&number| nonblocking_writer.try_write(line(number))).collect();
        assert!((4..100).contains(&taken.len()), "a pipe holds little: {}", taken.len());
        let read = thread::spawn(move || {
            let lines = BufReader::new(reader).lines().map_while(Result::ok);
            lines.map(|line| line.split(' ').next().unwrap().parse::<usize>().unwrap()).collect::<Vec<_>>()
        });
        drop(nonblocking_writer);
        assert_eq!(read.join().unwrap(), taken);
    }

    #[test]
    fn dropping_does_not_wait_for_a_reader_that_never_reads() {
        let (_reader, writer) = io::pipe().unwrap();
        let nonblocking_writer = NonBlockingWriter::new("test", 4, writer, |_| ()).unwrap();
        while nonblocking_writer.try_write(vec![b'x'; 10_000]) {}
        let (sender, dropped) = std::sync::mpsc::channel();
        thread::spawn(move || {
            drop(nonblocking_writer);
            let _ = sender.send(());
        });
        dropped.recv_timeout(30 * FLUSH_TIME).expect("it ends, though nobody reads");
    }
}
