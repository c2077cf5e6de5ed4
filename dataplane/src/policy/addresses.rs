//! The one map of addresses: to their owners in the cluster, and to this node's ports.

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::forward::{Forwarding, LocalAddresses, PortId};
use crate::packet::Address;

use super::peers::Identity;
use super::{AddressSet, DirectionVerdict, EndpointId, NodeId};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressOwner {
    Pod {
        /// Its class with respect to selectors.
        identity: Identity,
        /// Number of its endpoint, if its policies are enforced here.
        endpoint: Option<EndpointId>,
        /// The node on which it runs, if known.
        node: Option<NodeId>,
    },
    Node(NodeId),
}

/// "None" in an [`AddressEntry`].
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum LocalAddress {
    /// Not at a pod of this node.
    #[default]
    No,
    /// The same, and a pod may send to a Service there ([`AddressMap::set_services`]).
    Service,
    /// At a pod of this node that has no port (yet, or any more).
    Portless,
    At(PortId),
}

/// All that the packet path asks about an address. Policy and ports become known at different times; an entry holds
/// what is known of either.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AddressEntry {
    /// 0 if no selector can match it: it is not a pod's address.
    pub(super) identity: u32,
    /// [`NONE`] if it has no endpoint.
    pub(super) endpoint: u32,
    /// [`NONE`] if it has no known node.
    pub(super) node: u32,
    pub(super) local: LocalAddress,
}

impl AddressEntry {
    pub(super) const UNKNOWN: Self = Self { identity: 0, endpoint: NONE, node: NONE, local: LocalAddress::No };

    /// The port of the local pod with this address.
    #[inline]
    pub(crate) const fn port(&self) -> Option<PortId> {
        match self.local {
            LocalAddress::At(port) => Some(port),
            LocalAddress::No | LocalAddress::Service | LocalAddress::Portless => None,
        }
    }

    /// Whether this is an address of a pod of this node, with or without a port.
    #[inline]
    pub(crate) fn is_local_pod(&self) -> bool {
        matches!(self.local, LocalAddress::Portless | LocalAddress::At(_))
    }

    /// Whether this is an address of a pod of this node without a port.
    #[inline]
    pub(crate) fn is_portless_pod(&self) -> bool {
        self.local == LocalAddress::Portless
    }

    /// Whether it is a pod's address, of whatever node.
    pub(crate) const fn is_pod(&self) -> bool {
        self.identity != 0
    }

    /// Whether a pod may send to a Service there.
    #[inline]
    pub(crate) fn is_service(&self) -> bool {
        self.local == LocalAddress::Service
    }

    /// The same address as it is, without a Service.
    pub(crate) fn without_service(&self) -> Self {
        Self { local: if self.local == LocalAddress::Service { LocalAddress::No } else { self.local }, ..*self }
    }

    #[inline]
    pub(crate) const fn is_node(&self) -> bool {
        self.identity == 0 && self.node != NONE
    }

    /// The verdict of the direction of this end, if it has no endpoint. A pod of this node whose policies are not known
    /// yet must not be treated as another node's.
    #[inline]
    pub(super) const fn without_endpoint(&self) -> DirectionVerdict {
        match self.local {
            LocalAddress::At(_) => DirectionVerdict::NotReady,
            LocalAddress::No | LocalAddress::Service | LocalAddress::Portless => DirectionVerdict::NotLocal,
        }
    }

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

    fn set_owner(&mut self, owner: Option<AddressOwner>) {
        (self.identity, self.endpoint, self.node) = match owner {
            None => (0, NONE, NONE),
            Some(AddressOwner::Node(node)) => (0, NONE, node.0),
            Some(AddressOwner::Pod { identity, endpoint, node }) => {
                (identity.0.get(), endpoint.map_or(NONE, |endpoint| endpoint.0), node.map_or(NONE, |node| node.0))
            }
        };
    }
}

/// A change copies one shard: about a hundred entries at 100,000 addresses.
const SHARDS: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct AddressSlot {
    address: Address,
    /// [`AddressEntry::UNKNOWN`] if the slot is free.
    entry: AddressEntry,
}

impl AddressSlot {
    const FREE: Self = Self { address: Address::from_bits(0), entry: AddressEntry::UNKNOWN };

    #[inline]
    fn is_free(&self) -> bool {
        self.entry == AddressEntry::UNKNOWN
    }
}

/// A persistent hash map in shards; a modified copy shares all shards but one.
///
/// A shard is an open-addressed array with linear probing and at most three quarters of its slots in use: a lookup
/// reads the shard's pointer and, nearly always, one or two adjacent slots.
#[derive(Clone, Debug)]
pub(super) struct AddressMap {
    shards: Arc<[Arc<[AddressSlot]>; SHARDS]>,
    /// Number of addresses with an owner.
    owned: usize,
    local: Arc<LocalAddresses>,
    services: Arc<AddressSet>,
}

