//! Packets of several ports on one worker's veth pair. A packet socket at the near end stands for the tcx programs.

use super::net::in_namespace;
use super::*;
use crate::tag::FROM_NODE;

#[test]
fn ports_that_share_a_pair_keep_order_and_counters() {
    in_namespace(|| {
        let pair = Pair::new();
        let [a, b] = pair.ports;
        pair.wires.connect(a, b);
        pair.wires.connect(b, a);
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
        pair.account();
    });
}

#[test]
fn a_frame_from_a_pod_or_the_node_names_its_port() {
    in_namespace(|| {
        let pair = Pair::new();
        let [a, b] = pair.ports;
        pair.wires.connect(b, pair.node);
        pair.wires.connect(pair.node, a);
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
        pair.wires.connect(a, b);
        pair.wires.connect(b, a);
        let good = pair.frame(0, 0, 0);
        let mut of_another_interface = good.clone();
        of_another_interface[11] ^= 1;
        let mut of_no_port = good.clone();
        of_no_port[4..6].copy_from_slice(&[0x0f, 0xff]);
        let mut of_a_worker = good.clone();
        of_a_worker[1] = 0xfb;
        let untagged = vec![0; 60];
        pair.near.send_all(&[of_another_interface, of_no_port, of_a_worker, untagged]);
        pair.wait_for(4);
        wait_until("they are dropped", || pair.traffic(pair.pair).dropped_packets() == 4);
        assert_eq!((pair.traffic(a).rx_packets, pair.traffic(b).rx_packets), (0, 0));

        pair.dataplane.close_port(a).unwrap();
        pair.near.send_all(&[good]);
        wait_until("a closed port's too", || pair.traffic(pair.pair).dropped_packets() == 5);
        pair.account();
    });
}
