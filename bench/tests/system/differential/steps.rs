//! Random histories of packets: scripts of connections and odd packets, which are mixed.

use std::net::IpAddr;

use rand::Rng;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;

use super::bytes::{Ip, is_of_connection};
use super::{Event, Reference, Setting, Translator};
use crate::system::no_policy::packets::End::{self, Outside as Out, Pod0, Pod1};

/// The MAC that a frame is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Hop {
    Gateway,
    /// A neighbour on the same bridge.
    Peer(End),
    /// That of its group, or everybody's.
    Group,
}

/// A packet on its sender's wire.
#[derive(Clone, Debug)]
pub(super) struct Shot {
    pub(super) from: End,
    pub(super) hop: Hop,
    pub(super) packet: Vec<u8>,
    /// The device is to write its transport checksum, which begins here, at this offset.
    pub(super) open_sum: Option<(u16, u16)>,
    /// Why a node with Penstock may keep it back.
    pub(super) exception: Option<&'static str>,
}

#[derive(Clone, Debug)]
pub(super) enum Act {
    Send(Shot),
    Change(Event),
}

/// One step of a history. A step of a script needs no other script's.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) number: u16,
    pub(super) script: usize,
    pub(super) what: String,
    pub(super) act: Act,
}

/// Adds the steps of a script.
type Kind = fn(&mut Maker, &mut Vec<Step>);

/// Makes histories from random numbers.
pub(super) struct Maker {
    pub(super) random: SmallRng,
    pub(super) setting: Setting,
    number: u16,
    port: u16,
    script: usize,
}

impl Maker {
    pub(super) fn new(random: SmallRng, setting: Setting) -> Self {
        Self { random, setting, number: 1, port: 20_000, script: 0 }
    }

    /// A history of so many scripts; each event comes somewhere between their steps.
    pub(super) fn history(&mut self, scripts: usize, events: &[Event]) -> Vec<Step> {
        let mut left: Vec<std::vec::IntoIter<Step>> = (0..scripts).map(|_| self.script().into_iter()).collect();
        let mut history = Vec::new();
        while !left.is_empty() {
            let chosen = self.random.random_range(0..left.len());
            match left[chosen].next() {
                Some(step) => history.push(step),
                None => drop(left.swap_remove(chosen)),
            }
        }
        for event in events {
            let at = self.random.random_range(0..history.len());
            let (number, what) = (self.next_number(), format!("{event:?}"));
            history.insert(at, Step { number, script: usize::MAX, what, act: Act::Change(*event) });
        }
        history
    }

    fn script(&mut self) -> Vec<Step> {
        self.script += 1;
        let kinds: &[(u32, Kind)] = &[
            (10, Self::tcp),
            (4, Self::udp),
            (3, Self::sctp),
            (3, Self::echo),
            (4, Self::error),
            (5, Self::fragments),
            (4, Self::options),
            (3, Self::extensions),
            (2, Self::groups),
            (2, Self::other),
            (2, Self::ask_the_node),
            (if self.setting.translator == Translator::Nobody { 0 } else { 10 }, Self::service),
        ];
        let (_, make) = kinds.choose_weighted(&mut self.random, |kind| kind.0).unwrap();
        let mut steps = Vec::new();
        make(self, &mut steps);
        steps
    }

    fn next_number(&mut self) -> u16 {
        self.number = self.number.checked_add(1).unwrap_or(1);
        self.number
    }

    pub(super) fn next_port(&mut self) -> u16 {
        self.port = if self.port > 60_000 { 20_000 } else { self.port + 1 };
        self.port
    }

    pub(super) fn one_in(&mut self, count: u32) -> bool {
        self.random.random_ratio(1, count)
    }

