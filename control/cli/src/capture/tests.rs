//! Bundles as the daemon's packets and objects make them, against what replay decides on them.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::sync::Arc;

use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep};
use penstock_admin::capture::{
    CaptureCounts, CaptureMessage, ObjectsInForce, PacketRecord, PickupInForce, Verdict as Named,
};
use penstock_dataplane::conntrack::{Config, ConnTable, MidStreamPickup, Timestamp};
use penstock_dataplane::forward::{Forwarding, Mac, Port, PortId, PortKind};
use penstock_dataplane::packet::{Address, Flow, Protocol, parse};
use penstock_dataplane::pipeline::MemoryFrames;
use penstock_dataplane::pipeline::{BATCH, EvaluationReason, Observer, Pipeline, PipelineMode, Verdict};
use penstock_dataplane::policy::{EvaluationForm, PolicyVerdict, RuleAction};
use penstock_dataplane::{DropReason, Epoch, Snapshot};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{
    ClusterNetworkPolicy, ClusterRule, ClusterTier, LabelOperator, Namespace, NetworkPolicy, Node, Object,
    ObjectChange, ObjectKey, ObjectRef, Peer, Peers, Pod, PolicyPorts, Requirement, Rule, Selector, Staging, Subject,
};
use penstock_replay::bundle::BundleWriter;
use penstock_replay::capture::VerdictFile;
use penstock_replay::{OutputPaths, ReplayOptions, ReplayReport, run};
use serde_json::Value;

/// All on one node.
const PODS: u8 = 5;
const BEGAN: u64 = 1_767_225_600_000_000_000;

/// Numbers that look random, the same for the same seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

fn address(pod: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, pod + 1)
}

fn address6(pod: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x10, 0, 0, 0, 0, 0, u16::from(pod) + 1)
}

fn key(name: String) -> ObjectKey {
    ObjectKey { namespace: "shop".to_owned(), name }
}

fn pod(number: u8) -> Object {
    Object::Pod(Pod {
        key: key(format!("pod-{number}")),
        labels: [("app".to_owned(), number.to_string())].into(),
        node: Some("here".to_owned()),
        addresses: vec![address(number).into()],
        ..Pod::default()
    })
}

fn of_apps(apps: Vec<String>) -> Selector {
    Selector { requirements: vec![Requirement { key: "app".to_owned(), operator: LabelOperator::In(apps) }] }
}

/// A rule for some of the pods.
fn rule(numbers: &mut Numbers) -> Rule {
    let peers = (0..PODS).filter(|_| numbers.below(2) == 0).map(|pod| pod.to_string()).collect();
    Rule { peers: Peers::AnyOf(vec![Peer::Pods(of_apps(peers))]), ports: PolicyPorts::Every }
}

/// A policy for one direction of one pod: of its namespace, or one time in four of the cluster. Most have a name that another
/// may have had.
fn policy(numbers: &mut Numbers, name: u64) -> Object {
    match numbers.below(4) {
        0 => cluster_policy(numbers, name),
        _ => network_policy(numbers, name),
    }
}

fn cluster_policy(numbers: &mut Numbers, name: u64) -> Object {
    let pods = of_apps(vec![numbers.below(PODS.into()).to_string()]);
    let mut rules = |count: u64| -> Vec<ClusterRule> {
        let rules = (0..count).map(|_| {
            let action = [RuleAction::Accept, RuleAction::Deny, RuleAction::Pass][numbers.below(3) as usize];
            ClusterRule { name: None, action, matches: rule(numbers), is_understood: true }
        });
        rules.collect()
    };
    let (ingress, egress) = (rules(2), rules(1));
    Object::ClusterNetworkPolicy(ClusterNetworkPolicy {
        name: format!("policy-{name}"),
        tier: [ClusterTier::Admin, ClusterTier::Baseline][numbers.below(2) as usize],
        priority: numbers.below(3) as u16,
        subject: Subject { namespaces: Selector::default(), pods },
        ingress,
        egress,
        staging: Staging::InForce,
        notes: Default::default(),
    })
}

