//! Records of flows: of each connection when it ends and while it lives, and of those that were denied.
//!
//! A thread of its own makes them, so that neither the control thread nor a worker waits. Ten times a second it takes what
//! the workers have put into bounded queues: connections that have ended
//! ([`penstock_dataplane::conntrack::EndedConnection`]) and packets that were denied
//! ([`penstock_dataplane::worker::VerdictLog::take_denied`]). At each interval it walks the table for those that are open,
//! idle or not, some at a time. It names ends and rules by the objects in effect, under the same lock as others, in portions.
//! It alone has what it keeps between records: no other thread reads it.
//!
//! Records go to a file and to a collector, each behind a bounded queue. What is lost anywhere is counted.

mod denied;
mod file;
mod live;
mod names;
mod otlp;
mod record;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use jiff::Timestamp as Time;
use penstock_dataplane::conntrack::{ConnTable, ConnectionInfo, EndedConnection, Ending, State, Timestamp, Traffic};
use penstock_dataplane::packet::{Address, Flow, TcpFlags};
use penstock_dataplane::worker::{Dataplane, VerdictLog};
use penstock_policy::engine::Engine;
use penstock_policy::state::ClusterState;

use super::config;
use super::naming::{identifier, sides};
use super::nonblocking_writer::NonBlockingWriter;
use super::publisher::Publisher;
use crate::privileges;
use denied::{DeniedFlow, DeniedFlows, DeniedPackets};
use file::{RecordsFileError, RotatingFile};
use live::{Counted, LiveConnections};
use names::Names;
use otlp::{OtlpError, OtlpSender};
use record::{DecidingRules, FlowEvent, FlowRecord, RecordedEnd, RecordedVerdict, ended, flag_names};

const ROUND: Duration = Duration::from_millis(100);
const DENIED_INTERVAL: Duration = Duration::from_secs(5);
/// How many records are made under one lock of the objects: policy waits for that many at most.
const PORTION: usize = 200;
/// The most portions of one kind in a round: twenty thousand records a second.
const PORTIONS: usize = 10;
/// Chunks of lines, of a portion each, that may wait to be written.
const WAITING_CHUNKS: usize = 64;
/// How long the last records may take when the daemon ends.
const LAST_RECORDS: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
pub(super) struct RecordCounters {
    made: [AtomicU64; FlowEvent::ALL.len()],
    /// Denied packets in no record, because there were too many kinds.
    denied: AtomicU64,
    file: Arc<AtomicU64>,
    otlp: Arc<AtomicU64>,
}

