//! The connection table against concurrent maps.
//!
//! `cargo bench -p penstock-bench --bench conntrack`, or `make bench-conntrack`. It prints each figure beside its
//! threshold. The contenders of a ratio alternate in one run, pinned to the same cores, and the ratio is the median of
//! the rounds' ratios.
//!
//! The maps store what an entry of the table stores, in the same number of bytes, and update it in the same way: the
//! time is written when it has changed. They use their default hash, which is keyed like ours, since a node hashes
//! untrusted input. The same map with FxHash, which is fast and not keyed, is shown for comparison.
//!
//! Environment: `ROUNDS` (11), `ROUND_MS` (200), `FLOOD_SECONDS` (60), `CLOCK` (`wall`, or `cpu`: each thread's CPU
//! time, for a machine with other load; it does not count waiting), `LARGE` (16777216).

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use hdrhistogram::Histogram;
use nix::time::{ClockId, clock_gettime};
use penstock_dataplane::Epoch;
use penstock_dataplane::conntrack::{
    Config, ConnTable, Insertion, NewConnection, OwnerId, SweepCursor, Timeouts, Timestamp, Update,
};
use penstock_dataplane::packet::{Address, Flow, FlowKey, Protocol, TcpFlags, TcpSegment, Transport};
use rustc_hash::FxBuildHasher;

/// Counts allocated bytes.
struct CountingAllocator;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards every call to the system's allocator and only counts.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const BATCH: usize = 64;
const CONNECTIONS: u32 = 1_000_000;
const SMALL: u32 = 65_536;
/// Connections that come and go in the mixed benchmark, per thread.
const CHURN: u32 = 65_536;

/// The flow of number `n`, in its client's direction.
fn flow(n: u32) -> Flow {
    Flow {
        src: Address::from_v4_bytes((0x0a00_0000 | (n >> 14)).to_be_bytes()),
        dst: Address::from_v4_bytes([10, 200, 0, 1 + (n & 3) as u8]),
        protocol: Protocol::UDP,
        src_port: 1024 + (n & 0x3fff) as u16,
        dst_port: 53,
    }
}

/// A table or map under test.
trait ConnectionMap: Sync {
    fn insert(&self, n: u32);
    /// Finds and updates the connections of a batch of packets; returns how many were found.
    fn touch(&self, flows: &[Flow; BATCH], now: u64) -> usize;
    /// Removes the connection if present, inserts it otherwise.
    fn toggle(&self, n: u32, now: u64);
}

impl ConnectionMap for ConnTable {
    fn insert(&self, n: u32) {
        enter(self, &flow(n), Timestamp::now().as_millis());
    }

    fn touch(&self, flows: &[Flow; BATCH], now: u64) -> usize {
        let now = Timestamp::from_millis(now);
        let mut hashed: [_; BATCH] = std::array::from_fn(|index| self.prepare(&flows[index]));
        hashed.iter_mut().for_each(|hashed| self.locate(hashed));
        let found = hashed.iter().filter(|hashed| {
            self.find(hashed, now).is_some_and(|mut conn| {
                matches!(conn.update(hashed.orientation(), &Transport::Udp, now), Update::Accepted(_))
            })
        });
        found.count()
    }

    fn toggle(&self, n: u32, now: u64) {
        let hashed = self.prepare(&flow(n));
        match self.find(&hashed, Timestamp::from_millis(now)) {
            Some(conn) => _ = conn.remove(),
            None => enter(self, &flow(n), now),
        }
    }
}

fn enter(table: &ConnTable, flow: &Flow, now: u64) {
    let hashed = table.prepare(flow);
    let now = Timestamp::from_millis(now);
    // Many owners, so that only the table's size limits the number of connections.
    let owner = OwnerId(flow.src_port);
    let new = NewConnection {
        hashed: &hashed,
        transport: &Transport::Udp,
        owner,
        via_host: false,
        opener: None,
        epoch: Epoch(1),
        now,
    };
    assert!(matches!(table.insert(&new), Ok(Insertion::Created(_) | Insertion::Found(_))), "there is room");
}

fn table(connections: u32) -> ConnTable {
    ConnTable::new(&Config { entries: connections as usize, quota: Some(u32::MAX), ..without_expiry() })
        .expect("memory")
}