fn network_policy(numbers: &mut Numbers, name: u64) -> Object {
    let subject = numbers.below(PODS.into()).to_string();
    let rule = rule(numbers);
    let is_ingress = numbers.below(2) == 0;
    Object::NetworkPolicy(NetworkPolicy {
        key: key(format!("policy-{name}")),
        pod_selector: of_apps(vec![subject]),
        isolates: true,
        ingress: is_ingress.then(|| vec![rule.clone()]),
        egress: (!is_ingress).then(|| vec![rule]),
        staging: Staging::InForce,
        notes: Default::default(),
    })
}

/// Tables and ports as a daemon has them, made without replay.
fn snapshot(engine: &mut Engine, epoch: Epoch) -> Snapshot {
    let mut forwarding = Forwarding::new([Address::from(IpAddr::from([192, 0, 2, 1]))]);
    for number in 0..PODS {
        let mac = Mac([2, 0, 0, 0, 0, number]);
        let addresses = vec![IpAddr::from(address(number)).into(), IpAddr::from(address6(number)).into()];
        let port = Port::new(PortKind::Pod, mac, mac, 1500, addresses);
        forwarding.insert(PortId(40 - u16::from(number)), port).unwrap();
    }
    engine.set_local(&forwarding);
    Snapshot::new(epoch, engine.policy_set().clone(), forwarding)
}

/// The question to policy about the only packet of a batch.
#[derive(Default)]
struct Asked(Option<(Flow, EvaluationReason)>);

impl Observer for Asked {
    fn evaluated(&mut self, _: usize, flow: &Flow, _: &PolicyVerdict, _: EvaluationForm, reason: EvaluationReason) {
        self.0 = Some((*flow, reason));
    }
}

/// A TCP connection as its ends know it, which may be opened again and again.
#[derive(Clone, Copy)]
struct Dialogue {
    ends: [u8; 2],
    port: u16,
    v6: bool,
    /// The next segment of each end.
    next: [u32; 2],
    step: Step,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Closed,
    /// One end has sent its SYN.
    Asked,
    Open,
}

impl Dialogue {
    fn random(numbers: &mut Numbers, port: u16) -> Self {
        let ends = [numbers.below(PODS.into()) as u8, numbers.below(PODS.into()) as u8];
        let next = [0, 1].map(|_| numbers.below(u32::MAX.into()) as u32);
        Self { ends, port, v6: numbers.below(2) == 0, next, step: Step::Closed }
    }

    /// The next segment of one end, and the dialogue if that arrives. One time in eight it is not what the other expects.
    fn segment(self, numbers: &mut Numbers) -> (usize, Vec<u8>, Self) {
        let mut after = self;
        let unexpected = numbers.below(8) == 0;
        let step =
            if unexpected { [Step::Closed, Step::Asked, Step::Open][numbers.below(3) as usize] } else { self.step };
        let from = match step {
            Step::Closed => 0,
            Step::Asked => 1,
            Step::Open => numbers.below(2) as usize,
        };
        let far = if unexpected && numbers.below(2) == 0 { 1 << 30 } else { 0 };
        let ports = if from == 0 { [self.port, 80] } else { [80, self.port] };
        let (sequence, acknowledged) = (self.next[from].wrapping_add(far), self.next[1 - from]);
        let packet = ip(self.ends[from], self.ends[1 - from], self.v6).tcp(ports[0], ports[1], sequence, 60_000);
        let (packet, length, then) = match (step, numbers.below(16)) {
            (Step::Closed, _) => (packet.syn(), 1, Step::Asked),
            (Step::Asked, _) => (packet.syn().ack(acknowledged), 1, Step::Open),
            (Step::Open, 0) => (packet.ack(acknowledged).rst(), 0, Step::Closed),
            (Step::Open, 1) => (packet.ack(acknowledged).fin(), 1, Step::Closed),
            (Step::Open, _) => (packet.ack(acknowledged), 7, Step::Open),
        };
        let payload = if length == 7 { &b"payload"[..] } else { b"" };
        let mut frame = Vec::new();
        packet.write(&mut frame, payload).unwrap();
        if !unexpected {
            after.next[from] = self.next[from].wrapping_add(length);
            after.step = then;
        }
        (from, frame, after)
    }
}

