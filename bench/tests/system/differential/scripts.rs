//! The kinds of scripts.

use std::net::IpAddr;

use rand::Rng;
use rand::seq::SliceRandom;

use super::bytes::{ICMP, ICMPV6, Ip, SCTP, TCP, UDP, checksum, icmp, octets, sctp, tcp, udp};
use super::segments::{ACK, FIN, RST, SYN};
use super::steps::{Act, Hop, Maker, Shot, Step};
use super::{HOST_PORT, NODE_PORT, Reference, Translator, WEB, service};
use crate::system::no_policy::packets::End::{self, Outside as Out, Pod0, Pod1};

const ANOTHERS: &str = "ICMP errors about another's connections";
const GROUPS: &str = "groups and links";
const SOURCE_ROUTES: &str = "source routes";
const REDIRECTS: &str = "ICMP redirects";
const WRITTEN: &str = "options that routers act on";
const WHOLE: &str = "headers of IPv6 fragments that are whole, which connection tracking takes away";
const UNREADABLE: &str = "what cannot be read";
const TUNNELS: &str = "tunnels to a node, to a group or to a pod's link";

/// A connection's ends with their ports and next numbers.
pub(super) struct Talk {
    pub(super) ends: [End; 2],
    pub(super) addresses: [IpAddr; 2],
    pub(super) ports: [u16; 2],
    pub(super) next: [u32; 2],
}

impl Talk {
    pub(super) fn swapped<T: Copy>(of: [T; 2], by: usize) -> [T; 2] {
        if by == 0 { of } else { [of[1], of[0]] }
    }
}

impl Maker {
    pub(super) fn talk(&mut self, port: u16) -> Talk {
        let (from, to) = self.pair();
        let v6 = self.random.random();
        let ports = [self.next_port(), port];
        Talk { ends: [from, to], addresses: [from, to].map(|end| end.address(v6)), ports, next: self.random.random() }
    }

    pub(super) fn udp(&mut self, steps: &mut Vec<Step>) {
        let port = self.pick(&[53, 443, 7, 0, 3478]);
        let talk = self.talk(port);
        for _ in 0..self.random.random_range(1..6) {
            let by = self.random.random_range(0..2);
            let [from, to] = Talk::swapped(talk.addresses, by);
            let ends = Talk::swapped(talk.ends, by);
            let ip = self.ip(from, to, UDP);
            let length = self.longest();
            let mut bytes = udp(Talk::swapped(talk.ports, by), &self.bytes(length));
            let mut what = format!("UDP {} length {length}", talk.ports[0]);
            match self.random.random_range(0..20) {
                0 => {
                    // None (RFC 768; for tunnels also in IPv6, RFC 6935).
                    self.send(steps, (ends[0], ends[1]), &ip, &bytes, what + ", without sum");
                    continue;
                }
                1 => {
                    bytes[4..6].copy_from_slice(&self.random.random::<u16>().to_be_bytes());
                    what += ", of an odd length";
                }
                2 => {
                    bytes.truncate(self.random.random_range(0..8));
                    what += ", cut off";
                }
                _ => {}
            }
            self.send_summed(steps, (ends[0], ends[1]), &ip, (bytes, 6), what);
        }
    }

    /// An association whose ends use both of their addresses.
    pub(super) fn sctp(&mut self, steps: &mut Vec<Step>) {
        let talk = self.talk(9000);
        let tags: [u32; 2] = self.random.random();
        let chunks: Vec<(usize, u8)> = match self.random.random_range(0..3) {
            0 => vec![(0, 1), (1, 2), (0, 10), (1, 11), (0, 0), (1, 3), (0, 4), (1, 5), (0, 7), (1, 8), (0, 14)],
            1 => vec![(0, 4), (1, 5), (0, 0), (1, 6)],
            _ => (0..6).map(|_| (self.random.random_range(0..2), self.random.random())).collect(),
        };
        for (by, chunk) in chunks {
            let v6 = if self.one_in(3) { !talk.addresses[0].is_ipv6() } else { talk.addresses[0].is_ipv6() };
            let [from, to] = Talk::swapped(talk.ends, by);
            let ip = self.ip(from.address(v6), to.address(v6), SCTP);
            let tag = if chunk == 1 { 0 } else { tags[1 - by] };
            let length = self.random.random_range(0..40);
            let value = self.bytes(length);
            let mut bytes = sctp(Talk::swapped(talk.ports, by), tag, &[(chunk, &value)]);
            if self.one_in(20) {
                bytes.truncate(self.random.random_range(0..bytes.len()));
            }
            self.send(steps, (from, to), &ip, &bytes, format!("SCTP {} chunk {chunk}", talk.ports[0]));
        }
    }

