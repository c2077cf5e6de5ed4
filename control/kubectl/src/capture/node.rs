//! One node's capture: what its daemon sends, as messages.

use penstock_admin::capture::{CaptureMessage, DecodedMessage, decode};
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;

use super::super::ask::{MAX_ERRORS, problem, read_all};
use super::super::cluster::{Problem, Reader, Running};

const CHUNK: usize = 1 << 16;

#[derive(Debug)]
pub(super) enum Event {
    Message(usize, CaptureMessage, Vec<u8>),
    /// Nothing more comes of it.
    Ended(usize, Result<(), Problem>),
}

pub(super) async fn follow(node: usize, running: Running, events: mpsc::Sender<Event>) {
    let Running { stdin: _, stdout, stderr, status } = running;
    let messages = async { Ok(pass_on(node, stdout, &events).await) };
    let stderr = async { Ok(read_all(stderr, MAX_ERRORS).await.unwrap_or_default()) };
    let ended = match tokio::try_join!(messages, stderr, status) {
        Err(problem) => Err(problem),
        Ok((messages, _, 0)) => messages.map_err(Problem::Garbage),
        Ok((_, stderr, code)) => Err(problem(code, &String::from_utf8_lossy(&stderr))),
    };
    // Nobody waits for it if this fails.
    let _ = events.send(Event::Ended(node, ended)).await;
}

/// Passes messages on. Fails if the last one is not that of the end.
async fn pass_on(node: usize, mut output: Reader, events: &mpsc::Sender<Event>) -> Result<(), String> {
    let (mut received, mut is_ended) = (Vec::new(), false);
    loop {
        let mut read = 0;
        while let Some(DecodedMessage { message, frame, length }) = decode(&received[read..])? {
            read += length;
            is_ended = matches!(message, CaptureMessage::End { .. });
            if events.send(Event::Message(node, message, frame.to_vec())).await.is_err() {
                return Ok(());
            }
        }
        received.drain(..read);
        received.reserve(CHUNK);
        match output.read_buf(&mut received).await {
            Ok(count) if count > 0 => {}
            _ if is_ended && received.is_empty() => return Ok(()),
            _ => return Err(format!("its packets break off, {} bytes into a message", received.len())),
        }
    }
}
