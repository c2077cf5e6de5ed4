//! A case's conversations on a [`Node`], each packet with what an evaluator says of it that is written apart: policy as the API documents
//! it, asked for the client and for the end that answers.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::Path;

use penstock_dataplane::policy::RuleScope;
use penstock_policy::model::{Object, ObjectChange, Service};
use penstock_replay::cluster::ReplayCluster;
use penstock_sources::manifest::{Options, read_text};

use super::made::{Conversation, Destination, Part, changes, time_of};
use super::node::{Arrival, Node, Packet, Rule};
use crate::oracle::connections::reversed;
use crate::oracle::policy::{ClusterObjects, Flow};
use crate::oracle::services::Backend as End;

/// The blocks of cluster addresses.
const BLOCKS: [&str; 2] = ["10.96.0.0/16", "fd00:96::/64"];
const OWN_NODE: &str = "n1";
/// The first sequence numbers of both sides.
const FIRST: [u32; 2] = [100, 900];

/// The counts of a case.
#[derive(Default, Debug)]
pub(super) struct Found {
    /// Packets of clients that arrived, and that did not.
    pub(super) arrived: u64,
    pub(super) denied: u64,
    /// Answers that arrived.
    pub(super) answered: u64,
    pub(super) differences: Vec<String>,
}

impl Found {
    pub(super) fn add(&mut self, other: &Self) {
        self.arrived += other.arrived;
        self.denied += other.denied;
        self.answered += other.answered;
    }
}

/// The evaluator: what a cluster's objects say.
struct Evaluator {
    objects: ClusterObjects,
    /// The same without Services, for what nothing translates.
    plain: ClusterObjects,
}

impl Evaluator {
    fn new(objects: &[Object]) -> Self {
        let of = |objects: Vec<Object>| ClusterObjects {
            objects,
            node: Some(OWN_NODE.to_owned()),
            ..ClusterObjects::default()
        };
        let is_plain = |object: &&Object| !matches!(object, Object::Service(_));
        Self { objects: of(objects.to_vec()), plain: of(objects.iter().filter(is_plain).cloned().collect()) }
    }

    fn services(&self) -> impl Iterator<Item = &Service> {
        self.objects.objects.iter().filter_map(|object| match object {
            Object::Service(service) => Some(service),
            _ => None,
        })
    }

    /// The addresses at which egress policy is postponed.
    fn postponed(&self) -> HashSet<IpAddr> {
        self.services().flat_map(|service| service.addresses.iter().chain(&service.external).copied()).collect()
    }

    /// The backends of the Service that is asked for with this flow, if it has what the client sends to: those for new connections, and
    /// those that serve.
    fn backends(&self, talk: &Conversation, flow: &Flow) -> Option<(Vec<End>, Vec<End>)> {
        let (address, dport) = talk.by_service()?;
        let dst: IpAddr = address.parse().unwrap();
        let service = self.services().find(|service| service.addresses.contains(&dst))?;
        let has = match talk.to {
            Destination::External(_) => service.external.contains(&flow.dst),
            Destination::NodePort(_) => service.ports.iter().any(|port| port.node_port == Some(flow.dport)),
            _ => true,
        };
        let found = self.objects.backends_of(&Flow { dst, dport, ..*flow }).filter(|_| has)?;
        Some((found.eligible, found.serving))
    }

    /// Whether a flow may pass that nothing translates.
    fn allows_plain(&self, flow: &Flow) -> bool {
        self.plain.allows(flow)
    }
}

/// A conversation in progress.
struct Talk<'a> {
    of: &'a Conversation,
    flow: Flow,
    /// Its flow as the server has it, once a packet has arrived there.
    seen: Option<Flow>,
    /// Whether the server's first answer has arrived.
    is_answered: bool,
    last: u64,
    /// The next sequence numbers of both sides.
    next: [u32; 2],
    /// Whether the Service had what the client sends to when it began.
    by_service: bool,
    /// Whether a packet has arrived that a machine outside sent before.
    is_invited: bool,
    is_over: bool,
}

