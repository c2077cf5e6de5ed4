//! Model test: random sequences of the pipeline's operations on the table and on a plain map with a clock.

use std::collections::HashMap;

use proptest::prelude::*;

use super::hash::{alternate, home};
use super::tags::LANES;
use super::tests::NOW;
use super::*;
use crate::epoch::Epoch;
use crate::packet::{Address, Flow, FlowKey, Protocol, TcpFlags, TcpSegment, Transport};

#[derive(Clone, Copy, Debug)]
enum Op {
    /// A packet of connection `n`, from its client or its server.
    Packet { n: u8, reply: bool },
    /// The server rejects TCP connection `n`.
    Refusal { n: u8 },
    /// Connection `n` is evaluated again, and stays, is revoked or is restored.
    Evaluate { n: u8, epoch: u32, allowed: bool },
    /// Connection `n` is removed.
    Remove { n: u8 },
    /// Time passes.
    Advance { seconds: u64 },
    /// A sweep of some entries.
    Sweep { steps: usize },
    /// The pod of this owner is removed.
    PodGone { owner: u16 },
    /// This client's address is removed.
    AddressGone { client: u8 },
}

const CONNECTIONS: u8 = 60;
const OWNERS: u8 = 4;

fn any_op() -> impl Strategy<Value = Op> {
    let n = 0..CONNECTIONS;
    prop_oneof![
        12 => (n.clone(), any::<bool>()).prop_map(|(n, reply)| Op::Packet { n, reply }),
        1 => n.clone().prop_map(|n| Op::Refusal { n }),
        2 => (n.clone(), 1..9u32, any::<bool>()).prop_map(|(n, epoch, allowed)| Op::Evaluate { n, epoch, allowed }),
        1 => n.prop_map(|n| Op::Remove { n }),
        1 => prop_oneof![Just(0u64), Just(1), Just(7), Just(20), Just(100)].prop_map(|seconds| Op::Advance { seconds }),
        1 => (0..200usize).prop_map(|steps| Op::Sweep { steps }),
        1 => (0..u16::from(OWNERS)).prop_map(|owner| Op::PodGone { owner }).boxed(),
        1 => (0..8u8).prop_map(|client| Op::AddressGone { client }).boxed(),
    ]
}

fn address(last: u8) -> Address {
    Address::from_v4_bytes([10, 0, 0, last])
}

/// The flow of connection `n` from its client. Protocols alternate, and some clients have a higher address than the
/// server and some a lower one.
fn flow(n: u8) -> Flow {
    let protocol = [Protocol::UDP, Protocol::TCP, Protocol::ICMP, Protocol::UDP][usize::from(n % 4)];
    let (src_port, dst_port) = if protocol == Protocol::ICMP { (n.into(), 0) } else { (1000 + u16::from(n), 80) };
    Flow { src: address(n / 4 % 8 * 10), dst: address(35), protocol, src_port, dst_port }
}

fn segment(flags: TcpFlags, seq: u32, ack: u32) -> Transport {
    Transport::Tcp(TcpSegment { seq, ack, window: 100, flags, ..TcpSegment::default() })
}

fn transport(protocol: Protocol, reply: bool) -> Transport {
    match protocol {
        Protocol::UDP => Transport::Udp,
        Protocol::ICMP if reply => Transport::EchoReply,
        Protocol::ICMP => Transport::EchoRequest,
        // Without mid-stream pickup an acknowledgement opens nothing, and the client only sends a SYN.
        _ if reply => segment(TcpFlags::ACK, 7, 7),
        _ => segment(TcpFlags::SYN, 100, 0),
    }
}

/// The map's entry of a connection.
#[derive(Clone, Copy, PartialEq, Debug)]
struct ModelConnection {
    original: Flow,
    state: State,
    is_revoked: bool,
    owner: OwnerId,
    epoch: u32,
    began: u64,
    last: u64,
}

struct Model {
    known: HashMap<FlowKey, ModelConnection>,
    millis: u64,
    epoch: u32,
    created: u64,
    quota: usize,
}

/// Same capacity as the table.
const ENTRIES: usize = 64;

impl Model {
    /// Maximum number of connections of an owner with this many in total.
    fn limit(&self, all: usize) -> usize {
        self.quota.min(ENTRIES.saturating_sub(all).max(1))
    }
}

/// Half seconds, the table's resolution.
fn ticks(millis: u64) -> u64 {
    millis / 512
}