impl Default for AddressMap {
    fn default() -> Self {
        let empty: Arc<[AddressSlot]> = Arc::new([AddressSlot::FREE]);
        let shards = Arc::new(std::array::from_fn(|_| empty.clone()));
        Self { shards, owned: 0, local: Arc::default(), services: Arc::default() }
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
    #[inline(always)]
    pub(super) fn find(&self, address: Address) -> &AddressEntry {
        let hash = hash(address);
        let slots = &*self.shards[shard_of(hash)];
        let mut at = slot_of(hash, slots.len());
        loop {
            // A free slot has the entry of an unknown address.
            if slots[at].address == address || slots[at].is_free() {
                return &slots[at].entry;
            }
            at = (at + 1) & (slots.len() - 1);
        }
    }

    /// Whether lookups find the same as in the other map, of which this is a copy with changes that have changed nothing.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shards, &other.shards)
    }

    pub(super) fn services(&self) -> &Arc<AddressSet> {
        &self.services
    }

    pub(super) fn owned(&self) -> usize {
        self.owned
    }

    pub(super) fn set_owner(&mut self, address: Address, owner: Option<AddressOwner>) {
        let before = *self.find(address);
        let mut after = before;
        after.set_owner(owner);
        self.owned += usize::from(after.owner().is_some());
        self.owned -= usize::from(before.owner().is_some());
        self.replace(address, before, after);
    }

    /// Makes the local addresses those of `forwarding`. What does not differ stays shared.
    pub(super) fn set_local(&mut self, forwarding: &Forwarding) {
        let (before, after) = (Arc::clone(&self.local), forwarding.local_addresses());
        if Arc::ptr_eq(&before, after) {
            return;
        }
        for &address in before.keys().filter(|address| !after.contains_key(address)) {
            self.set_local_address(address, self.elsewhere(address));
        }
        for (&address, port) in after.iter().filter(|(address, port)| before.get(address) != Some(port)) {
            self.set_local_address(address, port.map_or(LocalAddress::Portless, LocalAddress::At));
        }
        self.local = Arc::clone(after);
    }

    /// Makes these the addresses at which pods may send to Services. What does not differ stays shared.
    pub(super) fn set_services(&mut self, services: &Arc<AddressSet>) {
        let before = std::mem::replace(&mut self.services, Arc::clone(services));
        for &address in before.symmetric_difference(services) {
            if !self.find(address).is_local_pod() {
                self.set_local_address(address, self.elsewhere(address));
            }
        }
    }

    /// The kind of an address that is at no pod of this node.
    fn elsewhere(&self, address: Address) -> LocalAddress {
        if self.services.contains(&address) { LocalAddress::Service } else { LocalAddress::No }
    }

    fn set_local_address(&mut self, address: Address, local: LocalAddress) {
        let before = *self.find(address);
        self.replace(address, before, AddressEntry { local, ..before });
    }

    /// Replaces the entry of an address, which is `before`.
    fn replace(&mut self, address: Address, before: AddressEntry, after: AddressEntry) {
        if before == after {
            return;
        }
        let shard = &mut Arc::make_mut(&mut self.shards)[shard_of(hash(address))];
        let used = shard.iter().filter(|slot| !slot.is_free()).count();
        if after == AddressEntry::UNKNOWN {
            let slots = if (used - 1) * 4 < shard.len() { (shard.len() / 2).max(1) } else { shard.len() };
            *shard = rehash(shard, slots, address);
        } else if before == AddressEntry::UNKNOWN {
            if (used + 1) * 4 > shard.len() * 3 {
                *shard = rehash(shard, shard.len() * 2, address);
            }
            insert(Arc::make_mut(shard), AddressSlot { address, entry: after });
        } else {
            let slot = Arc::make_mut(shard).iter_mut().find(|slot| slot.address == address && !slot.is_free());
            slot.expect("it has an entry").entry = after;
        }
    }

    /// Approximate size of the map in bytes.
    pub(super) fn size(&self) -> usize {
        size_of_val(&*self.shards) + self.shards.iter().map(|shard| size_of_val(&**shard)).sum::<usize>()
    }
}

/// A copy of the shard without this address and with another number of slots.
fn rehash(shard: &[AddressSlot], slots: usize, without: Address) -> Arc<[AddressSlot]> {
    let mut fresh = vec![AddressSlot::FREE; slots];
    shard.iter().filter(|slot| !slot.is_free() && slot.address != without).for_each(|slot| insert(&mut fresh, *slot));
    fresh.into()
}

