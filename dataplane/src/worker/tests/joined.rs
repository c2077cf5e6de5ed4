//! Workers with the real pipeline.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use super::net::{Raw, frame, in_namespace, veth};
use super::*;
use crate::Epoch;
use crate::conntrack::Timestamp;
use crate::forward::{Forwarding, Mac, Port, PortKind};
use crate::packet::Address;
use crate::policy::{AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, PolicySet};

const PATIENCE: Duration = Duration::from_secs(2);

/// A packet of [`frame`] with its header checksum.
fn datagram(number: u32) -> Vec<u8> {
    let mut frame = frame(number, 60);
    let sum: u32 = frame[14..34].chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    frame[24..26].copy_from_slice(&(!(folded as u16)).to_be_bytes());
    frame
}

/// Two pods without policies, each behind one of the ports.
pub(super) fn snapshot(epoch: u32, ports: [PortId; 2]) -> Snapshot {
    let mut forwarding = Forwarding::new([]);
    let mut update = PolicySet::default().update();
    for (index, port) in ports.into_iter().enumerate() {
        let address = Address::from(IpAddr::from([10, 0, 0, index as u8 + 1]));
        let mac = |last| Mac([2, 0, 0, 0, index as u8, last]);
        let (own_mac, peer_mac) = (mac(1), mac(2));
        let entry = Port::new(PortKind::Pod, own_mac, peer_mac, 1500, vec![address]);
        forwarding.insert(port, entry).unwrap();
        let id = EndpointId(index as u32);
        let identity = Identity(NonZeroU32::new(index as u32 + 1).unwrap());
        update.set_address(address, Some(AddressOwner::Pod { identity, endpoint: Some(id), node: None }));
        update.set_endpoint(id, Some(Endpoint { egress: EndpointPolicy::Open, ingress: EndpointPolicy::Open }));
    }
    Snapshot::new(Epoch(epoch), update.finish(), forwarding)
}

#[test]
fn allowed_packets_pass_rewritten_and_are_tracked() {
    in_namespace(|| {
        veth("a");
        veth("b");
        let dataplane = Dataplane::start(config(&[0, 1])).unwrap();
        let bench = Bench { dataplane, redirect: Redirect::new().unwrap(), wires: Wires::new() };
        let (a, _a) = bench.open("a");
        let (b, _b) = bench.open("b");
        let (at_a, at_b) = (Raw::open("ap"), Raw::open("bp"));
        // Before the first snapshot is published nothing passes, and nothing is lost.
        let sent: Vec<_> = (0..=100).map(datagram).collect();
        at_a.send_all(&sent[..1]);
        assert_eq!(at_b.receive(Duration::from_millis(50)), None);

        bench.dataplane.publish(snapshot(1, [a, b]));
        at_a.send_all(&sent[1..]);
        for sent in &sent {
            let got = at_b.receive(PATIENCE).expect("it arrives");
            assert_eq!(got[..12], [2, 0, 0, 0, 1, 2, 2, 0, 0, 0, 1, 1], "to the peer of b, from b");
            assert_eq!((got[22], &got[26..]), (63, &sent[26..]), "one hop further, and otherwise as it was");
        }
        let connections = bench.dataplane.connections();
        assert_eq!((connections.len(), connections.iter(Timestamp::now()).count()), (1, 1));

        let statistics = bench.dataplane.statistics();
        let traffic = statistics.port(a).unwrap().traffic;
        assert_eq!(
            (traffic.rx_packets, traffic.dropped_packets()),
            (101, 0),
            "{:?}",
            traffic.drops().collect::<Vec<_>>()
        );
        assert_eq!(statistics.port(b).unwrap().traffic.tx_packets, 101);

        // A snapshot without the ports: nothing passes again.
        bench.dataplane.publish(Snapshot { epoch: Epoch(2), ..Snapshot::default() });
        at_a.send_all(&[datagram(101)]);
        assert_eq!(at_b.receive(Duration::from_millis(50)), None);
        assert_eq!(bench.account().in_flight, 0);
    });
}
