//! An engine's turn: it starts on new nodes, is seen to do what policy says, and is measured.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use penstock_bench::testbed::api_server::Account;

use crate::cell::Cell;
use crate::changes::{ChangeOutcome, Disturbances, change_policy, disturb};
use crate::cluster::Cluster;
use crate::engine::{Engine, PeersFolder};
use crate::results::{Figure, Reading, Results, Section};
use crate::running::Running;
use crate::traffic::{PLACES, TESTS, measure};

/// How long an engine that enforces already may go on with what it does at its start.
const SETTLE: Duration = Duration::from_secs(10);

pub(crate) struct Turn {
    pub(crate) engine: &'static Engine,
    pub(crate) policies: usize,
    pub(crate) round: u32,
    pub(crate) length: Duration,
    pub(crate) patience: Duration,
}

struct Readings<'a> {
    turn: &'a Turn,
    results: &'a mut Results,
    order: usize,
}

impl Readings<'_> {
    fn add(&mut self, section: Section, name: &str, digits: usize, absent: &'static str, reading: Reading) {
        // By the order in which they are added.
        self.order += 1;
        let figure = Figure { section, order: self.order, name: name.to_owned(), digits, absent };
        self.results.add(self.turn.policies, figure, self.turn.engine.name, self.turn.round, reading);
    }
}

/// Takes it; its readings so far stay where it fails.
pub(crate) fn take(turn: &Turn, cluster: &Cluster, peers: &PeersFolder, results: &mut Results) -> Result<()> {
    let cell = Cell::new(turn.engine.prefix, cluster.server.port()?).context("cannot wire the nodes")?;
    let kubeconfig = cluster.server.kubeconfig(Account::Admin);
    let started = Instant::now();
    let mut running = Running::start(turn.engine, &cell, peers, &kubeconfig).context("cannot start it")?;
    let verified = running.wait_until_verified(turn.patience)?;
    running.settle(SETTLE)?;
    let mut readings = Readings { turn, results, order: 0 };
    add_traffic(&mut readings, &cell, &running)?;
    if !turn.engine.enforces() {
        return Ok(());
    }
    readings.order = 100;
    let started = (verified - started).as_secs_f64();
    readings.add(Section::Daemons, "start to verified, s", 1, "–", Reading::Number(started));
    if let Some((resident, maps)) = running.memory() {
        let mebibytes = |bytes: u64| Reading::Number(bytes as f64 / f64::from(1 << 20));
        readings.add(Section::Daemons, "resident memory, MiB", 0, "–", mebibytes(resident));
        readings.add(Section::Daemons, "BPF maps, MiB", 0, "–", mebibytes(maps));
    }
    let change = change_policy(cluster, &cell);
    // Whatever came of it, the next engine finds the policies as this one did.
    cluster.set_open(true)?;
    add_change(&mut readings, &change.context("a change of policy")?);
    // It takes long, and what it shows is counted: once is enough.
    if turn.round == 0 {
        let disturbances = disturb(&cell, &mut running, turn.patience);
        add_disturbances(&mut readings, &disturbances.context("crash, start, stop and start")?);
    }
    Ok(())
}

fn add_traffic(readings: &mut Readings<'_>, cell: &Cell, running: &Running<'_>) -> Result<()> {
    for (place, to) in PLACES {
        for test in &TESTS {
            let what = || format!("{}, {place}", test.name);
            let measured = measure(test, cell, to, running, readings.turn.length).with_context(what)?;
            let name = |unit: &str| format!("{}, {place}, {unit}", test.name);
            readings.add(Section::Rates, &name(test.rate), 1, "–", Reading::Number(measured.rate));
            let cost = measured.cost.map_or(Reading::Absent, Reading::Number);
            readings.add(Section::Costs, &name(test.cost), 1, "–", cost);
        }
    }
    Ok(())
}

fn add_change(readings: &mut Readings<'_>, change: &ChangeOutcome) {
    const NEVER: &str = "not within 10 s";
    let milliseconds =
        |time: Option<Duration>| time.map_or(Reading::Absent, |time| Reading::Number(time.as_secs_f64() * 1e3));
    let mut add = |name, absent, reading| readings.add(Section::Changes, name, 0, absent, reading);
    add("no new connection passes from, ms", NEVER, milliseconds(change.denied));
    add("connections that passed after one had not", "–", Reading::Number(change.late as f64));
    add("last answer in an established connection, ms", "goes on", milliseconds(change.cut));
    add("taken back to the first allowed connection, ms", NEVER, milliseconds(change.allowed));
}

fn add_disturbances(readings: &mut Readings<'_>, disturbances: &Disturbances) {
    let names = ["after a crash", "start after the crash", "after a stop", "start after the stop"];
    for (name, part) in names.iter().zip(disturbances.parts) {
        for (what, (some, all)) in [("allowed that did not pass", part.lost), ("denied that passed", part.leaked)] {
            readings.add(Section::Disturbances, &format!("{name}: {what}"), 0, "–", Reading::Of(some, all));
        }
    }
    let survived = usize::from(disturbances.survived);
    let name = "established connections that went on through the crash";
    readings.add(Section::Disturbances, name, 0, "–", Reading::Of(survived, 1));
}