/// Nothing expires during a measurement.
fn without_expiry() -> Config {
    let day = Duration::from_secs(86_400);
    Config {
        timeouts: Timeouts { udp_timeout: day, udp_timeout_stream: day, ..Timeouts::default() },
        ..Config::default()
    }
}

/// A map stores this for a connection: the same as an entry without its key.
#[derive(Default)]
struct MapEntry {
    control: AtomicU64,
    last: AtomicU32,
    _epoch: AtomicU32,
    _tracking: [AtomicU64; 2],
}

impl MapEntry {
    fn touch(&self, now: u64) -> bool {
        let now = (now >> 9) as u32;
        if self.last.load(Relaxed) != now {
            self.last.store(now, Relaxed);
        }
        black_box(self.control.load(Relaxed)) == 0
    }
}

impl<S: BuildHasher + Clone + Send + Sync> ConnectionMap for DashMap<FlowKey, MapEntry, S> {
    fn insert(&self, n: u32) {
        DashMap::insert(self, flow(n).key().0, MapEntry::default());
    }

    fn touch(&self, flows: &[Flow; BATCH], now: u64) -> usize {
        flows.iter().filter(|flow| self.get(&flow.key().0).is_some_and(|value| value.touch(now))).count()
    }

    fn toggle(&self, n: u32, _: u64) {
        if self.remove(&flow(n).key().0).is_none() {
            ConnectionMap::insert(self, n);
        }
    }
}

impl<S: BuildHasher + Send + Sync> ConnectionMap for papaya::HashMap<FlowKey, MapEntry, S> {
    fn insert(&self, n: u32) {
        self.pin().insert(flow(n).key().0, MapEntry::default());
    }

    fn touch(&self, flows: &[Flow; BATCH], now: u64) -> usize {
        let map = self.pin();
        flows.iter().filter(|flow| map.get(&flow.key().0).is_some_and(|value| value.touch(now))).count()
    }

    fn toggle(&self, n: u32, _: u64) {
        if self.pin().remove(&flow(n).key().0).is_none() {
            ConnectionMap::insert(self, n);
        }
    }
}

impl<S: BuildHasher + Send + Sync> ConnectionMap for scc::HashMap<FlowKey, MapEntry, S> {
    fn insert(&self, n: u32) {
        assert!(self.insert_sync(flow(n).key().0, MapEntry::default()).is_ok());
    }

    fn touch(&self, flows: &[Flow; BATCH], now: u64) -> usize {
        let touch = |flow: &&Flow| self.read_sync(&flow.key().0, |_, value| value.touch(now)) == Some(true);
        flows.iter().filter(touch).count()
    }

    fn toggle(&self, n: u32, _: u64) {
        if self.remove_sync(&flow(n).key().0).is_none() {
            ConnectionMap::insert(self, n);
        }
    }
}

/// Upper bound of the machine: work in registers only, without shared memory.
struct RegisterLoop;

impl ConnectionMap for RegisterLoop {
    fn insert(&self, _: u32) {}

    fn touch(&self, flows: &[Flow; BATCH], now: u64) -> usize {
        let mix = |sum: u64, flow: &Flow| {
            (0..40).fold(sum ^ flow.src.bits() as u64, |sum, _| {
                (sum ^ now).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
            })
        };
        black_box(flows.iter().fold(0, mix));
        BATCH
    }

    fn toggle(&self, _: u32, _: u64) {}
}

/// Upper bound of memory: random reads of as much memory as the table uses, without writers; two cache lines per
/// packet, prefetched a batch ahead as the table does.
struct RandomReads(Vec<[u64; 8]>);

impl RandomReads {
    fn of(bytes: usize) -> Self {
        Self((0..bytes as u64 / 64).map(|n| [n; 8]).collect())
    }
}

impl ConnectionMap for RandomReads {
    fn insert(&self, _: u32) {}

