//! A way out that keeps nobody waiting: a thread writes, and what finds no room because a disk is slow, or because nobody
//! reads the pipe, is refused to whoever offers it.

use std::io::{self, Write};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use penstock_privileges as privileges;

/// How long the end waits for what is still to be written: as a disk may take that is no worse than slow.
const LAST: Duration = Duration::from_secs(1);

/// The end that offers. Dropping it waits a little until all is written.
pub(super) struct Outlet {
    portions: Option<SyncSender<Vec<u8>>>,
    thread: JoinHandle<()>,
}

impl Drop for Outlet {
    fn drop(&mut self) {
        self.portions = None;
        let until = Instant::now() + LAST;
        while !self.thread.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Outlet {
    /// Starts the thread. So many portions may wait; `failed` is told of the first of every row of errors.
    pub(super) fn new(
        name: &str,
        waiting: usize,
        mut output: impl Write + Send + 'static,
        failed: impl Fn(io::Error) + Send + 'static,
    ) -> io::Result<Self> {
        let (sender, receiver) = sync_channel::<Vec<u8>>(waiting);
        let body = move || {
            privileges::forgo();
            let mut fails = false;
            while let Ok(portion) = receiver.recv() {
                let written = output.write_all(&portion).and_then(|()| output.flush());
                let failed_before = std::mem::replace(&mut fails, written.is_err());
                if let Err(error) = written
                    && !failed_before
                {
                    failed(error);
                }
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(body)?;
        Ok(Self { portions: Some(sender), thread })
    }

    /// Has this written, if there is room. Never waits.
    pub(super) fn offer(&self, portion: Vec<u8>) -> bool {
        self.portions.as_ref().is_some_and(|portions| portions.try_send(portion).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    #[test]
    fn who_offers_never_waits_and_what_was_taken_is_written() {
        let (reader, writer) = io::pipe().unwrap();
        let outlet = Outlet::new("test", 4, writer, |error| panic!("{error}")).unwrap();
        let line = |number: usize| format!("{number} {}\n", "x".repeat(10_000)).into_bytes();
        let taken: Vec<usize> = (0..1000).filter(|&number| outlet.offer(line(number))).collect();
        assert!((4..100).contains(&taken.len()), "a pipe holds little: {}", taken.len());
        let read = thread::spawn(move || {
            let lines = BufReader::new(reader).lines().map_while(Result::ok);
            lines.map(|line| line.split(' ').next().unwrap().parse::<usize>().unwrap()).collect::<Vec<_>>()
        });
        drop(outlet);
        assert_eq!(read.join().unwrap(), taken);
    }

    #[test]
    fn the_end_does_not_wait_for_who_never_reads() {
        let (_reader, writer) = io::pipe().unwrap();
        let outlet = Outlet::new("test", 4, writer, |_| ()).unwrap();
        while outlet.offer(vec![b'x'; 10_000]) {}
        let (sender, dropped) = std::sync::mpsc::channel();
        thread::spawn(move || {
            drop(outlet);
            let _ = sender.send(());
        });
        dropped.recv_timeout(30 * LAST).expect("it ends, though nobody reads");
    }
}
