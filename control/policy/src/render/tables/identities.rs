//! Identities: groups of addresses that no rule distinguishes.

use std::net::IpAddr;
use std::num::NonZeroU32;

use penstock_dataplane::policy::Identity;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::{PeerSetId, Registry};

#[derive(Debug)]
struct IdentityRecord {
    /// Sorted.
    peer_sets: Box<[PeerSetId]>,
    /// How many addresses have it.
    addresses: usize,
}

/// One identity for each distinct set of peer sets of a pod's address.
#[derive(Default, Debug)]
pub(super) struct Identities {
    known: Registry<Box<[PeerSetId]>, IdentityRecord>,
    by_address: FxHashMap<IpAddr, u32>,
    members: Members,
    /// Identities added or removed; those removed are listed below with their peer sets.
    changed: FxHashSet<u32>,
    removed: Vec<(u32, Box<[PeerSetId]>)>,
}

/// The identities in each peer set.
#[derive(Default, Debug)]
pub(super) struct Members(FxHashMap<PeerSetId, FxHashSet<u32>>);

impl Members {
    /// The identities in a peer set.
    pub(super) fn of(&self, peer_set: PeerSetId) -> impl Iterator<Item = u32> {
        self.0.get(&peer_set).into_iter().flatten().copied()
    }

    pub(super) fn has(&self, peer_set: PeerSetId, identity: u32) -> bool {
        self.0.get(&peer_set).is_some_and(|members| members.contains(&identity))
    }

    /// A copy for these peer sets, which may repeat.
    pub(super) fn only(&self, peer_sets: impl Iterator<Item = PeerSetId>) -> Self {
        let mut copy = FxHashMap::default();
        for peer_set in peer_sets {
            if let Some(members) = self.0.get(&peer_set) {
                copy.entry(peer_set).or_insert_with(|| members.clone());
            }
        }
        Self(copy)
    }

    fn insert(&mut self, peer_set: PeerSetId, identity: u32) {
        self.0.entry(peer_set).or_default().insert(identity);
    }

    fn remove(&mut self, peer_set: PeerSetId, identity: u32) {
        let members = self.0.entry(peer_set).or_default();
        members.remove(&identity);
        if members.is_empty() {
            self.0.remove(&peer_set);
        }
    }
}

/// The identity number in tables: they count from 1.
pub(super) fn identity(number: u32) -> Identity {
    Identity(NonZeroU32::new(number + 1).expect("one more than an index is not zero"))
}

impl Identities {
    /// Sets the peer sets of a pod's address; `None` if it is no longer a pod's.
    pub(super) fn set(&mut self, address: IpAddr, peer_sets: Option<Vec<PeerSetId>>) {
        let number = peer_sets.map(|peer_sets| self.acquire(peer_sets));
        let before = match number {
            Some(number) => self.by_address.insert(address, number),
            None => self.by_address.remove(&address),
        };
        if let Some(before) = before {
            self.release(before);
        }
    }

    fn acquire(&mut self, peer_sets: Vec<PeerSetId>) -> u32 {
        if let Some(number) = self.known.find(peer_sets.as_slice()) {
            self.known[number].addresses += 1;
            return number;
        }
        let peer_sets: Box<[PeerSetId]> = peer_sets.into();
        let number =
            self.known.insert(peer_sets.clone(), IdentityRecord { peer_sets: peer_sets.clone(), addresses: 1 });
        for peer_set in &peer_sets {
            self.members.insert(*peer_set, number);
        }
        self.changed.insert(number);
        number
    }

    fn release(&mut self, number: u32) {
        let record = &mut self.known[number];
        record.addresses -= 1;
        if record.addresses > 0 {
            return;
        }
        let peer_sets = std::mem::take(&mut record.peer_sets);
        self.known.remove(&peer_sets);
        for peer_set in &peer_sets {
            self.members.remove(*peer_set, number);
        }
        self.changed.insert(number);
        self.removed.push((number, peer_sets));
    }

    /// The identities added or removed since the last call, each once for every peer set it has or had.
    pub(super) fn take_changed(&mut self) -> Vec<(u32, PeerSetId)> {
        let removed = std::mem::take(&mut self.removed);
        let removed = removed
            .into_iter()
            .flat_map(|(number, peer_sets)| peer_sets.into_iter().map(move |peer_set| (number, peer_set)));
        let mut changed: Vec<_> = removed.collect();
        for number in std::mem::take(&mut self.changed) {
            changed.extend(self.peer_sets(number).iter().map(|peer_set| (number, *peer_set)));
        }
        changed
    }

    /// The identity of a pod's address.
    pub(super) fn at(&self, address: &IpAddr) -> Option<u32> {
        self.by_address.get(address).copied()
    }

    /// Every pod's address, with its identity.
    pub(super) fn addresses(&self) -> impl Iterator<Item = (IpAddr, u32)> {
        self.by_address.iter().map(|(address, number)| (*address, *number))
    }

    /// The peer sets of an identity, sorted; empty if no address has it.
    pub(super) fn peer_sets(&self, number: u32) -> &[PeerSetId] {
        self.known.get(number).map(|record| &*record.peer_sets).unwrap_or_default()
    }

    /// The identities in each peer set.
    pub(super) fn members(&self) -> &Members {
        &self.members
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }
}
