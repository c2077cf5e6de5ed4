//! A record of a flow, as it is written and sent.

use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp as Time;
use penstock_admin::types::Traffic;
use penstock_dataplane::conntrack::{Ending, State, TcpState};
use penstock_dataplane::packet::TcpFlags;
use penstock_policy::model::Controller;
use serde::{Serialize, Serializer};

/// The event that a record tells. `docs/operate/flow-records.md` describes each field for users.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FlowRecord {
    #[serde(serialize_with = "rfc3339")]
    pub(crate) time: Time,
    pub(crate) event: FlowEvent,
    #[serde(serialize_with = "text")]
    pub(crate) node: Arc<str>,
    /// The connection's identifier, as in `penstock flows` and the verdict log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) connection: Option<String>,
    pub(crate) protocol: String,
    /// The end that opened it, or tried to.
    pub(crate) from: RecordedEnd,
    /// The other end.
    pub(crate) to: RecordedEnd,
    pub(crate) verdict: RecordedVerdict,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<&'static str>,
    #[serde(flatten)]
    pub(crate) rules: DecidingRules,
    /// The state, named as in nf_conntrack.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) state: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ended: Option<&'static str>,
    #[serde(flatten)]
    pub(crate) counts: Option<RecordedCounts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) packets: Option<u64>,
    /// Flags of all TCP segments that workers forwarded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tcp_flags: Vec<&'static str>,
    /// When it was opened, or first denied; not known of a connection that an earlier daemon opened.
    #[serde(serialize_with = "rfc3339_if_known", skip_serializing_if = "Option::is_none")]
    pub(crate) first: Option<Time>,
    /// The last packet, to within a second.
    #[serde(serialize_with = "rfc3339")]
    pub(crate) last: Time,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FlowEvent {
    End,
    /// It is open at the end of an interval, or has sent something since its last record when the daemon ends.
    Interval,
    /// Packets were denied that would have opened one.
    Denied,
}

impl FlowEvent {
    pub(crate) const ALL: [Self; 3] = [Self::End, Self::Interval, Self::Denied];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::End => "end",
            Self::Interval => "interval",
            Self::Denied => "denied",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RecordedVerdict {
    Allowed,
    /// Allowed once, and no longer.
    Revoked,
    Denied,
}

impl RecordedVerdict {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Revoked => "revoked",
            Self::Denied => "denied",
        }
    }
}

/// The rules that decided both directions, or the verdict in words; and the tiers of the rules.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize)]
pub(crate) struct DecidingRules {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) egress: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) egress_tier: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ingress: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ingress_tier: Option<&'static str>,
}

impl DecidingRules {
    pub(crate) fn new((egress, ingress): (String, String)) -> Self {
        let (egress_tier, ingress_tier) = (tier(&egress), tier(&ingress));
        Self { egress: Some(egress), egress_tier, ingress: Some(ingress), ingress_tier }
    }
}

/// The tier of a rule by its name, which begins with the tier or a namespace; a namespace has no upper-case letter.
fn tier(rule: &str) -> Option<&'static str> {
    let rule = rule.strip_prefix("denied by ").unwrap_or(rule);
    let is_rule = rule.contains("-egress-") || rule.contains("-ingress-");
    match rule.split('-').next() {
        Some("Admin") if is_rule => Some("Admin"),
        Some("Baseline") if is_rule => Some("Baseline"),
        _ if is_rule => Some("NetworkPolicy"),
        _ => None,
    }
}

/// Traffic of both ends: since the connection was opened, and since its last record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct RecordedCounts {
    pub(crate) sent: Traffic,
    pub(crate) received: Traffic,
    pub(crate) sent_since: Traffic,
    pub(crate) received_since: Traffic,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize)]
pub(crate) struct RecordedEnd {
    pub(crate) address: IpAddr,
    /// 0 where the protocol has none, or several are summed up.
    pub(crate) port: u16,
    #[serde(flatten, serialize_with = "known")]
    pub(crate) identity: Option<Arc<Identity>>,
}

/// Whose address it is.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize)]
pub(crate) struct Identity {
    /// `namespace/pod`, or `node NAME`.
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pod: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) workload: Option<Controller>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<String>,
}

/// How a connection ended, in a word.
pub(crate) const fn ended(ending: Ending, state: State) -> &'static str {
    match (state, ending) {
        (State::Tcp(TcpState::Close | TcpState::Resetting), _) => "reset",
        (state, _) if state.has_ended() => "closed",
        (State::Revoked, _) => "revoked",
        (_, Ending::Expired) => "expired",
        (_, Ending::Evicted) => "evicted",
        (_, Ending::Replaced) => "replaced",
        (_, Ending::Removed) => "pod_gone",
    }
}

/// The names of these flags, in the order of their bits.
pub(crate) fn flag_names(flags: TcpFlags) -> Vec<&'static str> {
    const NAMED: [(TcpFlags, &str); 6] = [
        (TcpFlags::FIN, "FIN"),
        (TcpFlags::SYN, "SYN"),
        (TcpFlags::RST, "RST"),
        (TcpFlags::PSH, "PSH"),
        (TcpFlags::ACK, "ACK"),
        (TcpFlags::URG, "URG"),
    ];
    NAMED.into_iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, name)| name).collect()
}

