//! From an address to the row of rules whose address blocks contain it.

use std::sync::Arc;

use ipnet::IpNet;

use crate::packet::Address;

use super::rows::{Row, RowsBuilder, RuleSet, RuleSweep};

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct AddressBlock {
    pub cidr: IpNet,
    pub except: Vec<IpNet>,
}

/// Marks an entry as a node index rather than a row.
const NODE: u32 = 1 << 31;
const MAX_STRIDE: u32 = 8;

/// Blocks and excepts resolved into rows: a trie over the points of the address line at which the set of rules changes.
///
/// Each node skips the bits that all changes below it have in common and then branches on as many bits as needed to
/// separate the changes. So its size is linear in the number of blocks, and its depth is one or two for most tables.
/// Both families share the line: IPv4 is mapped into it as IPv4-mapped IPv6.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    root: u32,
    nodes: Arc<[TrieNode]>,
    entries: Arc<[u32]>,
}

/// A trie under construction.
#[derive(Default)]
struct Builder {
    nodes: Vec<TrieNode>,
    entries: Vec<u32>,
}

#[derive(Clone, Debug)]
struct TrieNode {
    /// All addresses under this node start with the first `128 - shift - stride` bits of this.
    prefix: u128,
    /// The row of addresses of the parent's entry before those of this node.
    below: Row,
    /// The row of addresses of the parent's entry after those of this node.
    above: Row,
    /// Index of its first entry.
    base: u32,
    /// Number of bits below those it branches on.
    shift: u8,
    /// Number of bits it branches on.
    stride: u8,
}

impl Blocks {
    #[inline]
    pub(super) fn row(&self, address: Address) -> Row {
        let mut entry = self.root;
        while entry & NODE != 0 {
            let node = &self.nodes[(entry & !NODE) as usize];
            let path = (address.bits() ^ node.prefix) >> node.shift;
            if path >> node.stride != 0 {
                return if address.bits() < node.prefix { node.below } else { node.above };
            }
            entry = self.entries[node.base as usize + path as usize];
        }
        entry
    }

    /// Resolves blocks to rows: `any` are the rules that match every address, `blocks` those of the other rules.
    pub(super) fn build(any: &RuleSet, blocks: &[(&AddressBlock, u32)], rows: &mut RowsBuilder) -> Self {
        let (first, points) = changes(any, blocks, rows);
        let mut trie = Builder::default();
        let root = trie.subtree(first, &points);
        Self { root, nodes: trie.nodes.into(), entries: trie.entries.into() }
    }

    /// Size of the trie in bytes.
    pub(super) fn size(&self) -> usize {
        size_of_val(&*self.nodes) + size_of_val(&*self.entries)
    }
}

impl Builder {
    /// The entry for addresses with row `first` up to the first of `points`, and from each point on its row.
    fn subtree(&mut self, first: Row, points: &[(u128, Row)]) -> u32 {
        let (Some((lowest, _)), Some((highest, above))) = (points.first(), points.last()) else { return first };
        self.node(first, points, (*lowest - 1, *highest), *above)
    }

    /// A node for the smallest prefix that contains both `ends`: the last address before the first change, and the
    /// first address after the last one.
    fn node(&mut self, first: Row, points: &[(u128, Row)], ends: (u128, u128), above: Row) -> u32 {
        let rest = u128::BITS - (ends.0 ^ ends.1).leading_zeros();
        let wanted = usize::BITS - points.len().leading_zeros();
        let stride = wanted.clamp(1, MAX_STRIDE).min(rest);
        let shift = rest - stride;
        let prefix = ends.1.checked_shr(rest).and_then(|bits| bits.checked_shl(rest)).unwrap_or(0);
        let (number, base) = (self.nodes.len(), self.entries.len());
        self.nodes.push(TrieNode {
            prefix,
            below: first,
            above,
            base: base as u32,
            shift: shift as u8,
            stride: stride as u8,
        });
        self.entries.resize(base + (1 << stride), 0);
        let (mut row, mut rest) = (first, points);
        for slot in 0..1u128 << stride {
            let start = prefix | slot << shift;
            if let Some(((_, changed), later)) = rest.split_first().filter(|((point, _), _)| *point == start) {
                (row, rest) = (*changed, later);
            }
            let end = start | ((1u128 << shift) - 1);
            let (inside, later) = rest.split_at(rest.partition_point(|(point, _)| *point <= end));
            self.entries[base + slot as usize] = self.subtree(row, inside);
            row = inside.last().map_or(row, |(_, row)| *row);
            rest = later;
        }
        NODE | number as u32
    }
}

