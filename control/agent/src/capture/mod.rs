//! A capture that runs: what was asked for, and the way of packets from the workers' queue to the client.
//!
//! The workers copy packets into a queue and never wait ([`penstock_dataplane::worker::CaptureQueue`]). The daemon's loop
//! adds names, some packets at a time, and passes them on to the client's connection in chunks. While the client does not
//! read, chunks stay; then the queue fills, and what workers cannot put there is counted.

mod objects;

use std::collections::HashMap;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use penstock_admin::capture::{
    self, CaptureCounts, CaptureMessage, CaptureQuery, MAX_BYTES, MAX_PACKETS, MAX_SECONDS, MAX_SNAP_LENGTH,
    MIN_SNAP_LENGTH, ObjectsInForce, PacketRecord, PickupInForce, StagedVerdict, Verdict,
};
use penstock_dataplane::conntrack::{MidStreamPickup, Timestamp};
use penstock_dataplane::forward::PortId;
use penstock_dataplane::pipeline::EvaluationReason;
use penstock_dataplane::worker::{Capture, CaptureFilter, CaptureQueue, CapturedPacket, CapturedPod, LoggedEvaluation};
use penstock_dataplane::{DropReason, Epoch, pipeline};
use penstock_policy::flow::{self, FlowEndpoint};
use penstock_policy::model::ObjectKey;
use tokio::sync::mpsc;

pub(super) use objects::CapturedObjects;
use objects::ObjectStep;

use super::config::Config;
use super::naming::{PacketNames, evaluated_sides, identifier, sides};
use super::ports::CapturedPorts;
use super::testing;

/// How often packets are passed on.
pub(super) const INTERVAL: Duration = Duration::from_millis(5);
/// How often the client hears of the capture, without packets too.
const PROGRESS: Duration = Duration::from_secs(1);
const WAITING_CHUNKS: usize = 8;
/// Packets that wait for the reader of a capture; more are lost to the capture. Each takes as many bytes as the capture keeps of a
/// packet, while it runs.
const WAITING_PACKETS: usize = 4096;
/// Chunks that are made in one round, to keep the daemon's loop responsive.
const CHUNKS_PER_ROUND: usize = 4;
/// Connections whose rules are remembered.
const REMEMBERED: usize = 4096;
/// How long the last message waits for a client that does not read.
const LAST_MESSAGE: Duration = Duration::from_secs(10);

/// The client's end: chunks of messages.
pub(super) type CaptureChunks = mpsc::Receiver<Vec<u8>>;

pub(super) struct RunningCapture {
    /// Without the pod.
    filter: CaptureFilter,
    pod: Option<ObjectKey>,
    queue: Arc<CaptureQueue>,
    /// The pod as the workers know it.
    known_pod: Option<CapturedPod>,
    packets: u64,
    bytes: u64,
    until: Instant,
    /// The same time on both clocks.
    origin: (Instant, SystemTime),
    chunks: mpsc::Sender<Vec<u8>>,
    counts: CaptureCounts,
    reported: (Instant, CaptureCounts),
    named: NamedConnections,
    /// The cluster's objects, as far as they are asked for.
    objects: ObjectsOfCapture,
}

pub(super) enum ObjectsOfCapture {
    /// None are asked for, or they are not taken yet.
    None,
    /// These are to be sent, then their changes.
    InForce(CapturedObjects),
    /// A change is not known any more.
    Lost,
}

#[derive(Default)]
pub(super) struct NamedPackets {
    records: Vec<PacketRecord>,
    steps: Vec<ObjectStep>,
    has_lost_changes: bool,
}

/// The same on the clock of packets, of which both give one moment.
fn pickup_in_force(pickup: MidStreamPickup, now: Timestamp, nanoseconds: u64) -> PickupInForce {
    match pickup {
        MidStreamPickup::Always => PickupInForce::Always,
        MidStreamPickup::Never => PickupInForce::Never,
        MidStreamPickup::AfterLoss(end) | MidStreamPickup::Until(end) if end <= now => PickupInForce::Never,
        MidStreamPickup::AfterLoss(end) | MidStreamPickup::Until(end) => {
            PickupInForce::Until(nanoseconds + (end.as_millis() - now.as_millis()) * 1_000_000)
        }
    }
}