impl ModelConnection {
    /// The visible state.
    fn shown(&self) -> State {
        if self.is_revoked { State::Revoked } else { self.state }
    }
    fn lifetime(&self) -> u64 {
        let seconds: u64 = match (self.original.protocol, self.shown()) {
            (Protocol::UDP, State::Replied | State::Assured | State::Revoked) => 120,
            (Protocol::UDP | Protocol::ICMP, _) => 30,
            (_, State::Revoked) => 300,
            (_, State::Tcp(TcpState::SynSent)) => 120,
            (_, State::Tcp(TcpState::Close)) => 10,
            other => panic!("the model does not reach {other:?}"),
        };
        (seconds * 1000).div_ceil(512)
    }
    fn is_expired(&self, now: u64) -> bool {
        ticks(now) - ticks(self.last) > self.lifetime()
    }
    /// The documented eviction rank for a connection from `source`; `None`: never evicted.
    fn rank(&self, source: Address, now: u64) -> Option<EvictionRank> {
        let (liveness, class) = match self.state {
            _ if self.is_expired(now) => (0, 0),
            _ if self.is_revoked => return None,
            State::Tcp(TcpState::Close) => (1, 0),
            State::Tcp(TcpState::SynSent) | State::Unreplied => (2, 0),
            State::Replied => (2, 1),
            _ => return None,
        };
        Some((liveness, self.original.src != source, class, ticks(self.last)))
    }
}

/// Closing or not, of another source or not, answered or not, and the time of last use.
type EvictionRank = (u8, bool, u8, u64);

/// Runs one packet like the pipeline, and checks the result.
fn packet(table: &ConnTable, model: &mut Model, flow: Flow, transport: &Transport) {
    let now = Timestamp::from_millis(model.millis);
    let hashed = table.prepare(&flow);
    let key = flow.key().0;
    let owner = OwnerId(key.low_port.max(key.high_port) % u16::from(OWNERS));
    let known = model.known.get(&key).copied().filter(|known| !known.is_expired(model.millis));
    let found = table.find(&hashed, now);
    assert_eq!(
        found.map(|conn| (conn.original_flow(), conn.state(), conn.owner())),
        known.map(|k| (k.original, k.shown(), k.owner))
    );
    match (found, known) {
        (Some(mut conn), Some(mut known)) => {
            assert!(conn.is_evaluated_under(Epoch(known.epoch)) && !conn.is_evaluated_under(Epoch(known.epoch + 1)));
            let reply = flow != known.original;
            let update = conn.update(hashed.orientation(), transport, now);
            let expected = expected_state(&known, reply, transport, model.millis);
            match expected {
                Expected::State(state) => {
                    assert_eq!(update, Update::Accepted(state));
                    (known.state, known.last) = (state, model.millis);
                    model.known.insert(key, known);
                }
                Expected::Unchanged => assert_eq!(update, Update::Accepted(known.state)),
                Expected::Invalid => assert_eq!(update, Update::Invalid),
                Expected::Revoked => {
                    assert_eq!(update, Update::Revoked);
                    // The opener alone keeps only what both sides had agreed to.
                    if reply || known.state == State::Assured {
                        known.last = model.millis;
                        model.known.insert(key, known);
                    }
                }
                Expected::Opens => {
                    assert_eq!(update, Update::Opens);
                    assert!(conn.replace(hashed.orientation(), transport, now));
                    model.known.remove(&key);
                    enter(table, model, flow, transport, owner);
                }
            }
        }
        (None, None) => enter(table, model, flow, transport, owner),
        _ => unreachable!("they were equal"),
    }
}

enum Expected {
    State(State),
    Unchanged,
    Invalid,
    Revoked,
    Opens,
}

fn expected_state(known: &ModelConnection, reply: bool, transport: &Transport, now: u64) -> Expected {
    if known.is_revoked {
        let anew = matches!(transport, Transport::Tcp(segment) if segment.flags == TcpFlags::SYN);
        return if anew { Expected::Opens } else { Expected::Revoked };
    }
    let Transport::Tcp(segment) = transport else {
        return match transport {
            Transport::EchoReply if !reply => Expected::Invalid,
            Transport::EchoRequest if reply => Expected::Invalid,
            _ if reply && known.state == State::Unreplied => Expected::State(State::Replied),
            _ if !reply && known.state == State::Replied && ticks(now) - ticks(known.began) >= 4 => {
                Expected::State(State::Assured)
            }
            _ => Expected::State(known.state),
        };
    };
    let closed = known.state == State::Tcp(TcpState::Close);
    if segment.flags.contains(TcpFlags::RST) {
        // Only the SYN of the client was seen, and nothing of the server's numbers.
        Expected::State(State::Tcp(TcpState::Close))
    } else if segment.flags.contains(TcpFlags::SYN) {
        if closed { Expected::Opens } else { Expected::State(known.state) }
    } else if closed {
        Expected::State(known.state)
    } else {
        Expected::Unchanged
    }
}

