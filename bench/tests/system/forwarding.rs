//! Forwarding between pods, their node and machines behind it.

use std::time::Duration;

use penstock_bench::load::UdpSink;
use penstock_bench::probe::{self, EchoServers, ProbeOutcome, Protocol, RetryPolicy, Site};

use crate::fixture::{Fixture, PROTOCOLS, SERVICES, pods, policy};

#[test]
fn pods_and_machines_behind_the_node_reach_each_other() {
    let mut outside = None;
    let fixture = Fixture::of(&pods(2), |cluster, _| outside = Some(cluster.node.add_outside("outside").unwrap()));
    let outside = Site::from(&outside.unwrap());
    let identity = fixture.cluster.sites.len() as u32;
    let _servers = EchoServers::start(&outside, identity, &SERVICES).unwrap();
    for pod in ["test/pod-0", "test/pod-1"] {
        for v6 in [false, true] {
            for protocol in PROTOCOLS {
                let there = (identity, outside.address(v6).unwrap());
                let outcome = probe::run_one(fixture.site(pod), there, protocol, RetryPolicy::default()).unwrap();
                assert_eq!(outcome, ProbeOutcome::Reached, "{pod} to outside, {protocol}, IPv6: {v6}");
                let back = fixture.target(pod, v6);
                let outcome = probe::run_one(&outside, back, protocol, RetryPolicy::default()).unwrap();
                assert_eq!(outcome, ProbeOutcome::Reached, "outside to {pod}, {protocol}, IPv6: {v6}");
            }
        }
    }
}

#[test]
fn ip_blocks_apply_to_machines_behind_the_node() {
    let spec = "  policyTypes: [Ingress, Egress]\n  ingress: []\n  egress:\n    - to: [{ipBlock: {cidr: 198.51.100.0/24}}]\n      \
                ports: [{port: 8080}]\n    - to: [{ipBlock: {cidr: \"fd00:51::/32\", except: [\"fd00:51:100::/48\"]}}]\n";
    let yaml = pods(1) + &policy("blocks", "pod-0", spec);
    let mut outside = None;
    let fixture = Fixture::of(&yaml, |cluster, _| outside = Some(cluster.node.add_outside("outside").unwrap()));
    let outside = Site::from(&outside.unwrap());
    let _servers = EchoServers::start(&outside, 9, &SERVICES).unwrap();
    let pod = fixture.site("test/pod-0");
    for (v6, protocol, expected) in [
        (false, Protocol::Tcp(8080), ProbeOutcome::Reached),
        (false, Protocol::Tcp(9090), ProbeOutcome::Silent),
        (false, Protocol::Icmp, ProbeOutcome::Silent),
        (true, Protocol::Tcp(8080), ProbeOutcome::Silent),
        (true, Protocol::Icmp, ProbeOutcome::Silent),
    ] {
        let there = (9, outside.address(v6).unwrap());
        assert_eq!(probe::run_one(pod, there, protocol, RetryPolicy::default()).unwrap(), expected, "{protocol} {v6}");
        let back = fixture.target("test/pod-0", v6);
        let entering = probe::run_one(&outside, back, protocol, RetryPolicy::default()).unwrap();
        assert_eq!(entering, ProbeOutcome::Silent, "from outside: {protocol} {v6}");
    }
}

/// A pod's stack leaves the checksum to hardware that a veth lacks: the dataplane completes it.
#[test]
fn datagrams_of_every_length_arrive_with_a_valid_checksum() {
    let fixture = Fixture::of(&pods(2), |_, _| {});
    let (from, to) = (fixture.site("test/pod-0"), fixture.site("test/pod-1"));
    for v6 in [false, true] {
        let address = std::net::SocketAddr::new(to.address(v6).unwrap(), 7000);
        let sink = UdpSink::open(&to.namespace, address).unwrap();
        let before = (sink.arrived().unwrap(), sink.wrong_checksums().unwrap());
        let sender = from.namespace.udp((from.address(v6).unwrap(), 0)).unwrap();
        // Zero bytes, odd and even lengths, and the longest payload of a packet of 1,500 bytes.
        let longest = if v6 { 1452 } else { 1472 };
        let lengths: Vec<usize> = (0..=64).chain([65, 511, 512, 1399, longest - 1, longest]).collect();
        for &length in &lengths {
            let content: Vec<u8> = (0..length).map(|at| (at * 7 + length) as u8).collect();
            sender.send_to(&content, address).unwrap();
            let datagrams = sink.drain(Duration::from_secs(1)).unwrap();
            assert_eq!(datagrams.len(), 1, "a datagram of {length} bytes to {address}");
            assert_eq!(datagrams[0].1, content);
        }
        assert_eq!(sink.arrived().unwrap() - before.0, lengths.len() as u64);
        assert_eq!(sink.wrong_checksums().unwrap(), before.1);
    }
}