impl<'a> Talk<'a> {
    fn new(of: &'a Conversation) -> Self {
        let (dst, dport) = of.destination();
        let (src, dst) = (of.source().parse().unwrap(), dst.parse().unwrap());
        let flow = Flow { src, dst, protocol: if of.is_tcp { 6 } else { 17 }, sport: of.client_port, dport };
        let (seen, next): (Option<Flow>, _) = (None, FIRST);
        Self { of, flow, seen, is_answered: false, last: 0, next, by_service: false, is_invited: false, is_over: false }
    }

    /// A client that has got no answer tries again from another port.
    fn begin_anew(&mut self) {
        (self.seen, self.is_answered, self.next) = (None, false, FIRST);
        self.flow.sport += 100;
    }

    /// Whether the tables still have it.
    fn is_kept(&self, now: u64) -> bool {
        self.of.is_tcp || now - self.last <= if self.is_answered { 120 } else { 30 } * 1_000_000_000
    }

    fn packet(&self, is_sent: bool) -> Packet {
        let flow = if is_sent { self.flow } else { reversed(self.seen.expect("a packet has arrived")) };
        let [own, other] = if is_sent { self.next } else { [self.next[1], self.next[0]] };
        let number = |word: &str, number: u32| (word.to_owned(), number.to_string());
        let flag = |flag: &str| (flag.to_owned(), String::new());
        let words = match (self.of.is_tcp, self.is_answered, is_sent) {
            (false, ..) => vec![number("len", 20)],
            (true, false, true) => vec![flag("S"), number("seq", FIRST[0])],
            (true, false, false) => vec![flag("S"), flag("A"), number("seq", FIRST[1]), number("ack", other)],
            (true, true, _) => vec![flag("A"), number("len", 10), number("seq", own), number("ack", other)],
        };
        Packet { flow, words }
    }

    /// Counts the bytes of a packet that has arrived.
    fn count(&mut self, is_sent: bool) {
        let side = usize::from(!is_sent);
        self.next[side] = if self.is_answered { self.next[side] + 10 } else { FIRST[side] + 1 };
    }
}

/// The way of a client's packet as it must be.
struct Expected {
    rule: Rule,
    /// With which destination it arrives, if it does.
    at: Option<End>,
}

struct Play {
    node: Node,
    evaluator: Evaluator,
    found: Found,
}

/// Plays a case.
pub(super) fn play(base: &str, parts: &[Part]) -> Found {
    let states: Vec<Vec<Object>> = changes().map(|change| objects(base, parts, change)).collect();
    let cluster = ReplayCluster::new(states[0].iter().cloned(), Some(OWN_NODE), RuleScope::BothSides).unwrap();
    let blocks = BLOCKS.map(|block| block.parse().unwrap());
    let node = Node::new(cluster.with_service_cidrs(&blocks).unwrap());
    let evaluator = Evaluator::new(&states[0]);
    let mut play = Play { node, evaluator, found: Found::default() };
    play.node.postponed = play.evaluator.postponed();
    let conversations = parts.iter().filter_map(|part| match part {
        Part::Conversation(conversation) => Some(conversation),
        Part::Objects(..) => None,
    });
    let mut talks: Vec<Talk<'_>> = conversations.map(Talk::new).collect();
    let mut events: Vec<(u64, usize, bool)> = Vec::new();
    for (number, talk) in talks.iter().enumerate() {
        events.extend(talk.of.packets.iter().map(|(time, is_sent)| (*time, number, *is_sent)));
    }
    events.sort_unstable();
    let mut next = changes().skip(1).peekable();
    for (time, number, is_sent) in events {
        while let Some(change) = next.next_if(|change| time_of(*change) <= time) {
            play.change(&states[change as usize - 1], &states[change as usize]);
            talks.iter_mut().for_each(|talk| play.forget(talk));
        }
        play.node.now = time;
        match is_sent {
            true => play.send(&mut talks[number]),
            false => play.answer(&mut talks[number]),
        }
    }
    play.found
}