/// A packet between two pods, up to its IP header.
fn ip(from: u8, to: u8, v6: bool) -> PacketBuilderStep<IpHeaders> {
    let ethernet = PacketBuilder::ethernet2([0; 6], [0; 6]);
    match v6 {
        true => ethernet.ipv6(address6(from).octets(), address6(to).octets(), 64),
        false => ethernet.ipv4(address(from).octets(), address(to).octets(), 64),
    }
}

/// Two workers with one connection table, and a capture of what they do.
struct Workers {
    engine: Engine,
    table: Arc<ConnTable>,
    pipeline: Pipeline,
    /// The newest, and the one that the second worker still has.
    snapshots: [Snapshot; 2],
    now: u64,
    known: HashSet<u64>,
    dialogues: Vec<Dialogue>,
}

/// A packet with what was decided on it.
struct Decided {
    record: PacketRecord,
    frame: Vec<u8>,
    /// Whether its connection began within the capture, or it has none.
    is_comparable: bool,
}

impl Workers {
    fn new(objects: &[Object], midstream_pickup: MidStreamPickup) -> Self {
        let mut engine = Engine::new(EngineSettings::for_node("here"));
        engine.apply(objects.iter().cloned().map(ObjectChange::Set));
        let newest = snapshot(&mut engine, Epoch(5));
        let table = Arc::new(ConnTable::new(&Config { entries: 4096, midstream_pickup, ..Config::default() }).unwrap());
        let pipeline = Pipeline::new(Arc::clone(&table), PipelineMode::Full);
        let snapshots = [newest.clone(), newest];
        Self { engine, table, pipeline, snapshots, now: BEGAN, known: HashSet::new(), dialogues: Vec::new() }
    }

    fn change(&mut self, change: ObjectChange) {
        self.engine.apply([change]);
        self.snapshots[0] = snapshot(&mut self.engine, self.snapshots[0].epoch.next());
    }

    fn packet(&mut self, numbers: &mut Numbers) -> Decided {
        self.now += 1_000_000 * (1 + numbers.below(40));
        match numbers.below(2) {
            0 => self.datagram(numbers),
            _ => self.segment(numbers),
        }
    }

    fn datagram(&mut self, numbers: &mut Numbers) -> Decided {
        let (from, to) = (numbers.below(PODS.into()) as u8, numbers.below(PODS.into()) as u8);
        let ports = [7000 + numbers.below(2) as u16, 7000 + numbers.below(2) as u16];
        let mut frame = Vec::new();
        ip(from, to, numbers.below(4) == 0).udp(ports[0], ports[1]).write(&mut frame, b"payload").unwrap();
        self.send(from, to, frame)
    }

    fn segment(&mut self, numbers: &mut Numbers) -> Decided {
        let chosen = numbers.below(self.dialogues.len() as u64) as usize;
        let dialogue = self.dialogues[chosen];
        let (from, frame, after) = dialogue.segment(numbers);
        let decided = self.send(dialogue.ends[from], dialogue.ends[1 - from], frame);
        // One that does not get through is sometimes given up.
        match decided.record.verdict {
            Named::Allow => self.dialogues[chosen] = after,
            Named::Deny if numbers.below(4) == 0 => self.dialogues[chosen].step = Step::Closed,
            Named::Deny => {}
        }
        decided
    }

    /// By the worker that has both.
    fn send(&mut self, from: u8, to: u8, frame: Vec<u8>) -> Decided {
        self.process(usize::from(from + to) % 2, PortId(40 - u16::from(from)), frame, format!("shop/pod-{from}"))
    }