    /// A message of the family's ICMP.
    fn message(&self, ip: &Ip, kind: u8, code: u8, rest: [u8; 4], payload: &[u8]) -> Vec<u8> {
        let bytes = icmp(kind, code, rest, payload);
        if ip.is_v6() { ip.summed(bytes, 2, false) } else { bytes }
    }

    fn icmp_ip(&mut self, from: End, to: End, v6: bool) -> Ip {
        self.ip(from.address(v6), to.address(v6), if v6 { ICMPV6 } else { ICMP })
    }

    /// Echoes, and messages that few know.
    pub(super) fn echo(&mut self, steps: &mut Vec<Step>) {
        let (from, to) = self.pair();
        let v6 = self.random.random();
        let rest: [u8; 4] = self.random.random();
        for _ in 0..self.random.random_range(1..5) {
            let ends = if self.random.random() { (from, to) } else { (to, from) };
            let ip = self.icmp_ip(ends.0, ends.1, v6);
            let kind = match (v6, self.random.random_range(0..4)) {
                (false, 0 | 1) => self.pick(&[0, 8]),
                (true, 0 | 1) => self.pick(&[128, 129]),
                (false, 2) => self.pick(&[13, 14, 15, 17, 42, 43]),
                (false, _) => self.pick(&[1, 2, 7, 19, 40, 100, 255]),
                (true, _) => self.pick(&[100, 138, 139, 144, 150, 200, 255]),
            };
            let length = self.longest();
            let payload = self.bytes(length);
            let mut bytes = self.message(&ip, kind, 0, rest, &payload);
            if self.one_in(20) {
                bytes.truncate(self.random.random_range(0..8));
            }
            self.send(steps, ends, &ip, &bytes, format!("ICMP type {kind} length {}", bytes.len()));
        }
    }