    pub(super) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        *of.choose(&mut self.random).unwrap()
    }

    pub(super) fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.random.random()).collect()
    }

    /// A sender and a receiver.
    pub(super) fn pair(&mut self) -> (End, End) {
        self.pick(&[(Pod0, Pod1), (Pod1, Pod0), (Pod0, Out), (Out, Pod0), (Out, Pod1), (Pod1, Out)])
    }

    /// The longest packet that a script makes, less some room for headers.
    pub(super) fn longest(&mut self) -> usize {
        let mtu = self.setting.mtu.unwrap_or(1500) as usize;
        let most = if self.one_in(8) { mtu } else { 300 };
        self.random.random_range(0..most - 150)
    }

    pub(super) fn ip(&mut self, from: IpAddr, to: IpAddr, protocol: u8) -> Ip {
        // A router looks at the TTL before it drops what is invalid.
        let ttl = if self.setting.reference == Reference::Plain && self.one_in(12) {
            self.pick(&[0, 1, 2, 3, 255])
        } else {
            64
        };
        let class = if self.one_in(3) { self.random.random() } else { 0 };
        let number = self.next_number();
        let dont_fragment = self.random.random();
        Ip { from, to, protocol, number, ttl, class, dont_fragment, options: Vec::new(), fragment: None }
    }

    /// How a packet leaves its sender.
    pub(super) fn hop(&mut self, from: End, to: End) -> Hop {
        let is_neighbour = self.setting.is_bridged && from != Out && to != Out;
        if is_neighbour && !self.one_in(6) { Hop::Peer(to) } else { Hop::Gateway }
    }

    /// Adds a packet to a script.
    pub(super) fn send(
        &mut self,
        steps: &mut Vec<Step>,
        (from, to): (End, End),
        ip: &Ip,
        payload: &[u8],
        what: String,
    ) {
        let hop = self.hop(from, to);
        let is_kept = (1..254).contains(&ip.ttl) || !matches!(hop, Hop::Peer(_)) || !is_of_connection(ip.protocol);
        let exception =
            (!is_kept).then_some("the longest TTL, or none, by the node's stack between two pods on a bridge");
        let exception = exception.or_else(|| exception_of(from, ip));
        let shot = Shot { from, hop, packet: ip.packet(payload), open_sum: None, exception };
        self.add(steps, ip, shot, what);
    }

    pub(super) fn add(&mut self, steps: &mut Vec<Step>, ip: &Ip, shot: Shot, what: String) {
        let family = if ip.is_v6() { "IPv6" } else { "IPv4" };
        let what = format!("{:?} to {} by {:?}, {family} {what}, ttl {}", shot.from, ip.to, shot.hop, ip.ttl);
        steps.push(Step { number: ip.number, script: self.script, what, act: Act::Send(shot) });
    }

    /// A packet whose transport checksum is right, wrong, or left to the device.
    pub(super) fn send_summed(
        &mut self,
        steps: &mut Vec<Step>,
        ends: (End, End),
        ip: &Ip,
        (payload, at): (Vec<u8>, usize),
        what: String,
    ) {
        let is_open = self.one_in(4) && payload.len() > at + 1;
        // The kernel's tracking reads checksums, and translates no packet with a wrong one.
        let reads_sums = self.setting.reference == Reference::Tracked;
        let is_wrong = !reads_sums && !is_open && self.one_in(16);
        let mut payload = if payload.len() > at + 1 { ip.summed(payload, at, is_open) } else { payload };
        if is_wrong && payload.len() > at {
            payload[at] ^= 0x55;
        }
        let what = what + if is_open { ", open sum" } else { "" } + if is_wrong { ", wrong sum" } else { "" };
        self.send(steps, ends, ip, &payload, what);
        let Some(Step { act: Act::Send(shot), .. }) = steps.last_mut() else { return };
        if is_open {
            shot.open_sum = Some(((14 + shot.packet.len() - payload.len()) as u16, at as u16));
        }
    }
}

/// Why the sender's address is not allowed.
fn exception_of(from: End, ip: &Ip) -> Option<&'static str> {
    (ip.from != from.address(ip.is_v6())).then_some("forged sources")
}