fn objects(base: &str, parts: &[Part], wanted: u64) -> Vec<Object> {
    let mut yaml = base.to_owned();
    for part in parts {
        if let Part::Objects(change, text) = part
            && *change == wanted
        {
            yaml += "---\n";
            yaml += text;
        }
    }
    let read = read_text(Path::new("case.yaml"), &yaml, &Options::default());
    let manifests = read.unwrap_or_else(|error| panic!("{error}\n{yaml}"));
    manifests.documents.into_iter().map(|document| document.object).collect()
}

impl Play {
    /// The cluster's objects become others. kube-proxy makes the kernel forget connections of UDP to what serves no more.
    fn change(&mut self, before: &[Object], after: &[Object]) {
        let is_gone = |object: &&Object| after.iter().all(|other| other.reference() != object.reference());
        let gone = before.iter().filter(is_gone).map(|object| ObjectChange::Delete(object.reference()));
        self.node.cluster.apply(gone.chain(after.iter().cloned().map(ObjectChange::Set))).unwrap();
        self.evaluator = Evaluator::new(after);
        self.node.postponed = self.evaluator.postponed();
        let evaluator = &self.evaluator;
        self.node.forget(|to, by| {
            let is_asked = |service: &&Service| service.addresses.contains(&to.0) || service.external.contains(&to.0);
            let by_port = |service: &&Service| service.ports.iter().any(|port| port.node_port == Some(to.1));
            let is_node_port = |port: u16| port >= 30_000;
            match evaluator.services().find(|service| is_asked(service) || by_port(service)) {
                // It does not know a connection that it does not translate, or no more.
                None => true,
                Some(_) if to.1 != 53 && !is_node_port(to.1) => true,
                Some(service) => {
                    let dst = service.addresses.iter().find(|address| address.is_ipv6() == to.0.is_ipv6());
                    let flow = Flow { src: to.0, dst: *dst.unwrap(), protocol: 17, sport: 0, dport: 53 };
                    evaluator.objects.backends_of(&flow).is_some_and(|found| found.serving.contains(&by))
                }
            }
        });
    }

    /// A flow of datagrams has lost its backend.
    fn forget(&self, talk: &mut Talk<'_>) {
        let Some(seen) = talk.seen.filter(|_| !talk.of.is_tcp) else { return };
        let backends = self.evaluator.backends(talk.of, &talk.flow);
        if backends.is_some_and(|(_, serving)| !serving.contains(&(seen.dst, seen.dport))) {
            (talk.seen, talk.is_answered) = (None, false);
        }
    }

    /// The way of the client's next packet as it must be; `None` if it would be another conversation.
    fn expect(&self, talk: &mut Talk<'_>) -> Option<Expected> {
        let flow = talk.flow;
        let backends = self.evaluator.backends(talk.of, &flow);
        if !talk.is_kept(self.node.now) {
            (talk.seen, talk.is_answered, talk.is_invited) = (None, false, false);
        }
        if talk.seen.is_some() && talk.by_service != backends.is_some() {
            // The Service, or its address, has come or gone.
            return None;
        }
        talk.by_service = backends.is_some();
        let Some((eligible, serving)) = backends else { return Some(self.expect_untranslated(talk)) };
        let known = talk.seen.map(|seen| (seen.dst, seen.dport));
        let known = known.filter(|backend| talk.of.is_tcp || serving.contains(backend));
        if known.is_none() {
            (talk.seen, talk.is_answered) = (None, false);
        }
        let chosen = || eligible.get(talk.of.pick % eligible.len().max(1)).copied();
        let Some(backend) = known.or_else(chosen) else { return Some(Expected { rule: Rule::Refuse, at: None }) };
        let masquerades = !matches!(talk.of.to, Destination::Cluster(_));
        let (dst, dport) = backend;
        let is_allowed = self.evaluator.objects.allows(&Flow { dst, dport, ..flow });
        Some(Expected { rule: Rule::To { backend, masquerades }, at: is_allowed.then_some(backend) })
    }