/// Inserts a connection and checks the result against the available room.
fn enter(table: &ConnTable, model: &mut Model, flow: Flow, transport: &Transport, owner: OwnerId) {
    let (now, key) = (Timestamp::from_millis(model.millis), flow.key().0);
    // The insert removes an expired entry of its own key.
    let expired = model.known.remove(&key);
    let hashed = table.prepare(&flow);
    let groups = [home(hashed.hash, table.groups), alternate(hashed.hash, table.groups)];
    let group_of = |key: &FlowKey| {
        let hashed = table.prepare(&key.flow(crate::packet::Orientation::LowToHigh));
        table.lookup(&hashed).map(|(slot, _)| slot / LANES)
    };
    let candidates: HashMap<FlowKey, (u32, EvictionRank)> = model
        .known
        .iter()
        .filter(|(_, known)| known.owner == owner)
        .filter_map(|(key, known)| Some((*key, (group_of(key)?, known.rank(flow.src, model.millis)?))))
        .filter(|(_, (group, _))| groups.contains(group))
        .collect();
    let owned = model.known.values().filter(|known| known.owner == owner).count();
    let all = model.known.len();
    let is_full = owned >= model.limit(all);
    let epoch = Epoch(model.epoch);
    let new = NewConnection { hashed: &hashed, transport, owner, via_host: false, opener: None, epoch, now };
    let opens = !matches!(transport, Transport::EchoReply)
        && !matches!(transport, Transport::Tcp(segment) if segment.flags != TcpFlags::SYN);
    match table.insert(&new) {
        Ok(Insertion::Created(conn)) => {
            assert!(opens);
            assert_eq!(conn.original_flow(), flow);
            if is_full {
                evicted(table, model, candidates, if owned > model.limit(all) { 2 } else { 1 });
            }
            let (state, began) = (conn.state(), model.millis);
            let known = ModelConnection {
                original: flow,
                state,
                is_revoked: false,
                owner,
                epoch: model.epoch,
                began,
                last: model.millis,
            };
            model.known.insert(key, known);
            model.created += 1;
        }
        Ok(Insertion::Found(_)) => panic!("nobody else enters connections"),
        Err(InsertError::CannotOpen) => {
            assert!(!opens);
            model.known.extend(expired.map(|known| (key, known)));
        }
        Err(InsertError::Quota) => assert!(opens && is_full && candidates.is_empty()),
        Err(InsertError::Full) => panic!("the table is larger than the model ever is"),
    }
}

/// This many of the candidates were evicted, or as many as there are; none in their group ranked before them.
fn evicted(table: &ConnTable, model: &mut Model, mut candidates: HashMap<FlowKey, (u32, EvictionRank)>, wanted: usize) {
    let is_there =
        |key: &FlowKey| table.lookup(&table.prepare(&key.flow(crate::packet::Orientation::LowToHigh))).is_some();
    let mut gone: Vec<FlowKey> = model.known.keys().filter(|key| !is_there(key)).copied().collect();
    assert_eq!(gone.len(), wanted.min(candidates.len()), "{gone:?} made room");
    gone.sort_by_key(|key| candidates[key].1);
    for victim in gone {
        let (group, rank) = candidates[&victim];
        assert!(
            candidates.values().all(|(other, better)| *other != group || rank <= *better),
            "{rank:?} of {candidates:?}"
        );
        assert!(candidates.values().all(|(_, better)| rank.0 < 2 || better.0 >= 2), "an open one before one that ends");
        candidates.remove(&victim);
        model.known.remove(&victim);
    }
}

