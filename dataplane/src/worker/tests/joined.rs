//! Workers with the real pipeline.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use super::net::{frame, in_namespace};
use super::*;
use crate::Epoch;
use crate::conntrack::Timestamp;
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
        let (own_mac, peer_mac) = PortRequest::macs(Some(port));
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
        let dataplane = Dataplane::start(config(&[0])).unwrap();
        let pair = Pair::of(dataplane, Wires::new());
        let [a, b] = pair.ports;
        // A snapshot without the ports: nothing passes.
        pair.near.send_all(&[pair.tag(0, 0, datagram(0))]);
        assert_eq!(pair.near.receive(Duration::from_millis(50)), None);

        pair.dataplane.publish(snapshot(2, [a, b]));
        let sent: Vec<_> = (1..=100).map(|number| pair.tag(0, 0, datagram(number))).collect();
        pair.near.send_all(&sent);
        for sent in &sent {
            let got = pair.near.receive(PATIENCE).expect("it arrives");
            let (own, peer) = PortRequest::macs(Some(b));
            assert_eq!(got[..12], [peer.0, own.0].concat(), "to the pod of b");
            assert_eq!((got[22], &got[26..]), (63, &sent[26..]), "one hop further, and otherwise as it was");
        }
        let connections = pair.dataplane.connections();
        assert_eq!((connections.len(), connections.iter(Timestamp::now()).count()), (1, 1));
        let traffic = pair.traffic(a);
        assert_eq!(
            (traffic.rx_packets, traffic.dropped_packets()),
            (101, 1),
            "{:?}",
            traffic.drops().collect::<Vec<_>>()
        );
        assert_eq!(pair.traffic(b).tx_packets, 100);
        assert_eq!(pair.account().in_flight, 0);
    });
}
