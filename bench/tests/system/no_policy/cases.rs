//! Kinds of traffic, in the order of sending.

use std::net::SocketAddr;

use etherparse::{IcmpEchoHeader, Icmpv4Type, Ipv4Options, icmpv4::DestUnreachableHeader};

use super::packets::End::{Outside as Out, Pod0, Pod1};
use super::packets::{Arrival, Before, Case, End, datagram, fragment, fragment_v6, icmp, sctp, segment, tcp, udp, v4};
use super::{NODE, NODE_PORT};
use crate::services::service::{WEB, service};

/// The table of kinds of traffic, in the order of sending.
pub(super) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let mut port = 20_000;
    for (from, to) in [(Pod0, Pod1), (Pod1, Pod0), (Pod0, Out), (Out, Pod1)] {
        let mut add = |name: &str, packet: Vec<u8>, exception: Option<&'static str>| {
            cases.push(Case { exception, ..Case::new(name, from, to, packet) });
        };
        for v6 in [false, true] {
            for flags in ["A", "FA", "RA", "R", "SA", "F", "SF", "SR", "", "FPU", "S"] {
                port += 1;
                add(&format!("TCP {flags:?} of no connection, v6 {v6}"), tcp(from, to, v6, (port, 80), flags, 9), None);
            }
            for (number, flags) in ["S", "S", "A", "A", "FA", "A", "R", "S", "A"].into_iter().enumerate() {
                let seq = 1_000_000_000_u32.wrapping_mul(number as u32 + 1);
                add(
                    &format!("TCP {flags} far out of window, v6 {v6}"),
                    tcp(from, to, v6, (443, 50_000), flags, seq),
                    None,
                );
            }
            add("UDP", udp(from, to, v6, (port, 53), b"question"), None);
            add("UDP without payload", udp(from, to, v6, (port, 53), b""), None);
        }
        let mut unchecked = udp(from, to, false, (port, 54), b"without checksum");
        unchecked[26..28].fill(0);
        add("UDP without checksum", unchecked, None);
        for (tag, chunk) in [(0, 1), (7, 4), (8, 5), (9, 10), (10, 0), (11, 7), (12, 14), (13, 6)] {
            port += 1;
            add(&format!("SCTP chunk {chunk} of no association"), sctp(from, to, (port, 9000), tag, chunk), None);
        }
        for (tag, chunk) in [(0, 1), (21, 0), (22, 0), (23, 4), (24, 5)] {
            add(&format!("SCTP chunk {chunk} with tag {tag}"), sctp(from, to, (6000, 9001), tag, chunk), None);
        }
        let echo = |id| IcmpEchoHeader { id, seq: 1 };
        add("echo request", icmp(from, to, Icmpv4Type::EchoRequest(echo(7)), b"ping"), None);
        add("echo reply to nothing", icmp(from, to, Icmpv4Type::EchoReply(echo(8)), b"pong"), None);
        let quoted = udp(to, from, false, (1, 2), b"");
        let unreachable = Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Port);
        add("ICMP error about nothing", icmp(from, to, unreachable.clone(), &quoted), None);
        for protocol in [47, 50, 89, 99, 132, 253] {
            add(&format!("protocol {protocol}"), v4(from, to, protocol, &[9; 24], |_| {}), None);
        }
        for (what, order) in [("in order", [0, 3, 6]), ("last first", [6, 3, 0]), ("mixed", [3, 0, 6])] {
            port += 1;
            for units in order {
                let packet = fragment(from, to, port, units, units != 6, 24);
                add(&format!("fragments {what}: {units}"), packet, None);
            }
        }
        add("a later fragment alone", fragment(from, to, 9, 3, true, 24), None);
        for units in [3, 0] {
            add(
                &format!("IPv6 fragments last first: {units}"),
                fragment_v6(from, to, port.into(), units, units == 0),
                None,
            );
        }
        let options = |bytes: &[u8]| Ipv4Options::try_from(bytes).unwrap();
        for (what, bytes, exception) in [
            ("router alert", &[148, 4, 0, 0][..], None),
            ("no operation", &[1, 1, 1, 0], None),
            (
                "source route",
                &[131, 7, 4, 10, 244, 1, 1, 0],
                Some("source routes: a pod would choose its way past policy"),
            ),
        ] {
            add(
                &format!("option {what}"),
                v4(from, to, 17, &[0, 9, 0, 9, 0, 8, 0, 0], |header| header.options = options(bytes)),
                exception,
            );
        }
        let redirect = Icmpv4Type::Unknown { type_u8: 5, code_u8: 1, bytes5to8: [10, 244, 1, 1] };
        add("ICMP redirect", icmp(from, to, redirect, &quoted), Some("redirects: they change a pod's routes"));
        if from != Out {
            let other = if from == Pod0 { Pod1 } else { Pod0 };
            let forged = udp(other, Out, false, (port, 55), b"forged");
            let case = Case::new("another pod's source", from, Out, forged);
            cases.push(Case { exception: Some("forged sources"), ..case });
        }
    }
    // The same flows after days of silence, and by another daemon.
    for (before, what, seq) in [(Before::Pause, "a pause", 4_000_000), (Before::Restart, "a restart", 5_000_000)] {
        let flows = [(Pod0, Pod1), (Pod1, Pod0), (Out, Pod1), (Pod0, Out)];
        let segments = flows.into_iter().flat_map(|(from, to)| ["A", "FA", "R"].map(|flags| (from, to, flags)));
        let again = segments.enumerate().map(|(number, (from, to, flags))| Case {
            before: if number == 0 { before } else { Before::Nothing },
            ..Case::new(format!("TCP {flags} after {what}"), from, to, tcp(from, to, false, (443, 50_000), flags, seq))
        });
        cases.extend(again);
    }
    cases
}