    /// The same for what no Service has.
    fn expect_untranslated(&self, talk: &Talk<'_>) -> Expected {
        let flow = &talk.flow;
        let is_plain = self.evaluator.allows_plain(flow);
        let passes = match talk.is_invited {
            // Its connection is that of who has begun.
            true => self.evaluator.allows_plain(&reversed(*flow)),
            false => is_plain,
        };
        Expected { rule: Rule::None, at: passes.then_some((flow.dst, flow.dport)) }
    }

    /// A machine outside sends to the client's port, with the address to which the client will send.
    fn begin_outside(&mut self, talk: &mut Talk<'_>) {
        let packet = Packet { flow: reversed(talk.flow), words: vec![("len".to_owned(), "20".to_owned())] };
        talk.is_invited = self.node.answer(&packet, talk.of.pick.is_multiple_of(2)).is_ok();
        talk.last = self.node.now;
    }

    fn send(&mut self, talk: &mut Talk<'_>) {
        if talk.is_over {
            return;
        }
        let Some(Expected { rule, at }) = self.expect(talk) else {
            talk.is_over = true;
            return;
        };
        let packet = talk.packet(true);
        let arrival = self.node.send(&packet, rule);
        let found = arrival.map(|seen| (seen.dst, seen.dport));
        if found.ok() != at {
            self.differ(talk, &format!("{packet:?} must arrive at {at:?}"), &arrival);
            talk.is_over = true;
            return;
        }
        talk.last = self.node.now;
        match arrival {
            Ok(seen) => {
                talk.seen = Some(seen);
                self.found.arrived += 1;
                talk.count(true);
                talk.is_answered |= talk.is_invited;
            }
            Err(_) => {
                self.found.denied += 1;
                if !(talk.is_answered && talk.seen.is_some() || talk.of.is_begun_outside) {
                    talk.begin_anew();
                }
            }
        }
    }

    fn answer(&mut self, talk: &mut Talk<'_>) {
        if talk.of.is_begun_outside {
            return self.begin_outside(talk);
        }
        let Some(seen) = talk.seen.filter(|_| !talk.is_over && talk.is_kept(self.node.now)) else { return };
        let backends = self.evaluator.backends(talk.of, &talk.flow);
        let is_lost =
            |(_, serving): &(Vec<End>, Vec<End>)| !talk.of.is_tcp && !serving.contains(&(seen.dst, seen.dport));
        if talk.by_service != backends.is_some() || backends.as_ref().is_some_and(is_lost) {
            // A new flow of the server's own, or one that its client's next packet ends.
            return;
        }
        let asked = Flow { dst: seen.dst, dport: seen.dport, ..talk.flow };
        let is_allowed = match talk.by_service {
            true => self.evaluator.objects.allows(&asked),
            false => self.evaluator.allows_plain(&asked),
        };
        let is_elsewhere = self.evaluator.objects.local_pod(seen.dst).is_none();
        if !is_allowed && is_elsewhere && talk.by_service {
            // Answers of what another machine has been asked come by the node, which knows no policy.
            talk.is_over = true;
            return;
        }
        let packet = talk.packet(false);
        let arrival = self.node.answer(&packet, talk.of.pick.is_multiple_of(2));
        let expected = is_allowed.then(|| reversed(talk.flow));
        if arrival.ok() != expected {
            self.differ(talk, &format!("the answer {packet:?} must arrive as {expected:?}"), &arrival);
            talk.is_over = true;
        } else if is_allowed {
            self.found.answered += 1;
            talk.count(false);
            (talk.is_answered, talk.last) = (true, self.node.now);
        } else if talk.of.is_tcp && !talk.is_answered {
            talk.begin_anew();
        }
    }

    fn differ(&mut self, talk: &Talk<'_>, expected: &str, arrival: &Arrival) {
        let seconds = self.node.now as f64 / 1e9;
        self.found.differences.push(format!("{seconds:.3} {:?}: {expected}, and: {arrival:?}", talk.of));
    }
}
