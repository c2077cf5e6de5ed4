//! The program's actions on each kind of packet, run in the kernel without an interface (BPF_PROG_TEST_RUN).

use std::net::Ipv6Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use libbpf_rs::{MapCore, MapFlags, libbpf_sys};
use nix::sched::{CloneFlags, unshare};

use super::*;
use crate::{ModeChoice, ProgramOutcome, ProgramOutcomeCounts};

const DROP: u32 = libbpf_sys::XDP_DROP;
const PASS: u32 = libbpf_sys::XDP_PASS;
const REDIRECT: u32 = libbpf_sys::XDP_REDIRECT;

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
    ipv6(to, 58, hop_limit, &[kind, 0, 0, 0, 0, 0, 0, 0])
}

/// A destination-options header (RFC 8200 section 4.6) and a neighbour solicitation behind it.
fn solicitation_behind_an_option() -> Vec<u8> {
    ipv6("ff02::1", 60, 255, &[58, 0, 1, 4, 0, 0, 0, 0, 135, 0, 0, 0, 0, 0, 0, 0])
}

/// The action that the program returns, and the outcome that it counts.
type ActionAndOutcome = (u32, ProgramOutcome);

/// The packets that the program must tell apart, and what it must do with each on a pod's port and on an uplink
/// when the queue has a socket.
fn packets() -> Vec<(&'static str, Vec<u8>, ActionAndOutcome, ActionAndOutcome)> {
    let redirected = (REDIRECT, ProgramOutcome::Redirected);
    let not_local = (PASS, ProgramOutcome::NotLocal);
    let not_ip = (PASS, ProgramOutcome::NotIp);
    let discovery = (PASS, ProgramOutcome::NeighbourDiscovery);
    let forged = (DROP, ProgramOutcome::ForgedNeighbour);
    let mut tagged_v4 = vec![0, 0];
    tagged_v4.extend(&ipv4(LOCAL_V4)[12..]);
    vec![
        ("IPv4 to a local pod", ipv4(LOCAL_V4), redirected, redirected),
        ("IPv4 to elsewhere", ipv4(OTHER_V4), redirected, not_local),
        ("IPv4 cut inside its header", ipv4(LOCAL_V4)[..30].to_vec(), redirected, not_local),
        ("IPv6 to a local pod", ipv6(LOCAL_V6, 17, 64, &[0; 8]), redirected, redirected),
        ("IPv6 to elsewhere", ipv6(OTHER_V6, 17, 64, &[0; 8]), redirected, not_local),
        ("IPv6 cut inside its header", ipv6(LOCAL_V6, 17, 64, &[])[..50].to_vec(), redirected, not_local),
        ("ARP", ethernet(0x0806, &[0; 28]), (PASS, ProgramOutcome::Arp), (PASS, ProgramOutcome::Arp)),
        ("router solicitation", icmpv6("ff02::2", 255, 133), discovery, discovery),
        ("router advertisement", icmpv6("ff02::1", 255, 134), forged, discovery),
        ("neighbour solicitation", icmpv6("ff02::1:ff00:5", 255, 135), discovery, discovery),
        ("neighbour advertisement to a link-local address", icmpv6("fe80::1", 255, 136), discovery, discovery),
        ("neighbour advertisement to an address of this node", icmpv6("::1", 255, 136), discovery, discovery),
        ("redirect message", icmpv6("fe80::1", 255, 137), forged, discovery),
        ("neighbour solicitation that was forwarded", icmpv6("fe80::1", 254, 135), redirected, not_local),
        ("neighbour solicitation behind an option", solicitation_behind_an_option(), redirected, not_local),
        ("ICMPv6 of the type below", icmpv6("ff02::1", 255, 132), redirected, not_local),
        ("ICMPv6 of the type above", icmpv6("ff02::1", 255, 138), redirected, not_local),
        ("ICMPv6 to all nodes of a site", icmpv6("ff05::1", 255, 135), discovery, discovery),
        ("echo request", icmpv6(LOCAL_V6, 255, 128), redirected, redirected),
        ("VLAN tag", ethernet(0x8100, &tagged_v4), (DROP, ProgramOutcome::VlanTag), not_ip),
        ("provider VLAN tag", ethernet(0x88a8, &tagged_v4), (DROP, ProgramOutcome::VlanTag), not_ip),
        ("LLDP", ethernet(0x88cc, &[0; 20]), not_ip, not_ip),
        ("802.3 length field", ethernet(0x0040, &[0; 60]), not_ip, not_ip),
    ]
}

