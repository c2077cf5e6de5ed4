//! Cluster-wide map from addresses to their owners.

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::packet::Address;

use super::peers::Identity;

/// A pod whose policies are enforced on this node. Numbered from 0; small numbers are reused first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(transparent)]
pub struct EndpointId(pub u32);

/// A node of the cluster; any number except `u32::MAX`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(transparent)]
pub struct NodeId(pub u32);

/// Owner of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressOwner {
    /// A pod's.
    Pod {
        /// Its class with respect to selectors.
        identity: Identity,
        /// Number of its endpoint, if its policies are enforced here.
        endpoint: Option<EndpointId>,
        /// The node on which it runs, if known.
        node: Option<NodeId>,
    },
    /// The address of a node itself.
    Node(NodeId),
}

/// "None" in an [`AddressEntry`].
pub(super) const NONE: u32 = u32::MAX;

/// The owner of an address as the lookup needs it: three comparisons instead of nested options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct AddressEntry {
    /// 0 if no selector can match it: it is not a pod's address.
    pub(super) identity: u32,
    /// [`NONE`] if it has no endpoint.
    pub(super) endpoint: u32,
    /// [`NONE`] if it has no known node.
    pub(super) node: u32,
}

impl AddressEntry {
    /// An unknown address.
    pub(super) const UNKNOWN: Self = Self { identity: 0, endpoint: NONE, node: NONE };

    /// Whether it is a node's own address.
    #[inline]
    pub(super) const fn is_node(&self) -> bool {
        self.identity == 0 && self.node != NONE
    }
}

impl From<AddressOwner> for AddressEntry {
    fn from(owner: AddressOwner) -> Self {
        match owner {
            AddressOwner::Pod { identity, endpoint, node } => Self {
                identity: identity.0.get(),
                endpoint: endpoint.map_or(NONE, |endpoint| endpoint.0),
                node: node.map_or(NONE, |node| node.0),
            },
            AddressOwner::Node(node) => Self { node: node.0, ..Self::UNKNOWN },
        }
    }
}

/// A change copies one shard: about a hundred entries at 100,000 addresses.
const SHARDS: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct AddressSlot {
    address: Address,
    /// `None` if the slot is free.
    entry: Option<AddressEntry>,
}

const FREE: AddressSlot = AddressSlot { address: Address::from_bits(0), entry: None };

/// A persistent hash map in shards; a modified copy shares all shards but one.
///
/// A shard is an open-addressed array with linear probing and at most three quarters of its slots in use: a lookup
/// reads the shard's pointer and, nearly always, one or two adjacent slots.
#[derive(Clone, Debug)]
pub(super) struct AddressMap {
    shards: Arc<[Arc<[AddressSlot]>; SHARDS]>,
    len: usize,
}

impl Default for AddressMap {
    fn default() -> Self {
        let empty: Arc<[AddressSlot]> = Arc::new([FREE]);
        Self { shards: Arc::new(std::array::from_fn(|_| empty.clone())), len: 0 }
    }
}

