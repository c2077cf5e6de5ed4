//! Alternatives to the policy tables, each as fast as its data structure allows.

use std::collections::HashMap;
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_bench::rulesets::acl::{Action, SixTuple};
use penstock_dataplane::packet::{Address, Flow, Protocol};

/// A first-match list of six-tuples, packed so that nearly every entry costs one comparison: fields that are equal in
/// all entries are not compared.
pub(crate) struct LinearList {
    entries: Vec<MaskedEntry>,
}

struct MaskedEntry {
    peer: u128,
    mask: u128,
    protocol: Option<Protocol>,
    first: u16,
    last: u16,
    permit: bool,
}

impl LinearList {
    /// From the entries of an ingress list.
    pub(crate) fn new(entries: &[SixTuple]) -> Self {
        let entry = |tuple: &SixTuple| {
            let (peer, mask) = tuple.src.map_or((0, 0), prefix);
            let ports = tuple
                .ports
                .map_or((None, 0, u16::MAX), |range| (Some(range.protocol.number()), range.first, range.last));
            MaskedEntry {
                peer,
                mask,
                protocol: ports.0,
                first: ports.1,
                last: ports.2,
                permit: tuple.action == Action::Permit,
            }
        };
        Self { entries: entries.iter().map(entry).collect() }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn evaluate_all(&self, flows: &[Flow]) -> u64 {
        flows.iter().map(|flow| u64::from(self.permits(flow))).sum()
    }

    fn permits(&self, flow: &Flow) -> bool {
        let matching = self.entries.iter().find(|entry| {
            flow.src.bits() & entry.mask == entry.peer
                && entry.protocol.is_none_or(|protocol| protocol == flow.protocol)
                && (entry.first..=entry.last).contains(&flow.dst_port)
        });
        matching.is_some_and(|entry| entry.permit)
    }
}

fn prefix(net: IpNet) -> (u128, u128) {
    let length = net.prefix_len() as u32 + if net.addr().is_ipv4() { 96 } else { 0 };
    let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
    (Address::from(net.network()).bits() & mask, mask)
}

/// Ingress in the form of Mizar's design: an enforcement map, a map of blocks, one of blocks that have excepts, one of
/// excepts (longest prefix each) and one of ports, with one bit per policy. IPv4 as there; one network, so the network
/// number is left out of every key.
pub(crate) struct MizarTables {
    enforce: HashMap<u32, bool, multiply::FastBuildHasher>,
    primary: PrefixTrie,
    supplementary: PrefixTrie,
    except: PrefixTrie,
    ports: HashMap<(u32, u8, u16), u64, multiply::FastBuildHasher>,
}

impl MizarTables {
    /// For one endpoint; of each policy the block, its except and the TCP port.
    pub(crate) fn new(endpoint: IpAddr, policies: &[(String, String, u16)]) -> Self {
        let endpoint = v4(endpoint);
        let mut tables = Self {
            enforce: HashMap::from_iter([(endpoint, true)]),
            primary: PrefixTrie::default(),
            supplementary: PrefixTrie::default(),
            except: PrefixTrie::default(),
            ports: HashMap::default(),
        };
        for (bit, (cidr, except, port)) in policies.iter().enumerate() {
            let key = |text: &str| {
                let net: IpNet = text.parse().expect("a prefix");
                ((u64::from(endpoint) << 32) | u64::from(v4(net.network())), 32 + net.prefix_len() as u32)
            };
            tables.supplementary.insert(key(cidr), 1 << bit);
            tables.except.insert(key(except), 1 << bit);
            *tables.ports.entry((endpoint, Protocol::TCP.0, *port)).or_default() |= 1 << bit;
        }
        tables
    }

    pub(crate) fn evaluate_all(&self, flows: &[Flow]) -> u64 {
        flows.iter().map(|flow| u64::from(self.allows(flow))).sum()
    }