/// Runs a program once over a frame, in this context; what it returns.
fn test_run(program: BorrowedFd<'_>, frame: &[u8], context: &mut [u8]) -> u32 {
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as _,
        data_in: frame.as_ptr().cast(),
        data_size_in: frame.len() as u32,
        ctx_in: context.as_ptr().cast(),
        ctx_size_in: context.len() as u32,
        ..Default::default()
    };
    // SAFETY: both buffers live across the call and are as long as is said; nothing is written, since no room for it is given.
    let error = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut options) };
    assert_eq!(error, 0, "{}", std::io::Error::from_raw_os_error(-error));
    options.retval
}

/// Runs the program once over a frame that came in on the loopback interface, and says what it did.
fn run(loaded: &Program, frame: &[u8]) -> (u32, ProgramOutcome) {
    let before = ProgramOutcomeCounts::read(&loaded.outcomes).unwrap();
    // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
    let mut context = Vec::new();
    for field in [0, frame.len() as u32, 0, 1, 0, 0] {
        context.extend(field.to_ne_bytes());
    }
    let action = test_run(loaded.fd.as_fd(), frame, &mut context);
    let after = ProgramOutcomeCounts::read(&loaded.outcomes).unwrap();
    let moved: Vec<ProgramOutcome> =
        ProgramOutcome::ALL.iter().copied().filter(|&outcome| after.get(outcome) != before.get(outcome)).collect();
    assert_eq!((moved.len(), after.total()), (1, before.total() + 1), "exactly one counter moves, by one");
    (action, moved[0])
}

fn options(role: Role, on_miss: OnMiss) -> AttachOptions {
    AttachOptions { role, on_miss, mode: ModeChoice::default(), bridge: None }
}

fn shared() -> SharedMaps {
    let shared = SharedMaps::create().unwrap();
    shared.local_pods.insert(LOCAL_V4.into(), u16::MAX).unwrap();
    shared.local_pods.insert(LOCAL_V6.parse().unwrap(), u16::MAX).unwrap();
    shared
}

#[test]
fn every_kind_of_packet_gets_the_action_of_its_port() {
    let shared = shared();
    let socket = crate::liveness::socket().unwrap();
    let mut reached = std::collections::BTreeSet::new();
    for role in [Role::Pod, Role::Host, Role::Uplink] {
        let loaded = Program::load(options(role, OnMiss::Drop), &shared).unwrap();
        let value = socket.as_raw_fd().to_ne_bytes();
        loaded.sockets.update(&0u32.to_ne_bytes(), &value, MapFlags::ANY).unwrap();
        for (what, frame, on_pod, on_uplink) in packets() {
            let expected = match role {
                // The node's own stack may be a router.
                Role::Host if on_pod.1 == ProgramOutcome::ForgedNeighbour => on_uplink,
                Role::Host | Role::Pod => on_pod,
                Role::Uplink => on_uplink,
            };
            assert_eq!(run(&loaded, &frame), expected, "{what} on {role:?}");
            reached.insert(expected.1);
        }
    }
    assert_eq!(reached.len(), ProgramOutcome::COUNT - 9, "all but those that have tests of their own: {reached:?}");
}

/// Puts the calling thread into a network namespace that forwards and has routes to the other addresses.
fn enter_a_router() {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        std::fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
    }
    for command in ["link set lo up", "route add 192.0.2.0/24 dev lo", "-6 route add 2001:db8::/64 dev lo"] {
        assert!(Command::new("ip").args(command.split(' ')).status().unwrap().success(), "ip {command}");
    }
}