    /// A packet, and an error that its receiver, or another, says about it.
    pub(super) fn error(&mut self, steps: &mut Vec<Step>) {
        let talk = self.talk(53);
        let v6 = talk.addresses[0].is_ipv6();
        let ip = self.ip(talk.addresses[0], talk.addresses[1], UDP);
        let cause = match self.random.random_range(0..4) {
            0 => (TCP, tcp(talk.ports, talk.next, self.pick(&[SYN, ACK]), 100, &[], b"x"), 16),
            1 => (SCTP, sctp(talk.ports, 7, &[(0, b"data of SCTP")]), 8),
            _ => (UDP, udp(talk.ports, b"a question"), 6),
        };
        let ip = Ip { protocol: cause.0, ttl: 64, ..ip };
        let payload = if cause.0 == SCTP { cause.1 } else { ip.summed(cause.1, cause.2, false) };
        if !self.one_in(4) {
            self.send(steps, (talk.ends[0], talk.ends[1]), &ip, &payload, "the cause of an error".to_owned());
        }
        let mut quoted = ip.packet(&payload);
        let (mut exception, mut how) = (None, "");
        let head = if v6 { 40 } else { 20 };
        match self.random.random_range(0..9) {
            0 => quoted.truncate(head + 8),
            1 => {
                quoted.truncate(head + self.random.random_range(0..8));
                let is_tracked = self.setting.reference == Reference::Tracked;
                exception = is_tracked.then_some("ICMP errors that quote less than eight bytes of a transport header");
                how = ", cut off within ports";
            }
            2 => {
                quoted.truncate(self.random.random_range(0..head));
                (exception, how) = (Some(ANOTHERS), ", cut off within addresses");
            }
            3 => {
                // The last byte of its source.
                quoted[if v6 { 23 } else { 15 }] ^= 3;
                (exception, how) = (Some(ANOTHERS), ", of another's source");
            }
            4 => {
                quoted[if v6 { 39 } else { 19 }] ^= 3;
                how = ", of another's destination";
                // Whoever is no pod may be a router.
                exception = (talk.ends[1] != Out).then_some(ANOTHERS);
            }
            5 => {
                quoted[head] ^= 0x81;
                how = ", of another port";
            }
            6 => {
                quoted[if v6 { 6 } else { 9 }] = self.random.random();
                how = ", of another protocol";
            }
            _ => {}
        }
        let (kind, code) = match v6 {
            false => self.pick(&[(3, 0), (3, 1), (3, 3), (3, 4), (3, 13), (4, 0), (11, 0), (11, 1), (12, 0)]),
            true => self.pick(&[(1, 0), (1, 4), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1)]),
        };
        let rest = if (kind, code) == (3, 4) || v6 && kind == 2 { [0, 0, 5, 0x50] } else { [0; 4] };
        let ends = (talk.ends[1], talk.ends[0]);
        let error = self.icmp_ip(ends.0, ends.1, v6);
        let bytes = self.message(&error, kind, code, rest, &quoted);
        self.send(steps, ends, &error, &bytes, format!("ICMP error {kind}/{code} about {}{how}", ip.protocol));
        except(steps, exception);
        if !v6 && self.one_in(4) {
            let redirect = self.icmp_ip(ends.0, ends.1, false);
            let bytes = self.message(&redirect, 5, 1, [10, 244, 1, 1], &quoted);
            self.send(steps, ends, &redirect, &bytes, "ICMP redirect".to_owned());
            except(steps, Some(REDIRECTS));
        }
    }

    /// A datagram in fragments: in order or not, with gaps, copies and overlaps.
    pub(super) fn fragments(&mut self, steps: &mut Vec<Step>) {
        let talk = self.talk(7000);
        let protocol = self.pick(&[UDP, UDP, TCP, SCTP, 253]);
        let ip = self.ip(talk.addresses[0], talk.addresses[1], protocol);
        let length = 24 + self.longest();
        let data = self.bytes(length);
        let whole = match protocol {
            UDP => ip.summed(udp(talk.ports, &data), 6, false),
            TCP => ip.summed(tcp(talk.ports, talk.next, ACK, 9, &[], &data), 16, false),
            SCTP => sctp(talk.ports, 9, &[(0, &data)]),
            _ => data,
        };
        let units = whole.len().div_ceil(8);
        let mut cuts: Vec<usize> =
            (0..self.random.random_range(0..3)).map(|_| self.random.random_range(1..units)).collect();
        cuts.extend([0, units]);
        cuts.sort_unstable();
        cuts.dedup();
        let in_order: Vec<(usize, usize)> = cuts.windows(2).map(|cut| (cut[0], cut[1])).collect();
        let mut pieces = in_order.clone();
        match self.random.random_range(0..6) {
            0 => pieces.shuffle(&mut self.random),
            1 => drop(pieces.remove(0)),
            2 => pieces.push(pieces[0]),
            3 => {
                // Overlaps.
                let (from, to) = pieces[pieces.len() - 1];
                pieces.push((from.saturating_sub(1), to));
            }
            4 => pieces.reverse(),
            _ => {}
        }
        let options = if !ip.is_v6() && self.one_in(4) { vec![1, 1, 1, 0] } else { Vec::new() };
        let is_tracked = self.setting.reference == Reference::Tracked;
        let exception = (is_tracked && pieces != in_order).then_some("fragments out of order, or that overlap");
        let is_whole = self.setting.tracks() && ip.is_v6() && in_order.len() == 1;
        let exception = if is_whole { Some(WHOLE) } else { exception };
        for (from, to) in pieces {
            let bytes = &whole[from * 8..whole.len().min(to * 8)];
            let fragment = Some((from as u16, to < units));
            let ip = Ip { fragment, options: options.clone(), ..ip.clone() };
            self.send(
                steps,
                (talk.ends[0], talk.ends[1]),
                &ip,
                bytes,
                format!("fragment {from}..{to} of {units} units of protocol {protocol}"),
            );
            except(steps, exception);
        }
    }

    /// IPv4 options.
    pub(super) fn options(&mut self, steps: &mut Vec<Step>) {
        let talk = self.talk(53);
        let [from, to] = talk.ends;
        let ip = self.ip(from.address(false), to.address(false), UDP);
        let (options, what, exception): (&[u8], _, _) = match self.random.random_range(0..11) {
            0 => (&[1, 1, 1, 1], "no operation", None),
            1 => (&[148, 4, 0, 0], "router alert", None),
            2 => (&[7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0], "record route", Some(WRITTEN)),
            3 => (&[68, 12, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0], "timestamp", Some(WRITTEN)),
            4 => (&[131, 7, 4, 10, 244, 1, 1, 0], "loose source route", Some(SOURCE_ROUTES)),
            5 => (&[137, 7, 4, 10, 244, 1, 1, 0], "strict source route", Some(SOURCE_ROUTES)),
            6 => (&[158, 4, 1, 2], "an experiment", None),
            7 => (&[130, 4, 1, 2], "security", None),
            8 => (&[0, 9, 9, 9], "what follows the end", Some(WRITTEN)),
            9 => (&[134, 6, 0, 0, 0, 1, 0, 0], "a label", Some(WRITTEN)),
            _ => (&[9, 1, 0, 0], "of a wrong length", Some(UNREADABLE)),
        };
        let ip = Ip { options: options.to_vec(), ..ip };
        for _ in 0..2 {
            let ip = Ip { number: self.ip(ip.from, ip.to, UDP).number, ..ip.clone() };
            let bytes = udp(talk.ports, b"with options");
            self.send_summed(steps, (from, to), &ip, (bytes, 6), format!("option {what}"));
            except(steps, exception);
        }
    }

    /// IPv6 extension headers.
    pub(super) fn extensions(&mut self, steps: &mut Vec<Step>) {
        let talk = self.talk(53);
        let [from, to] = talk.ends;
        let plain = self.ip(from.address(true), to.address(true), UDP);
        let datagram = plain.summed(udp(talk.ports, b"with headers"), 6, false);
        let (first, headers, what, exception): (u8, Vec<u8>, _, _) = match self.random.random_range(0..16) {
            0 => (0, vec![UDP, 0, 1, 4, 0, 0, 0, 0], "hop by hop", None),
            1 => (0, vec![UDP, 0, 5, 2, 0, 0, 1, 0], "router alert", None),
            2 => (0, vec![UDP, 0, 0x1e, 4, 0, 0, 0, 0], "an option to skip", None),
            3 => (0, vec![UDP, 0, 0x5e, 4, 0, 0, 0, 0], "an option to discard", Some(WRITTEN)),
            4 => (60, vec![UDP, 0, 1, 4, 0, 0, 0, 0], "for the destination", None),
            5 => (43, vec![UDP, 0, 0, 0, 0, 0, 0, 0], "a route at its end", None),
            6 => (
                43,
                vec![UDP, 2, 0, 1, 0, 0, 0, 0].into_iter().chain([7; 16]).collect(),
                "a route",
                Some(SOURCE_ROUTES),
            ),
            7 => (
                51,
                vec![UDP, 4, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1].into_iter().chain([3; 12]).collect(),
                "authentication",
                None,
            ),
            8 => (50, vec![0, 0, 0, 9, 0, 0, 0, 1], "ESP", None),
            9 => (59, Vec::new(), "nothing that follows", None),
            10 => {
                (44, vec![UDP, 0, 0, 0, 0, 0, 0, 7], "a fragment that is whole", self.setting.tracks().then_some(WHOLE))
            }
            11 => (
                60,
                [60, 60, UDP].into_iter().flat_map(|next| [next, 0, 1, 4, 0, 0, 0, 0]).collect(),
                "three headers",
                None,
            ),
            12 => (self.pick(&[135, 139, 140]), vec![UDP, 0, 1, 4, 0, 0, 0, 0], "few know", Some(UNREADABLE)),
            13 => (self.pick(&[253, 254]), vec![UDP, 0, 1, 4, 0, 0, 0, 0], "of an experiment", None),
            14 => (
                60,
                [60; 40].into_iter().flat_map(|next| [next, 0, 1, 4, 0, 0, 0, 0]).collect(),
                "too many",
                Some(UNREADABLE),
            ),
            _ => (60, vec![UDP, 200, 1, 4, 0, 0, 0, 0], "longer than the packet", Some(UNREADABLE)),
        };
        let ip = Ip { protocol: first, ..plain };
        self.send(steps, (from, to), &ip, &[headers, datagram].concat(), format!("header {what}"));
        except(steps, exception);
    }

    /// To groups, to everybody and on the link.
    pub(super) fn groups(&mut self, steps: &mut Vec<Step>) {
        let from = self.pick(&[Pod0, Pod1, Out]);
        let (to, hop) = self.pick(&[
            ("224.0.0.251", Hop::Group),
            ("239.1.2.3", Hop::Group),
            ("255.255.255.255", Hop::Group),
            ("10.244.1.255", Hop::Group),
            ("ff02::fb", Hop::Group),
            ("ff05::2", Hop::Group),
            ("169.254.1.2", Hop::Gateway),
            ("10.244.1.255", Hop::Gateway),
            ("fe80::7", Hop::Gateway),
            ("127.0.0.1", Hop::Gateway),
            ("0.0.0.0", Hop::Gateway),
        ]);
        let to: IpAddr = to.parse().unwrap();
        let ip = self.ip(from.address(to.is_ipv6()), to, UDP);
        let payload = ip.summed(udp([5353, 5353], b"to a group"), 6, false);
        let shot = Shot { from, hop, packet: ip.packet(&payload), open_sum: None, exception: Some(GROUPS) };
        self.add(steps, &ip, shot, "UDP to a group or link".to_owned());
    }

    /// Other protocols, forged sources and wrong headers.
    pub(super) fn other(&mut self, steps: &mut Vec<Step>) {
        let (from, to) = self.pair();
        let v6 = self.random.random();
        let protocol = self.pick(&[47, 50, 89, 103, 112, 115, 253, 254, 4, 41, 46, 33, 136]);
        let ip = self.ip(from.address(v6), to.address(v6), protocol);
        let length = self.longest();
        let payload = self.bytes(length);
        match self.random.random_range(0..5) {
            0 => {
                let third = [Pod0, Pod1, Out].into_iter().find(|end| *end != from && *end != to).unwrap();
                let ip = Ip { from: third.address(v6), ..ip };
                self.send(steps, (from, to), &ip, &payload, "of another's source".to_owned());
            }
            1 if !v6 => {
                let mut packet = ip.packet(&payload);
                packet[10] ^= 1;
                let shot = Shot { from, hop: self.hop(from, to), packet, open_sum: None, exception: Some(UNREADABLE) };
                self.add(steps, &ip, shot, "of a wrong header checksum".to_owned());
            }
            2 => {
                // More than there is, or less.
                let mut packet = ip.packet(&payload);
                let at = if v6 { 4 } else { 2 };
                let said = u16::from_be_bytes([packet[at], packet[at + 1]])
                    .wrapping_add(self.random.random_range(0..80))
                    .wrapping_sub(40);
                packet[at..at + 2].copy_from_slice(&said.to_be_bytes());
                if !v6 {
                    packet[10..12].fill(0);
                    let sum = checksum(&[&packet[..20]]);
                    packet[10..12].copy_from_slice(&sum.to_be_bytes());
                }
                let is_whole = usize::from(said) + if v6 { 40 } else { 0 } <= packet.len() && (v6 || said >= 20);
                let exception = (!is_whole).then_some(UNREADABLE);
                let shot = Shot { from, hop: self.hop(from, to), packet, open_sum: None, exception };
                self.add(steps, &ip, shot, format!("protocol {protocol} of {length} that says to be {said}"));
            }
            _ => self.send(steps, (from, to), &ip, &payload, format!("protocol {protocol} length {length}")),
        }
        // A tunnel would take it apart.
        let is_tunnel = [47, 4, 41].contains(&protocol);
        if is_tunnel && from != Out && to == Out {
            except(steps, Some(TUNNELS));
        }
    }

    /// Asks for something that the node itself answers.
    pub(super) fn ask_the_node(&mut self, steps: &mut Vec<Step>) {
        let from = self.pick(&[Pod0, Pod1, Out]);
        let to: IpAddr = self.pick(&super::NODE).parse().unwrap();
        let v6 = to.is_ipv6();
        let own = from.address(v6);
        let port = self.next_port();
        for _ in 0..self.random.random_range(1..3) {
            let (protocol, payload, at, what) = match self.random.random_range(0..4) {
                0 => (UDP, udp([port, 9], b"nobody listens"), 6, "UDP"),
                1 => (TCP, tcp([port, 9], [77, 0], SYN, 1000, &[], b""), 16, "SYN"),
                2 => (TCP, tcp([port, 9], [77, 99], ACK, 1000, &[], b"x"), 16, "ACK"),
                _ => (
                    if v6 { ICMPV6 } else { ICMP },
                    icmp(if v6 { 128 } else { 8 }, 0, self.random.random(), b"?"),
                    2,
                    "echo",
                ),
            };
            let ip = Ip { class: 0, ttl: 64, ..self.ip(own, to, protocol) };
            let payload = if protocol == ICMP { payload } else { ip.summed(payload, at, false) };
            let shot = Shot { from, hop: Hop::Gateway, packet: ip.packet(&payload), open_sum: None, exception: None };
            self.add(steps, &ip, shot, format!("{what} to the node"));
        }
    }

    /// To a Service or a node port, and the answers of the pod behind it.
    pub(super) fn service(&mut self, steps: &mut Vec<Step>) {
        let v6: bool = self.random.random();
        let node: IpAddr = super::NODE[usize::from(v6)].parse().unwrap();
        let (from, frontend, is_masqueraded) = match (self.setting.translator, self.random.random_range(0..4)) {
            (Translator::HostPort, 0) => (Pod1, (node, HOST_PORT), true),
            (Translator::HostPort, 1) => (Pod0, (node, HOST_PORT), false),
            (Translator::HostPort, _) => (Out, (node, HOST_PORT), false),
            (_, 0) => (Pod0, (node, NODE_PORT), true),
            (_, 1) => (Out, (node, NODE_PORT), true),
            (_, 2) => (Pod1, (service(v6), WEB), true),
            _ => (Pod0, (service(v6), WEB), false),
        };
        let (port, client, backend) = (self.next_port(), from.address(v6), Pod1.address(v6));
        let (mut own, mut other): (u32, u32) = self.random.random();
        let plan: &[(bool, u8, usize)] = match self.random.random_range(0..4) {
            0 => &[(true, ACK, 7), (true, ACK, 9)],
            1 => &[
                (true, SYN, 0),
                (false, SYN | ACK, 0),
                (true, ACK, 0),
                (true, ACK, 90),
                (false, ACK, 300),
                (false, FIN | ACK, 0),
                (true, ACK, 0),
                (true, FIN | ACK, 0),
                (false, ACK, 0),
            ],
            2 => &[(true, SYN, 0), (false, SYN | ACK, 0), (true, ACK, 0), (true, RST, 0)],
            _ => &[],
        };
        if plan.is_empty() {
            for is_sent in [true, true, false, true] {
                let (ends, ip, ports) = match is_sent {
                    true => ((from, Pod1), self.ip(client, frontend.0, UDP), [port, frontend.1]),
                    false if is_masqueraded => continue,
                    false => ((Pod1, from), self.ip(backend, client, UDP), [53, port]),
                };
                let what = format!("UDP {port} of a Service");
                self.by_gateway(steps, ends, &ip, (udp(ports, b"question or answer"), 6), what);
            }
        }
        for &(is_sent, flags, length) in plan {
            let payload = self.bytes(length);
            let (ends, ip, ports, numbers) = match is_sent {
                true => ((from, Pod1), self.ip(client, frontend.0, TCP), [port, frontend.1], [own, other]),
                false => ((Pod1, from), self.ip(backend, client, TCP), [8080, port], [other, own]),
            };
            *(if is_sent { &mut own } else { &mut other }) += length as u32 + u32::from(flags & (SYN | FIN) != 0);
            if is_sent || !is_masqueraded {
                let what = format!("TCP {port} flags {flags:#x} of a Service");
                self.by_gateway(steps, ends, &ip, (tcp(ports, numbers, flags, 5000, &[], &payload), 16), what);
            }
        }
    }

    /// Sends by the gateway, which is where an address outside of the link is reached.
    fn by_gateway(
        &mut self,
        steps: &mut Vec<Step>,
        ends: (End, End),
        ip: &Ip,
        payload: (Vec<u8>, usize),
        what: String,
    ) {
        let ip = Ip { ttl: 64, ..ip.clone() };
        self.send_summed(steps, ends, &ip, payload, what);
        if let Some(Step { act: Act::Send(shot), .. }) = steps.last_mut() {
            shot.hop = Hop::Gateway;
        }
    }
}

/// The last packet may be kept back for this.
pub(super) fn except(steps: &mut [Step], reason: Option<&'static str>) {
    if let Some(Step { act: Act::Send(shot), .. }) = steps.last_mut() {
        shot.exception = shot.exception.or(reason);
    }
}

/// The MAC of a packet's group (RFC 1112 section 6.4, RFC 2464 section 7).
pub(super) fn group_mac(packet: &[u8]) -> [u8; 6] {
    match packet[0] >> 4 {
        4 if packet[16] & 0xf0 == 0xe0 => [1, 0, 0x5e, packet[17] & 0x7f, packet[18], packet[19]],
        4 => [0xff; 6],
        _ => [0x33, 0x33, packet[36], packet[37], packet[38], packet[39]],
    }
}

/// Whether a packet's source is the node's.
pub(super) fn is_of_node(packet: &[u8]) -> bool {
    let source = if packet[0] >> 4 == 4 { &packet[12..16] } else { &packet[8..24] };
    super::NODE.iter().any(|node| octets(node.parse().unwrap()) == source)
}
