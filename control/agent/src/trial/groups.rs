//! Connections that promotion would change, in groups of a bounded number.

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp as Time;
use penstock_admin::types::{StagedChange, StagedVerdict, Traffic};
use penstock_dataplane::DropReason;
use penstock_dataplane::packet::{Address, Flow};
use penstock_dataplane::policy::DirectionVerdict;
use penstock_dataplane::worker::{NamedVerdict, VerdictChange};
use penstock_policy::engine::Engine;
use penstock_policy::flow;

use super::feed::{ChangeKind, ChangeTotals};

/// The most groups. What is in none of them is counted.
const MOST_GROUPS: usize = 1_000;
/// The most connections that are remembered, to count the packets of one as one: twice this many.
const REMEMBERED: usize = 32_768;
/// Groups that are logged when their first connection is seen.
const LOGGED_GROUPS: usize = 20;
/// The name of every end that is neither a pod nor a node.
const OUTSIDE: &str = "outside";

#[derive(Clone, Copy, Debug)]
pub(super) enum Seen {
    /// It is open, and its ends have sent this; `None` where connections have no counters.
    Live([Option<Traffic>; 2]),
    /// A packet of this size opened it, or was denied.
    Packet {
        connection: u64,
        /// Ethernet header included.
        bytes: usize,
    },
}

#[derive(Debug, Default)]
pub(super) struct ChangeGroups {
    groups: BTreeMap<GroupKey, Group>,
    /// Connections of packets that were seen lately, and before these.
    seen: [HashSet<u64>; 2],
    live_judged: u64,
    /// Connections in no group: those that are open, and those that were opened or denied.
    ungrouped: [u64; 2],
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct GroupKey {
    from: String,
    to: String,
    protocol: String,
    port: u16,
    present: (bool, String),
    promoted: (bool, String),
}

#[derive(Debug)]
struct Group {
    live: u64,
    live_traffic: Option<Traffic>,
    opened: u64,
    packets: u64,
    bytes: u64,
    first: Time,
    last: Time,
    example: String,
    /// The flow of the example.
    flow: Flow,
    /// The policies that isolate the pod where no rule would allow it.
    isolating: Vec<String>,
}

impl ChangeGroups {
    pub(super) fn add(&mut self, engine: &Engine, flow: &Flow, change: &VerdictChange, seen: Seen, at: Time) {
        let is_new = match seen {
            Seen::Packet { connection, .. } => self.remember(connection),
            Seen::Live(_) => true,
        };
        let key = key_of(engine, flow, change);
        if !self.groups.contains_key(&key) {
            if self.groups.len() >= MOST_GROUPS {
                let of = usize::from(matches!(seen, Seen::Packet { .. }));
                self.ungrouped[of] += u64::from(is_new);
                return;
            }
            if self.groups.len() < LOGGED_GROUPS {
                log(&key, flow);
            }
        }
        let fresh = || Group {
            live: 0,
            live_traffic: None,
            opened: 0,
            packets: 0,
            bytes: 0,
            first: at,
            last: at,
            example: ends(flow),
            flow: *flow,
            isolating: isolating(engine, flow, change),
        };
        let group = self.groups.entry(key).or_insert_with(fresh);
        (group.first, group.last) = (group.first.min(at), group.last.max(at));
        match seen {
            Seen::Live(traffic) => {
                group.live += 1;
                for sent in traffic.into_iter().flatten() {
                    *group.live_traffic.get_or_insert_default() += sent;
                }
            }
            Seen::Packet { bytes, .. } => {
                group.opened += u64::from(is_new);
                group.packets += 1;
                group.bytes += bytes as u64;
            }
        }
    }

    /// Whether a connection was not seen lately.
    fn remember(&mut self, connection: u64) -> bool {
        if self.seen.iter().any(|some| some.contains(&connection)) {
            return false;
        }
        if self.seen[0].len() >= REMEMBERED {
            self.seen.swap(0, 1);
            self.seen[0].clear();
        }
        self.seen[0].insert(connection)
    }