    fn touch(&self, flows: &[Flow; BATCH], _: u64) -> usize {
        let at = |flow: &Flow, by: u64| {
            let hash = (flow.src.bits() as u64 ^ u64::from(flow.src_port) << 40).wrapping_mul(by).rotate_left(17);
            ((u128::from(hash.wrapping_mul(by)) * self.0.len() as u128) >> 64) as usize
        };
        let line = |flow: &Flow, by: u64| self.0[at(flow, by)][usize::from(flow.src_port & 7)];
        let (first, second) = (0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f);
        black_box(flows.iter().fold(0u64, |sum, flow| sum ^ line(flow, first) ^ line(flow, second)));
        BATCH
    }

    fn toggle(&self, _: u32, _: u64) {}
}

struct Settings {
    rounds: usize,
    round: Duration,
    flood: Duration,
    cpu_clock: bool,
    large: u32,
}

impl Settings {
    fn from_environment() -> Self {
        let number = |name: &str, default: u64| match std::env::var(name) {
            Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}: give a number")),
            Err(_) => default,
        };
        Self {
            rounds: number("ROUNDS", 11) as usize,
            round: Duration::from_millis(number("ROUND_MS", 200)),
            flood: Duration::from_secs(number("FLOOD_SECONDS", 60)),
            cpu_clock: std::env::var("CLOCK").is_ok_and(|clock| clock == "cpu"),
            large: number("LARGE", 1 << 24) as u32,
        }
    }

    /// Seconds on the selected clock.
    fn now(&self) -> f64 {
        let clock = if self.cpu_clock { ClockId::CLOCK_THREAD_CPUTIME_ID } else { ClockId::CLOCK_MONOTONIC };
        let now = clock_gettime(clock).expect("Linux has these clocks");
        now.tv_sec() as f64 + now.tv_nsec() as f64 / 1e9
    }
}

fn pin(thread: usize) {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    if !cores.is_empty() {
        core_affinity::set_for_current(cores[thread % cores.len()]);
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as u32
    }
}

/// Workload of one measurement.
#[derive(Clone, Copy)]
struct Workload {
    threads: usize,
    connections: u32,
    /// Packets out of the 64 of a batch that insert or remove a connection instead.
    churn: usize,
}