/// Mixes both halves of an address into 64 bits; the upper ones are mixed best. The multiplier is that of Fibonacci
/// hashing (Knuth, TAOCP 6.4). The content is the cluster's own, so outsiders cannot choose colliding addresses;
/// lookups of unknown addresses stop at the first free slot.
#[inline]
fn hash(address: Address) -> u64 {
    let bits = address.bits();
    (bits as u64 ^ ((bits >> 64) as u64).rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[inline]
const fn shard_of(hash: u64) -> usize {
    (hash >> (u64::BITS - SHARDS.ilog2())) as usize
}

#[inline]
const fn slot_of(hash: u64, slots: usize) -> usize {
    (hash >> 22) as usize & (slots - 1)
}

impl AddressMap {
    /// The entry of an address.
    #[inline]
    pub(super) fn find(&self, address: Address) -> AddressEntry {
        let hash = hash(address);
        let slots = &*self.shards[shard_of(hash)];
        let mut at = slot_of(hash, slots.len());
        loop {
            match slots[at].entry {
                None => return AddressEntry::UNKNOWN,
                Some(entry) if slots[at].address == address => return entry,
                Some(_) => at = (at + 1) & (slots.len() - 1),
            }
        }
    }

    /// Number of addresses.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Sets or removes the entry of an address.
    pub(super) fn set(&mut self, address: Address, entry: Option<AddressEntry>) {
        let shard = &mut Arc::make_mut(&mut self.shards)[shard_of(hash(address))];
        let known = find_slot(shard, address);
        match (known, entry) {
            (Some(at), Some(entry)) => Arc::make_mut(shard)[at].entry = Some(entry),
            (None, Some(entry)) => {
                self.len += 1;
                let used = shard.iter().filter(|slot| slot.entry.is_some()).count();
                if (used + 1) * 4 > shard.len() * 3 {
                    *shard = rehash(shard, shard.len() * 2, address);
                }
                insert(Arc::make_mut(shard), AddressSlot { address, entry: Some(entry) });
            }
            (Some(_), None) => {
                self.len -= 1;
                let used = shard.iter().filter(|slot| slot.entry.is_some()).count();
                let slots = if (used - 1) * 4 < shard.len() { (shard.len() / 2).max(1) } else { shard.len() };
                *shard = rehash(shard, slots, address);
            }
            (None, None) => {}
        }
    }

    /// Approximate size of the map in bytes.
    pub(super) fn size(&self) -> usize {
        size_of_val(&*self.shards) + self.shards.iter().map(|shard| size_of_val(&**shard)).sum::<usize>()
    }
}

fn find_slot(shard: &[AddressSlot], address: Address) -> Option<usize> {
    let mut at = slot_of(hash(address), shard.len());
    loop {
        match shard[at] {
            AddressSlot { entry: None, .. } => return None,
            AddressSlot { address: found, .. } if found == address => return Some(at),
            _ => at = (at + 1) & (shard.len() - 1),
        }
    }
}

/// A copy of the shard without this address and with another number of slots.
fn rehash(shard: &[AddressSlot], slots: usize, without: Address) -> Arc<[AddressSlot]> {
    let mut fresh = vec![FREE; slots];
    shard
        .iter()
        .filter(|slot| slot.entry.is_some() && slot.address != without)
        .for_each(|slot| insert(&mut fresh, *slot));
    fresh.into()
}

fn insert(shard: &mut [AddressSlot], slot: AddressSlot) {
    let mut at = slot_of(hash(slot.address), shard.len());
    while shard[at].entry.is_some() {
        at = (at + 1) & (shard.len() - 1);
    }
    shard[at] = slot;
}

impl AddressEntry {
    /// As the public type; `None` if nothing is known.
    pub(super) fn owner(&self) -> Option<AddressOwner> {
        let some = |number: u32| (number != NONE).then_some(number);
        match NonZeroU32::new(self.identity) {
            Some(identity) => Some(AddressOwner::Pod {
                identity: Identity(identity),
                endpoint: some(self.endpoint).map(EndpointId),
                node: some(self.node).map(NodeId),
            }),
            None => some(self.node).map(|node| AddressOwner::Node(NodeId(node))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn entry(number: u32) -> AddressEntry {
        AddressEntry { identity: number, endpoint: number, node: 0 }
    }

    proptest! {
        #[test]
        fn agrees_with_a_hash_map_under_any_history(
            steps in prop::collection::vec((0u128..600, prop::option::weighted(0.7, 1u32..100)), 0..2000),
        ) {
            // Spread over one shard and over many; a copy made in between must not see later changes.
            let (mut map, mut oracle) = (AddressMap::default(), HashMap::new());
            let mut copy = (map.clone(), oracle.clone());
            for (index, (address, value)) in steps.into_iter().enumerate() {
                let address = Address::from_bits((address << 64) | (address % 7));
                map.set(address, value.map(entry));
                match value {
                    Some(value) => oracle.insert(address, value),
                    None => oracle.remove(&address),
                };
                if index == 500 {
                    copy = (map.clone(), oracle.clone());
                }
            }
            for (map, oracle) in [(map, oracle), copy] {
                prop_assert_eq!(map.len(), oracle.len());
                for address in (0..600u128).map(|address| Address::from_bits((address << 64) | (address % 7))) {
                    let expected = oracle.get(&address).map_or(AddressEntry::UNKNOWN, |value| entry(*value));
                    prop_assert_eq!(map.find(address), expected);
                }
            }
        }
    }

    #[test]
    fn pod_networks_spread_evenly_over_the_shards() {
        let mut map = AddressMap::default();
        for pod in 0..100_000u32 {
            map.set(Address::from_v4_bytes((10 << 24 | (pod / 100) << 8 | (pod % 100)).to_be_bytes()), Some(entry(1)));
        }
        let largest = map.shards.iter().map(|shard| shard.len()).max().unwrap();
        assert!(largest <= 512, "{largest} slots in one of {SHARDS} shards");
    }
}