/// Packets longer than a frame of Ethernet, between pods whose links take them.
pub(super) fn jumbo_cases() -> Vec<Case> {
    const LENGTH: usize = 8_900;
    let mut cases = Vec::new();
    let mut port = 30_000;
    for (round, before) in [Before::Nothing, Before::Restart].into_iter().enumerate() {
        let first = cases.len();
        for (from, to) in [(Pod0, Pod1), (Pod1, Pod0)] {
            let mut add =
                |what: String, packet| cases.push(Case::new(format!("{what}, round {round}"), from, to, packet));
            let payload = |number: u16| [number as u8; LENGTH];
            for v6 in [false, true] {
                for flags in ["S", "A", "FA", "A"] {
                    port += 1;
                    let packet = segment(from.at(v6, port), to.at(v6, 80), flags, (9, 9), &payload(port));
                    add(format!("TCP {flags} of no connection, v6 {v6}"), packet);
                }
                for number in [1, 2] {
                    let numbers = (number * 900_000_000, u32::from(port));
                    let packet = segment(from.at(v6, 444), to.at(v6, 50_001), "A", numbers, &payload(port));
                    add(format!("TCP out of window {number}, v6 {v6}"), packet);
                }
                add(format!("UDP, v6 {v6}"), udp(from, to, v6, (port, 53), &payload(port)));
            }
            let request = Icmpv4Type::EchoRequest(IcmpEchoHeader { id: port, seq: 1 });
            add("echo request".to_owned(), icmp(from, to, request, &payload(7)));
            add("protocol 253".to_owned(), v4(from, to, 253, &payload(port), |_| {}));
            add("protocol 47".to_owned(), v4(from, to, 47, &payload(port), |_| {}));
        }
        cases[first].before = before;
    }
    cases
}

/// Packets of pods and machines outside to a Service and to a port of the node, and the answers, by rules of kube-proxy's form: each
/// kind before and after another daemon has started.
pub(super) fn service_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (round, before) in [(0_u16, Before::Nothing), (1, Before::Restart)] {
        let first = cases.len();
        for v6 in [false, true] {
            let family = if v6 { "v6" } else { "v4" };
            cases.extend(
                to_a_cluster_address(v6, round)
                    .into_iter()
                    .map(|case: Case| Case { name: format!("{} ({family}, round {round})", case.name), ..case }),
            );
            cases.extend(
                by_the_node(v6, round)
                    .into_iter()
                    .map(|case: Case| Case { name: format!("{} ({family}, round {round})", case.name), ..case }),
            );
        }
        cases[first].before = before;
    }
    cases
}