fn rfc3339<S: Serializer>(time: &Time, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{time:.3}"))
}

fn text<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

fn known<S: Serializer>(identity: &Option<Arc<Identity>>, serializer: S) -> Result<S::Ok, S::Error> {
    identity.as_deref().serialize(serializer)
}

fn rfc3339_if_known<S: Serializer>(time: &Option<Time>, serializer: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => rfc3339(time, serializer),
        None => serializer.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rules_tier_is_that_of_its_policy() {
        for (rule, expected) in [
            ("shop-ingress-web-0-podSelector-0-0", Some("NetworkPolicy")),
            ("denied by Admin-egress-quarantine-1", Some("Admin")),
            ("Baseline-ingress-default-0-namespaces-0-0", Some("Baseline")),
            ("admin-egress-a-0-all-0-0", Some("NetworkPolicy")),
            ("denied", None),
            ("open", None),
            ("not here", None),
        ] {
            assert_eq!(tier(rule), expected, "{rule}");
        }
    }

    #[test]
    fn an_ending_is_by_the_ends_or_else_by_the_table() {
        for (state, ending, expected) in [
            (State::Tcp(TcpState::TimeWait), Ending::Expired, "closed"),
            (State::Tcp(TcpState::LastAck), Ending::Evicted, "closed"),
            (State::Tcp(TcpState::TimeWait), Ending::Replaced, "closed"),
            (State::Tcp(TcpState::Close), Ending::Expired, "reset"),
            (State::Tcp(TcpState::Established), Ending::Expired, "expired"),
            (State::Unreplied, Ending::Evicted, "evicted"),
            (State::Tcp(TcpState::SynSent), Ending::Replaced, "replaced"),
            (State::Revoked, Ending::Expired, "revoked"),
            (State::Assured, Ending::Removed, "pod_gone"),
        ] {
            assert_eq!(ended(ending, state), expected, "{state:?} {ending:?}");
        }
    }

    #[test]
    fn flags_have_their_names() {
        assert_eq!(flag_names(TcpFlags(0x3f)), ["FIN", "SYN", "RST", "PSH", "ACK", "URG"]);
        assert_eq!(flag_names(TcpFlags::SYN.with(TcpFlags::ACK)), ["SYN", "ACK"]);
        assert!(flag_names(TcpFlags::default()).is_empty());
    }

    /// The page for users, with an example of each kind of record and a table of fields.
    const PAGE: &str = include_str!("../../../../docs/operate/flow-records.md");

    /// All names of fields, those of objects inside included.
    fn names(value: &serde_json::Value, into: &mut std::collections::BTreeSet<String>) {
        for (name, value) in value.as_object().into_iter().flatten() {
            into.insert(name.clone());
            names(value, into);
        }
    }

    #[test]
    fn each_field_is_described_and_each_described_field_exists() {
        let identity = Identity {
            name: "shop/web-1".into(),
            namespace: Some("shop".into()),
            pod: Some("web-1".into()),
            workload: Some(Controller { kind: "Deployment".into(), name: "web".into() }),
            node: Some("n".into()),
        };
        let end = RecordedEnd { address: [10, 0, 0, 1].into(), port: 1, identity: Some(Arc::new(identity)) };
        let (time, traffic) = (Time::from_second(1).unwrap(), Traffic::default());
        let full = FlowRecord {
            time,
            event: FlowEvent::End,
            node: "n".into(),
            connection: Some("0".into()),
            protocol: "TCP".into(),
            from: end.clone(),
            to: end.clone(),
            verdict: RecordedVerdict::Allowed,
            reason: Some("ingress_denied"),
            rules: DecidingRules::new(("shop-egress-a-0".into(), "shop-ingress-a-0".into())),
            state: Some("ESTABLISHED"),
            ended: Some("closed"),
            counts: Some(RecordedCounts {
                sent: traffic,
                received: traffic,
                sent_since: traffic,
                received_since: traffic,
            }),
            packets: Some(1),
            tcp_flags: vec!["SYN"],
            first: Some(time),
            last: time,
        };
        let mut has = std::collections::BTreeSet::new();
        names(&serde_json::to_value(&full).unwrap(), &mut has);
        let rows = PAGE.lines().filter(|line| line.starts_with("| `")).map(|line| line.split('|').nth(1).unwrap());
        let cells: Vec<&str> = rows.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
        for name in has.iter().filter(|name| !["kind", "bytes"].contains(&name.as_str())) {
            assert!(cells.contains(&name.as_str()), "{name} is not in the table");
        }
        let examples = PAGE.lines().filter(|line| line.starts_with('{'));
        let mut shown = std::collections::BTreeSet::new();
        examples.for_each(|line| names(&serde_json::from_str(line).unwrap(), &mut shown));
        assert!(shown.is_subset(&has), "{shown:?} against {has:?}");
        assert!(["ended", "packets", "workload", "sent_since"].iter().all(|name| shown.contains(*name)));
    }
}
