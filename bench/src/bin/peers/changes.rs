//! Which connections pass while a policy changes, or the engine itself.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use penstock_bench::probe::{EchoConnection, OLDEST, Protocol, Series, SeriesPoint};

use crate::cell::Cell;
use crate::cluster::{CLIENT, Cluster, OPEN, PODS, SERVER, STRANGER};
use crate::running::Running;

/// How long a change of policy may take.
const LIMIT: Duration = Duration::from_secs(10);
/// How long connections are still tried after it.
const AFTER: Duration = Duration::from_millis(700);
/// How long nothing runs after a crash and after a stop.
const AWAY: Duration = Duration::from_millis(1500);
/// Between the attempts of changes of policy, and of disturbances.
const ATTEMPTS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(5)];

/// The effect of a change of policy. Times are from when the API server was asked to save it.
pub(crate) struct ChangeOutcome {
    /// When the first connection was tried since which none has passed.
    pub(crate) denied: Option<Duration>,
    /// Connections that passed after one had not.
    pub(crate) late: usize,
    /// When the established connection had its last answer; `None`: it goes on.
    pub(crate) cut: Option<Duration>,
    /// From taking it back to the first connection that passes.
    pub(crate) allowed: Option<Duration>,
}

/// Denies what connections use, and takes it back.
pub(crate) fn change_policy(cluster: &Cluster, cell: &Cell) -> Result<ChangeOutcome> {
    let (client, server) = (&cell.sites[CLIENT], &cell.sites[SERVER]);
    let established = establish(cell)?;
    let series = Series::start(client, server, SERVER, Protocol::Tcp(OPEN), ATTEMPTS[0])?;
    sleep(OLDEST + Duration::from_millis(200));
    let (passed, all) = count(&series.points(), Instant::now() - AFTER, Instant::now(), true);
    ensure!(2 * passed > all, "only {passed} of {all} allowed connections passed within {OLDEST:?} before it");
    let saved = Instant::now();
    cluster.set_open(false)?;
    wait_until_none_passes(&series, saved);
    let cut = established.wait_until_blocked(AFTER);
    let restored = Instant::now();
    cluster.set_open(true)?;
    let allowed = series.wait_for(restored, true, LIMIT)?;
    let points = series.end()?;
    let after: Vec<SeriesPoint> = points.into_iter().filter(|it| it.at >= saved && it.at < restored - OLDEST).collect();
    let (denied, late) = from_when_none_passes(&after);
    // A pause that ends sooner was the end of the wait, not of the connections.
    let denied = denied.filter(|&denied| denied + AFTER <= restored);
    Ok(ChangeOutcome {
        denied: denied.map(|at| at - saved),
        late,
        cut: cut.map(|at| at.saturating_duration_since(saved)),
        allowed: allowed.map(|at| at - restored),
    })
}

/// Waits until no connection has passed for a while, so long that those before it have failed; at most [`LIMIT`].
fn wait_until_none_passes(series: &Series, saved: Instant) {
    while saved.elapsed() < LIMIT {
        let passed = series.points().iter().filter(|point| point.reached).map(|point| point.at).max();
        if passed.map_or(saved, |passed| passed.max(saved)).elapsed() > AFTER + OLDEST {
            break;
        }
        sleep(Duration::from_millis(20));
    }
}

/// When the first attempt began since which none has passed, and how many passed after one that had not. One that takes too long has not
/// passed either, so a single failure says nothing about policy.
fn from_when_none_passes(points: &[SeriesPoint]) -> (Option<Instant>, usize) {
    let last = points.iter().rposition(|point| point.reached);
    let denied = points.get(last.map_or(0, |last| last + 1)).map(|point| point.at);
    let first = points.iter().position(|point| !point.reached).unwrap_or(points.len());
    (denied, points[first..].iter().filter(|point| point.reached).count())
}