#[test]
fn uplink_packets_too_long_for_the_pod_pass_unless_spoofed() {
    enter_a_router();
    let (shared, socket) = (shared(), crate::liveness::socket().unwrap());
    let v6 = |address: &str| address.parse::<Ipv6Addr>().unwrap().octets().to_vec();
    let senders = [
        ("another machine", OTHER_V4.to_vec(), true),
        ("another machine", v6(OTHER_V6), true),
        ("the node", vec![127, 0, 0, 1], false),
        ("the node", v6("::1"), false),
        ("a local pod", LOCAL_V4.to_vec(), false),
        ("a local pod", v6(LOCAL_V6), false),
        ("nobody that is known", vec![203, 0, 113, 9], false),
        ("nobody that is known", v6("fd99::9"), false),
    ];
    for (role, longest) in [(Role::Uplink, 100), (Role::Uplink, 1399), (Role::Pod, 100), (Role::Host, 100)] {
        for address in [LOCAL_V4.into(), LOCAL_V6.parse().unwrap()] {
            shared.local_pods.insert(address, longest).unwrap();
        }
        let loaded = Program::load(options(role, OnMiss::Drop), &shared).unwrap();
        let value = socket.as_raw_fd().to_ne_bytes();
        loaded.sockets.update(&0u32.to_ne_bytes(), &value, MapFlags::ANY).unwrap();
        for ((who, source, is_other), length) in
            senders.iter().flat_map(|it| [99, 100, 101, 1399, 1400].map(|n| (it, n)))
        {
            let (mut frame, at) = match source.len() {
                4 => (ipv4(LOCAL_V4), 26),
                _ => (ipv6(LOCAL_V6, 17, 64, &[0; 8]), 22),
            };
            frame[at..at + source.len()].copy_from_slice(source);
            frame.resize(length, 0);
            let passes = role == Role::Uplink && *is_other && length > usize::from(longest);
            let expected =
                if passes { (PASS, ProgramOutcome::TooLong) } else { (REDIRECT, ProgramOutcome::Redirected) };
            assert_eq!(
                run(&loaded, &frame),
                expected,
                "{length} bytes from {who} {source:?} on {role:?}, at most {longest}"
            );
        }
    }
}

/// An IPv4 frame of another protocol, or another word of flags and offset.
fn changed(mut frame: Vec<u8>, protocol: u8, fragment: u16) -> Vec<u8> {
    frame[23] = protocol;
    frame[20..22].copy_from_slice(&fragment.to_be_bytes());
    frame
}

#[test]
fn on_an_uplink_possibly_translated_packets_pass_to_the_kernel() {
    enter_a_router();
    let (shared, socket) = (shared(), crate::liveness::socket().unwrap());
    let loaded = Program::load(options(Role::Uplink, OnMiss::Drop), &shared).unwrap();
    let value = socket.as_raw_fd().to_ne_bytes();
    loaded.sockets.update(&0u32.to_ne_bytes(), &value, MapFlags::ANY).unwrap();
    let (redirected, undecided) = ((REDIRECT, ProgramOutcome::Redirected), (PASS, ProgramOutcome::Undecided));
    let v4 = |protocol, fragment| changed(ipv4(LOCAL_V4), protocol, fragment);
    let v6 = |next_header: u8, payload: &[u8]| ipv6(LOCAL_V6, next_header, 64, payload);
    let unreachable = |quoted: &[u8]| v6(58, &[&[1, 4, 0, 0, 0, 0, 0, 0][..], quoted].concat());
    let quoted = &ipv6(OTHER_V6, 17, 64, &[0; 8])[14..];
    let cases = [
        ("UDP", v4(17, 0), redirected),
        ("UDP that says not to be cut", v4(17, 0x4000), redirected),
        ("TCP", v4(6, 0), redirected),
        ("UDP", v6(17, &[0; 8]), redirected),
        ("TCP without its ports", v6(6, &[0; 2]), redirected),
        ("a first fragment", v4(17, 0x2000), undecided),
        ("a later fragment", v4(17, 0x0001), undecided),
        ("a fragment", v6(44, &[17, 0, 0, 1, 0, 0, 0, 7, 0, 0, 0, 0, 0, 8, 0, 0]), undecided),
        ("SCTP", v4(132, 0), undecided),
        ("an echo request", v4(1, 0), undecided),
        ("GRE", v6(47, &[0; 8]), undecided),
        ("an error about UDP that is not translated", unreachable(quoted), redirected),
        ("an error about another protocol", unreachable(&ipv6(OTHER_V6, 132, 64, &[0; 8])[14..]), undecided),
        ("an error that is cut", unreachable(&quoted[..41]), undecided),
    ];
    for (what, mut frame, expected) in cases {
        // The way back to its sender is known.
        match frame[12] {
            0x08 => frame[26..30].copy_from_slice(&OTHER_V4),
            _ => frame[22..38].copy_from_slice(&OTHER_V6.parse::<Ipv6Addr>().unwrap().octets()),
        }
        assert_eq!(run(&loaded, &frame), expected, "{what}");
        // In a local pod's name it is a worker's to drop.
        match frame[12] {
            0x08 => frame[26..30].copy_from_slice(&LOCAL_V4),
            _ => frame[22..38].copy_from_slice(&LOCAL_V6.parse::<Ipv6Addr>().unwrap().octets()),
        }
        assert_eq!(run(&loaded, &frame), redirected, "{what} in a local pod's name");
    }
}

