//! Address blocks that excepts, or other blocks, make pointless.

use std::collections::BTreeMap;

use ipnet::IpNet;
use penstock_policy::model::{IpBlock, Peer};

use super::FindingKind;

/// Whether the excepts of a block leave nothing of it.
pub(super) fn is_covered(block: &IpBlock) -> bool {
    // Neighbours merge, so that together they are the block itself if they cover it.
    IpNet::aggregate(&block.except).contains(&block.cidr)
}

/// The blocks among a rule's peers, found by their addresses: a list of a country's networks has tens of thousands.
pub(super) struct RuleBlocks<'a> {
    peers: &'a [Peer],
    /// By the peers' indexes.
    blocks: Networks,
    /// The excepts of each block, by its peer's index.
    excepts: BTreeMap<usize, Networks>,
}

impl<'a> RuleBlocks<'a> {
    pub(super) fn of(peers: &'a [Peer]) -> Self {
        let blocks = || peers.iter().enumerate().filter_map(|(place, peer)| Some((place, block_of(peer)?)));
        Self {
            peers,
            blocks: blocks().map(|(place, block)| (block.cidr, place)).collect(),
            excepts: blocks()
                .map(|(place, block)| (place, (block.except.iter().copied().zip(0..)).collect()))
                .collect(),
        }
    }

    /// Findings about the block at an index of the peers: the index of the except concerned, if any, and the message.
    pub(super) fn pointless(&self, place: usize) -> Vec<(Option<usize>, FindingKind, String)> {
        let Some(block) = block_of(&self.peers[place]) else { return Vec::new() };
        if is_covered(block) {
            let message = format!("its excepts cover all of {}: no address can match", block.cidr);
            return vec![(None, FindingKind::NeverMatches, message)];
        }
        let mut found = Vec::new();
        let mut around = self.blocks.around(block.cidr).filter(|&other| other != place);
        if let Some(other) =
            around.find(|&other| self.is_within(place, other) && (other < place || !self.is_within(other, place)))
        {
            found.push((
                None,
                FindingKind::Shadowed,
                format!("{} is in the block of peer {other} already", block.cidr),
            ));
        }
        for (i, except) in block.except.iter().enumerate() {
            let is_wider = |j: &usize| *j != i && (block.except[*j] != *except || *j < i);
            let message = match self.excepts[&place].around(*except).find(is_wider) {
                Some(wider) => format!("{except} is in except {} already", block.except[wider]),
                None => {
                    let mut others = self.blocks.around(*except).filter(|&other| other != place);
                    let Some(other) = others.find(|other| !self.excepts[other].overlap(*except)) else { continue };
                    format!("{except} has no effect: the block of peer {other} of the same rule has it")
                }
            };
            found.push((Some(i), FindingKind::Shadowed, message));
        }
        found
    }

    /// Whether all that a block matches is matched by another, whose network is around its own.
    fn is_within(&self, place: usize, outer: usize) -> bool {
        let (Some(block), Some(outer)) = (block_of(&self.peers[place]), block_of(&self.peers[outer])) else {
            return false;
        };
        let excepted = |except: &IpNet| {
            !(except.contains(&block.cidr) || block.cidr.contains(except))
                || self.excepts[&place].around(*except).next().is_some()
        };
        outer.cidr.contains(&block.cidr) && outer.except.iter().all(excepted)
    }
}

fn block_of(peer: &Peer) -> Option<&IpBlock> {
    match peer {
        Peer::IpBlock(block) => Some(block),
        _ => None,
    }
}

struct Networks(BTreeMap<IpNet, Vec<usize>>);

impl FromIterator<(IpNet, usize)> for Networks {
    fn from_iter<I: IntoIterator<Item = (IpNet, usize)>>(networks: I) -> Self {
        let mut found = BTreeMap::<IpNet, Vec<usize>>::new();
        networks.into_iter().for_each(|(network, index)| found.entry(network.trunc()).or_default().push(index));
        Self(found)
    }
}

impl Networks {
    /// The indexes of those that contain a network, ascending.
    fn around(&self, network: IpNet) -> impl Iterator<Item = usize> {
        let wider = |length| IpNet::new(network.addr(), length).ok().and_then(|wider| self.0.get(&wider.trunc()));
        let mut found: Vec<usize> = (0..=network.prefix_len()).filter_map(wider).flatten().copied().collect();
        found.sort_unstable();
        found.into_iter()
    }