    /// Call before each walk of the open connections.
    pub(super) fn forget_live(&mut self) {
        self.groups.values_mut().for_each(|group| (group.live, group.live_traffic) = (0, None));
        self.ungrouped[0] = 0;
    }

    /// Call after each walk, with how many connections there were.
    pub(super) fn walked(&mut self, connections: u64) {
        self.live_judged = connections;
        self.groups.retain(|_, group| group.live + group.opened > 0);
    }

    /// Call when what is in effect, or what is staged, has changed: forgets groups that promotion would not change any more. Returns
    /// whether none is left of some.
    pub(super) fn forget_settled(&mut self, would_change: impl Fn(&Flow) -> bool) -> bool {
        let had_some = !self.groups.is_empty();
        self.groups.retain(|_, group| would_change(&group.flow));
        let is_settled = had_some && self.groups.is_empty();
        if is_settled {
            (self.ungrouped, self.seen) = Default::default();
        }
        is_settled
    }

    /// Open connections at the last walk.
    pub(super) fn live_judged(&self) -> u64 {
        self.live_judged
    }

    /// Connections that would change and are in no group.
    pub(super) fn ungrouped(&self) -> u64 {
        self.ungrouped.iter().sum()
    }

    pub(super) fn totals(&self) -> ChangeTotals {
        let mut totals = ChangeTotals::default();
        for (key, group) in &self.groups {
            let kind = match (key.present.0, key.promoted.0) {
                (true, _) => ChangeKind::Denied,
                (false, true) => ChangeKind::Allowed,
                (false, false) => ChangeKind::Otherwise,
            };
            totals.live[kind as usize] += group.live;
            totals.opened[kind as usize] += group.opened;
        }
        totals
    }

