//! Fragments that arrive before the first of their datagram, to a pod that policy selects.

use std::net::IpAddr;
use std::time::Duration;

use crate::fixture::{Fixture, pods, policy};
use crate::forger::{Forger, count, count_to};

/// `pod-1` admits only `pod-0`.
const ONLY_POD_0: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
const PORT: u16 = 7000;
/// Bytes of a datagram and of its fragments.
const LONG: usize = 1400;
const PART: usize = 512;

/// The fragments of a datagram that is sent from one address to another, the last one first.
fn reversed(forger: &Forger, from: IpAddr, to: IpAddr, payload: &[u8], id: u16) -> Vec<Vec<u8>> {
    let whole = forger.udp((from, 40_000), (to, PORT), payload);
    let (headers, content) = whole.split_at(if from.is_ipv4() { 34 } else { 54 });
    let fragment = |(index, part): (usize, &[u8])| {
        let (offset, more) = ((index * PART) as u16, (index + 1) * PART < content.len());
        let mut frame = headers.to_vec();
        if from.is_ipv4() {
            frame[16..18].copy_from_slice(&(20 + part.len() as u16).to_be_bytes());
            frame[18..20].copy_from_slice(&id.to_be_bytes());
            frame[20..22].copy_from_slice(&((offset / 8) | (u16::from(more) << 13)).to_be_bytes());
            let header = etherparse::Ipv4Header::from_slice(&frame[14..]).unwrap().0;
            frame[24..26].copy_from_slice(&header.calc_header_checksum().to_be_bytes());
        } else {
            const FRAGMENT: u8 = 44;
            frame[18..20].copy_from_slice(&(8 + part.len() as u16).to_be_bytes());
            let next = std::mem::replace(&mut frame[20], FRAGMENT);
            let ([a, b], [c, d]) = ((offset | u16::from(more)).to_be_bytes(), id.to_be_bytes());
            frame.extend([next, 0, a, b, 0, 0, c, d]);
        }
        [&frame, part].concat()
    };
    content.chunks(PART).enumerate().map(fragment).rev().collect()
}

#[test]
fn fragments_before_their_first_pass_where_policy_allows_it() {
    let fixture = Fixture::of(&(pods(3) + &policy("only", "pod-1", ONLY_POD_0)), |_, _| {});
    let (allowed, denied, to) = (fixture.site("test/pod-0"), fixture.site("test/pod-2"), fixture.site("test/pod-1"));
    let mut forgers = ["test/pod-0", "test/pod-2"].map(|pod| Forger::of(&fixture, pod));
    let mut buffer = [0; 2 * LONG];
    for v6 in [false, true] {
        let there = to.address(v6).unwrap();
        let sink = to.namespace.udp((there, PORT)).unwrap();
        sink.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let mut rounds = 0;
        loop {
            rounds += 1;
            assert!(rounds < 6, "v6 {v6}: {:#?}", fixture.statistics());
            let payload = [rounds as u8; LONG];
            let frames = reversed(&forgers[0], allowed.address(v6).unwrap(), there, &payload, rounds);
            assert_eq!(frames.len(), 3);
            frames.iter().for_each(|frame| forgers[0].send(frame));
            // On a machine without time a fragment may be held for too long.
            if sink.recv(&mut buffer).is_ok_and(|length| buffer[..length] == payload) {
                break;
            }
        }
        if rounds == 1 && !v6 {
            assert_eq!(count(&fixture, "test/pod-0", "fragment"), 0, "none counts as dropped");
        }
        let frames = reversed(&forgers[1], denied.address(v6).unwrap(), there, &[9; LONG], 9);
        frames.iter().for_each(|frame| forgers[1].send(frame));
        let of_families = 1 + u64::from(v6);
        assert_eq!(count_to(&fixture, "test/pod-2", "ingress_denied", of_families), of_families);
        assert_eq!(count_to(&fixture, "test/pod-2", "fragment", 2 * of_families), 2 * of_families, "each once");
        sink.set_nonblocking(true).unwrap();
        assert!(sink.recv(&mut buffer).is_err(), "what policy denies does not arrive");
    }
}