/// `::ffff:0:0/96`, the IPv4 part of the line: no IPv6 prefix extends into it.
const MAPPED: IpNet = IpNet::V6(ipnet::Ipv6Net::new_assert(std::net::Ipv6Addr::from_bits(0xffff_0000_0000), 96));

/// First and last address of a prefix.
fn bounds(prefix: &IpNet) -> (u128, u128) {
    (Address::from(prefix.network()).bits(), Address::from(prefix.broadcast()).bits())
}

/// An event at a point of the line, in the order in which simultaneous events apply.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Boundary {
    BlockBegins,
    ExceptBegins,
    ExceptEnds,
    BlockEnds,
}

/// The row of the first address, and each point at which the row changes.
fn changes(any: &RuleSet, blocks: &[(&AddressBlock, u32)], rows: &mut RowsBuilder) -> (Row, Vec<(u128, Row)>) {
    let mut events: Vec<(u128, Boundary, usize)> = Vec::new();
    let mut add = |prefix: &IpNet, begins: Boundary, ends: Boundary, block: usize| {
        let (first, last) = bounds(prefix);
        events.push((first, begins, block));
        events.extend(last.checked_add(1).map(|end| (end, ends, block)));
    };
    for (index, (block, _)) in blocks.iter().enumerate() {
        if block.except.iter().chain([&MAPPED]).any(|except| except.contains(&block.cidr)) {
            continue;
        }
        add(&block.cidr, Boundary::BlockBegins, Boundary::BlockEnds, index);
        for except in block.except.iter().chain([&MAPPED]).filter(|except| block.cidr.contains(*except)) {
            add(except, Boundary::ExceptBegins, Boundary::ExceptEnds, index);
        }
    }
    events.sort_unstable();
    let mut sweep = RuleSweep::default();
    let mut excepts = vec![0u32; blocks.len()];
    let mut row = |sweep: &RuleSweep| {
        let mut rules = sweep.current().clone();
        rules.union_with(any);
        rows.row(&rules)
    };
    let mut first = row(&sweep);
    let (mut points, mut last) = (Vec::new(), first);
    for same_place in events.chunk_by(|a, b| a.0 == b.0) {
        for (_, event, block) in same_place {
            step(&mut sweep, *event, &mut excepts[*block], blocks[*block].1);
        }
        let here = row(&sweep);
        if same_place[0].0 == 0 {
            (first, last) = (here, here);
        } else if here != last {
            points.push((same_place[0].0, here));
            last = here;
        }
    }
    (first, points)
}