impl RunningCapture {
    /// Prepares what a query asks for, with a queue of so many packets. Nothing is captured yet.
    ///
    /// # Errors
    /// A part of the query is not understood, or beyond a limit.
    pub(super) fn new(query: &CaptureQuery) -> Result<(Self, CaptureChunks), String> {
        let snap_length = limited(query.snap_length, "snap length", MIN_SNAP_LENGTH, MAX_SNAP_LENGTH)?;
        let seconds = limited(query.seconds, "seconds", 1, MAX_SECONDS)?;
        let now = Instant::now();
        let (sender, chunks) = mpsc::channel(WAITING_CHUNKS);
        let running = Self {
            filter: filter(query)?,
            pod: query.pod.as_deref().map(pod).transpose()?,
            queue: Arc::new(CaptureQueue::new(
                testing::capture_queue().unwrap_or(WAITING_PACKETS),
                snap_length as usize,
            )),
            known_pod: None,
            packets: limited(query.packets, "packets", 1, MAX_PACKETS)?,
            bytes: limited(query.bytes, "bytes", 1, MAX_BYTES)?,
            until: now + Duration::from_secs(seconds),
            origin: (now, SystemTime::now()),
            chunks: sender,
            counts: CaptureCounts::default(),
            reported: (now, CaptureCounts::default()),
            named: NamedConnections::default(),
            objects: ObjectsOfCapture::None,
        };
        Ok((running, chunks))
    }

    pub(super) fn pod(&self) -> Option<&ObjectKey> {
        self.pod.as_ref()
    }

    pub(super) fn counts(&self) -> CaptureCounts {
        CaptureCounts { lost: self.queue.lost(), ..self.counts }
    }

    pub(super) fn age(&self) -> Duration {
        self.origin.0.elapsed()
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.chunks.is_closed()
    }

    /// The ports whose packets must all reach the workers, as far as is known of local pods' addresses. Programs forward by
    /// themselves only what is allowed.
    pub(super) fn ports(&self, pod_of: impl FnOnce(IpAddr) -> Option<ObjectKey>) -> CapturedPorts {
        if self.filter.allowed == Some(false) || self.filter.reason.is_some() {
            return CapturedPorts::None;
        }
        let of_host = || self.filter.host.and_then(|host| pod_of(host.into()));
        self.pod.clone().or_else(of_host).map_or(CapturedPorts::All, CapturedPorts::Pod)
    }

    /// The capture for the workers with the pod as it is now. `None`: they have it already.
    pub(super) fn for_workers(&mut self, pod: Option<CapturedPod>) -> Option<Capture> {
        if self.known_pod.is_some() && self.known_pod == pod {
            return None;
        }
        self.known_pod.clone_from(&pod);
        let filter = CaptureFilter { pod, ..self.filter.clone() };
        Some(Capture { filter: Arc::new(filter), queue: Arc::clone(&self.queue) })
    }

    /// Sends these objects before the packets, and their changes between them.
    pub(super) fn with_objects(&mut self, objects: CapturedObjects) {
        self.objects = ObjectsOfCapture::InForce(objects);
    }

    /// Tells the client that the workers capture.
    pub(super) fn begun(&self, config: &Config, pickup: MidStreamPickup) {
        let objects = match &self.objects {
            ObjectsOfCapture::InForce(objects) => Some(ObjectsInForce {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                epoch: objects.epoch.0,
                time: objects.time,
                count: objects.left() as u64,
                service_cidrs: config.service_cidrs.iter().map(ToString::to_string).collect(),
                midstream_pickup: pickup_in_force(pickup, Timestamp::now(), objects.time),
            }),
            ObjectsOfCapture::None | ObjectsOfCapture::Lost => None,
        };
        self.send(&CaptureMessage::Begin { node: config.node.to_string(), objects });
    }

    /// Passes packets on, with their names by `name`, which gets some at a time. Returns why the capture is to end.
    pub(super) fn forward(
        &mut self,
        mut name: impl FnMut(&mut NamedConnections, &ObjectsOfCapture, &[CapturedPacket]) -> NamedPackets,
        most_named: usize,
    ) -> Option<String> {
        for _ in 0..CHUNKS_PER_ROUND {
            if self.chunks.capacity() == 0 {
                break;
            }
            if let ObjectsOfCapture::InForce(objects) = &mut self.objects
                && let Some(message) = objects.next_message()
            {
                let _ = self.chunks.try_send(message);
                continue;
            }
            let mut packets: Vec<CapturedPacket> = std::iter::from_fn(|| self.queue.take()).take(most_named).collect();
            // Several workers have sent them.
            packets.sort_by_key(|packet| packet.at);
            // After they were taken: the changes that were in effect for them are there.
            let NamedPackets { records, steps, has_lost_changes } = name(&mut self.named, &self.objects, &packets);
            if has_lost_changes {
                self.objects = ObjectsOfCapture::Lost;
                break;
            }
            let mut chunk = Vec::new();
            steps.iter().for_each(|step| step.encode(&mut chunk));
            if packets.is_empty() && chunk.is_empty() {
                break;
            }
            for (packet, record) in packets.into_iter().zip(records) {
                if !self.is_full() && !self.is_of_earlier_objects(&packet) {
                    let record = PacketRecord { time: self.nanoseconds(packet.at), ..record };
                    capture::encode(&CaptureMessage::Packet(record), &packet.bytes, &mut chunk);
                    self.counts.packets += 1;
                    self.counts.bytes += packet.bytes.len() as u64;
                }
                self.queue.give_back(packet.bytes);
            }
            let _ = self.chunks.try_send(chunk);
            if self.is_full() {
                break;
            }
        }
        self.counts = self.counts();
        self.report_progress();
        self.ended()
    }