fn apply(table: &ConnTable, model: &mut Model, cursor: &mut SweepCursor, op: Op) {
    match op {
        Op::Packet { n, reply } => {
            let flow = if reply { flow(n).reversed() } else { flow(n) };
            packet(table, model, flow, &transport(flow.protocol, reply));
        }
        Op::Refusal { n } if flow(n).protocol == Protocol::TCP => {
            packet(table, model, flow(n).reversed(), &segment(TcpFlags::RST.with(TcpFlags::ACK), 0, 101));
        }
        Op::Refusal { .. } => {}
        Op::Evaluate { n, epoch, allowed } => {
            model.epoch = epoch;
            let now = Timestamp::from_millis(model.millis);
            if let Some(mut conn) = table.find(&table.prepare(&flow(n)), now) {
                let known = model.known.get_mut(&flow(n).key().0).unwrap();
                let expected = match (known.is_revoked, allowed) {
                    _ if known.epoch >= epoch => Reevaluation::Unchanged,
                    (false, false) => Reevaluation::Revoked,
                    (true, true) => Reevaluation::Restored,
                    _ => Reevaluation::Unchanged,
                };
                if known.epoch < epoch {
                    (known.epoch, known.is_revoked) = (epoch, !allowed);
                }
                assert_eq!(conn.set_verdict(Epoch(epoch), allowed), expected);
            }
        }
        Op::Remove { n } => {
            let now = Timestamp::from_millis(model.millis);
            if let Some(conn) = table.find(&table.prepare(&flow(n).reversed()), now) {
                assert!(conn.remove());
                model.known.remove(&flow(n).key().0).unwrap();
            }
        }
        Op::Advance { seconds } => model.millis += seconds * 1000 + 77,
        Op::Sweep { steps } => {
            let swept = table.sweep(cursor, steps, Timestamp::from_millis(model.millis), Epoch(model.epoch));
            let before = model.known.len();
            let now = model.millis;
            model.known.retain(|key, known| {
                !known.is_expired(now)
                    || table.lookup(&table.prepare(&key.flow(crate::packet::Orientation::LowToHigh))).is_some()
            });
            assert_eq!(swept.expired, before - model.known.len());
        }
        Op::PodGone { owner } => {
            let before = model.known.len();
            model.known.retain(|_, known| known.owner != OwnerId(owner));
            assert_eq!(table.remove_owner(OwnerId(owner)), before - model.known.len());
        }
        Op::AddressGone { client } => {
            let (before, gone) = (model.known.len(), address(client * 10));
            model.known.retain(|_, known| known.original.src != gone && known.original.dst != gone);
            assert_eq!(table.remove_addresses(&[gone]), before - model.known.len());
        }
    }
}

/// The visible content of the table equals the map.
fn compare(table: &ConnTable, model: &Model) {
    let listed: HashMap<FlowKey, ConnectionInfo> = table
        .iter(Timestamp::from_millis(model.millis))
        .map(|connection| (connection.original.key().0, connection))
        .collect();
    let live: HashMap<_, _> = model.known.iter().filter(|(_, known)| !known.is_expired(model.millis)).collect();
    assert_eq!(listed.len(), live.len());
    for (key, known) in live {
        let connection = listed[key];
        assert_eq!(
            (connection.original, connection.state, connection.owner),
            (known.original, known.shown(), known.owner)
        );
        assert_eq!(connection.idle.as_millis() as u64 / 512, ticks(model.millis) - ticks(known.last));
    }
    for owner in 0..OWNERS {
        let owner = OwnerId(owner.into());
        assert_eq!(table.len_of(owner) as usize, model.known.values().filter(|known| known.owner == owner).count());
    }
    assert_eq!(table.statistics().created, model.created);
}

/// 2,000 sequences, or more if `PROPTEST_CASES` says so.
fn cases() -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig { cases: config.cases.max(2000), failure_persistence: None, ..config }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn the_table_matches_a_map_with_a_clock(
        ops in prop::collection::vec(any_op(), 1..150),
        quota in prop_oneof![Just(4u32), Just(8), Just(100)],
    ) {
        let config = Config { entries: ENTRIES, quota: Some(quota), midstream_pickup: MidStreamPickup::Never, ..Config::default() };
        let table = ConnTable::new(&config).unwrap();
        let mut model = Model {
            known: HashMap::new(),
            millis: NOW.as_millis(),
            epoch: 1,
            created: 0,
            quota: quota as usize,
        };
        let mut cursor = SweepCursor::default();
        for op in ops {
            apply(&table, &mut model, &mut cursor, op);
            compare(&table, &model);
        }
        prop_assert_eq!(table.len(), model.known.len());
    }
}