/// The same at one time, by name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct RecordTotals {
    /// By event.
    pub(super) made: Vec<(&'static str, u64)>,
    /// By what they were lost at.
    pub(super) lost: Vec<(&'static str, u64)>,
    /// Forwarded packets that are in no connection's counts.
    pub(super) uncounted: u64,
}

/// The thread that makes records. Dropping it ends it, with the last records.
pub(super) struct FlowRecorder {
    counters: Arc<RecordCounters>,
    table: Arc<ConnTable>,
    log: Arc<VerdictLog>,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

pub(super) struct Sinks {
    counters: Arc<RecordCounters>,
    /// `None` as well if it has no thread: every record counts as lost then.
    file: Option<NonBlockingWriter>,
    otlp: Option<OtlpSender>,
    wanted: [bool; 2],
}

#[derive(Debug, thiserror::Error)]
pub(super) enum SinkError {
    #[error(transparent)]
    File(#[from] RecordsFileError),
    #[error(transparent)]
    Otlp(#[from] OtlpError),
}

impl Sinks {
    /// Opens what is configured; `None` if nothing is.
    ///
    /// # Errors
    /// A file that cannot be opened, or settings of the collector that cannot be used.
    pub(super) fn open(config: &config::Config) -> Result<Option<Self>, SinkError> {
        let settings = &config.flow_records;
        if !settings.is_on() {
            return Ok(None);
        }
        let counters = Arc::new(RecordCounters::default());
        let open = |path| RotatingFile::open(path, settings.file_size.bytes(), settings.files, counters.file.clone());
        let file = settings.file.path().map(open).transpose()?.and_then(writer);
        let otlp = OtlpSender::start(settings, config.node.as_str(), &counters.otlp)?;
        let wanted = [settings.file.path().is_some(), settings.otlp_url().is_some()];
        Ok(Some(Self { counters, file, otlp, wanted }))
    }

    /// Hands records to what writes and sends them. Never waits.
    fn put(&self, records: Vec<FlowRecord>) {
        if records.is_empty() {
            return;
        }
        for record in &records {
            self.counters.made[record.event as usize].fetch_add(1, Ordering::Relaxed);
        }
        let (count, [wants_file, wants_otlp]) = (records.len() as u64, self.wanted);
        if wants_file && !self.file.as_ref().is_some_and(|file| file.try_write(lines(&records))) {
            self.counters.file.fetch_add(count, Ordering::Relaxed);
        }
        if wants_otlp && !self.otlp.as_ref().is_some_and(|otlp| otlp.try_send(records)) {
            self.counters.otlp.fetch_add(count, Ordering::Relaxed);
        }
    }
}

fn writer(file: RotatingFile) -> Option<NonBlockingWriter> {
    let failed = |error| tracing::error!(%error, "cannot write flow_records.file; records are lost until it can");
    NonBlockingWriter::new("flow-file", WAITING_CHUNKS, file, failed)
        .inspect_err(|error| tracing::error!(%error, "cannot start the thread that writes flow_records.file"))
        .ok()
}

fn lines(records: &[FlowRecord]) -> Vec<u8> {
    let mut lines = Vec::with_capacity(records.len() * 800);
    for record in records {
        serde_json::to_writer(&mut lines, record).expect("strings and numbers are JSON");
        lines.push(b'\n');
    }
    lines
}

impl FlowRecorder {
    /// Starts the thread, without capabilities.
    pub(super) fn start(
        sinks: Sinks,
        config: &config::Config,
        dataplane: &Dataplane,
        publisher: &Arc<Publisher>,
    ) -> io::Result<Self> {
        let settings = &config.flow_records;
        let (table, log) = (Arc::clone(dataplane.connections()), Arc::clone(dataplane.verdicts()));
        let counters = Arc::clone(&sinks.counters);
        log.keep_denied(settings.denied_each_second);
        let maker = RecordMaker {
            node: config.node.as_str().into(),
            interval: settings.interval.duration(),
            publisher: Arc::downgrade(publisher),
            table: Arc::clone(&table),
            log: Arc::clone(&log),
            sinks,
            names: Names::default(),
            live: LiveConnections::new(settings.interval.duration()),
            denied: DeniedFlows::default(),
        };
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new().name("flow-records".to_owned()).spawn(move || {
            privileges::drop_all();
            maker.run(&stopped);
        })?;
        Ok(Self { counters, table, log, stop: Some(stop), thread: Some(thread) })
    }

    pub(super) fn totals(&self) -> RecordTotals {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let made = FlowEvent::ALL.map(|event| (event.name(), read(&self.counters.made[event as usize])));
        RecordTotals {
            made: made.into(),
            lost: vec![
                ("ended", self.table.ended_lost()),
                ("denied", self.log.denied_missing() + read(&self.counters.denied)),
                ("file", read(&self.counters.file)),
                ("otlp", read(&self.counters.otlp)),
            ],
            uncounted: self.table.uncounted(),
        }
    }
}

impl Drop for FlowRecorder {
    fn drop(&mut self) {
        self.log.keep_denied(0);
        self.stop = None;
        // A panic has been reported on standard error.
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

struct RecordMaker {
    node: Arc<str>,
    interval: Duration,
    publisher: Weak<Publisher>,
    table: Arc<ConnTable>,
    log: Arc<VerdictLog>,
    sinks: Sinks,
    names: Names,
    live: LiveConnections,
    denied: DeniedFlows,
}

/// The same time on both clocks.
#[derive(Clone, Copy)]
struct Now {
    table: Timestamp,
    wall: Time,
    monotonic: Instant,
}

impl Now {
    fn read() -> Self {
        Self { table: Timestamp::now(), wall: Time::now(), monotonic: Instant::now() }
    }

    fn before(&self, age: Duration) -> Time {
        self.wall.checked_sub(age).unwrap_or(self.wall)
    }

    fn at(&self, at: Timestamp) -> Time {
        self.before(Duration::from_millis(self.table.as_millis().saturating_sub(at.as_millis())))
    }
}

struct Connection {
    original: Flow,
    state: State,
    begun: Option<Timestamp>,
    traffic: [Traffic; 2],
    flags: TcpFlags,
    idle: Duration,
    cause: Cause,
}

/// Why a connection has a record.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// It is open at the end of an interval.
    Interval,
    /// It is open when the daemon ends.
    DaemonEnds,
    Ended(Ending),
}

impl Connection {
    fn open(info: &ConnectionInfo, cause: Cause) -> Self {
        let ConnectionInfo { original, state, begun, traffic, flags, idle, .. } = *info;
        Self { original, state, begun, traffic: traffic.unwrap_or_default(), flags, idle, cause }
    }

    fn ended(connection: &EndedConnection, now: Timestamp) -> Self {
        let EndedConnection { original, state, begun, traffic, flags, ending, .. } = *connection;
        let idle = connection.idle(now);
        Self { original, state, begun, traffic, flags, idle, cause: Cause::Ended(ending) }
    }
}

impl RecordMaker {
    fn run(mut self, stopped: &Receiver<()>) {
        let table = Arc::clone(&self.table);
        self.find(&table);
        let (mut walk, start) = (None, Instant::now());
        let [mut next_walk, mut next_denied, mut next_read] =
            [self.interval, DENIED_INTERVAL, Duration::ZERO].map(|wait| start + wait);
        loop {
            let ends = !matches!(stopped.recv_timeout(ROUND), Err(RecvTimeoutError::Timeout));
            let now = Now::read();
            self.record_ended(&now);
            if now.monotonic >= next_read {
                self.read_pods(&now);
                next_read = now.monotonic + names::READ_INTERVAL;
            }
            self.sum_up_denied(&now);
            if ends || now.monotonic >= next_denied {
                self.record_denied(&now);
                next_denied = now.monotonic + DENIED_INTERVAL;
            }
            if ends {
                return self.record_last(&table);
            }
            if walk.is_none() && now.monotonic >= next_walk {
                self.live.begin_walk();
                walk = Some(table.iter(now.table));
                next_walk = now.monotonic + self.interval;
            }
            if let Some(open) = &mut walk
                && !self.record_open(open, Cause::Interval, PORTIONS, &now)
            {
                self.live.end_walk();
                walk = None;
            }
        }
    }

    /// Notes the connections of an earlier daemon, which has recorded what they have sent.
    fn find(&mut self, table: &ConnTable) {
        for info in table.iter(Timestamp::now()).filter(|info| info.begun.is_none()) {
            let found = counted(table, &Connection::open(&info, Cause::Interval));
            self.live.found(found);
        }
    }

    /// Who owns the addresses of this node's pods.
    fn read_pods(&mut self, now: &Now) {
        let Some(publisher) = self.publisher.upgrade() else { return };
        self.names.read(publisher.inputs().objects.pods(), now.table);
        self.names.forget(now.table);
    }

    fn record_ended(&mut self, now: &Now) {
        for _ in 0..PORTIONS {
            let ended: Vec<_> = std::iter::from_fn(|| self.table.take_ended()).take(PORTION).collect();
            let ended: Vec<_> = ended.iter().map(|ended| Connection::ended(ended, now.table)).collect();
            self.record(&ended, now);
            if ended.len() < PORTION {
                return;
            }
        }
    }

    /// Records the next open connections of a walk. False if it has come to the end.
    fn record_open(
        &mut self,
        open: &mut impl Iterator<Item = ConnectionInfo>,
        cause: Cause,
        portions: usize,
        now: &Now,
    ) -> bool {
        for _ in 0..portions {
            let portion: Vec<_> = open.by_ref().take(PORTION).map(|info| Connection::open(&info, cause)).collect();
            self.record(&portion, now);
            if portion.len() < PORTION {
                return false;
            }
        }
        true
    }

    /// The daemon ends: what connections have sent since their last records must not be missing from the next daemon's.
    fn record_last(mut self, table: &ConnTable) {
        let deadline = Instant::now() + LAST_RECORDS;
        let mut open = table.iter(Timestamp::now());
        while self.record_open(&mut open, Cause::DaemonEnds, 1, &Now::read()) && Instant::now() < deadline {}
    }

    /// Makes records of these connections, and hands them on.
    fn record(&mut self, connections: &[Connection], now: &Now) {
        let Some(publisher) = self.publisher.upgrade().filter(|_| !connections.is_empty()) else { return };
        let inputs = publisher.inputs();
        let engine = inputs.objects.engine();
        let records: Vec<_> =
            connections.iter().filter_map(|connection| self.of_connection(connection, engine, now)).collect();
        drop(inputs);
        self.sinks.put(records);
    }

    fn of_connection(&mut self, connection: &Connection, engine: &Engine, now: &Now) -> Option<FlowRecord> {
        let counted = counted(&self.table, connection);
        let counts = match connection.cause {
            Cause::Ended(_) => self.live.end(counted),
            Cause::Interval => self.live.interval(counted),
            Cause::DaemonEnds => self.live.news(counted)?,
        };
        let original = &connection.original;
        let (src_port, dst_port) = original.shown_ports();
        let ended = match connection.cause {
            Cause::Ended(ending) => Some(ended(ending, connection.state)),
            Cause::Interval | Cause::DaemonEnds => None,
        };
        // Its rules have gone with its pod.
        let rules = match connection.cause {
            Cause::Ended(Ending::Removed) => DecidingRules::default(),
            _ => DecidingRules::new(sides(engine, original)),
        };
        let mut end = |address, port| self.end(engine.state(), address, port, connection.begun, now);
        Some(FlowRecord {
            time: now.wall,
            event: if ended.is_some() { FlowEvent::End } else { FlowEvent::Interval },
            from: end(original.src, src_port),
            to: end(original.dst, dst_port),
            node: Arc::clone(&self.node),
            connection: Some(identifier(counted.id)),
            protocol: original.protocol.to_string(),
            verdict: match connection.state {
                State::Revoked => RecordedVerdict::Revoked,
                _ => RecordedVerdict::Allowed,
            },
            reason: None,
            rules,
            state: Some(connection.state.name()),
            ended,
            counts: Some(counts),
            packets: None,
            tcp_flags: flag_names(connection.flags),
            first: connection.begun.map(|begun| now.at(begun)),
            last: now.before(connection.idle),
        })
    }

    fn end(
        &mut self,
        state: &ClusterState,
        address: Address,
        port: u16,
        begun: Option<Timestamp>,
        now: &Now,
    ) -> RecordedEnd {
        let address = address.into();
        RecordedEnd { address, port, identity: self.names.owner(state, address, begun, now.table) }
    }

    fn sum_up_denied(&mut self, now: &Now) {
        for record in std::iter::from_fn(|| self.log.take_denied()).take(PORTION * PORTIONS) {
            let age = now.monotonic.saturating_duration_since(record.at);
            if !self.denied.add(&record, now.before(age)) {
                self.sinks.counters.denied.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn record_denied(&mut self, now: &Now) {
        let Some(publisher) = self.publisher.upgrade() else { return };
        for portion in self.denied.take().chunks(PORTION) {
            let inputs = publisher.inputs();
            let engine = inputs.objects.engine();
            let records: Vec<_> = portion.iter().map(|denied| self.of_denied(denied, engine, now)).collect();
            drop(inputs);
            self.sinks.put(records);
        }
    }

    fn of_denied(&mut self, (flow, packets): &(DeniedFlow, DeniedPackets), engine: &Engine, now: &Now) -> FlowRecord {
        let mut end = |address: std::net::IpAddr, port| self.end(engine.state(), address.into(), port, None, now);
        FlowRecord {
            time: now.wall,
            event: FlowEvent::Denied,
            from: end(flow.src, packets.src_port),
            to: end(flow.dst, flow.port),
            node: Arc::clone(&self.node),
            connection: packets.connection.map(identifier),
            protocol: flow.protocol.to_string(),
            verdict: RecordedVerdict::Denied,
            reason: Some(flow.reason.name()),
            rules: flow.rules.clone(),
            state: None,
            ended: None,
            counts: None,
            packets: Some(packets.packets),
            tcp_flags: Vec::new(),
            first: Some(packets.first),
            last: packets.last,
        }
    }
}

fn counted(table: &ConnTable, connection: &Connection) -> Counted {
    let &Connection { ref original, begun, state, traffic, .. } = connection;
    Counted { id: table.connection_id(original), begun, state, traffic }
}
