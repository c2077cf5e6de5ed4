//! Attempts at a steady interval, each with its result: what passes while something changes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::attempt::{Attempt, drive};
use super::{Probe, ProbeOutcome, Protocol, Site};

/// Without an answer for this long an attempt has failed.
pub const OLDEST: Duration = Duration::from_millis(300);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeriesPoint {
    pub at: Instant,
    pub reached: bool,
}

/// Attempts from one site to another until this is ended or dropped.
pub struct Series {
    stop: Arc<AtomicBool>,
    points: Arc<Mutex<Vec<SeriesPoint>>>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Series {
    /// Starts them, one each `interval`, to the server with this identity.
    pub fn start(from: &Site, to: &Site, identity: usize, protocol: Protocol, interval: Duration) -> Result<Self> {
        let destination = to.addresses.first().copied().with_context(|| format!("{} has no address", to.name))?;
        let probe = Probe { from: 0, to: identity, source: None, destination, protocol };
        let (stop, points) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::default()));
        let (stopped, into) = (Arc::clone(&stop), Arc::clone(&points));
        let thread = from.namespace.spawn("series", move || attempt_until(&stopped, &probe, interval, &into))?;
        Ok(Self { stop, points, thread: Some(thread) })
    }

    /// The results so far, in the order in which they came to be known.
    pub fn points(&self) -> Vec<SeriesPoint> {
        self.points.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for an attempt since `from` with this result; `None` once `limit` has passed. Returns when the first of them began.
    pub fn wait_for(&self, from: Instant, reached: bool, limit: Duration) -> Result<Option<Instant>> {
        let deadline = Instant::now() + limit;
        loop {
            let points = self.points();
            let matching = points.iter().filter(|point| point.at >= from && point.reached == reached);
            if let Some(first) = matching.map(|point| point.at).min() {
                return Ok(Some(first));
            }
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                bail!("the attempts have ended: {:?}", points.last());
            }
            if Instant::now() > deadline {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends them and returns all results, ordered by time.
    pub fn end(mut self) -> Result<Vec<SeriesPoint>> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        let mut points = self.points();
        points.sort_by_key(|point| point.at);
        Ok(points)
    }
}

impl Drop for Series {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn attempt_until(stop: &AtomicBool, probe: &Probe, interval: Duration, points: &Mutex<Vec<SeriesPoint>>) -> Result<()> {
    let mut attempts: Vec<Attempt> = Vec::new();
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) || !attempts.is_empty() {
        if !stop.load(Ordering::Relaxed) {
            attempts.push(Attempt::start(probe).with_context(|| format!("cannot try {}", probe.destination))?);
        }
        // After a delay the rhythm begins anew: a burst would measure itself.
        next = (next + interval).max(Instant::now());
        drive(&mut attempts, next)?;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let mut known = points.lock().unwrap_or_else(PoisonError::into_inner);
        attempts.retain(|attempt| {
            let outcome = attempt.outcome();
            let is_over = outcome.is_some() || attempt.started().elapsed() >= OLDEST;
            if is_over {
                known.push(SeriesPoint { at: attempt.started(), reached: outcome == Some(ProbeOutcome::Reached) });
            }
            !is_over
        });
    }
    Ok(())
}