/// Packets a second of all threads together, in one round.
fn run(settings: &Settings, connections: &dyn ConnectionMap, load: Workload) -> f64 {
    let (barrier, stop) = (Barrier::new(load.threads + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let work = |thread: usize| {
            pin(thread);
            let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ ((thread as u64 + 1) << 32));
            let mut packets = 0u64;
            barrier.wait();
            let begun = settings.now();
            let mut now = Timestamp::now().as_millis();
            while !stop.load(Relaxed) {
                // Like a worker: read the clock occasionally, not for every packet.
                if packets.is_multiple_of(BATCH as u64 * 16) {
                    now = Timestamp::now().as_millis();
                }
                let flows: [Flow; BATCH] = std::array::from_fn(|_| {
                    let number = random.next();
                    let flow = flow(((u64::from(number) * u64::from(load.connections)) >> 32) as u32);
                    if number & 1 == 0 { flow } else { flow.reversed() }
                });
                assert_eq!(connections.touch(&flows, now), BATCH, "all are there");
                for _ in 0..load.churn {
                    connections.toggle(load.connections + thread as u32 * CHURN + random.next() % CHURN, now);
                }
                packets += (BATCH + load.churn) as u64;
            }
            packets as f64 / (settings.now() - begun)
        };
        let threads: Vec<_> = (0..load.threads).map(|thread| scope.spawn(move || work(thread))).collect();
        barrier.wait();
        std::thread::sleep(settings.round);
        stop.store(true, Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One of the alternating measurements.
type Contender<'a> = (&'a dyn ConnectionMap, Workload);

/// Runs the contenders in alternation; returns each one's packets a second, by round.
fn rounds(settings: &Settings, contenders: &[Contender<'_>]) -> Vec<Vec<f64>> {
    let mut results = vec![Vec::new(); contenders.len()];
    for round in 0..settings.rounds + 1 {
        for (result, (connections, load)) in results.iter_mut().zip(contenders) {
            let packets = run(settings, *connections, *load);
            // The first round warms up.
            if round > 0 {
                result.push(packets);
            }
        }
    }
    results
}

/// Median over the rounds of the first contender's rate divided by the other's.
fn ratio(of: &[f64], to: &[f64]) -> f64 {
    median(of.iter().zip(to).map(|(of, to)| of / to).collect())
}

/// A line of the printed table.
struct Row {
    measure: String,
    measured: f64,
    must_reach: Option<(f64, bool)>,
    detail: String,
}

impl Row {
    /// `measured` must be at least `threshold`.
    fn at_least(measure: &str, measured: f64, threshold: f64, detail: String) -> Self {
        Self { measure: measure.to_owned(), measured, must_reach: Some((threshold, true)), detail }
    }

    /// `measured` must be at most `threshold`.
    fn at_most(measure: &str, measured: f64, threshold: f64, detail: String) -> Self {
        Self { measure: measure.to_owned(), measured, must_reach: Some((threshold, false)), detail }
    }

    /// Without a threshold.
    fn beside(measure: &str, measured: f64, detail: String) -> Self {
        Self { measure: measure.to_owned(), measured, must_reach: None, detail }
    }

    fn print(&self) {
        let (threshold, verdict) = match self.must_reach {
            Some((threshold, true)) if self.measured >= threshold => (format!("≥ {threshold:.2}"), "meets"),
            Some((threshold, true)) => (format!("≥ {threshold:.2}"), "falls short"),
            Some((threshold, false)) if self.measured <= threshold => (format!("≤ {threshold:.2}"), "meets"),
            Some((threshold, false)) => (format!("≤ {threshold:.2}"), "falls short"),
            None => (String::new(), "for comparison"),
        };
        println!(
            "| {:<62} | {:>8.2} | {threshold:>6} | {:<44} | {verdict} |",
            self.measure, self.measured, self.detail
        );
    }
}

/// Millions per second.
fn millions(rates: &[f64]) -> String {
    format!("{:.1} M/s", median(rates.to_vec()) / 1e6)
}

fn against(of: &[f64], to: &[f64]) -> String {
    format!("{} against {}", millions(of), millions(to))
}

/// Read-only and mixed benchmarks with a million connections, and the memory of each contender.
fn against_maps(settings: &Settings) -> Vec<Row> {
    let fill = |connections: &dyn ConnectionMap| (0..CONNECTIONS).for_each(|n| connections.insert(n));
    let ours = table(CONNECTIONS + 2 * CHURN);
    fill(&ours);
    let exact = table(CONNECTIONS);
    let before = ALLOCATED.load(Relaxed);
    let dashmap = DashMap::<FlowKey, MapEntry, RandomState>::with_hasher(RandomState::new());
    fill(&dashmap);
    let dashmap_bytes = (ALLOCATED.load(Relaxed) - before) as f64 / f64::from(CONNECTIONS);
    let dashmap_fx = DashMap::<FlowKey, MapEntry, FxBuildHasher>::with_hasher(FxBuildHasher);
    fill(&dashmap_fx);
    let papaya = papaya::HashMap::<FlowKey, MapEntry, RandomState>::builder().hasher(RandomState::new()).build();
    fill(&papaya);
    let scc = scc::HashMap::<FlowKey, MapEntry, RandomState>::with_hasher(RandomState::new());
    fill(&scc);

    let read = Workload { threads: 2, connections: CONNECTIONS, churn: 0 };
    let mixed = Workload { churn: BATCH / 9, ..read };
    let single = Workload { threads: 1, ..read };
    let (registers, memory) = (RegisterLoop, RandomReads::of(ours.memory()));
    let contenders: [Contender<'_>; 13] = [
        (&ours, read),
        (&dashmap, read),
        (&dashmap_fx, read),
        (&papaya, read),
        (&scc, read),
        (&ours, single),
        (&ours, mixed),
        (&dashmap, mixed),
        (&dashmap_fx, mixed),
        (&registers, read),
        (&registers, single),
        (&memory, read),
        (&memory, single),
    ];
    let [
        ours_read,
        dash,
        dash_fx,
        papaya,
        scc,
        ours_single,
        ours_mixed,
        dash_mixed,
        dash_fx_mixed,
        registers,
        registers_single,
        memory,
        memory_single,
    ] = rounds(settings, &contenders).try_into().expect("one result per contender");
    let bytes = exact.memory() as f64 / f64::from(CONNECTIONS);
    vec![
        Row::at_least(
            "find + touch, 2 threads, 1 M: against DashMap",
            ratio(&ours_read, &dash),
            5.0,
            against(&ours_read, &dash),
        ),
        Row::beside("  against DashMap with FxHash", ratio(&ours_read, &dash_fx), against(&ours_read, &dash_fx)),
        Row::at_least(
            "  with 10% insert/remove: against DashMap",
            ratio(&ours_mixed, &dash_mixed),
            3.0,
            against(&ours_mixed, &dash_mixed),
        ),
        Row::beside(
            "  with 10% insert/remove: against DashMap with FxHash",
            ratio(&ours_mixed, &dash_fx_mixed),
            against(&ours_mixed, &dash_fx_mixed),
        ),
        Row::at_least("  against papaya", ratio(&ours_read, &papaya), 2.0, against(&ours_read, &papaya)),
        Row::at_least("  against scc", ratio(&ours_read, &scc), 2.0, against(&ours_read, &scc)),
        Row::at_least("2 threads against 1", ratio(&ours_read, &ours_single), 1.85, against(&ours_read, &ours_single)),
        Row::beside(
            "  the machine's own: a loop in registers",
            ratio(&registers, &registers_single),
            against(&registers, &registers_single),
        ),
        Row::beside(
            "  the memory's own: reads of as much that nobody writes",
            ratio(&memory, &memory_single),
            against(&memory, &memory_single),
        ),
        Row::at_most(
            "memory per connection against DashMap, 1 M",
            bytes / dashmap_bytes,
            0.6,
            format!("{bytes:.0} against {dashmap_bytes:.0} bytes"),
        ),
    ]
}

/// A table much larger than all caches against one that fits. Beside it what memory allows: the small table's time, and what the
/// large one's reads of memory take longer than the small one's.
fn large_against_small(settings: &Settings) -> [Row; 2] {
    let (large, small) = (table(settings.large), table(SMALL));
    (0..settings.large).for_each(|n| ConnectionMap::insert(&large, n));
    (0..SMALL).for_each(|n| ConnectionMap::insert(&small, n));
    let load = |connections| Workload { threads: 1, connections, churn: 0 };
    let (large_memory, small_memory) = (RandomReads::of(large.memory()), RandomReads::of(small.memory()));
    let results = rounds(
        settings,
        &[
            (&large, load(settings.large)),
            (&small, load(SMALL)),
            (&large_memory, load(settings.large)),
            (&small_memory, load(SMALL)),
        ],
    );
    let by_round = (0..settings.rounds).map(|round| {
        let [small, large_memory, small_memory] = [1, 2, 3].map(|contender: usize| 1.0 / results[contender][round]);
        small / (small + large_memory - small_memory)
    });
    let name = format!("{} M connections against 64 k, one thread", settings.large >> 20);
    [
        Row::at_least(&name, ratio(&results[0], &results[1]), 0.5, against(&results[0], &results[1])),
        Row::beside(
            "  what the memory's own reads allow",
            median(by_round.collect()),
            format!("its reads: {}", against(&results[2], &results[3])),
        ),
    ]
}

/// Nanoseconds a packet in batches of established connections, while `running` is set.
fn latencies(table: &ConnTable, connections: u32, running: &AtomicBool) -> Histogram<u64> {
    let mut histogram = Histogram::new(3).expect("three digits");
    let mut random = Random(0xdead_beef_cafe_f00d);
    while running.load(Relaxed) {
        let flows: [Flow; BATCH] =
            std::array::from_fn(|_| flow(((u64::from(random.next()) * u64::from(connections)) >> 32) as u32));
        let now = Timestamp::now().as_millis();
        let begun = Instant::now();
        assert_eq!(table.touch(&flows, now), BATCH, "an established connection is never lost to a flood");
        histogram.saturating_record((begun.elapsed().as_nanos() as u64).max(1));
    }
    histogram
}

/// A pod floods with SYNs of new connections on one core while another core serves established ones.
fn flood(settings: &Settings) -> Row {
    const ESTABLISHED: u32 = 500_000;
    let table = ConnTable::new(&Config { entries: CONNECTIONS as usize, ..without_expiry() }).expect("memory");
    let now = Timestamp::now().as_millis();
    for n in 0..ESTABLISHED {
        // Four pods, so that none reaches its quota.
        let (request, owner) = (flow(n), OwnerId(1 + (n % 4) as u16));
        let hashed = table.prepare(&request);
        // Both sides have sent, and the opener again seconds later: such a connection is not evicted.
        let at = Timestamp::from_millis(now - 3000);
        let new = NewConnection {
            hashed: &hashed,
            transport: &Transport::Udp,
            owner,
            via_host: false,
            opener: None,
            epoch: Epoch(1),
            now: at,
        };
        let Ok(Insertion::Created(mut conn)) = table.insert(&new) else { panic!("there is room") };
        conn.update(hashed.orientation().opposite(), &Transport::Udp, at);
        conn.update(hashed.orientation(), &Transport::Udp, Timestamp::from_millis(now));
    }
    let measure = |seconds: Duration, is_flooded: bool| {
        let running = AtomicBool::new(true);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                pin(0);
                latencies(&table, ESTABLISHED, &running)
            });
            let sender = scope.spawn(|| {
                pin(1);
                if is_flooded { send_flood(&table, &running) } else { 0 }
            });
            std::thread::sleep(seconds);
            running.store(false, Relaxed);
            (reader.join().unwrap(), sender.join().unwrap())
        })
    };
    let idle = measure(settings.flood / 6, false).0;
    let (flooded, sent) = measure(settings.flood, true);
    let p99 = |histogram: &Histogram<u64>| histogram.value_at_quantile(0.99) as f64 / BATCH as f64;
    let detail = format!(
        "{:.0} against {:.0} ns, {:.1} M SYN/s, {} kept",
        p99(&flooded),
        p99(&idle),
        sent as f64 / settings.flood.as_secs_f64() / 1e6,
        table.len()
    );
    let name = format!("SYN flood for {} s: p99 of established lookups against idle", settings.flood.as_secs());
    Row::at_most(&name, p99(&flooded) / p99(&idle), 1.5, detail)
}