    /// Whether a worker processed it under a snapshot from before the objects.
    fn is_of_earlier_objects(&self, packet: &CapturedPacket) -> bool {
        matches!(&self.objects, ObjectsOfCapture::InForce(objects) if packet.epoch.is_before(objects.epoch))
    }

    fn is_full(&self) -> bool {
        self.counts.packets >= self.packets || self.counts.bytes >= self.bytes
    }

    fn ended(&self) -> Option<String> {
        if matches!(self.objects, ObjectsOfCapture::Lost) {
            Some("more changes of objects than its reader takes".to_owned())
        } else if self.counts.packets >= self.packets {
            Some(format!("{} packets", self.packets))
        } else if self.counts.bytes >= self.bytes {
            Some(format!("{} bytes", self.bytes))
        } else if Instant::now() >= self.until {
            Some(format!("{} seconds", self.until.duration_since(self.origin.0).as_secs()))
        } else {
            None
        }
    }

    fn report_progress(&mut self) {
        let (at, counts) = self.reported;
        let interval = if counts.lost == self.counts.lost { PROGRESS } else { PROGRESS / 10 };
        if at.elapsed() >= interval {
            self.reported = (Instant::now(), self.counts);
            self.send(&CaptureMessage::Progress(self.counts));
        }
    }

    /// Sends the last message, which says why the capture ends.
    pub(super) fn end(self, reason: String) {
        let mut chunk = Vec::new();
        capture::encode(&CaptureMessage::End { reason, counts: self.counts }, &[], &mut chunk);
        let chunks = self.chunks;
        tokio::spawn(async move {
            // A client that does not read, or is gone, learns no more.
            let _ = tokio::time::timeout(LAST_MESSAGE, chunks.send(chunk)).await;
        });
    }

    fn send(&self, message: &CaptureMessage) {
        let mut chunk = Vec::new();
        capture::encode(message, &[], &mut chunk);
        // If there is no room, the next message has newer counts.
        let _ = self.chunks.try_send(chunk);
    }

    fn nanoseconds(&self, at: Instant) -> u64 {
        let (origin, clock) = self.origin;
        let time = match at.checked_duration_since(origin) {
            Some(after) => clock + after,
            None => clock - origin.duration_since(at),
        };
        time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
    }
}

fn limited<T: Copy + PartialOrd + std::fmt::Display>(
    value: Option<T>,
    what: &str,
    least: T,
    most: T,
) -> Result<T, String> {
    match value {
        None => Ok(most),
        Some(value) if (least..=most).contains(&value) => Ok(value),
        Some(value) => Err(format!("{what} = {value}: out of range; give {least} to {most}")),
    }
}

fn pod(text: &str) -> Result<ObjectKey, String> {
    match FlowEndpoint::from_str(text) {
        Ok(FlowEndpoint::Pod(key)) => Ok(key),
        _ => Err(format!("pod {text:?}: not a pod's name; write NAMESPACE/NAME, or give an address with --host")),
    }
}

fn filter(query: &CaptureQuery) -> Result<CaptureFilter, String> {
    let reason = query.reason.as_deref().map(|name| {
        let known = DropReason::of_workers().find(|reason| reason.name() == name);
        known.ok_or_else(|| {
            let names: Vec<&str> = DropReason::of_workers().map(DropReason::name).collect();
            format!("reason {name:?}: unknown; use one of {}", names.join(", "))
        })
    });
    let protocol = query.protocol.as_deref().map(|text| {
        flow::protocol(text)
            .map_err(|_| format!("protocol {text:?}: unknown; use TCP, UDP, SCTP, ICMP, ICMPv6 or a number up to 255"))
    });
    let connection = query.connection.as_deref().map(|text| {
        u64::from_str_radix(text, 16).map_err(|_| {
            format!("connection {text:?}: not an identifier; give the one that penstock flows or the verdict log shows")
        })
    });
    let allowed = query.verdict.map(|verdict| verdict == Verdict::Allow);
    if allowed == Some(true) && query.reason.is_some() {
        return Err("verdict allow: only a packet that is denied has a reason; leave out one of the two".to_owned());
    }
    Ok(CaptureFilter {
        pod: None,
        allowed,
        reason: reason.transpose()?,
        host: query.host.map(Into::into),
        port: query.port,
        protocol: protocol.transpose()?,
        connection: connection.transpose()?,
        program: query.program.as_deref().map(str::parse).transpose().map_err(|error| format!("filter: {error}"))?,
    })
}