    fn process(&mut self, worker: usize, ingress: PortId, frame: Vec<u8>, interface: String) -> Decided {
        let snapshot = &self.snapshots[worker];
        let now = Timestamp::from_millis(self.now / 1_000_000);
        let flow = parse(&frame).unwrap().flow;
        let mut frames = MemoryFrames::new();
        frames.push(frame.clone()).unwrap();
        let (mut verdicts, mut asked) = ([Verdict::Drop(DropReason::NotReady); BATCH], Asked::default());
        self.pipeline.process_batch(snapshot, now, ingress, &mut frames, &mut verdicts, &mut asked);
        let original = self.table.find(&self.table.prepare(&flow), now).map(|found| found.original_flow());
        let connection = self.table.connection_id(&original.or(asked.0.map(|it| it.0)).unwrap_or(flow));
        let opens = asked.0.is_some_and(|(_, reason)| reason == EvaluationReason::Opened);
        let dropped = match verdicts[0] {
            Verdict::Drop(reason) => Some(reason),
            Verdict::Forward(_) => None,
            Verdict::Early => panic!("nothing is held"),
        };
        // In the place of a connection that is not in the capture, by a SYN of its own.
        let is_reopened = is_answer_to_syn(&frame) && !self.known.contains(&connection);
        let is_opened = opens && !is_reopened;
        if is_opened && dropped.is_none() {
            self.known.insert(connection);
        }
        let needs_none = matches!(dropped, Some(DropReason::SpoofedSource | DropReason::NoConnection));
        let is_comparable = is_opened || self.known.contains(&connection) || needs_none;
        let record = PacketRecord {
            time: self.now,
            port: ingress.0,
            interface,
            length: frame.len() as u32,
            verdict: if dropped.is_some() { Named::Deny } else { Named::Allow },
            reason: dropped.map(|reason| reason.name().to_owned()),
            egress: None,
            ingress: Some("a \"rule\" of verdict=deny".to_owned()),
            connection: Some(format!("{connection:016x}")),
            opens,
            staged: None,
            epoch: snapshot.epoch.0,
            worker,
        };
        Decided { record, frame, is_comparable }
    }
}

fn is_answer_to_syn(frame: &[u8]) -> bool {
    const SYN_AND_ACK: u8 = 0x12;
    let tcp = if frame[12] == 0x08 { 14 + 20 } else { 14 + 40 };
    parse(frame).unwrap().flow.protocol == Protocol::TCP && frame[tcp + 13] & SYN_AND_ACK == SYN_AND_ACK
}

/// Begins a bundle as a daemon does that has so many objects.
fn begin(bundle: &mut BundleWriter, count: u64, epoch: Epoch, time: u64, midstream_pickup: PickupInForce) {
    let (version, node) = ("0.0.0".to_owned(), "here".to_owned());
    let (epoch, service_cidrs) = (epoch.0, Vec::new());
    let objects = ObjectsInForce { version, epoch, time, count, service_cidrs, midstream_pickup };
    bundle.message(&CaptureMessage::Begin { node, objects: Some(objects) }, &[]).unwrap();
}

fn begin_with(bundle: &mut BundleWriter, objects: &[Object], node: &Workers) {
    let pickup = match node.table.midstream_pickup() {
        MidStreamPickup::Until(end) => PickupInForce::Until(end.as_millis() * 1_000_000),
        MidStreamPickup::Never => PickupInForce::Never,
        MidStreamPickup::Always | MidStreamPickup::AfterLoss(_) => PickupInForce::Always,
    };
    begin(bundle, objects.len() as u64, node.snapshots[0].epoch, node.now, pickup);
    for object in objects {
        let line = serde_json::to_string(object).unwrap() + "\n";
        bundle.message(&CaptureMessage::Objects { count: 1 }, line.as_bytes()).unwrap();
    }
}

