//! The program on a pod's packets does with each kind of packet, address resolution above all, what it must: run in the kernel without
//! sending anything (BPF_PROG_TEST_RUN). These tests need root; each has its own temporary network namespace.

use std::net::{IpAddr, Ipv6Addr};
use std::panic::resume_unwind;
use std::process::Command;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use penstock_xdp_redirect::ProgramOutcome::{
    self, Arp, ForgedNeighbour, NeighbourDiscovery, NotIp, Redirected, VlanTag,
};
use penstock_xdp_redirect::{Filtered, Interface, PodVeth, ServedPort, TcxOptions, TcxPrograms, TriedSender};

/// Runs the `ip` command in the calling thread's namespace.
fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("iproute2 is installed");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A pod behind the veth `v`.
struct Pod {
    programs: TcxPrograms,
    veth: PodVeth,
}

/// Runs a test with a pod that is served, in a temporary network namespace.
fn with_pod(test: impl FnOnce(&mut Pod) + Send) {
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        // So that only the test sends packets on its interfaces.
        std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        ip("link set dev lo up");
        ip("link add name v type veth peer name vp");
        ip("link set dev v up");
        ip("link set dev vp up");
        let programs = TcxPrograms::load(&TcxOptions::default(), None).unwrap();
        programs.set_pairs(&[1], &[]).unwrap();
        let veth = programs.attach_pod(&Interface::by_name("v").unwrap()).unwrap();
        let mut pod = Pod { programs, veth };
        pod.serve(0);
        test(&mut pod);
    };
    if let Err(panic) = thread::scope(|scope| scope.spawn(run).join()) {
        resume_unwind(panic);
    }
}

impl Pod {
    fn serve(&mut self, bridge: u32) {
        let filtered = Filtered { to_pod: false, from_pod: false };
        let served =
            ServedPort { port: 5, node_mac: [2, 0, 0, 0, 0, 1], pod_mac: POD_MAC, bridge, mtu: 1500, filtered };
        self.veth.serve(&served).unwrap();
    }

    fn own(&self, addresses: &[IpAddr]) {
        self.veth.set_own_addresses(POD_MAC, &addresses.iter().copied().collect()).unwrap();
    }

    /// The outcome of a frame that the pod sends.
    fn sends(&self, frame: &[u8]) -> ProgramOutcome {
        const DROP: u32 = 2;
        let before = self.veth.outcomes().unwrap();
        let tried = self.programs.try_frame(TriedSender::Pod, self.veth.interface().index, frame, 0).unwrap();
        let after = self.veth.outcomes().unwrap();
        let all = ProgramOutcome::ALL.iter().copied();
        let moved: Vec<ProgramOutcome> = all.filter(|&outcome| after.get(outcome) != before.get(outcome)).collect();
        assert_eq!((moved.len(), after.total()), (1, before.total() + 1), "exactly one counter moves, by one");
        assert_eq!(tried.action == DROP, moved[0].drop_reason().is_some(), "{}", moved[0]);
        moved[0]
    }
}

const LOCAL_V4: [u8; 4] = [10, 0, 0, 5];
const OTHER_V4: [u8; 4] = [192, 0, 2, 1];
const LOCAL_V6: &str = "fd00::5";
const OTHER_V6: &str = "2001:db8::1";

fn ethernet(ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    frame.extend(ethertype.to_be_bytes());
    frame.extend(payload);
    frame
}

fn ipv4(to: [u8; 4]) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 9];
    packet.extend(to);
    packet.extend([0, 1, 0, 2, 0, 8, 0, 0]);
    ethernet(0x0800, &packet)
}

fn ipv6(to: &str, next_header: u8, hop_limit: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0, 0, payload.len() as u8, next_header, hop_limit];
    packet.extend("fd00::9".parse::<Ipv6Addr>().unwrap().octets());
    packet.extend(to.parse::<Ipv6Addr>().unwrap().octets());
    packet.extend(payload);
    ethernet(0x86dd, &packet)
}

fn icmpv6(to: &str, hop_limit: u8, kind: u8) -> Vec<u8> {
    let mut message = [0; 24];
    message[0] = kind;
    ipv6(to, 58, hop_limit, &message)
}

/// A destination-options header (RFC 8200 section 4.6) and a neighbour solicitation behind it.
fn solicitation_behind_an_option() -> Vec<u8> {
    ipv6("ff02::1", 60, 255, &[58, 0, 1, 4, 0, 0, 0, 0, 135, 0, 0, 0, 0, 0, 0, 0])
}

