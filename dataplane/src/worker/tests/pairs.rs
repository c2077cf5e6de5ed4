//! Packets of several ports on one worker's veth pair. A packet socket at the near end stands for the tcx programs.

use std::time::Duration;

use super::net::{Raw, in_namespace, veth};
use super::*;
use crate::forward::{Forwarding, Port, PortKind};
use crate::tag::{CHECKSUM_OPEN, FROM_NODE};

/// A worker's pair `x` and `xp`, ports of the interfaces `a` and `b` on it, and the node's stack.
struct Pair {
    bench: Bench,
    near: Raw,
    pair: PortId,
    ports: [PortId; 2],
    node: PortId,
    _attached: Attached,
}

impl Pair {
    fn new() -> Self {
        ["x", "a", "b"].into_iter().for_each(veth);
        let bench = Bench::start(config(&[0]));
        let request = |interface: &str, path| PortRequest { path, ..PortRequest::new(interface) };
        let open = |interface: &str, path| bench.dataplane.open_port(&request(interface, path)).unwrap();
        let pair = open("x", PortPath::PairOf(0));
        let attached =
            bench.redirect.attach(&Interface::by_name("x").unwrap(), AttachOptions::new(Role::Host)).unwrap();
        let set = bench.dataplane.with_sockets(pair, |sockets| {
            sockets.iter().try_for_each(|&(queue, socket)| attached.set_socket(queue, socket))
        });
        set.unwrap().unwrap();
        let ports = ["a", "b"].map(|interface| open(interface, PortPath::Pairs));
        let node = open("xp", PortPath::NodeByPairs);
        let mut forwarding = Forwarding::new([]);
        let (own_mac, peer_mac) = PortRequest::macs(None);
        let host = Port::new(PortKind::Host, own_mac, peer_mac, 1500, Vec::new());
        forwarding.insert(node, host).unwrap();
        bench.dataplane.publish(Snapshot { forwarding, epoch: Epoch(1), ..Snapshot::default() });
        let near = Raw::open("xp");
        Self { bench, near, pair, ports, node, _attached: attached }
    }

    /// A frame as a program tags it, with this number in it.
    fn frame(&self, port: usize, flags: u8, number: u8) -> Vec<u8> {
        let interface = Interface::by_name(["a", "b"][port]).unwrap().index.to_be_bytes();
        let [p, q] = self.ports[port].0.to_be_bytes();
        let mut frame = [&[2, 0xfa, CHECKSUM_OPEN | flags, 0, p, q, 2, 0xfa][..], &interface, &[8, 0]].concat();
        frame.resize(59, 0);
        frame.push(number);
        frame
    }

    fn traffic(&self, port: PortId) -> Traffic {
        self.bench.dataplane.statistics().port(port).unwrap().traffic
    }

    /// Waits until the pair has received so many packets.
    fn wait_for(&self, packets: u64) {
        wait_until("all are received", || self.traffic(self.pair).rx_packets >= packets);
        assert_eq!(self.traffic(self.pair).rx_packets, packets);
    }

    /// The frames that come out of the pair: so many.
    fn received(&self, count: usize) -> Vec<Vec<u8>> {
        let next = || self.near.receive(Duration::from_secs(10)).expect("a frame comes out");
        std::iter::repeat_with(next).filter(|frame| frame[0] == 0x42).take(count).collect()
    }
}

#[test]
fn ports_that_share_a_pair_keep_order_and_counters() {
    in_namespace(|| {
        let pair = Pair::new();
        let [a, b] = pair.ports;
        pair.bench.wires.connect(a, b);
        pair.bench.wires.connect(b, a);
        let frames: Vec<Vec<u8>> = (0..60).map(|number| pair.frame(usize::from(number % 3 == 0), 0, number)).collect();
        pair.near.send_all(&frames);
        pair.wait_for(60);
        let out = pair.received(60);
        for (port, expected) in [(a, 40), (b, 20)] {
            let of: Vec<u8> =
                out.iter().filter(|frame| frame[4..6] == port.0.to_be_bytes()).map(|frame| frame[59]).collect();
            assert_eq!(of.len(), expected);
            assert!(of.is_sorted(), "in their order: {of:?}");
        }
        assert_eq!((pair.traffic(a).rx_packets, pair.traffic(a).rx_bytes), (40, 40 * 60));
        assert_eq!((pair.traffic(b).rx_packets, pair.traffic(b).tx_packets), (20, 40), "what came from the other left");
        assert_eq!((pair.traffic(a).tx_packets, pair.traffic(a).tx_bytes), (20, 20 * 60));
        pair.bench.account();
    });
}

#[test]
fn a_frame_from_a_pod_or_the_node_names_its_port() {
    in_namespace(|| {
        let pair = Pair::new();
        let [a, b] = pair.ports;
        pair.bench.wires.connect(b, pair.node);
        pair.bench.wires.connect(pair.node, a);
        pair.near.send_all(&[pair.frame(1, 0, 1), pair.frame(0, FROM_NODE, 2)]);
        let out = pair.received(2);
        let to_node = out.iter().find(|frame| frame[59] == 1).unwrap();
        assert_eq!(to_node[4..6], b.0.to_be_bytes(), "as the pod's");
        assert_eq!((pair.traffic(b).rx_packets, pair.traffic(pair.node).rx_packets), (1, 1));
        assert_eq!((pair.traffic(a).rx_packets, pair.traffic(a).tx_packets), (0, 1));
    });
}

#[test]
fn frames_without_an_open_ports_tag_are_dropped() {
    in_namespace(|| {
        let pair = Pair::new();
        let [a, b] = pair.ports;
        pair.bench.wires.connect(a, b);
        pair.bench.wires.connect(b, a);
        let good = pair.frame(0, 0, 0);
        let mut of_another_interface = good.clone();
        of_another_interface[11] ^= 1;
        let mut of_no_port = good.clone();
        of_no_port[4..6].copy_from_slice(&[0x0f, 0xff]);
        let mut of_a_worker = good.clone();
        of_a_worker[1] = 0xfb;
        let untagged = vec![0; 60];
        pair.near.send_all(&[of_another_interface, of_no_port, of_a_worker, untagged]);
        // All of them with an Ethernet type of IP, except the last, which the program passes to the kernel.
        pair.wait_for(3);
        wait_until("they are dropped", || pair.traffic(pair.pair).dropped_packets() == 3);
        assert_eq!((pair.traffic(a).rx_packets, pair.traffic(b).rx_packets), (0, 0));

        pair.bench.dataplane.close_port(a).unwrap();
        pair.near.send_all(&[good]);
        wait_until("a closed port's too", || pair.traffic(pair.pair).dropped_packets() == 4);
        pair.bench.account();
    });
}