#[test]
fn the_stack_sends_no_pods_source_that_bypassed_workers() {
    // TC_ACT_OK and TC_ACT_SHOT of linux/pkt_cls.h.
    const OK: u32 = 0;
    const SHOT: u32 = 2;
    let shared = shared();
    let unserved: Ipv6Addr = "fd00::77".parse().unwrap();
    shared.local_pods.insert_unserved(unserved.into()).unwrap();
    let loaded = Program::load(options(Role::Host, OnMiss::Drop), &shared).unwrap();
    let v4 = |from: [u8; 4]| {
        let mut frame = ipv4(OTHER_V4);
        frame[26..30].copy_from_slice(&from);
        frame
    };
    let v6 = |from: &str| {
        let mut frame = ipv6(OTHER_V6, 17, 64, &[0; 8]);
        frame[22..38].copy_from_slice(&from.parse::<Ipv6Addr>().unwrap().octets());
        frame
    };
    let cases = [
        ("a pod", v4(LOCAL_V4), true),
        ("a pod", v6(LOCAL_V6), true),
        ("a pod that is not served", v6("fd00::77"), true),
        ("somebody else", v4(OTHER_V4), false),
        ("somebody else", v6(OTHER_V6), false),
        ("ARP", ethernet(0x0806, &[0; 28]), false),
    ];
    for (what, frame, is_pods) in cases {
        // Where it leaves is the loopback, of index 1; it came in there, elsewhere, or was made here.
        for (came_in, is_workers) in [(1_u32, true), (2, false), (0, false)] {
            let before = ProgramOutcomeCounts::read(&loaded.outcomes).unwrap().get(ProgramOutcome::SpoofedSource);
            // struct __sk_buff: ingress_ifindex and ifindex are its tenth and eleventh words.
            let mut context = vec![0; 192];
            context[36..40].copy_from_slice(&came_in.to_ne_bytes());
            context[40..44].copy_from_slice(&1_u32.to_ne_bytes());
            let action = test_run(loaded.egress_check.as_ref().unwrap().as_fd(), &frame, &mut context);
            let dropped = is_pods && !is_workers;
            assert_eq!(action, if dropped { SHOT } else { OK }, "{what}, came in at {came_in}");
            let after = ProgramOutcomeCounts::read(&loaded.outcomes).unwrap().get(ProgramOutcome::SpoofedSource);
            assert_eq!(after - before, u64::from(dropped), "{what}, came in at {came_in}");
        }
    }
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

/// Neighbour discovery of this type from an address, about a target.
fn discovery(kind: u8, from: &str, target: &str) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    message.extend(target.parse::<Ipv6Addr>().unwrap().octets());
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
        ("a probe", arp(POD_MAC, POD_MAC, [0; 4]), true),
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
    let loaded = Program::load(options(Role::Pod, OnMiss::Drop), &SharedMaps::create().unwrap()).unwrap();
    let own = &loaded.own;
    for known in [false, true] {
        if known {
            crate::own_addresses::set(own, POD_MAC, &[LOCAL_V4.into(), LOCAL_V6.parse().unwrap()].into()).unwrap();
        }
        for (what, frame, passes) in &cases {
            let routers = matches!(frame.get(54), Some(134 | 137));
            let expected = if *passes || !known && !routers { PASS } else { DROP };
            assert_eq!(run(&loaded, frame).0, expected, "{what}, known: {known}");
        }
    }
    // Its address goes to another pod.
    crate::own_addresses::set(own, POD_MAC, &[OTHER_V4.into()].into()).unwrap();
    assert_eq!(run(&loaded, &arp(POD_MAC, POD_MAC, LOCAL_V4)).1, ProgramOutcome::ForgedNeighbour);
    assert_eq!(run(&loaded, &arp(POD_MAC, POD_MAC, OTHER_V4)).1, ProgramOutcome::Arp);
}

#[test]
fn a_pod_has_a_limited_number_of_link_local_addresses() {
    let loaded = Program::load(options(Role::Pod, OnMiss::Drop), &shared()).unwrap();
    let own = &loaded.own;
    crate::own_addresses::set(own, POD_MAC, &[LOCAL_V4.into()].into()).unwrap();
    let solicits = |n: u16| run(&loaded, &discovery(135, &format!("fe80::{n:x}"), "fd00::1")).0 == PASS;
    assert_eq!((1..=1000).filter(|&n| solicits(n)).count(), 30, "with its address and the mark, the map is full");
    assert!(solicits(1), "the first ones stay");
}

