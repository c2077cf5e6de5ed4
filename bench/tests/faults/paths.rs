//! ICMP errors to senders whose packets expire or do not fit, as from any router.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use penstock_bench::load::PacketSocket;
use penstock_bench::probe::Site;

use crate::fixture::{Fixture, pods, policy};

/// Reply to a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum IcmpAnswer {
    TimeExceeded(IpAddr),
    PortUnreachable(IpAddr),
}

/// The ICMP error in a frame, if it is one of these two (RFC 792, RFC 4443).
fn answer(frame: &[u8]) -> Option<IcmpAnswer> {
    let ethertype = u16::from_be_bytes(frame.get(12..14)?.try_into().ok()?);
    let (from, kind): (IpAddr, [u8; 2]) = match ethertype {
        0x0800 if frame.get(23) == Some(&1) => {
            let from: [u8; 4] = frame[26..30].try_into().ok()?;
            (from.into(), frame.get(34..36)?.try_into().ok()?)
        }
        0x86dd if frame.get(20) == Some(&58) => {
            let from: [u8; 16] = frame[22..38].try_into().ok()?;
            (from.into(), frame.get(54..56)?.try_into().ok()?)
        }
        _ => return None,
    };
    match (from.is_ipv4(), kind) {
        (true, [11, 0]) | (false, [3, 0]) => Some(IcmpAnswer::TimeExceeded(from)),
        (true, [3, 3]) | (false, [1, 4]) => Some(IcmpAnswer::PortUnreachable(from)),
        _ => None,
    }
}

/// Sends datagrams with this TTL to a closed port until one is answered.
fn ask(wire: &PacketSocket, from: &Site, to: IpAddr, ttl: u32) -> IcmpAnswer {
    let local = SocketAddr::new(from.address(to.is_ipv6()).unwrap(), 0);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let socket = from.namespace.udp(local).unwrap();
        match to {
            IpAddr::V4(_) => socket.set_ttl(ttl).unwrap(),
            IpAddr::V6(_) => socket2::SockRef::from(&socket).set_unicast_hops_v6(ttl).unwrap(),
        }
        socket.send_to(b"how far", SocketAddr::new(to, 33_434 + ttl as u16)).unwrap();
        let frames = wire.received(Duration::from_millis(100)).unwrap();
        if let Some(answer) = frames.iter().find_map(|frame| answer(frame)) {
            return answer;
        }
        assert!(Instant::now() < deadline, "no answer to a TTL of {ttl} on the way to {to}");
    }
}

#[test]
fn traceroute_shows_the_node_and_the_destination() {
    let mut outside = None;
    // Errors about a pod's own packets are admitted, although nothing else is.
    let fixture = Fixture::of(&(pods(2) + &policy("asks", "pod-0", "  ingress: []\n")), |cluster, _| {
        outside = Some(Site::from(&cluster.node.add_outside("outside").unwrap()));
    });
    let (from, outside) = (fixture.site("test/pod-0"), outside.unwrap());
    let wire = PacketSocket::open(&from.namespace).unwrap();
    for v6 in [false, true] {
        for site in [fixture.site("test/pod-1"), &outside] {
            let end = site.address(v6).unwrap();
            let first = ask(&wire, from, end, 1);
            let IcmpAnswer::TimeExceeded(hop) = first else { panic!("{first:?} on the way to {end}") };
            assert_ne!(hop, end, "a router's, not the end's");
            assert_eq!(ask(&wire, from, end, 2), IcmpAnswer::PortUnreachable(end), "two hops, as by any router");
        }
    }
}
