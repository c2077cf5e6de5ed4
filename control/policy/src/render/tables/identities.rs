//! Identities: groups of addresses that no rule distinguishes.

use std::net::IpAddr;
use std::num::NonZeroU32;

use penstock_dataplane::policy::Identity;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::{ClassId, Registry};

/// An identity.
#[derive(Debug)]
struct IdentityRecord {
    /// Sorted.
    classes: Box<[ClassId]>,
    /// How many addresses have it.
    addresses: usize,
}

/// One identity for each distinct set of classes of a pod's address.
#[derive(Default, Debug)]
pub(super) struct Identities {
    known: Registry<Box<[ClassId]>, IdentityRecord>,
    by_address: FxHashMap<IpAddr, u32>,
    by_class: FxHashMap<ClassId, FxHashSet<u32>>,
    /// Identities added or removed; those removed are listed below with their classes.
    changed: FxHashSet<u32>,
    removed: Vec<(u32, Box<[ClassId]>)>,
}

/// The identity number in tables: they count from 1.
pub(super) fn identity(number: u32) -> Identity {
    Identity(NonZeroU32::new(number + 1).expect("one more than an index is not zero"))
}

impl Identities {
    /// Sets the classes of a pod's address; `None` if it is no longer a pod's.
    pub(super) fn set(&mut self, address: IpAddr, classes: Option<Vec<ClassId>>) {
        let number = classes.map(|classes| self.acquire(classes));
        let before = match number {
            Some(number) => self.by_address.insert(address, number),
            None => self.by_address.remove(&address),
        };
        if let Some(before) = before {
            self.release(before);
        }
    }

    fn acquire(&mut self, classes: Vec<ClassId>) -> u32 {
        if let Some(number) = self.known.find(classes.as_slice()) {
            self.known[number].addresses += 1;
            return number;
        }
        let classes: Box<[ClassId]> = classes.into();
        let number = self.known.insert(classes.clone(), IdentityRecord { classes: classes.clone(), addresses: 1 });
        for class in &classes {
            self.by_class.entry(*class).or_default().insert(number);
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
        let classes = std::mem::take(&mut record.classes);
        self.known.remove(&classes);
        for class in &classes {
            let members = self.by_class.entry(*class).or_default();
            members.remove(&number);
            if members.is_empty() {
                self.by_class.remove(class);
            }
        }
        self.changed.insert(number);
        self.removed.push((number, classes));
    }

    /// The identities added or removed since the last call, each once for every class it has or had.
    pub(super) fn take_changed(&mut self) -> Vec<(u32, ClassId)> {
        let removed = std::mem::take(&mut self.removed);
        let removed =
            removed.into_iter().flat_map(|(number, classes)| classes.into_iter().map(move |class| (number, class)));
        let mut changed: Vec<_> = removed.collect();
        for number in std::mem::take(&mut self.changed) {
            changed.extend(self.classes(number).iter().map(|class| (number, *class)));
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

    /// The classes of an identity, sorted; empty if no address has it.
    pub(super) fn classes(&self, number: u32) -> &[ClassId] {
        self.known.get(number).map(|record| &*record.classes).unwrap_or_default()
    }

    /// The identities in a class.
    pub(super) fn in_class(&self, class: ClassId) -> impl Iterator<Item = u32> {
        self.by_class.get(&class).into_iter().flatten().copied()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }
}