fn is_of_opening(evaluation: &LoggedEvaluation) -> bool {
    evaluation.evaluation_reason == EvaluationReason::Opened
}

fn staged(evaluation: &LoggedEvaluation) -> Box<StagedVerdict> {
    let verdict = if evaluation.policy_verdict.is_allowed() { Verdict::Allow } else { Verdict::Deny };
    let (egress, ingress) = evaluated_sides(evaluation);
    Box::new(StagedVerdict { verdict, egress, ingress })
}

/// Names of the rules that allow connections under one epoch: of a busy one it is looked up once. And the last name of each port.
#[derive(Default)]
pub(super) struct NamedConnections {
    epoch: Epoch,
    rules: HashMap<u64, Rules>,
    ports: HashMap<PortId, String>,
}

#[derive(Clone)]
struct Rules {
    egress: String,
    ingress: String,
}

impl NamedConnections {
    /// Names packets as the daemon's state is now, with the changes of objects since the last packets. Call it under the lock of what is
    /// published.
    pub(super) fn name(
        &mut self,
        names: &PacketNames<'_>,
        objects: &ObjectsOfCapture,
        packets: &[CapturedPacket],
    ) -> NamedPackets {
        let steps = match objects {
            ObjectsOfCapture::InForce(objects) => objects.take_changes(),
            ObjectsOfCapture::None | ObjectsOfCapture::Lost => Ok(Vec::new()),
        };
        if self.epoch != names.epoch || self.rules.len() > REMEMBERED {
            self.epoch = names.epoch;
            self.rules.clear();
        }
        let records = packets.iter().map(|packet| self.record(names, packet)).collect();
        let has_lost_changes = steps.is_err();
        NamedPackets { records, steps: steps.unwrap_or_default(), has_lost_changes }
    }

    fn record(&mut self, names: &PacketNames<'_>, packet: &CapturedPacket) -> PacketRecord {
        let (verdict, reason) = match packet.verdict {
            pipeline::Verdict::Forward(_) => (Verdict::Allow, None),
            pipeline::Verdict::Drop(reason) => (Verdict::Deny, Some(reason)),
            // None of these is captured.
            pipeline::Verdict::Early => (Verdict::Deny, Some(DropReason::Fragment)),
        };
        let rules = match &packet.evaluation {
            Some(evaluation) => {
                let (egress, ingress) = evaluated_sides(evaluation);
                Some(Rules { egress, ingress })
            }
            // Policy was asked for an earlier packet.
            None if matches!(reason, None | Some(DropReason::ConnectionRevoked)) => self.rules(names, packet),
            None => None,
        };
        let (egress, ingress) = rules.map(|rules| (rules.egress, rules.ingress)).unzip();
        PacketRecord {
            time: 0,
            port: packet.ingress.0,
            interface: self.port_name(names, packet.ingress),
            length: packet.length as u32,
            verdict,
            reason: reason.map(|reason| reason.name().to_owned()),
            egress,
            ingress,
            connection: packet.connection.map(identifier),
            opens: packet.evaluation.as_ref().is_some_and(is_of_opening),
            staged: packet.staged.as_ref().map(staged),
            epoch: packet.epoch.0,
            worker: packet.worker,
        }
    }

    /// The name of a port; of one that is closed since the packet came, the last that it had.
    fn port_name(&mut self, names: &PacketNames<'_>, port: PortId) -> String {
        match names.ports.name_of(port) {
            Some(name) => {
                self.ports.insert(port, name.clone());
                name
            }
            None => self.ports.get(&port).cloned().unwrap_or_else(|| format!("port {port}")),
        }
    }

