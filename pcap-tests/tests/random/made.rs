//! Clusters and conversations made at random.

use std::fmt;
use std::fmt::Write as _;

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

const APPS: [&str; 3] = ["a", "b", "c"];
/// The first pods are on this node, the rest on another one.
pub(super) const HERE: u8 = 5;
const PODS: u8 = 7;
const SERVICES: u8 = 4;
/// A cluster changes as a whole so often,
const CHANGES: u64 = 3;
/// after so many seconds.
const BETWEEN: u64 = 40;
const CONVERSATIONS: u16 = 40;
const SECOND: u64 = 1_000_000_000;

/// A part of a case: a case without it is a case, too.
#[derive(Clone)]
pub(super) enum Part {
    /// Objects that the cluster has from one change until the next.
    Objects(u64, String),
    /// Packets between a client and what it sends to.
    Conversation(Conversation),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Objects(change, yaml) => write!(f, "after change {change}:\n{yaml}"),
            Self::Conversation(conversation) => write!(f, "{conversation:?}"),
        }
    }
}

/// A destination of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Destination {
    /// The cluster address of the Service of this number.
    Cluster(u8),
    /// The same, at a port that it has not.
    OtherPort(u8),
    /// Its external address.
    External(u8),
    /// Its node port at the client's node.
    NodePort(u8),
    /// An address among those of Services that none has.
    Nothing,
    /// A pod itself.
    Pod(u8),
}

/// Packets between a client and what it sends to.
#[derive(Clone, Debug)]
pub(super) struct Conversation {
    pub(super) client: u8,
    pub(super) client_port: u16,
    pub(super) v6: bool,
    pub(super) is_tcp: bool,
    pub(super) to: Destination,
    /// Which of the backends it gets.
    pub(super) pick: usize,
    /// Whether a machine outside with this address has sent to the client's port before.
    pub(super) is_begun_outside: bool,
    /// When, in nanoseconds, and whether the client sends.
    pub(super) packets: Vec<(u64, bool)>,
}

impl Conversation {
    pub(super) fn source(&self) -> String {
        address(self.client, self.v6)
    }

    /// The address and port to which the client sends.
    pub(super) fn destination(&self) -> (String, u16) {
        let port = if self.is_tcp { 80 } else { 53 };
        let cluster = |number: u8| if self.v6 { format!("fd00:96::{number}") } else { format!("10.96.0.{number}") };
        match self.to {
            Destination::Cluster(service) => (cluster(10 + service), port),
            Destination::OtherPort(service) => (cluster(10 + service), 4444),
            Destination::External(service) => (format!("203.0.113.{}", 50 + service), port),
            Destination::NodePort(service) => ("192.168.0.1".to_owned(), 30_000 + port + 100 * u16::from(service)),
            Destination::Nothing => (cluster(99), port),
            Destination::Pod(pod) => (address(pod, self.v6), if self.is_tcp { 8080 } else { 5353 }),
        }
    }

    /// Whether a table forgets it between two packets, if they are datagrams without an answer.
    pub(super) fn expires(&self) -> bool {
        self.packets.windows(2).any(|pair| pair[1].0 - pair[0].0 > 25 * SECOND)
    }

    /// The Service by which it goes, with this cluster address and port.
    pub(super) fn by_service(&self) -> Option<(String, u16)> {
        let (Destination::Cluster(service) | Destination::External(service) | Destination::NodePort(service)) = self.to
        else {
            return None;
        };
        Some(Self { to: Destination::Cluster(service), ..self.clone() }.destination())
    }
}

/// When a change comes, in nanoseconds.
pub(super) const fn time_of(change: u64) -> u64 {
    change * BETWEEN * SECOND
}

/// All changes, with the first state as change 0.
pub(super) fn changes() -> std::ops::RangeInclusive<u64> {
    0..=CHANGES
}

fn address(pod: u8, v6: bool) -> String {
    let node = if pod < HERE { 1 } else { 2 };
    if v6 { format!("fd00:{node}::{}", pod + 1) } else { format!("10.0.{node}.{}", pod + 1) }
}

/// With a Service, replay translates, and with an EndpointSlice it derives none.
const ALWAYS: &str = "---
{apiVersion: v1, kind: Service, metadata: {namespace: t, name: always}, spec: {clusterIP: 10.96.0.200, ports: [{port: 1}]}}
---
{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4, endpoints: [],
 metadata: {namespace: t, name: always-1, labels: {kubernetes.io/service-name: always}}}