/// A change that the node has taken.
fn write_change(bundle: &mut BundleWriter, change: &ObjectChange, node: &Workers) {
    let message = CaptureMessage::Changes { epoch: node.snapshots[0].epoch.0, time: node.now };
    bundle.message(&message, &serde_json::to_vec(&[change]).unwrap()).unwrap();
}

fn end<W: Write>(mut file: VerdictFile<W>, reason: &str) -> u64 {
    file.end(&[(CaptureCounts::default(), reason.to_owned())]).unwrap();
    file.packets()
}

/// The objects without policies.
fn cluster() -> Vec<Object> {
    let labels = Default::default();
    let namespace = Namespace { name: "shop".to_owned(), labels, default_deny_ingress: false, terminating: false };
    let addresses = vec![IpAddr::from([192, 0, 2, 1])];
    let node = Node { name: "here".to_owned(), labels: Default::default(), addresses, status_addresses: Vec::new() };
    let objects = [Object::Namespace(namespace), Object::Node(node)];
    objects.into_iter().chain((0..PODS).map(pod)).collect()
}

/// Packets and changes of a random history, in a bundle; and the packets.
fn history(seed: u64, directory: &Path) -> Vec<Decided> {
    let mut numbers = Numbers(seed);
    let mut objects = cluster();
    for object in &mut objects {
        if let Object::Pod(pod) = object {
            let number = pod.labels["app"].parse().unwrap();
            pod.addresses.push(address6(number).into());
        }
    }
    objects.extend((0..numbers.below(3)).map(|name| policy(&mut numbers, name)));
    let pickup = match seed % 3 {
        0 => MidStreamPickup::Always,
        1 => MidStreamPickup::Never,
        // Half of the packets are later.
        _ => MidStreamPickup::Until(Timestamp::from_millis(BEGAN / 1_000_000 + 3_000)),
    };
    let mut node = Workers::new(&objects, pickup);
    node.dialogues = (0..8).map(|number| Dialogue::random(&mut numbers, 40_000 + number)).collect();
    (0..50).for_each(|_| _ = node.packet(&mut numbers));
    node.known.clear();

    let (mut bundle, file) = BundleWriter::create(directory).unwrap();
    let mut file = VerdictFile::new(file).unwrap();
    begin_with(&mut bundle, &objects, &node);
    let (mut there, mut packets) = (HashSet::<ObjectRef>::new(), Vec::new());
    for _ in 0..250 {
        match numbers.below(12) {
            0 => {
                let name = numbers.below(4);
                let changed = policy(&mut numbers, name);
                let reference = changed.reference();
                let change = match there.insert(reference.clone()) || numbers.below(2) == 0 {
                    true => ObjectChange::Set(changed),
                    false => {
                        there.remove(&reference);
                        ObjectChange::Delete(reference)
                    }
                };
                node.change(change.clone());
                write_change(&mut bundle, &change, &node);
            }
            3 => {
                // A connection that is met in its middle.
                let (place, port) = (numbers.below(8) as usize, 41_000 + packets.len() as u16);
                node.dialogues[place] = Dialogue { step: Step::Open, ..Dialogue::random(&mut numbers, port) };
            }
            1 | 2 => node.snapshots[1] = node.snapshots[0].clone(),
            _ => packets.push(node.packet(&mut numbers)),
        }
    }
    packets.iter().for_each(|packet| file.packet(0, &packet.record, &packet.frame, 0).unwrap());
    bundle.end(node.now, end(file, "its end"), 0).unwrap();
    packets
}

fn replay(directory: &Path, verdicts: &Path) -> ReplayReport {
    let outputs = OutputPaths { verdicts: Some(verdicts.to_owned()), ..OutputPaths::default() };
    let connections = Config { entries: 4096, ..Config::default() };
    run(&ReplayOptions { bundle: Some(directory.to_owned()), outputs, connections, ..ReplayOptions::default() })
        .unwrap()
}