    /// The design's `enforce_policy_on_packet`.
    fn allows(&self, flow: &Flow) -> bool {
        let (Some(src), Some(dst)) = (flow.src.v4_bits(), flow.dst.v4_bits()) else { return false };
        if !self.enforce.contains_key(&dst) {
            return true;
        }
        let peer = (u64::from(dst) << 32) | u64::from(src);
        let primary = self.primary.longest(peer);
        let supplementary = self.supplementary.longest(peer);
        let except = self.except.longest(peer);
        let port = |protocol: u8, port: u16| self.ports.get(&(dst, protocol, port)).copied().unwrap_or(0);
        let ports = port(flow.protocol.0, flow.dst_port) | port(0, 0);
        (primary | (supplementary & !except)) & ports != 0
    }
}

fn v4(address: IpAddr) -> u32 {
    Address::from(address).v4_bits().expect("IPv4")
}

/// A path-compressed binary trie, as the kernel's longest-prefix-match map is (kernel/bpf/lpm_trie.c).
#[derive(Default)]
struct PrefixTrie {
    nodes: Vec<TrieNode>,
}

struct TrieNode {
    prefix: u64,
    length: u32,
    value: Option<u64>,
    children: [Option<u32>; 2],
}

impl PrefixTrie {
    fn longest(&self, key: u64) -> u64 {
        let (mut found, mut at) = (0, if self.nodes.is_empty() { None } else { Some(0) });
        while let Some(number) = at {
            let node = &self.nodes[number as usize];
            if common(node.prefix, key) < node.length {
                break;
            }
            found = node.value.unwrap_or(found);
            at = if node.length == 64 { None } else { node.children[bit(key, node.length)] };
        }
        found
    }

    /// Adds bits to a prefix's value. Node 0 is the root, which matches every key.
    fn insert(&mut self, (prefix, length): (u64, u32), bits: u64) {
        if self.nodes.is_empty() {
            self.nodes.push(TrieNode { prefix: 0, length: 0, value: None, children: [None; 2] });
        }
        let mut at = 0usize;
        loop {
            let node = &mut self.nodes[at];
            if node.length == length && node.prefix == prefix {
                node.value = Some(node.value.unwrap_or(0) | bits);
                return;
            }
            let side = bit(prefix, node.length);
            let fresh = self.nodes.len() as u32;
            let Some(child) = self.nodes[at].children[side] else {
                self.nodes.push(TrieNode { prefix, length, value: Some(bits), children: [None; 2] });
                self.nodes[at].children[side] = Some(fresh);
                return;
            };
            let below = &self.nodes[child as usize];
            let shared = common(below.prefix, prefix).min(below.length).min(length);
            if shared == below.length {
                at = child as usize;
                continue;
            }
            let mut children = [None; 2];
            children[bit(below.prefix, shared)] = Some(child);
            let mask = if shared == 0 { 0 } else { u64::MAX << (64 - shared) };
            self.nodes.push(TrieNode { prefix: prefix & mask, length: shared, value: None, children });
            self.nodes[at].children[side] = Some(fresh);
            at = fresh as usize;
        }
    }
}

fn common(a: u64, b: u64) -> u32 {
    (a ^ b).leading_zeros()
}

fn bit(key: u64, place: u32) -> usize {
    (key >> (63 - place) & 1) as usize
}

/// The fastest hash for the standard library's map, so that hashing is not what is measured.
mod multiply {
    use std::hash::{BuildHasherDefault, Hasher};

    pub(crate) type FastBuildHasher = BuildHasherDefault<MultiplyHasher>;

    #[derive(Default)]
    pub(crate) struct MultiplyHasher(u64);

    impl Hasher for MultiplyHasher {
        fn finish(&self) -> u64 {
            self.0.rotate_left(26)
        }

        fn write(&mut self, bytes: &[u8]) {
            bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
        }

        fn write_u8(&mut self, value: u8) {
            self.write_u64(u64::from(value));
        }

        fn write_u16(&mut self, value: u16) {
            self.write_u64(u64::from(value));
        }

        fn write_u32(&mut self, value: u32) {
            self.write_u64(u64::from(value));
        }

        fn write_u64(&mut self, value: u64) {
            self.0 = (self.0 ^ value).wrapping_mul(0xf135_7aea_2e62_a9c5);
        }
    }
}
