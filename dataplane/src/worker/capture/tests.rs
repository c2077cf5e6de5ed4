use std::net::IpAddr;
use std::num::NonZeroU32;

use etherparse::icmpv4::DestUnreachableHeader;
use etherparse::{Icmpv4Type, PacketBuilder};

use super::*;
use crate::DropReason;
use crate::batch::MemoryFrames;
use crate::conntrack::Config;
use crate::forward::{Forwarding, Mac, Port, PortKind};
use crate::packet::{Address, Protocol};
use crate::pipeline::{Pipeline, PipelineMode};
use crate::policy::{AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, NodeId, PolicySet, RuleTable};
use crate::worker::{StagedSet, VerdictLog};

const WEB: PortId = PortId(1);
const DB: PortId = PortId(2);
const WEB4: &str = "10.0.0.1";
const DB4: &str = "10.0.0.2";

fn ip(text: &str) -> Address {
    text.parse::<IpAddr>().unwrap().into()
}

/// Two pods: `web`, which is open, and `db`, which admits nobody.
fn snapshot(own_mac: impl Fn(PortId) -> Mac) -> Snapshot {
    let identity = |number| Identity(NonZeroU32::new(number).unwrap());
    let mut forwarding = Forwarding::new([]);
    let mut update = PolicySet::default().update();
    let nobody = EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[], [])));
    for (id, address, number, ingress) in [(WEB, WEB4, 1, EndpointPolicy::Open), (DB, DB4, 2, nobody)] {
        let (own_mac, peer_mac) = (own_mac(id), Mac([2, 0, 0, 0, id.0 as u8, 2]));
        let addresses = vec![ip(address)];
        forwarding.insert(id, Port::new(PortKind::Pod, own_mac, peer_mac, 1500, addresses)).unwrap();
        let endpoint = Some(EndpointId(number));
        let owner = AddressOwner::Pod { identity: identity(number), endpoint, node: Some(NodeId(0)) };
        update.set_address(ip(address), Some(owner));
        update.set_endpoint(EndpointId(number), Some(Endpoint { egress: EndpointPolicy::Open, ingress }));
    }
    Snapshot::new(Epoch(5), update.finish(), forwarding)
}

fn real_mac(id: PortId) -> Mac {
    Mac([2, 0, 0, 0, id.0 as u8, 1])
}

fn udp(from: (&str, u16), to: (&str, u16), payload: &[u8]) -> Vec<u8> {
    let octets = |text: &str| text.parse::<std::net::Ipv4Addr>().unwrap().octets();
    let builder = PacketBuilder::ethernet2([6; 6], [8; 6]).ipv4(octets(from.0), octets(to.0), 64).udp(from.1, to.1);
    let mut frame = Vec::new();
    builder.write(&mut frame, payload).unwrap();
    frame
}

/// An ICMP error that quotes an IP packet: nobody listens on its port.
fn unreachable(from: &str, to: &str, quoted: &[u8]) -> Vec<u8> {
    let octets = |text: &str| text.parse::<std::net::Ipv4Addr>().unwrap().octets();
    let kind = Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Port);
    let builder = PacketBuilder::ethernet2([6; 6], [8; 6]).ipv4(octets(from), octets(to), 64).icmpv4(kind);
    let mut frame = Vec::new();
    builder.write(&mut frame, quoted).unwrap();
    frame
}

/// A worker's pipeline with a capture.
struct Bench {
    snapshot: Snapshot,
    pipeline: Pipeline,
    recorder: Recorder,
    tap: CaptureTap,
    queue: Arc<CaptureQueue>,
    log: Arc<VerdictLog>,
}

impl Bench {
    fn new(filter: CaptureFilter, snapshot: Snapshot, packets: usize, snap_length: usize) -> Self {
        let connections = Arc::new(ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap());
        let queue = Arc::new(CaptureQueue::new(packets, snap_length));
        let capture = Capture { filter: Arc::new(filter), queue: Arc::clone(&queue) };
        let log = Arc::new(VerdictLog::new(3));
        Self {
            snapshot,
            pipeline: Pipeline::new(connections, PipelineMode::Full),
            recorder: Recorder::new(Arc::clone(&log), 2),
            tap: CaptureTap::new(capture, 2),
            queue,
            log,
        }
    }

    /// Processes a batch as a worker does. Returns the frames as they leave.
    fn process(&mut self, ingress: PortId, frames: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        let (at, now) = (Instant::now(), Timestamp::from_millis(1_000_000));
        let mut batch = MemoryFrames::new();
        frames.into_iter().for_each(|frame| batch.push(frame).unwrap());
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        self.tap.keep(&mut batch);
        let Self { snapshot, pipeline, recorder, tap, .. } = self;
        pipeline.process_batch(snapshot, now, ingress, &mut batch, &mut verdicts, recorder);
        let connections = pipeline.connections();
        tap.record(&CapturedBatch { snapshot, connections, at, now, ingress }, &mut batch, &verdicts, recorder);
        recorder.forget();
        batch.drain().collect()
    }