    /// Whether one of them has an address of a network.
    fn overlap(&self, network: IpNet) -> bool {
        // The order is by first address, then by length: what is inside comes next.
        let next = self.0.range(network.trunc()..).next();
        next.is_some_and(|(next, _)| network.contains(next)) || self.around(network).next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use nix::time::{ClockId, clock_gettime};
    use proptest::prelude::*;

    use super::*;

    fn block(cidr: &str, except: &[&str]) -> IpBlock {
        IpBlock { cidr: cidr.parse().unwrap(), except: except.iter().map(|net| net.parse().unwrap()).collect() }
    }

    fn said(blocks: &[IpBlock]) -> Vec<(usize, Option<usize>)> {
        let peers: Vec<Peer> = blocks.iter().cloned().map(Peer::IpBlock).collect();
        let blocks = RuleBlocks::of(&peers);
        let of = |place| blocks.pointless(place).into_iter().map(move |(except, ..)| (place, except));
        (0..peers.len()).flat_map(of).collect()
    }

    #[test]
    fn excepts_that_leave_nothing_are_reported() {
        assert!(is_covered(&block("10.0.0.0/8", &["10.0.0.0/9", "10.128.0.0/9"])));
        assert!(is_covered(&block("10.0.0.0/8", &["10.64.0.0/10", "10.0.0.0/10", "10.128.0.0/10", "10.192.0.0/10"])));
        assert!(!is_covered(&block("10.0.0.0/8", &["10.0.0.0/9", "10.128.0.0/10"])));
        assert!(!is_covered(&block("10.0.0.0/8", &[])));
    }

    #[test]
    fn blocks_and_excepts_without_effect_are_reported() {
        assert_eq!(said(&[block("10.0.0.0/8", &[]), block("10.1.0.0/16", &[])]), [(1, None)]);
        assert_eq!(said(&[block("10.0.0.0/8", &[]), block("10.0.0.0/8", &[])]), [(1, None)], "of two equal ones, one");
        assert_eq!(said(&[block("10.0.0.0/8", &["10.1.0.0/16"]), block("10.1.2.0/24", &[])]), [], "a part comes back");
        assert_eq!(said(&[block("10.0.0.0/8", &["10.1.0.0/16"]), block("10.1.0.0/16", &[])]), [(0, Some(0))]);
        assert_eq!(said(&[block("10.0.0.0/8", &["10.1.0.0/16", "10.1.2.0/24"])]), [(0, Some(1))]);
        assert_eq!(said(&[block("10.0.0.0/8", &["10.1.0.0/16", "10.1.0.0/16"])]), [(0, Some(1))]);
        assert_eq!(said(&[block("10.0.0.0/8", &["10.1.0.0/16"]), block("10.0.0.0/8", &["10.1.0.0/16"])]), [(1, None)]);
    }

    /// By the thread's own processor time, which a busy machine does not add to.
    #[test]
    fn sixty_thousand_excepts_of_a_block_are_no_long_work() {
        let worked = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
        let net = |number: u32| IpNet::new(Ipv4Addr::from(10 << 24 | number << 4).into(), 28).unwrap();
        let wide =
            |count| IpBlock { cidr: "10.0.0.0/8".parse().unwrap(), except: (0..count).chain([7]).map(net).collect() };
        let before = worked();
        assert_eq!(said(&[wide(60_000)]), [(0, Some(60_000))], "the one that is there twice");
        let (ours, before) = (worked() - before, worked());
        assert_eq!(naive(&[wide(3_000)]), [(0, Some(3_000))]);
        let naive = worked() - before;
        // Comparing each with each takes four hundred times as long for twenty times as many.
        assert!(ours < naive * 20, "{ours:?}, and {naive:?} for a twentieth of them by comparing each with each");
    }

    /// Finds the same as [`RuleBlocks`], by comparing each with each.
    fn naive(blocks: &[IpBlock]) -> Vec<(usize, Option<usize>)> {
        let overlap = |a: &IpNet, b: &IpNet| a.contains(b) || b.contains(a);
        let is_within = |block: &IpBlock, outer: &IpBlock| {
            let excepted =
                |except: &IpNet| !overlap(except, &block.cidr) || block.except.iter().any(|own| own.contains(except));
            outer.cidr.contains(&block.cidr) && outer.except.iter().all(excepted)
        };
        let mut found = Vec::new();
        for (place, block) in blocks.iter().enumerate() {
            if is_covered(block) {
                found.push((place, None));
                continue;
            }
            let others = || blocks.iter().enumerate().filter(|(other, _)| *other != place);
            if others().any(|(other, outer)| is_within(block, outer) && (other < place || !is_within(outer, block))) {
                found.push((place, None));
            }
            for (i, except) in block.except.iter().enumerate() {
                let is_wider =
                    |(j, wider): (usize, &IpNet)| j != i && wider.contains(except) && (wider != except || j < i);
                let has_all = |(_, outer): (usize, &IpBlock)| {
                    outer.cidr.contains(except) && !outer.except.iter().any(|other| overlap(other, except))
                };
                if block.except.iter().enumerate().any(is_wider) || others().any(has_all) {
                    found.push((place, Some(i)));
                }
            }
        }
        found
    }

    fn network() -> impl Strategy<Value = IpNet> {
        (0..16u8, 24..=32u8)
            .prop_map(|(last, length)| IpNet::new([10, 0, 0, last * 16].into(), length).unwrap().trunc())
    }

    proptest! {
        #[test]
        fn what_is_pointless_is_found_as_by_comparing_all(
            blocks in prop::collection::vec((network(), prop::collection::vec(network(), 0..5)), 0..5),
        ) {
            let blocks: Vec<IpBlock> = blocks.into_iter().map(|(cidr, except)| IpBlock { cidr, except }).collect();
            prop_assert_eq!(said(&blocks), naive(&blocks));
        }
    }
}