#[test]
fn a_random_historys_bundle_replays_to_the_same_verdicts() {
    let scratch = tempfile::tempdir().unwrap();
    let (mut earlier, mut overtaken, mut seen) = (0, 0, HashMap::new());
    for seed in 0..24 {
        let directory = scratch.path().join(seed.to_string());
        let packets = history(seed, &directory);
        let verdicts = scratch.path().join("verdicts.jsonl");
        let report = replay(&directory, &verdicts);
        let recorded = report.recorded.unwrap();
        assert_eq!(recorded.different, 0, "seed {seed}: {recorded:#?}");
        let left_out = packets.iter().filter(|packet| !packet.is_comparable).count() as u64;
        assert_eq!((recorded.earlier_connections, recorded.node_state), (left_out, 0), "seed {seed}");
        // In the order of epochs, which is that of each worker.
        let mut expected: Vec<&PacketRecord> =
            packets.iter().filter(|packet| packet.is_comparable).map(|packet| &packet.record).collect();
        overtaken += expected.windows(2).filter(|pair| pair[1].epoch < pair[0].epoch).count();
        expected.sort_by_key(|record| record.epoch);
        let text = std::fs::read_to_string(&verdicts).unwrap();
        let decided: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(decided.len(), expected.len());
        for (record, again) in expected.iter().zip(&decided) {
            let here = (again["verdict"].as_str().unwrap(), again["reason"].as_str());
            assert_eq!(here, (record.verdict.name(), record.reason.as_deref()), "seed {seed}: {record:?} {again}");
            *seen.entry(here.1.map(str::to_owned)).or_insert(0) += 1;
        }
        earlier += left_out;
    }
    assert!(earlier > 20 && overtaken > 20, "{earlier}, {overtaken}");
    for (reason, least) in
        [("connection_revoked", 20), ("ingress_denied", 20), ("egress_denied", 20), ("no_connection", 20)]
    {
        assert!(seen.get(&Some(reason.to_owned())).is_some_and(|&count| count >= least), "{reason}: {seen:?}");
    }
}

#[test]
fn a_verdict_that_the_objects_do_not_give_is_found_and_named() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("bundle");
    let packets = history(1, &directory);
    let file = directory.join("packets.pcapng");
    let mut file = VerdictFile::new(std::fs::File::create(file).unwrap()).unwrap();
    let mut flipped = None;
    for Decided { record, frame, is_comparable } in &packets {
        let mut record = record.clone();
        let is_denied =
            *is_comparable && record.reason.as_deref().is_some_and(|reason| reason.ends_with("gress_denied"));
        if is_denied && flipped.is_none() {
            (record.verdict, record.reason) = (Named::Allow, None);
            flipped = Some(record.interface.clone());
        }
        file.packet(0, &record, frame, 0).unwrap();
    }
    end(file, "its end");
    let recorded = replay(&directory, &scratch.path().join("verdicts.jsonl")).recorded.unwrap();
    assert_eq!(recorded.different, 1, "{recorded:#?}");
    let group = &recorded.differences[0].group;
    assert_eq!((group.before.verdict, group.after.verdict), ("allow", "deny"));
    assert_eq!(Some(&group.src), flipped.as_ref());
    assert!(recorded.to_string().contains("decided otherwise: before by the daemon"), "{recorded}");
}