    fn captured(&self) -> Vec<CapturedPacket> {
        std::iter::from_fn(|| self.queue.take()).collect()
    }
}

#[test]
fn packets_are_captured_as_they_came_with_what_was_decided() {
    let mut bench = Bench::new(CaptureFilter::default(), snapshot(real_mac), 16, 2048);
    let (denied, spoofed) = (udp((WEB4, 7), (DB4, 9), b"no"), udp(("10.9.9.9", 7), (DB4, 9), b"no"));
    let allowed = udp((DB4, 9), (WEB4, 7), b"yes");
    bench.process(WEB, vec![denied.clone(), spoofed.clone(), vec![1; 10]]);
    bench.process(DB, vec![allowed.clone()]);
    let found = bench.captured();
    let summary: Vec<_> = found.iter().map(|it| (it.ingress, it.verdict, it.bytes.clone())).collect();
    let expected = [
        (WEB, Verdict::Drop(DropReason::IngressDenied), denied),
        (WEB, Verdict::Drop(DropReason::SpoofedSource), spoofed),
        (WEB, Verdict::Drop(DropReason::Truncated), vec![1; 10]),
        (DB, Verdict::Forward(WEB), allowed.clone()),
    ];
    assert_eq!(summary, expected);
    assert_eq!(found.iter().map(|it| it.evaluation.is_some()).collect::<Vec<_>>(), [true, false, false, true]);
    assert!(found.iter().all(|it| it.worker == 2 && it.epoch == Epoch(5) && it.length == it.bytes.len()));
    assert_eq!(found[2].connection, None);
    // Both directions have one id, and the flow in which the connection was opened.
    let reply = udp((WEB4, 7), (DB4, 9), b"reply");
    bench.process(WEB, vec![reply]);
    let reply = bench.captured().remove(0);
    let opened = parse(&allowed).unwrap().flow;
    assert_eq!((reply.connection, reply.original), (found[3].connection, Some(opened)));
    assert!(reply.verdict == Verdict::Forward(DB) && reply.evaluation.is_none(), "{reply:?}");
    // An ICMP error about it passes without a connection of its own, and no policy is asked.
    bench.process(WEB, vec![unreachable(WEB4, DB4, &allowed[14..])]);
    let error = bench.captured().remove(0);
    assert_eq!(error.verdict, Verdict::Forward(DB));
    assert!(error.connection.is_none() && error.original.is_none() && error.evaluation.is_none(), "{error:?}");
}

#[test]
fn a_fragment_before_its_first_is_captured_once_it_is_decided() {
    let mut bench = Bench::new(CaptureFilter::default(), snapshot(real_mac), 16, 2048);
    let mut early = udp((WEB4, 7), (DB4, 9), b"later");
    early[20..22].copy_from_slice(&185_u16.to_be_bytes());
    let header = etherparse::Ipv4Header::from_slice(&early[14..]).unwrap().0;
    early[24..26].copy_from_slice(&header.calc_header_checksum().to_be_bytes());
    bench.pipeline.hold_early(true);
    assert_eq!(bench.process(WEB, vec![early.clone()]), [early.clone()]);
    assert_eq!(bench.captured().len(), 0);
    bench.pipeline.hold_early(false);
    bench.process(WEB, vec![early.clone()]);
    let [packet] = &bench.captured()[..] else { panic!("one packet") };
    assert_eq!((packet.verdict, &packet.bytes), (Verdict::Drop(DropReason::Fragment), &early));
}

#[test]
fn only_opening_packets_have_what_staged_policies_decide() {
    let mut bench = Bench::new(CaptureFilter::default(), snapshot(real_mac), 16, 2048);
    // The connections of each round have a port of their own.
    let process = |bench: &mut Bench, port| -> Vec<Option<bool>> {
        let spoofed = udp(("10.9.9.9", port), (DB4, 9), b"");
        bench.process(WEB, vec![udp((WEB4, port), (DB4, 9), b""), spoofed]);
        // The second is of a connection that is known.
        for _ in 0..2 {
            bench.process(DB, vec![udp((DB4, port), (WEB4, 7), b"")]);
        }
        let staged = |it: CapturedPacket| it.staged.map(|staged| staged.policy_verdict.is_allowed());
        bench.captured().into_iter().map(staged).collect()
    };
    assert_eq!(process(&mut bench, 1), [None; 4], "nothing is staged");
    let present = bench.snapshot.policy.clone();
    let mut update = present.update();
    let nobody = EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[], [])));
    update.set_endpoint(EndpointId(1), Some(Endpoint { egress: EndpointPolicy::Open, ingress: nobody }));
    update.set_endpoint(EndpointId(2), Some(Endpoint { egress: EndpointPolicy::Open, ingress: EndpointPolicy::Open }));
    bench.log.stage(Some(StagedSet { number: 1, present, promoted: update.finish() }));
    assert_eq!(process(&mut bench, 2), [Some(true), None, Some(false), None], "the other way round");
    // One that is open, and evaluated again under the next epoch.
    bench.snapshot.epoch = Epoch(6);
    bench.process(DB, vec![udp((DB4, 2), (WEB4, 7), b"")]);
    let again = bench.captured().remove(0);
    assert!(again.evaluation.is_some() && again.staged.is_none(), "{again:?}");
    bench.log.stage(None);
    assert_eq!(process(&mut bench, 3), [None; 4], "not any more");
}

