//! A list without repetitions, which grows in constant time: whoever writes an object chooses how long its lists are.

use std::collections::HashSet;
use std::hash::Hash;

#[derive(Debug)]
pub(super) struct Distinct<T> {
    values: Vec<T>,
    seen: HashSet<T>,
}

impl<T> Default for Distinct<T> {
    fn default() -> Self {
        Self { values: Vec::new(), seen: HashSet::new() }
    }
}

impl<T: Clone + Eq + Hash> Distinct<T> {
    pub(super) fn push(&mut self, value: T) {
        if self.seen.insert(value.clone()) {
            self.values.push(value);
        }
    }

    /// The values in the order in which each came first.
    pub(super) fn into_vec(self) -> Vec<T> {
        self.values
    }
}