/// The packets of a pod that the program must tell apart.
fn packets() -> Vec<(&'static str, Vec<u8>, ProgramOutcome)> {
    let mut tagged_v4 = vec![0, 0];
    tagged_v4.extend(&ipv4(LOCAL_V4)[12..]);
    vec![
        ("IPv4 to a local pod", ipv4(LOCAL_V4), Redirected),
        ("IPv4 to elsewhere", ipv4(OTHER_V4), Redirected),
        ("IPv6 to a local pod", ipv6(LOCAL_V6, 17, 64, &[0; 8]), Redirected),
        ("IPv6 to elsewhere", ipv6(OTHER_V6, 17, 64, &[0; 8]), Redirected),
        ("ARP", ethernet(0x0806, &[0; 28]), Arp),
        ("router solicitation", icmpv6("ff02::2", 255, 133), NeighbourDiscovery),
        ("router advertisement", icmpv6("ff02::1", 255, 134), ForgedNeighbour),
        ("neighbour solicitation", icmpv6("ff02::1:ff00:5", 255, 135), NeighbourDiscovery),
        ("neighbour advertisement to a link-local address", icmpv6("fe80::1", 255, 136), NeighbourDiscovery),
        ("neighbour advertisement to an address of this node", icmpv6("::1", 255, 136), NeighbourDiscovery),
        ("redirect message", icmpv6("fe80::1", 255, 137), ForgedNeighbour),
        ("neighbour solicitation that was forwarded", icmpv6("fe80::1", 254, 135), Redirected),
        ("neighbour solicitation behind an option", solicitation_behind_an_option(), Redirected),
        ("ICMPv6 of the type below", icmpv6("ff02::1", 255, 132), Redirected),
        ("ICMPv6 of the type above", icmpv6("ff02::1", 255, 138), Redirected),
        ("ICMPv6 to all nodes of a site", icmpv6("ff05::1", 255, 135), NeighbourDiscovery),
        ("echo request", icmpv6(LOCAL_V6, 255, 128), Redirected),
        ("VLAN tag", ethernet(0x8100, &tagged_v4), VlanTag),
        ("provider VLAN tag", ethernet(0x88a8, &tagged_v4), VlanTag),
        ("LLDP", ethernet(0x88cc, &[0; 20]), NotIp),
        ("802.3 length field", ethernet(0x0040, &[0; 60]), NotIp),
    ]
}

#[test]
fn every_kind_of_packet_gets_its_outcome() {
    with_pod(|pod| {
        for (what, frame, expected) in packets() {
            assert_eq!(pod.sends(&frame), expected, "{what}");
        }
    });
}

/// A neighbour solicitation (RFC 4861 section 4.3) for this address.
fn solicitation(to: &str) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd];
    frame.extend([0x60, 0, 0, 0, 0, 24, 58, 255]);
    frame.extend("fd00::9".parse::<Ipv6Addr>().unwrap().octets());
    frame.extend(to.parse::<Ipv6Addr>().unwrap().octets());
    frame.extend([135, 0, 0, 0, 0, 0, 0, 0]);
    frame.extend(to.parse::<Ipv6Addr>().unwrap().octets());
    frame
}

#[test]
fn routable_neighbour_discovery_does_not_pass_to_the_kernel() {
    with_pod(|pod| {
        std::fs::write("/proc/sys/net/ipv6/conf/v/disable_ipv6", "0").unwrap();
        ip("-6 address add fd00::1/64 dev v nodad");
        std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        ip("link add name u type veth peer name up");
        ip("link set dev u up");
        std::fs::write("/proc/sys/net/ipv6/conf/u/disable_ipv6", "0").unwrap();
        ip("-6 route add default dev u");
        for (to, outcome) in [
            ("fd00::1", NeighbourDiscovery),
            ("ff02::1:ff00:1", NeighbourDiscovery),
            ("2001:db8::1", Redirected),
            ("fd00::2", Redirected),
        ] {
            assert_eq!(pod.sends(&solicitation(to)), outcome, "{to}");
        }
    });
}

#[test]
fn neighbour_discovery_of_a_bridges_port_stays_on_the_bridge() {
    with_pod(|pod| {
        std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        ip("link add name b type bridge");
        std::fs::write("/proc/sys/net/ipv6/conf/b/disable_ipv6", "0").unwrap();
        ip("link set dev b up");
        ip("link set dev v master b");
        ip("-6 address add fd00::1/64 dev b nodad");
        ip("link add name u type veth peer name up");
        ip("link set dev u up");
        std::fs::write("/proc/sys/net/ipv6/conf/u/disable_ipv6", "0").unwrap();
        ip("-6 address add fd00:9::1/64 dev u nodad");
        ip("-6 route add default via fd00:9::2 dev u");
        ip("-6 route add 2001:db8:2::/64 via fd00::9 dev b");
        pod.serve(nix::net::if_::if_nametoindex("b").unwrap());
        pod.programs.set_pod_address("2001:db8::5".parse().unwrap(), None).unwrap();
        for (to, outcome) in [
            ("fd00::1", NeighbourDiscovery),
            ("fd00::2", NeighbourDiscovery),
            ("2001:db8::5", NeighbourDiscovery),
            // By the uplink, and by a router on the bridge.
            ("2001:db8::1", Redirected),
            ("2001:db8:2::1", Redirected),
        ] {
            assert_eq!(pod.sends(&solicitation(to)), outcome, "{to}");
        }
    });
}