/// A connection from the client to the server. Its silence is shorter than what is looked at after a change and while an engine is away.
fn establish(cell: &Cell) -> Result<EchoConnection> {
    const SILENCE: Duration = Duration::from_secs(1);
    let address = (SERVER as u32, PODS[SERVER].address.into());
    let deadline = Instant::now() + LIMIT;
    loop {
        match EchoConnection::open(&cell.sites[CLIENT].namespace, address, OPEN, SILENCE) {
            Err(_) if Instant::now() < deadline => {}
            opened => return opened,
        }
    }
}

/// The connections that were tried in a part of a disturbance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    /// Allowed ones that did not pass, of how many.
    pub(crate) lost: (usize, usize),
    /// Denied ones that passed, of how many.
    pub(crate) leaked: (usize, usize),
}

/// A crash, a start, a stop and a start.
pub(crate) struct Disturbances {
    /// Parts in this order: while it is away after a crash, at the start after that, while it is stopped, at the start after that.
    pub(crate) parts: [Part; 4],
    /// Whether an established connection went on through the crash.
    pub(crate) survived: bool,
}

/// Kills the engine, starts it, stops it and starts it.
pub(crate) fn disturb(cell: &Cell, running: &mut Running<'_>, limit: Duration) -> Result<Disturbances> {
    let [client, server, stranger] = [CLIENT, SERVER, STRANGER].map(|pod| &cell.sites[pod]);
    let established = establish(cell)?;
    let allowed = Series::start(client, server, SERVER, Protocol::Tcp(OPEN), ATTEMPTS[1])?;
    let denied = Series::start(stranger, server, SERVER, Protocol::Tcp(OPEN), ATTEMPTS[1])?;
    sleep(Duration::from_millis(200));
    let mut borders = vec![Instant::now()];
    running.crash()?;
    sleep(AWAY);
    let survived = established.wait_until_blocked(Duration::ZERO).is_none();
    for is_last in [false, true] {
        borders.push(Instant::now());
        running.launch()?;
        running.wait_until_verified(limit)?;
        sleep(AFTER);
        borders.push(Instant::now());
        if !is_last {
            running.stop()?;
            sleep(AWAY);
        }
    }
    let (allowed, denied) = (allowed.end()?, denied.end()?);
    let part = |number: usize| {
        let (from, to) = (borders[number], borders[number + 1]);
        Part { lost: count(&allowed, from, to, false), leaked: count(&denied, from, to, true) }
    };
    Ok(Disturbances { parts: [0, 1, 2, 3].map(part), survived })
}

/// Attempts of a time with this result, and all of that time.
fn count(points: &[SeriesPoint], from: Instant, to: Instant, reached: bool) -> (usize, usize) {
    let within = || points.iter().filter(|point| point.at >= from && point.at < to);
    (within().filter(|point| point.reached == reached).count(), within().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denial_begins_after_the_last_attempt_that_passes() {
        let start = Instant::now();
        let points = |reached: &[bool]| -> Vec<SeriesPoint> {
            let at = |number: usize| start + Duration::from_millis(number as u64);
            reached.iter().enumerate().map(|(number, &reached)| SeriesPoint { at: at(number), reached }).collect()
        };
        for (reached, denied, late) in [
            (vec![true, false, false], Some(1), 0),
            (vec![false, true, true, false], Some(3), 2),
            (vec![false, false], Some(0), 0),
            (vec![false, true], None, 1),
            (vec![], None, 0),
        ] {
            let expected = (denied.map(|number| start + Duration::from_millis(number)), late);
            assert_eq!(from_when_none_passes(&points(&reached)), expected, "{reached:?}");
        }
    }

    #[test]
    fn attempts_count_for_the_time_in_which_they_began() {
        let start = Instant::now();
        let at = |milliseconds: u64| start + Duration::from_millis(milliseconds);
        let points: Vec<SeriesPoint> = [(0, true), (10, false), (19, true), (20, false)]
            .map(|(ms, reached)| SeriesPoint { at: at(ms), reached })
            .into();
        assert_eq!(count(&points, at(0), at(20), false), (1, 3));
        assert_eq!(count(&points, at(10), at(30), true), (1, 3));
    }
}