/// A pod and the backend of its Service. The connections of the first round go on in the second.
fn to_a_cluster_address(v6: bool, round: u16) -> Vec<Case> {
    let (client, datagrams) = (Pod0.at(v6, 40_000), Pod0.at(v6, 40_001));
    let frontend = SocketAddr::new(service(v6), WEB);
    let (web, dns) = (Pod1.at(v6, 8080), Pod1.at(v6, 53));
    let text = format!("question {round}");
    let translated = |what: &str, from, to, sent: Vec<u8>, arrives| Case {
        arrival: Arrival::Exactly(arrives),
        ..Case::new(what, from, to, sent)
    };
    let mut cases = vec![
        translated(
            "UDP to a Service",
            Pod0,
            Pod1,
            datagram(datagrams, frontend, text.as_bytes()),
            datagram(datagrams, dns, text.as_bytes()),
        ),
        translated(
            "the Service's answer",
            Pod1,
            Pod0,
            datagram(dns, datagrams, b"answer".repeat(2 + usize::from(round)).as_slice()),
            datagram(frontend, datagrams, b"answer".repeat(2 + usize::from(round)).as_slice()),
        ),
    ];
    // After the first round: each side's number, and what it has sent.
    let (mut own, mut other) = if round == 0 { (1_000, 7_000) } else { (1_009, 7_005) };
    let opening: &[(bool, &str)] = &[(true, "S"), (false, "SA"), (true, "A"), (false, "A"), (true, "A")];
    let going_on: &[(bool, &str)] = &[(true, "A"), (false, "A"), (false, "FA"), (true, "A"), (true, "FA")];
    for (number, &(is_sent, flags)) in (if round == 0 { opening } else { going_on }).iter().enumerate() {
        let payload = if flags == "A" { &b"data"[..] } else { b"" };
        let length = payload.len() as u32 + u32::from(flags.contains(['S', 'F']));
        let what = format!("TCP {flags}, packet {number} by a Service");
        cases.push(match is_sent {
            true => translated(
                &what,
                Pod0,
                Pod1,
                segment(client, frontend, flags, (own, other), payload),
                segment(client, web, flags, (own, other), payload),
            ),
            false => translated(
                &what,
                Pod1,
                Pod0,
                segment(web, client, flags, (other, own), payload),
                segment(frontend, client, flags, (other, own), payload),
            ),
        });
        *(if is_sent { &mut own } else { &mut other }) += length;
    }
    let late = Pod0.at(v6, 40_100 + round);
    cases.push(translated(
        "TCP A of no connection to a Service",
        Pod0,
        Pod1,
        segment(late, frontend, "A", (5, 5), b"late"),
        segment(late, web, "A", (5, 5), b"late"),
    ));
    cases
}

/// Packets that the node translates and masquerades: node ports, a Service from outside, and a pod that is its own backend.
fn by_the_node(v6: bool, round: u16) -> Vec<Case> {
    let node = SocketAddr::new(NODE[usize::from(v6)].parse().unwrap(), NODE_PORT);
    let frontend = SocketAddr::new(service(v6), WEB);
    let mut cases = Vec::new();
    let ways: [(&str, End, SocketAddr); 4] = [
        ("a node port", Out, node),
        ("a node port", Pod0, node),
        ("a Service", Pod1, frontend),
        ("its own node port", Pod1, node),
    ];
    for (number, (what, from, to)) in (0..).zip(ways) {
        for (kind, is_tcp) in [("UDP", false), ("TCP S", true), ("TCP A of no connection", true)] {
            let port = 41_000 + 1_000 * round + 10 * number + kind.len() as u16;
            let mark = format!("{kind} of {from:?} by {what} with {v6} in {round}, which nothing else ends with");
            let packet = match is_tcp {
                true => segment(from.at(v6, port), to, &kind[4..5], (5, 5), mark.as_bytes()),
                false => datagram(from.at(v6, port), to, mark.as_bytes()),
            };
            let arrival = Arrival::Ending(mark.into_bytes());
            cases.push(Case { arrival, ..Case::new(format!("{kind} to {what}"), from, Pod1, packet) });
        }
    }
    cases
}
