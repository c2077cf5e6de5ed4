//! Fixture for in-memory benchmarks of the pipeline: frames between two pods and a snapshot that knows them.

use std::net::Ipv4Addr;
use std::num::NonZeroU32;
use std::sync::Arc;

use etherparse::PacketBuilder;
use penstock_dataplane::forward::{Forwarding, Mac, Port, PortId, PortKind};
use penstock_dataplane::packet::Address;
use penstock_dataplane::pipeline::{BATCH, Frames};
use penstock_dataplane::policy::{
    AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, NodeId, PeerSpec, PolicySet, PortProtocol, PortRange,
    PortSpec, RuleName, RuleSpec, RuleTable,
};
use penstock_dataplane::{Epoch, Snapshot};

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

/// Frames that are restored when they are read, so that their TTL never runs out.
pub struct Batch {
    frames: Vec<[u8; 64]>,
    header: [u8; 4],
    first: usize,
}

impl Batch {
    /// Frames of this many flows in rotation; at least one batch.
    pub fn of(flows: usize) -> Self {
        let frames = (0..flows.max(BATCH)).map(|number| frame(number % flows)).collect();
        let header = *frame(0)[22..].first_chunk().expect("a frame has a header");
        Self { frames, header, first: 0 }
    }

    pub fn count(&self) -> usize {
        self.frames.len()
    }

    pub fn turn(&mut self) {
        self.first = (self.first + BATCH) % self.frames.len();
    }
}

// Inlined into the pipeline, as the frames of workers are: the pipeline is instantiated in other crates than this one.
impl Frames for Batch {
    #[inline]
    fn len(&self) -> usize {
        BATCH
    }

    #[inline]
    fn bytes(&mut self, index: usize) -> &mut [u8] {
        let frame = &mut self.frames[self.first + index];
        // TTL, protocol and header checksum are the same in all frames.
        frame[22..26].copy_from_slice(&self.header);
        frame
    }
}

/// A UDP packet of 64 bytes; each number has different ports.
pub fn frame(number: usize) -> [u8; 64] {
    let (from, to) = (1024 + (number & 0x7fff) as u16, 1 + (number >> 15) as u16);
    let mut bytes = Vec::new();
    PacketBuilder::ethernet2([1; 6], [2; 6])
        .ipv4(CLIENT.octets(), SERVER.octets(), 64)
        .udp(from, to)
        .write(&mut bytes, &[0; 22])
        .expect("a packet can be built");
    bytes.try_into().expect("it has 64 bytes")
}

/// Two pods on ports 0 and 1. One rule in either direction allows all UDP.
pub fn snapshot() -> Snapshot {
    let mut forwarding = Forwarding::default();
    let mut update = PolicySet::default().update();
    let rule = RuleSpec {
        name: RuleName::new("test/policy", "all UDP"),
        peers: PeerSpec::Every,
        ports: PortSpec::AnyOf(vec![PortRange { protocol: PortProtocol::Udp, first: 1, last: 65535 }]),
    };
    let table = Arc::new(RuleTable::new(&[rule], []));
    for (number, address) in [(0, CLIENT), (1, SERVER)] {
        let address = Address::from_v4_bytes(address.octets());
        let port =
            Port::new(PortKind::Pod, Mac([2, 0, 0, 0, 0, number]), Mac([4, 0, 0, 0, 0, number]), 1500, vec![address]);
        forwarding.insert(PortId(number.into()), port).expect("a port that is free");
        let endpoint = EndpointId(number.into());
        let isolation = || EndpointPolicy::Isolated(Arc::clone(&table));
        update.set_endpoint(endpoint, Some(Endpoint { egress: isolation(), ingress: isolation() }));
        let identity = Identity(NonZeroU32::MIN);
        update.set_address(
            address,
            Some(AddressOwner::Pod { identity, endpoint: Some(endpoint), node: Some(NodeId(0)) }),
        );
    }
    Snapshot::new(Epoch(1), update.finish(), forwarding)
}