    fn rules(&mut self, names: &PacketNames<'_>, packet: &CapturedPacket) -> Option<Rules> {
        let (connection, original) = (packet.connection?, packet.original?);
        let named = self.rules.entry(connection).or_insert_with(|| {
            let (egress, ingress) = sides(names.engine, &original);
            Rules { egress, ingress }
        });
        Some(named.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn refused(query: CaptureQuery) -> String {
        RunningCapture::new(&query).err().expect("a query that is refused")
    }

    #[test]
    fn a_query_not_understood_or_beyond_a_limit_is_refused() {
        let default = CaptureQuery::default;
        let text = |text: &str| Some(text.to_owned());
        for (query, expected) in [
            (CaptureQuery { pod: text("web"), ..default() }, "pod \"web\": not a pod's name"),
            (CaptureQuery { pod: text("10.0.0.1"), ..default() }, "pod \"10.0.0.1\": not a pod's name"),
            (CaptureQuery { reason: text("bad_luck"), ..default() }, "reason \"bad_luck\": unknown; use one of "),
            (CaptureQuery { protocol: text("TPC"), ..default() }, "protocol \"TPC\": unknown"),
            (CaptureQuery { connection: text("xyz"), ..default() }, "connection \"xyz\": not an identifier"),
            (CaptureQuery { program: text("1,6 0 0"), ..default() }, "filter: \"1,6 0 0\" is not a filter program"),
            (CaptureQuery { snap_length: Some(63), ..default() }, "snap length = 63: out of range; give 64 to 4096"),
            (CaptureQuery { snap_length: Some(4097), ..default() }, "snap length = 4097: out of range"),
            (CaptureQuery { seconds: Some(0), ..default() }, "seconds = 0: out of range; give 1 to 3600"),
            (CaptureQuery { packets: Some(MAX_PACKETS + 1), ..default() }, "packets = 10000001: out of range"),
            (CaptureQuery { bytes: Some(u64::MAX), ..default() }, "bytes = 18446744073709551615: out of range"),
            (
                CaptureQuery { verdict: Some(Verdict::Allow), reason: text("no_port"), ..default() },
                "verdict allow: only a packet that is denied has a reason",
            ),
        ] {
            let error = refused(query.clone());
            assert!(error.starts_with(expected) && !error.contains('\n'), "{query:?}: {error}");
        }
    }

    #[test]
    fn programs_go_on_to_forward_what_the_query_does_not_ask_for() {
        let web = ObjectKey { namespace: "shop".into(), name: "web".into() };
        let here: IpAddr = "10.0.0.1".parse().unwrap();
        let pod_of = |address: IpAddr| (address == here).then(|| web.clone());
        let ports = |query: CaptureQuery| RunningCapture::new(&query).unwrap().0.ports(pod_of);
        let pod = || Some("shop/web".to_owned());
        let of_pod = CapturedPorts::Pod(web.clone());
        let default = CaptureQuery::default;
        assert_eq!(ports(default()), CapturedPorts::All);
        assert_eq!(ports(CaptureQuery { pod: pod(), ..default() }), of_pod);
        assert_eq!(ports(CaptureQuery { host: Some(here), ..default() }), of_pod);
        assert_eq!(ports(CaptureQuery { host: "10.0.0.2".parse().ok(), ..default() }), CapturedPorts::All);
        assert_eq!(ports(CaptureQuery { verdict: Some(Verdict::Allow), ..default() }), CapturedPorts::All);
        assert_eq!(ports(CaptureQuery { verdict: Some(Verdict::Deny), pod: pod(), ..default() }), CapturedPorts::None);
        assert_eq!(ports(CaptureQuery { reason: Some("no_port".to_owned()), ..default() }), CapturedPorts::None);
    }

    #[tokio::test]
    async fn a_capture_ends_at_its_limits_and_says_which() {
        let query = CaptureQuery { seconds: Some(1), ..CaptureQuery::default() };
        let (mut running, mut chunks) = RunningCapture::new(&query).unwrap();
        let config =
            Config::parse("node = \"node-1\"\n[source]\nmanifests = \"/m\"\n", Path::new("/etc/penstock.toml"));
        running.begun(&config.unwrap(), MidStreamPickup::Always);
        let name = |_: &mut NamedConnections, _: &ObjectsOfCapture, _: &[CapturedPacket]| NamedPackets::default();
        assert_eq!(running.forward(name, 10), None);
        running.until = Instant::now();
        let reason = running.forward(name, 10).expect("its time is over");
        running.end(reason);
        let mut stream = Vec::new();
        while let Some(chunk) = chunks.recv().await {
            stream.extend(chunk);
        }
        let begin = capture::decode(&stream).unwrap().unwrap();
        assert_eq!(begin.message, CaptureMessage::Begin { node: "node-1".to_owned(), objects: None });
        let end = capture::decode(&stream[begin.length..]).unwrap().unwrap().message;
        assert!(matches!(&end, CaptureMessage::End { reason, .. } if reason.ends_with("seconds")), "{end:?}");
    }
}