/// The bundle that the documentation shows: pod-1 answers pod-0, until a policy admits pod-2 alone; pod-3 had a connection
/// before.
fn write_example(directory: &Path) {
    let admits = |apps: &[&str]| {
        let apps = apps.iter().map(ToString::to_string).collect();
        let rule = Rule { peers: Peers::AnyOf(vec![Peer::Pods(of_apps(apps))]), ports: PolicyPorts::Every };
        Object::NetworkPolicy(NetworkPolicy {
            key: key("served".to_owned()),
            pod_selector: of_apps(vec!["1".to_owned()]),
            isolates: true,
            ingress: Some(vec![rule]),
            egress: None,
            staging: Staging::InForce,
            notes: Default::default(),
        })
    };
    let mut objects = cluster();
    objects.push(admits(&["0", "2", "3"]));
    let mut node = Workers::new(&objects, MidStreamPickup::Always);
    let send = |node: &mut Workers, from: u8, to: u8| {
        let mut frame = Vec::new();
        let packet = PacketBuilder::ethernet2([0; 6], [0; 6]).ipv4(address(from).octets(), address(to).octets(), 64);
        packet.udp(7000, 7000).write(&mut frame, b"payload").unwrap();
        node.now += 1_000_000_000;
        node.process(0, PortId(40 - u16::from(from)), frame, format!("shop/pod-{from}"))
    };
    send(&mut node, 3, 1);
    let (mut bundle, file) = BundleWriter::create(directory).unwrap();
    let mut file = VerdictFile::new(file).unwrap();
    begin_with(&mut bundle, &objects, &node);
    let mut packets: Vec<Decided> = [(0, 1), (1, 0), (3, 1), (4, 1)].map(|(from, to)| send(&mut node, from, to)).into();
    let change = ObjectChange::Set(admits(&["2"]));
    node.change(change.clone());
    write_change(&mut bundle, &change, &node);
    packets.extend([(0, 1), (1, 0), (2, 1)].map(|(from, to)| send(&mut node, from, to)));
    packets.iter().for_each(|packet| file.packet(0, &packet.record, &packet.frame, 0).unwrap());
    bundle.end(node.now, end(file, "interrupted"), 0).unwrap();
}

#[test]
fn the_bundle_in_the_documentation_is_as_this_version_writes_it() {
    let scratch = tempfile::tempdir().unwrap();
    let written = scratch.path().join("incident");
    write_example(&written);
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/examples/incident");
    if std::env::var_os("UPDATE_EXPECTED").is_some() {
        let _ = std::fs::remove_dir_all(&example);
        write_example(&example);
    }
    // The packets name the version that wrote them.
    for name in ["bundle.json", "objects.jsonl", "timeline.jsonl"] {
        let [written, example] = [&written, &example].map(|directory| std::fs::read_to_string(directory.join(name)));
        assert_eq!(written.unwrap(), example.unwrap(), "{name}: run this with UPDATE_EXPECTED=1, and raise VERSION");
    }
}

#[test]
fn a_bundle_is_written_whole_or_not_at_all() {
    let scratch = tempfile::tempdir().unwrap();
    let (new, empty, full) = (scratch.path().join("new"), scratch.path().join("empty"), scratch.path().join("full"));
    std::fs::create_dir(&empty).unwrap();
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("notes.txt"), "kept").unwrap();
    let files = |directory: &Path| std::fs::read_dir(directory).unwrap().count();
    for directory in [&new, &empty] {
        let (mut bundle, _) = BundleWriter::create(directory).unwrap();
        assert_eq!(files(directory), 3, "no manifest before the end");
        begin(&mut bundle, 2, Epoch(5), BEGAN, PickupInForce::Always);
        bundle.message(&CaptureMessage::Objects { count: 1 }, b"{}\n").unwrap();
        let error = bundle.end(BEGAN, 0, 0).unwrap_err().to_string();
        assert_eq!(error, "it ended before all objects had come: capture again");
    }
    assert!(!new.exists() && files(&empty) == 0, "nothing is left that was not there before");
    let error = BundleWriter::create(&full).unwrap_err().to_string();
    assert!(
        error.ends_with("full: is not empty; give the name of a directory that does not exist, or of an empty one")
    );
    assert_eq!(files(&full), 1);
    let error = BundleWriter::create(&full.join("notes.txt/bundle")).unwrap_err().to_string();
    assert!(error.contains("cannot be created (") && error.ends_with("give a path that can be written"), "{error}");
    // As where no daemon offers captures.
    let output = Path::new("/nowhere/capture.sock");
    assert!(super::run_bundle(&new, output, &Default::default(), false).is_err() && !new.exists());
}