fn insert(shard: &mut [AddressSlot], slot: AddressSlot) {
    let mut at = slot_of(hash(slot.address), shard.len());
    while !shard[at].is_free() {
        at = (at + 1) & (shard.len() - 1);
    }
    shard[at] = slot;
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::forward::{Mac, Port, PortKind};

    fn pod(number: u32) -> AddressOwner {
        let identity = Identity(NonZeroU32::new(number).unwrap());
        AddressOwner::Pod { identity, endpoint: Some(EndpointId(number)), node: Some(NodeId(0)) }
    }

    /// Spread over one shard and over many.
    fn address(number: u128) -> Address {
        Address::from_bits((number << 64) | (number % 7))
    }

    /// Two ports and a pod without one, with these addresses.
    fn forwarding(of_ports: [Vec<Address>; 2], portless: Vec<Address>) -> Forwarding {
        let mut forwarding = Forwarding::new([]).with_portless(portless);
        for (number, addresses) in (0..).zip(of_ports) {
            let mac = Mac::default();
            let port = Port::new(PortKind::Pod, mac, mac, 1500, addresses);
            forwarding.insert(PortId(number), port).unwrap();
        }
        forwarding
    }

    proptest! {
        #[test]
        fn agrees_with_two_hash_maps_under_any_history(
            steps in prop::collection::vec((0u128..600, prop::option::weighted(0.7, 1u32..100)), 0..2000),
            locals in prop::collection::vec(prop::collection::vec((0u128..600, 0usize..3), 0..60), 0..6),
        ) {
            // A copy made in between must not see later changes.
            let (mut map, mut owners, mut local) = (AddressMap::default(), HashMap::new(), HashMap::new());
            let mut copy = (map.clone(), owners.clone(), local.clone());
            let mut locals = locals.into_iter();
            for (index, (number, value)) in steps.into_iter().enumerate() {
                map.set_owner(address(number), value.map(pod));
                match value {
                    Some(value) => owners.insert(number, value),
                    None => owners.remove(&number),
                };
                if index % 300 == 0 && let Some(next) = locals.next() {
                    local = next.into_iter().collect();
                    let of = |end| local.iter().filter(|&(_, at)| *at == end).map(|(&at, _)| address(at)).collect();
                    map.set_local(&forwarding([of(0), of(1)], of(2)));
                }
                if index == 500 {
                    copy = (map.clone(), owners.clone(), local.clone());
                }
            }
            for (map, owners, local) in [(map, owners, local), copy] {
                prop_assert_eq!(map.owned(), owners.len());
                for number in 0..600 {
                    let found = map.find(address(number));
                    prop_assert_eq!(found.owner(), owners.get(&number).map(|value| pod(*value)));
                    let expected = match local.get(&number) {
                        None => LocalAddress::No,
                        Some(2) => LocalAddress::Portless,
                        Some(port) => LocalAddress::At(PortId(*port as u16)),
                    };
                    prop_assert_eq!(found.local, expected);
                }
            }
        }
    }

    #[test]
    fn pod_networks_spread_evenly_over_the_shards() {
        let map = large();
        let largest = map.shards.iter().map(|shard| shard.len()).max().unwrap();
        assert!(largest <= 512, "{largest} slots in one of {SHARDS} shards");
    }

    #[test]
    fn only_ports_that_change_copy_a_shard() {
        let mut map = large();
        let own = |pods: std::ops::Range<u8>| pods.map(|pod| Address::from_v4_bytes([10, 0, 0, pod])).collect();
        map.set_local(&forwarding([own(0..50), own(50..90)], own(90..99)));
        let before = map.clone();
        let shared = |map: &AddressMap| {
            map.shards.iter().zip(&*before.shards).filter(|(now, before)| Arc::ptr_eq(now, before)).count()
        };
        map.set_local(&forwarding([own(0..50), own(50..90)], own(90..99)));
        assert_eq!(shared(&map), SHARDS);
        map.set_local(&forwarding([own(0..50), own(50..91)], own(91..99)));
        assert_eq!(shared(&map), SHARDS - 1);
        assert_eq!(map.find(Address::from_v4_bytes([10, 0, 0, 90])).port(), Some(PortId(1)));
        assert_eq!(map.owned(), 100_000);
    }

    fn large() -> AddressMap {
        let mut map = AddressMap::default();
        for number in 0..100_000u32 {
            let address = (10 << 24 | (number / 100) << 8 | (number % 100)).to_be_bytes();
            map.set_owner(Address::from_v4_bytes(address), Some(pod(1)));
        }
        map
    }
}