";

/// A case: objects that stay, and parts.
pub(super) fn case(seed: u64) -> (String, Vec<Part>) {
    let mut maker = Maker(SmallRng::seed_from_u64(seed));
    let base = maker.base();
    let mut parts = Vec::new();
    for change in changes() {
        let objects = maker.services().into_iter().chain(maker.policies());
        parts.extend(objects.map(|yaml| Part::Objects(change, yaml)));
    }
    parts.extend((0..CONVERSATIONS).map(|number| Part::Conversation(maker.conversation(number))));
    (base, parts)
}

struct Maker(SmallRng);

impl Maker {
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        *of.choose(&mut self.0).unwrap()
    }

    fn one_in(&mut self, count: u32) -> bool {
        self.0.random_ratio(1, count)
    }

    /// The objects that stay: a namespace, two nodes and their pods.
    fn base(&mut self) -> String {
        let mut yaml = String::from("{apiVersion: v1, kind: Namespace, metadata: {name: t, labels: {team: t}}}\n");
        for (name, number) in [("n1", 1), ("n2", 2)] {
            let _ = writeln!(
                yaml,
                "---\n{{apiVersion: v1, kind: Node, metadata: {{name: {name}}}, status: {{addresses: [\
                 {{type: InternalIP, address: 192.168.0.{number}}}, {{type: InternalIP, address: \"fd00:ffff::{number}\"}}]}}}}"
            );
        }
        for pod in 0..PODS {
            let (node, app) = (if pod < HERE { "n1" } else { "n2" }, self.pick(&APPS));
            let (named, v4, v6) = (self.pick(&[8080, 9090]), address(pod, false), address(pod, true));
            let _ = writeln!(
                yaml,
                "---\napiVersion: v1\nkind: Pod\nmetadata: {{namespace: t, name: p{pod}, labels: {{app: {app}}}}}\n\
                 spec: {{nodeName: {node}, containers: [{{name: c, image: example.invalid/c, ports: [{{name: web, containerPort: {named}}}]}}]}}\n\
                 status: {{phase: Running, podIPs: [{{ip: {v4}}}, {{ip: \"{v6}\"}}]}}"
            );
        }
        yaml + ALWAYS
    }

    fn services(&mut self) -> Vec<String> {
        let numbers: Vec<u8> = (0..SERVICES).filter(|_| !self.one_in(8)).collect();
        numbers.into_iter().flat_map(|number| self.service(number)).collect()
    }

    /// A Service and its EndpointSlices.
    fn service(&mut self, number: u8) -> Vec<String> {
        let mut more = String::new();
        if self.one_in(4) {
            more += ", sessionAffinity: ClientIP";
        }
        if self.one_in(5) {
            more += ", internalTrafficPolicy: Local";
        } else if self.one_in(2) {
            let _ = write!(more, ", type: NodePort, externalIPs: [203.0.113.{}]", 50 + number);
        }
        let node_port = |port: u16| match more.contains("NodePort") {
            true => format!(", nodePort: {}", 30_000 + port + 100 * u16::from(number)),
            false => String::new(),
        };
        let ip = 10 + number;
        let service = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{namespace: t, name: s{number}}}\n\
             spec: {{clusterIP: 10.96.0.{ip}, clusterIPs: [10.96.0.{ip}, \"fd00:96::{ip}\"]{more}, ports: [\
             {{name: web, port: 80, targetPort: web{}}}, {{name: dns, protocol: UDP, port: 53, targetPort: 5353{}}}]}}\n",
            node_port(80),
            node_port(53)
        );
        vec![service, self.slice(number, false), self.slice(number, true)]
    }

    fn slice(&mut self, number: u8, v6: bool) -> String {
        let mut endpoints = Vec::new();
        let own = if v6 { "fd00:ffff::1" } else { "192.168.0.1" };
        let nobody = if v6 { "2001:db8::9" } else { "198.51.100.9" };
        let pods = (0..PODS).map(|pod| (address(pod, v6), Some(if pod < HERE { "n1" } else { "n2" })));
        for (place, node) in pods.chain([(own.to_owned(), Some("n1")), (nobody.to_owned(), None)]) {
            if self.one_in(3) {
                let leaving = "ready: false, serving: true, terminating: true";
                let conditions = self.pick(&["ready: true", "ready: true", leaving, "ready: false"]);
                let node = node.map_or_else(String::new, |node| format!(", nodeName: {node}"));
                endpoints.push(format!("{{addresses: [\"{place}\"]{node}, conditions: {{{conditions}}}}}"));
            }
        }
        let (family, end) = if v6 { ("IPv6", "six") } else { ("IPv4", "four") };
        format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{namespace: t, name: s{number}-{end}, labels: {{kubernetes.io/service-name: s{number}}}}}\n\
             addressType: {family}\nendpoints: [{}]\n\
             ports: [{{name: web, port: 8080}}, {{name: dns, protocol: UDP, port: 5353}}]\n",
            endpoints.join(", ")
        )
    }

    fn peers(&mut self) -> String {
        let peer = match self.0.random_range(0..8) {
            0 => "{namespaceSelector: {}}".to_owned(),
            1 => "{ipBlock: {cidr: 10.0.0.0/8, except: [10.96.0.0/16]}}".to_owned(),
            2 => "{ipBlock: {cidr: 10.96.0.0/16}}, {ipBlock: {cidr: \"fd00:96::/64\"}}".to_owned(),
            3 => "{ipBlock: {cidr: 0.0.0.0/0, except: [10.0.0.0/8]}}, {ipBlock: {cidr: \"2001:db8::/32\"}}".to_owned(),
            _ => format!("{{podSelector: {{matchLabels: {{app: {}}}}}}}", self.pick(&APPS)),
        };
        format!("[{peer}]")
    }

    fn rule(&mut self, side: &str) -> String {
        let ports = self.pick(&[
            "",
            "",
            ", ports: [{port: 8080}]",
            ", ports: [{port: web}]",
            ", ports: [{port: 5353, protocol: UDP}]",
            ", ports: [{port: 80}, {port: 53, protocol: UDP}]",
            ", ports: [{port: 5000, endPort: 9000}, {port: 5000, endPort: 9000, protocol: UDP}]",
        ]);
        format!("{{{side}: {}{ports}}}", self.peers())
    }

    fn policies(&mut self) -> Vec<String> {
        let count = self.0.random_range(0..5);
        (0..count).map(|number| self.policy(number)).collect()
    }

    fn policy(&mut self, number: u8) -> String {
        let selector = match self.one_in(5) {
            true => "{}".to_owned(),
            false => format!("{{matchLabels: {{app: {}}}}}", self.pick(&APPS)),
        };
        let types = self.pick(&["[Ingress]", "[Egress]", "[Ingress, Egress]"]);
        let mut rules = String::new();
        for (kind, field, side) in [("Ingress", "ingress", "from"), ("Egress", "egress", "to")] {
            let count = self.0.random_range(0..3);
            let list: Vec<String> = (0..count).map(|_| self.rule(side)).collect();
            if types.contains(kind) {
                let _ = write!(rules, ", {field}: [{}]", list.join(", "));
            }
        }
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{namespace: t, name: n{number}}}\n\
             spec: {{podSelector: {selector}, policyTypes: {types}{rules}}}\n"
        )
    }

    fn conversation(&mut self, number: u16) -> Conversation {
        let (v6, is_tcp) = (self.one_in(4), self.one_in(2));
        let (service, pod) = (self.0.random_range(0..SERVICES), self.0.random_range(0..PODS));
        let to = match self.0.random_range(0..12) {
            0 if !v6 => Destination::External(service),
            1 if !v6 => Destination::NodePort(service),
            0..=2 => Destination::Pod(pod),
            3 => Destination::Nothing,
            4 => Destination::OtherPort(service),
            _ => Destination::Cluster(service),
        };
        let mut time = self.0.random_range(0..time_of(CHANGES + 1));
        let mut packets = Vec::new();
        let is_of_nobody = matches!(to, Destination::Nothing | Destination::OtherPort(_));
        let is_begun_outside = is_of_nobody && !is_tcp && self.one_in(2);
        let order: &[bool] =
            if is_begun_outside { &[false, true, true, true] } else { &[true, false, true, true, false, true] };
        for &is_sent in order {
            packets.push((time, is_sent));
            time += 1_000_000;
            if self.one_in(6) {
                time += self.pick(&[2, 20, 45]) * SECOND;
            }
        }
        let client = self.0.random_range(0..HERE);
        let pick = self.0.random_range(0..100);
        Conversation { client, client_port: 40_000 + number, v6, is_tcp, to, pick, is_begun_outside, packets }
    }
}