#[test]
fn a_miss_is_dropped_unless_configured_to_pass() {
    let shared = shared();
    for (on_miss, action) in [(OnMiss::default(), DROP), (OnMiss::Drop, DROP), (OnMiss::Pass, PASS)] {
        for role in [Role::Pod, Role::Host, Role::Uplink] {
            let loaded = Program::load(options(role, on_miss), &shared).unwrap();
            for frame in [ipv4(LOCAL_V4), ipv6(LOCAL_V6, 6, 64, &[0; 20])] {
                assert_eq!(run(&loaded, &frame), (action, ProgramOutcome::NoSocket), "{role:?} {on_miss:?}");
            }
        }
    }
}

#[test]
fn after_the_process_ends_packets_pass_only_where_misses_pass() {
    let mut shared = shared();
    let tagged = ethernet(0x8100, &[&[0, 0], &ipv4(LOCAL_V4)[12..]].concat());
    let open = Program::load(options(Role::Pod, OnMiss::Pass), &shared).unwrap();
    let closed = Program::load(options(Role::Pod, OnMiss::Drop), &shared).unwrap();
    assert_eq!(run(&open, &tagged), (DROP, ProgramOutcome::VlanTag));
    // Its last descriptor is closed, as when the process dies.
    shared.liveness.socket = crate::liveness::socket().unwrap();
    // A child that another test has just made has it too, until it runs its own program.
    let deadline = Instant::now() + Duration::from_secs(5);
    while run(&open, &tagged) != (PASS, ProgramOutcome::NoSocket) {
        assert!(Instant::now() < deadline, "the socket is closed");
    }
    assert_eq!(run(&open, &ipv4(LOCAL_V4)), (PASS, ProgramOutcome::NoSocket));
    assert_eq!(run(&closed, &tagged), (DROP, ProgramOutcome::VlanTag));
    assert_eq!(run(&closed, &ipv4(LOCAL_V4)), (DROP, ProgramOutcome::NoSocket));
}

/// As check_pseudo_btf_id in kernel/bpf/verifier.c of kernels before 6.4, which refuses a function.
fn takes_a_kernel_symbols_address(instructions: &[libbpf_sys::bpf_insn]) -> bool {
    const LOAD_64: u8 = (libbpf_sys::BPF_LD | libbpf_sys::BPF_IMM | libbpf_sys::BPF_DW) as u8;
    let takes =
        |at: &libbpf_sys::bpf_insn| at.code == LOAD_64 && u32::from(at.src_reg()) == libbpf_sys::BPF_PSEUDO_BTF_ID;
    instructions.iter().any(takes)
}

#[test]
fn no_program_takes_the_address_of_a_kernel_function() {
    let mut storage = MaybeUninit::uninit();
    let loaded = open_for_node(&mut storage, options(Role::Host, OnMiss::Drop), &shared()).unwrap().load().unwrap();
    for program in [&loaded.progs.penstock, &loaded.progs.penstock_leave] {
        assert!(!takes_a_kernel_symbols_address(program.insns()), "{:?}", program.name());
    }
}

#[test]
fn programs_load_whichever_functions_the_kernel_has() {
    let kernel = ConnectionFunctions::of_kernel();
    assert!(kernel.lookups && kernel.reads && kernel.casts, "the kernel that runs this test has them all");
    for (lookups, reads, casts) in
        [(false, false, false), (false, true, false), (true, true, false), (true, false, true), (true, true, true)]
    {
        let functions = ConnectionFunctions { lookups, reads, casts };
        for role in [Role::Host, Role::Uplink] {
            Program::load_for_node(options(role, OnMiss::Drop), &shared(), functions, 0)
                .unwrap_or_else(|error| panic!("{role:?}, {functions:?}: {error}"));
        }
    }
}

#[test]
fn local_pods_change_for_all_uplinks_at_once() {
    let shared = shared();
    let one = Program::load(options(Role::Uplink, OnMiss::Drop), &shared).unwrap();
    let two = Program::load(options(Role::Uplink, OnMiss::Drop), &shared).unwrap();
    let frame = ipv4(OTHER_V4);
    for (present, expected) in
        [(false, ProgramOutcome::NotLocal), (true, ProgramOutcome::NoSocket), (false, ProgramOutcome::NotLocal)]
    {
        match present {
            true => shared.local_pods.insert(OTHER_V4.into(), u16::MAX).unwrap(),
            false => shared.local_pods.remove(OTHER_V4.into()).unwrap(),
        }
        assert_eq!(shared.local_pods.contains(OTHER_V4.into()), present);
        assert_eq!(run(&one, &frame).1, expected);
        assert_eq!(run(&two, &frame).1, expected);
    }
}