/// Inserts SYNs of new connections as a worker does, and sweeps from time to time; returns how many.
fn send_flood(table: &ConnTable, running: &AtomicBool) -> u64 {
    let syn = Transport::Tcp(TcpSegment { seq: 1, window: 1000, flags: TcpFlags::SYN, ..TcpSegment::default() });
    let (mut sent, mut cursor) = (0u64, SweepCursor::default());
    while running.load(Relaxed) {
        let now = Timestamp::now();
        let flows: [Flow; BATCH] = std::array::from_fn(|index| Flow {
            src: Address::from_v4_bytes([10, 100, 0, 1]),
            dst: Address::from_v4_bytes(((sent + index as u64) as u32).to_be_bytes()),
            protocol: Protocol::TCP,
            src_port: 4000,
            dst_port: 80,
        });
        let mut hashed = flows.map(|flow| table.prepare(&flow));
        hashed.iter_mut().for_each(|hashed| table.locate(hashed));
        for hashed in &hashed {
            if table.find(hashed, now).is_none() {
                let new = NewConnection {
                    hashed,
                    transport: &syn,
                    owner: OwnerId(9),
                    via_host: false,
                    opener: None,
                    epoch: Epoch(1),
                    now,
                };
                // Inserted, or rejected because the pod is at its quota: both are expected.
                let _ = black_box(table.insert(&new).is_ok());
            }
        }
        sent += BATCH as u64;
        table.sweep(&mut cursor, 64, now, Epoch(1));
    }
    sent
}

fn main() {
    let settings = Settings::from_environment();
    println!(
        "{} rounds of {} ms, {} clock, load average {}",
        settings.rounds,
        settings.round.as_millis(),
        if settings.cpu_clock { "thread CPU" } else { "wall" },
        std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim()
    );
    println!("| {:<62} | measured | must   | {:<44} | |", "measure", "medians");
    against_maps(&settings).iter().for_each(Row::print);
    large_against_small(&settings).iter().for_each(Row::print);
    flood(&settings).print();
}