#[test]
fn a_full_queue_counts_lost_packets_and_changes_no_verdict() {
    let mut bench = Bench::new(CaptureFilter::default(), snapshot(real_mac), 3, 64);
    let frame = udp((DB4, 9), (WEB4, 7), &[5; 100]);
    let sent = bench.process(DB, vec![frame.clone(); 10]);
    assert!(sent.iter().all(|sent| sent[..6] == Mac([2, 0, 0, 0, 1, 2]).0), "all were rewritten for the pod");
    assert_eq!(bench.queue.lost(), 7);
    let found = bench.captured();
    let kept: Vec<_> = found.iter().map(|it| (it.length, it.bytes.clone())).collect();
    assert_eq!(kept, vec![(frame.len(), frame[..64].to_vec()); 3]);
    found.into_iter().for_each(|packet| bench.queue.give_back(packet.bytes));
    bench.process(DB, vec![frame]);
    assert_eq!((bench.captured().len(), bench.queue.lost()), (1, 7), "its buffers are used again");
}

#[test]
fn tags_of_programs_and_workers_are_no_addresses() {
    let mut bench = Bench::new(CaptureFilter::default(), snapshot(|_| tag::FROM), 4, 2048);
    let frame = udp((DB4, 9), (WEB4, 7), b"");
    bench.process(DB, vec![frame.clone()]);
    let found = bench.captured().remove(0);
    assert_eq!((&found.bytes[..MACS], &found.bytes[MACS..]), (&[0; MACS][..], &frame[MACS..]));
}

#[test]
fn a_packet_is_captured_if_it_fits_every_part_of_the_filter() {
    let default = CaptureFilter::default;
    let program = |text: &str| Some(text.parse().unwrap());
    let pod = |port, address: &str| Some(CapturedPod { port, addresses: vec![ip(address)] });
    // From `web`: one that is denied, one that is spoofed and allowed nothing, one that is no packet. From `db`: one that passes.
    for (filter, expected) in [
        (default(), [true, true, true, true]),
        (CaptureFilter { allowed: Some(true), ..default() }, [false, false, false, true]),
        (CaptureFilter { allowed: Some(false), ..default() }, [true, true, true, false]),
        (CaptureFilter { reason: Some(DropReason::SpoofedSource), ..default() }, [false, true, false, false]),
        (CaptureFilter { host: Some(ip(WEB4)), ..default() }, [true, false, false, true]),
        (CaptureFilter { host: Some(ip("10.9.9.9")), ..default() }, [false, true, false, false]),
        (CaptureFilter { port: Some(9), ..default() }, [true, true, false, true]),
        (CaptureFilter { port: Some(0), ..default() }, [false; 4]),
        (CaptureFilter { protocol: Some(Protocol::UDP), ..default() }, [true, true, false, true]),
        (CaptureFilter { protocol: Some(Protocol::TCP), ..default() }, [false; 4]),
        (CaptureFilter { connection: Some(1), ..default() }, [false; 4]),
        (CaptureFilter { pod: pod(Some(WEB), WEB4), ..default() }, [true; 4]),
        // By its port alone what it sends and gets, by its address alone what names it.
        (CaptureFilter { pod: pod(None, WEB4), ..default() }, [true, false, false, true]),
        (CaptureFilter { pod: pod(Some(DB), "10.7.7.7"), ..default() }, [false, false, false, true]),
        (CaptureFilter { program: program("1,6 0 0 1"), ..default() }, [true; 4]),
        (CaptureFilter { program: program("1,6 0 0 0"), ..default() }, [false; 4]),
        // The byte behind the Ethernet header, which the short frame does not have.
        (CaptureFilter { program: program("3,48 0 0 14,21 0 0 69,6 0 0 1"), ..default() }, [true, true, false, true]),
        (
            CaptureFilter { allowed: Some(false), protocol: Some(Protocol::UDP), host: Some(ip(WEB4)), ..default() },
            [true, false, false, false],
        ),
    ] {
        let mut bench = Bench::new(filter.clone(), snapshot(real_mac), 16, 2048);
        let from_web = vec![udp((WEB4, 7), (DB4, 9), b"1"), udp(("10.9.9.9", 7), (DB4, 9), b"2"), vec![1; 10]];
        let frames = [from_web.clone(), vec![udp((DB4, 9), (WEB4, 7), b"3")]].concat();
        bench.process(WEB, from_web);
        bench.process(DB, frames[3..].to_vec());
        let found: Vec<Vec<u8>> = bench.captured().into_iter().map(|it| it.bytes).collect();
        let wanted: Vec<Vec<u8>> =
            frames.into_iter().zip(expected).filter_map(|(frame, is_wanted)| is_wanted.then_some(frame)).collect();
        assert_eq!(found, wanted, "{filter:?}");
    }
}