/// A block's rule applies inside it except within its own excepts.
fn step(sweep: &mut RuleSweep, event: Boundary, excepts: &mut u32, rule: u32) {
    match event {
        Boundary::BlockBegins => sweep.begin_range(rule),
        Boundary::ExceptBegins => {
            *excepts += 1;
            if *excepts == 1 {
                sweep.end_range(rule);
            }
        }
        Boundary::ExceptEnds => {
            *excepts -= 1;
            if *excepts == 0 {
                sweep.begin_range(rule);
            }
        }
        Boundary::BlockEnds => sweep.end_range(rule),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;

    fn build(blocks: &[(AddressBlock, u32)]) -> (Blocks, super::super::rows::Rows) {
        let mut builder = RowsBuilder::new(70);
        let borrowed: Vec<_> = blocks.iter().map(|(block, rule)| (block, *rule)).collect();
        let trie = Blocks::build(&RuleSet::default(), &borrowed, &mut builder);
        (trie, builder.finish())
    }

    fn block(cidr: &str, except: &[&str]) -> AddressBlock {
        let parse = |text: &str| text.parse().unwrap();
        AddressBlock { cidr: parse(cidr), except: except.iter().copied().map(parse).collect() }
    }

    fn rules(built: &(Blocks, super::super::rows::Rows), address: &str) -> RuleSet {
        built.1.rules(built.0.row(Address::from(address.parse::<IpAddr>().unwrap())))
    }

    #[test]
    fn an_except_only_applies_to_its_own_block() {
        let built = build(&[
            (block("10.0.0.0/8", &["10.1.0.0/16", "10.1.2.0/24"]), 0),
            (block("10.1.2.0/24", &[]), 1),
            (block("0.0.0.0/0", &["10.0.0.0/8"]), 2),
            (block("::/0", &["fd00::/8"]), 3),
        ]);
        for (address, expected) in [
            ("10.0.0.1", vec![0]),
            ("10.1.0.1", vec![]),
            ("10.1.2.3", vec![1]),
            ("10.2.0.0", vec![0]),
            ("11.0.0.0", vec![2]),
            ("255.255.255.255", vec![2]),
            ("0.0.0.0", vec![2]),
            ("::fffe:ffff:ffff", vec![3]),
            ("::1:0:0:0", vec![3]),
            ("fd00::1", vec![]),
            ("fe00::1", vec![3]),
            ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", vec![3]),
        ] {
            assert_eq!(rules(&built, address), expected.into_iter().collect(), "{address}");
        }
    }

    #[test]
    fn many_blocks_make_a_shallow_trie_of_linear_size() {
        let blocks: Vec<_> = (0..1024).map(|n| (block(&format!("10.{}.{}.0/24", n / 256, n % 256), &[]), 0)).collect();
        let spread: Vec<_> =
            (0..1024u32).map(|n| (block(&format!("{}/24", Ipv4Addr::from(n << 20)), &[]), n % 70)).collect();
        for blocks in [blocks, spread] {
            let (trie, _) = build(&blocks);
            assert!(trie.size() < 64 * blocks.len() + 128, "{} bytes", trie.size());
        }
    }

    fn any_block() -> impl Strategy<Value = (AddressBlock, u32)> {
        // Few distinct bits, so that blocks nest, touch and repeat.
        let v4 = (0u32..16, 0u32..4, 0u8..=32)
            .prop_map(|(high, low, len)| IpNet::new(Ipv4Addr::from(high << 28 | low).into(), len).unwrap().trunc());
        let v6 = (0u128..16, 0u128..4, 0u8..=128)
            .prop_map(|(high, low, len)| IpNet::new(Ipv6Addr::from(high << 124 | low).into(), len).unwrap().trunc());
        let net = prop_oneof![v4, v6];
        (net.clone(), prop::collection::vec(net, 0..4), 0u32..70)
            .prop_map(|(cidr, except, rule)| (AddressBlock { cidr, except }, rule))
    }

    proptest! {
        #[test]
        fn every_address_has_the_rules_whose_blocks_contain_it(blocks in prop::collection::vec(any_block(), 0..10)) {
            let (trie, rows) = build(&blocks);
            let nets = blocks.iter().flat_map(|(block, _)| block.except.iter().chain([&block.cidr]));
            let edges = nets.flat_map(|net| {
                let (first, last) = bounds(net);
                [first, last, first.wrapping_sub(1), last.wrapping_add(1)]
            });
            for address in edges.map(Address::from_bits) {
                let ip = IpAddr::from(address);
                let expected: RuleSet = blocks
                    .iter()
                    .filter(|(block, _)| block.cidr.contains(&ip))
                    .filter(|(block, _)| !block.except.iter().any(|net| net.contains(&ip)))
                    .map(|(_, rule)| *rule)
                    .collect();
                prop_assert_eq!(rows.rules(trie.row(address)), expected, "{}", ip);
            }
        }
    }
}