const POD_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

/// An ARP packet for 10.0.0.1, in a frame from `frame_mac`.
fn arp(frame_mac: [u8; 6], sender_mac: [u8; 6], sender: [u8; 4]) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, 1];
    packet.extend(sender_mac);
    packet.extend(sender);
    packet.extend([0, 0, 0, 0, 0, 0, 10, 0, 0, 1]);
    let mut frame = ethernet(0x0806, &packet);
    frame[6..12].copy_from_slice(&frame_mac);
    frame
}

/// A probe for an address (RFC 5227 section 2.1.1).
fn probe(target: [u8; 4]) -> Vec<u8> {
    let mut frame = arp(POD_MAC, POD_MAC, [0; 4]);
    frame[38..42].copy_from_slice(&target);
    frame
}

/// Neighbour discovery of this type from an address, about a target.
fn discovery(kind: u8, from: &str, target: &str) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    // A router solicitation has no target (RFC 4861 section 4.1).
    if kind != 133 {
        message.extend(target.parse::<Ipv6Addr>().unwrap().octets());
    }
    let mut frame = ipv6("ff02::1", 58, 255, &message);
    frame[22..38].copy_from_slice(&from.parse::<Ipv6Addr>().unwrap().octets());
    frame[6..12].copy_from_slice(&POD_MAC);
    frame
}

#[test]
fn a_known_pod_may_claim_its_own_addresses_alone() {
    let mut stranger = discovery(135, LOCAL_V6, "fd00::1");
    stranger[6..12].copy_from_slice(&OTHER_MAC);
    let cases = [
        ("a request", arp(POD_MAC, POD_MAC, LOCAL_V4), true),
        ("a probe for its own address", probe(LOCAL_V4), true),
        ("a probe for another address", probe(OTHER_V4), false),
        ("a request of another address", arp(POD_MAC, POD_MAC, OTHER_V4), false),
        ("a request for another MAC", arp(POD_MAC, OTHER_MAC, LOCAL_V4), false),
        ("a request in another's frame", arp(OTHER_MAC, POD_MAC, LOCAL_V4), false),
        ("a request that is cut", arp(POD_MAC, POD_MAC, LOCAL_V4)[..40].to_vec(), false),
        ("a solicitation", discovery(135, LOCAL_V6, "fd00::1"), true),
        ("a solicitation from nobody", discovery(135, "::", LOCAL_V6), true),
        ("a solicitation of another address", discovery(135, OTHER_V6, "fd00::1"), false),
        ("a solicitation in another's frame", stranger, false),
        ("an advertisement", discovery(136, LOCAL_V6, LOCAL_V6), true),
        ("an advertisement of another address", discovery(136, LOCAL_V6, OTHER_V6), false),
        ("an advertisement from another address", discovery(136, OTHER_V6, LOCAL_V6), false),
        ("an advertisement of a link-local address", discovery(136, "fe80::5", "fe80::5"), true),
        ("a router's solicitation", discovery(133, LOCAL_V6, "::"), true),
        ("a router's advertisement", discovery(134, "fe80::5", "::"), false),
        ("a redirect", discovery(137, LOCAL_V6, "fd00::1"), false),
    ];
    // No other pod is served: one that is not known yet may name any address.
    with_pod(|pod| {
        for known in [false, true] {
            if known {
                pod.own(&[LOCAL_V4.into(), LOCAL_V6.parse().unwrap()]);
            }
            for (what, frame, passes) in &cases {
                let routers = matches!(frame.get(54), Some(134 | 137));
                assert_eq!(
                    pod.sends(frame) != ForgedNeighbour,
                    *passes || !known && !routers,
                    "{what}, known: {known}"
                );
            }
        }
        // Its address goes to another pod.
        pod.own(&[OTHER_V4.into()]);
        assert_eq!(pod.sends(&arp(POD_MAC, POD_MAC, LOCAL_V4)), ForgedNeighbour);
        assert_eq!(pod.sends(&arp(POD_MAC, POD_MAC, OTHER_V4)), Arp);
    });
}

#[test]
fn a_pod_has_a_limited_number_of_link_local_addresses() {
    with_pod(|pod| {
        pod.own(&[LOCAL_V4.into()]);
        let solicits = |n: u16| pod.sends(&discovery(135, &format!("fe80::{n:x}"), "fd00::1")) == NeighbourDiscovery;
        assert_eq!((1..=1000).filter(|&n| solicits(n)).count(), 30, "with its address and the mark, the map is full");
        assert!(solicits(1), "the first ones stay");
    });
}