    /// The groups, those that would be denied first, then by the number of their connections.
    pub(super) fn list(&self) -> Vec<StagedChange> {
        let mut groups: Vec<(&GroupKey, &Group)> = self.groups.iter().collect();
        let order = |(key, group): &(&GroupKey, &Group)| (!key.present.0, std::cmp::Reverse(group.live + group.opened));
        groups.sort_by_key(order);
        groups.into_iter().map(|(key, group)| listed(key, group)).collect()
    }
}

fn listed(key: &GroupKey, group: &Group) -> StagedChange {
    let verdict = |(allowed, reason): &(bool, String)| StagedVerdict { allowed: *allowed, reason: reason.clone() };
    StagedChange {
        from: key.from.clone(),
        to: key.to.clone(),
        protocol: key.protocol.clone(),
        port: key.port,
        present: verdict(&key.present),
        promoted: verdict(&key.promoted),
        isolating: group.isolating.clone(),
        live: group.live,
        live_traffic: group.live_traffic,
        opened: group.opened,
        packets: group.packets,
        bytes: group.bytes,
        first_seen: format!("{:.0}", group.first),
        last_seen: format!("{:.0}", group.last),
        example: group.example.clone(),
    }
}

fn log(key: &GroupKey, flow: &Flow) {
    let GroupKey { from, to, protocol, port, present, promoted } = key;
    let word =
        |(allowed, reason): &(bool, String)| format!("{} ({reason})", if *allowed { "allowed" } else { "denied" });
    tracing::info!(
        "staged: {from} to {to} port {port}/{protocol}, such as {}: {}, would be {}",
        ends(flow),
        word(present),
        word(promoted)
    );
}

fn key_of(engine: &Engine, flow: &Flow, change: &VerdictChange) -> GroupKey {
    let name = |address: Address| flow::name(engine.state(), address.into()).unwrap_or_else(|| OUTSIDE.to_owned());
    GroupKey {
        from: name(flow.src),
        to: name(flow.dst),
        protocol: flow.protocol.to_string(),
        port: flow.shown_ports().1,
        present: reason(&change.present),
        promoted: reason(&change.promoted),
    }
}

/// The policies that isolate the pod in the direction in which no rule would allow the flow.
fn isolating(engine: &Engine, flow: &Flow, change: &VerdictChange) -> Vec<String> {
    let verdict = change.promoted.verdict;
    let explanation = match verdict.drop_reason() {
        Some(DropReason::EgressDenied) if verdict.egress == DirectionVerdict::Denied => engine.explain(flow).egress,
        Some(DropReason::IngressDenied) if verdict.ingress == DirectionVerdict::Denied => engine.explain(flow).ingress,
        _ => return Vec::new(),
    };
    explanation.policies.iter().map(ToString::to_string).collect()
}

/// `10.0.0.1:40000 to 10.0.0.2:80`.
fn ends(flow: &Flow) -> String {
    let end = |address: Address, port: u16| match (IpAddr::from(address), port) {
        (address, 0) => address.to_string(),
        (address, port) => SocketAddr::new(address, port).to_string(),
    };
    let (src, dst) = flow.shown_ports();
    format!("{} to {}", end(flow.src, src), end(flow.dst, dst))
}

/// Whether it passes, and what decided that.
fn reason(named: &NamedVerdict) -> (bool, String) {
    let NamedVerdict { verdict, egress_rule, ingress_rule } = named;
    let rule = |direction: &str, side: DirectionVerdict, rule: &Option<_>| match (side, rule) {
        (DirectionVerdict::Denied, _) => format!("{direction}: no rule allows it"),
        (_, Some(rule)) => format!("{direction}: {rule}"),
        _ => String::new(),
    };
    let (egress, ingress) =
        (rule("egress", verdict.egress, egress_rule), rule("ingress", verdict.ingress, ingress_rule));
    match verdict.drop_reason() {
        Some(DropReason::EgressDenied) => (false, egress),
        Some(DropReason::IngressDenied) => (false, ingress),
        Some(_) => (false, "policies of the pod are not known yet".to_owned()),
        None => {
            let rules: Vec<String> = [egress, ingress].into_iter().filter(|text| !text.is_empty()).collect();
            (true, if rules.is_empty() { "no policy applies".to_owned() } else { rules.join(", ") })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use penstock_dataplane::packet::Protocol;
    use penstock_dataplane::policy::{PolicyVerdict, RuleName};
    use penstock_policy::engine::EngineSettings;

    use super::*;

    fn flow(client: u16, port: u16) -> Flow {
        let address = |last| Address::from_v4_bytes([192, 0, 2, last]);
        Flow { src: address(1), dst: address(2), protocol: Protocol::TCP, src_port: client, dst_port: port }
    }

    /// From this verdict of ingress to that one.
    fn change(present: DirectionVerdict, promoted: DirectionVerdict) -> VerdictChange {
        let named = |ingress| NamedVerdict {
            verdict: PolicyVerdict { egress: DirectionVerdict::NotLocal, ingress },
            egress_rule: None,
            ingress_rule: matches!(ingress, DirectionVerdict::Allowed(_)).then(|| RuleName::new("test/policy", "rule")),
        };
        VerdictChange { present: named(present), promoted: named(promoted) }
    }

    fn engine() -> Engine {
        Engine::new(EngineSettings::for_all_pods())
    }

    #[test]
    fn packets_of_one_connection_count_once_and_walks_anew() {
        let (engine, mut groups, at) = (engine(), ChangeGroups::default(), Time::now());
        let closes = change(DirectionVerdict::Open, DirectionVerdict::Denied);
        for connection in [7, 7, 7, 8] {
            groups.add(&engine, &flow(1, 80), &closes, Seen::Packet { connection, bytes: 60 }, at);
        }
        for _ in 0..2 {
            groups.forget_live();
            groups.add(
                &engine,
                &flow(2, 80),
                &closes,
                Seen::Live([1, 2].map(|packets| Some(Traffic { packets, bytes: 100 * packets }))),
                at - Duration::from_secs(5),
            );
            groups.walked(9);
        }
        let [group] = &groups.list()[..] else { panic!("{groups:?}") };
        assert_eq!((group.live, group.opened, group.packets, group.bytes), (1, 2, 4, 240));
        assert_eq!(group.live_traffic, Some(Traffic { packets: 3, bytes: 300 }));
        assert_eq!((group.from.as_str(), group.port, groups.live_judged()), (OUTSIDE, 80, 9));
        assert_eq!(group.example, "192.0.2.1:1 to 192.0.2.2:80");
        assert!(group.first_seen < group.last_seen, "{group:?}");
        assert_eq!((group.present.reason.as_str(), group.present.allowed), ("no policy applies", true));
        assert_eq!((group.promoted.reason.as_str(), group.promoted.allowed), ("ingress: no rule allows it", false));
        groups.forget_live();
        assert_eq!(groups.totals().live, [0; 3]);
    }

    #[test]
    fn totals_are_by_outcome_and_denied_comes_first() {
        let (engine, mut groups, at) = (engine(), ChangeGroups::default(), Time::now());
        let opens = change(DirectionVerdict::Denied, DirectionVerdict::Open);
        let closes = change(DirectionVerdict::Open, DirectionVerdict::Denied);
        groups.add(&engine, &flow(1, 80), &opens, Seen::Packet { connection: 1, bytes: 60 }, at);
        groups.add(&engine, &flow(1, 81), &opens, Seen::Packet { connection: 2, bytes: 60 }, at);
        groups.add(&engine, &flow(1, 82), &closes, Seen::Live([None; 2]), at);
        let ChangeTotals { live, opened } = groups.totals();
        assert_eq!((live, opened), ([1, 0, 0], [0, 2, 0]));
        assert_eq!(groups.list()[0].port, 82);
    }

    #[test]
    fn what_promotion_would_not_change_any_more_is_forgotten() {
        let (engine, mut groups, at) = (engine(), ChangeGroups::default(), Time::now());
        let closes = change(DirectionVerdict::Open, DirectionVerdict::Denied);
        for port in 80..83 {
            groups.add(&engine, &flow(1, port), &closes, Seen::Packet { connection: port.into(), bytes: 60 }, at);
        }
        let ports = |groups: &ChangeGroups| groups.list().iter().map(|group| group.port).collect::<Vec<_>>();
        assert!(!groups.forget_settled(|flow| flow.dst_port != 81), "others are left");
        assert_eq!(ports(&groups), [80, 82]);
        groups.ungrouped = [1, 1];
        assert!(groups.forget_settled(|_| false), "the last ones");
        assert_eq!((ports(&groups), groups.ungrouped()), (vec![], 0));
        assert!(!groups.forget_settled(|_| false), "there were none");
        // An open connection that is gone at the next walk.
        groups.add(&engine, &flow(1, 80), &closes, Seen::Live([None; 2]), at);
        groups.walked(1);
        assert_eq!(ports(&groups), [80]);
        groups.forget_live();
        groups.walked(0);
        assert_eq!(ports(&groups), [0; 0]);
    }

    #[test]
    fn groups_and_connections_are_bounded_and_the_rest_counted() {
        let (engine, mut groups, at) = (engine(), ChangeGroups::default(), Time::now());
        let closes = change(DirectionVerdict::Open, DirectionVerdict::Denied);
        for port in 0..MOST_GROUPS as u16 + 3 {
            let seen = Seen::Packet { connection: port.into(), bytes: 60 };
            groups.add(&engine, &flow(1, port), &closes, seen, at);
        }
        groups.add(&engine, &flow(1, u16::MAX), &closes, Seen::Live([None; 2]), at);
        assert_eq!((groups.list().len(), groups.ungrouped()), (MOST_GROUPS, 4));
        groups.forget_live();
        assert_eq!(groups.ungrouped(), 3, "open connections are counted at each walk");
        for connection in 0..3 * REMEMBERED as u64 {
            groups.add(&engine, &flow(1, 80), &closes, Seen::Packet { connection, bytes: 60 }, at);
        }
        assert!(groups.seen.iter().map(HashSet::len).sum::<usize>() <= 2 * REMEMBERED);
    }
}
