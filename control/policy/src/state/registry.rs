//! Values indexed by key and by a small number.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::Hash;
use std::ops::{Index, IndexMut};

use rustc_hash::FxHashMap;

/// Assigns each key the smallest free number and keeps a value under both. Callers remove an entry only when its number is
/// no longer in use.
#[derive(Debug)]
pub(crate) struct Registry<K, V> {
    index: FxHashMap<K, u32>,
    entries: Vec<Option<V>>,
    free: BinaryHeap<Reverse<u32>>,
}

impl<K, V> Default for Registry<K, V> {
    fn default() -> Self {
        Self { index: FxHashMap::default(), entries: Vec::new(), free: BinaryHeap::new() }
    }
}

impl<K: Eq + Hash, V> Registry<K, V> {
    /// The number of a key.
    pub(crate) fn find<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<u32>
    where
        K: std::borrow::Borrow<Q>,
    {
        self.index.get(key).copied()
    }

    /// Adds an entry for a key that has none.
    pub(crate) fn insert(&mut self, key: K, value: V) -> u32 {
        let number = match self.free.pop() {
            Some(Reverse(number)) => number,
            None => {
                self.entries.push(None);
                self.entries.len() as u32 - 1
            }
        };
        self.entries[number as usize] = Some(value);
        let before = self.index.insert(key, number);
        debug_assert!(before.is_none(), "the key had an entry");
        number
    }

    /// The number of a key; inserts this value if the key has none.
    pub(crate) fn find_or_insert<Q>(&mut self, key: &Q, value: impl FnOnce() -> V) -> u32
    where
        K: std::borrow::Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = K> + ?Sized,
    {
        match self.find(key) {
            Some(number) => number,
            None => self.insert(key.to_owned(), value()),
        }
    }

    /// Removes an entry.
    pub(crate) fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: std::borrow::Borrow<Q>,
    {
        let number = self.index.remove(key)?;
        self.free.push(Reverse(number));
        self.entries[number as usize].take()
    }

    /// Removes an entry whose number is still in use: nobody has it before [`Registry::free`].
    pub(crate) fn withdraw<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<(u32, V)>
    where
        K: std::borrow::Borrow<Q>,
    {
        let number = self.index.remove(key)?;
        Some((number, self.entries[number as usize].take()?))
    }

    /// A withdrawn number is not in use any more.
    pub(crate) fn free(&mut self, number: u32) {
        debug_assert!(self.entries[number as usize].is_none(), "it is withdrawn");
        self.free.push(Reverse(number));
    }

    /// The value under a number.
    pub(crate) fn get(&self, number: u32) -> Option<&V> {
        self.entries.get(number as usize)?.as_ref()
    }

    /// The value under a number, to change it.
    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut V> {
        self.entries.get_mut(number as usize)?.as_mut()
    }

    /// All entries by ascending number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &V)> {
        (0u32..).zip(&self.entries).filter_map(|(number, value)| Some((number, value.as_ref()?)))
    }

    /// All entries from a number on, ascending.
    pub(crate) fn iter_from(&self, first: u32) -> impl Iterator<Item = (u32, &V)> {
        let entries = self.entries.get(first as usize..).unwrap_or_default();
        (first..).zip(entries).filter_map(|(number, value)| Some((number, value.as_ref()?)))
    }

    /// All entries by key, in no order.
    pub(crate) fn index(&self) -> impl Iterator<Item = (&K, &V)> {
        self.index.iter().filter_map(|(key, number)| Some((key, self.get(*number)?)))
    }

    /// All values, to change them.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.entries.iter_mut().flatten()
    }

    /// How many entries there are.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }
}

impl<K, V> Index<u32> for Registry<K, V> {
    type Output = V;

    fn index(&self, number: u32) -> &V {
        self.entries[number as usize].as_ref().expect("the number is in use")
    }
}

impl<K, V> IndexMut<u32> for Registry<K, V> {
    fn index_mut(&mut self, number: u32) -> &mut V {
        self.entries[number as usize].as_mut().expect("the number is in use")
    }
}

#[cfg(test)]
mod tests {
    use super::Registry;

    #[test]
    fn numbers_are_the_smallest_free_ones() {
        let mut registry = Registry::<String, u8>::default();
        let numbers = ["a", "b", "c"].map(|key| registry.find_or_insert(key, || 0));
        assert_eq!(numbers, [0, 1, 2]);
        assert_eq!(registry.remove("c"), Some(0));
        assert_eq!(registry.remove("a"), Some(0));
        assert_eq!(registry.find("a"), None);
        assert_eq!(["d", "e", "f"].map(|key| registry.find_or_insert(key, || 1)), [0, 2, 3]);
        assert_eq!(registry.len(), 4);
        assert_eq!(registry.iter().map(|(number, _)| number).collect::<Vec<_>>(), [0, 1, 2, 3]);
    }
}
