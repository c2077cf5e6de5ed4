//! Which backend a client of a Service with `sessionAffinity: ClientIP` had last.
//!
//! The table has a fixed size and no lock. An entry is two words: a keyed hash of client and Service port, and a digest of
//! the backend with the time of the client's last new connection. The digest is combined with the hash, so that words of two
//! entries, read while another worker writes, name no backend. In a full set the entry that was used longest ago goes: its
//! client may get another backend, no more.

use std::hash::Hasher;
use std::sync::atomic::{AtomicU64, Ordering};

use siphasher::sip::SipHasher13;

use super::time::Timestamp;
use crate::packet::Address;
use crate::services::{Affinity, Backend};

/// Entries that a client may be in: a cache line.
const WAYS: usize = 4;
/// Entries of a large table: a mebibyte.
const MOST: usize = 1 << 16;

#[derive(Default)]
struct AffinityEntry {
    /// The hash of client and Service port; 0 if it is free.
    key: AtomicU64,
    /// Seconds in the upper half, digest in the lower.
    value: AtomicU64,
}

/// The table of all workers.
pub(crate) struct AffinityTable {
    entries: Box<[AffinityEntry]>,
    keys: [u64; 2],
}

impl AffinityTable {
    /// A table beside one of this many connections.
    pub(super) fn new(connections: usize) -> Self {
        let entries = connections.next_power_of_two().clamp(WAYS, MOST);
        let entries = (0..entries).map(|_| AffinityEntry::default()).collect();
        Self { entries, keys: [rand::random(), rand::random()] }
    }

    /// The one of `backends` that this client had, if it opened its last connection within the affinity's time.
    pub(crate) fn find<'b>(
        &self,
        affinity: &Affinity,
        client: Address,
        backends: &'b [Backend],
        now: Timestamp,
    ) -> Option<&'b Backend> {
        let key = self.key(affinity, client);
        let entry = self.set(key).iter().find(|entry| entry.key.load(Ordering::Relaxed) == key)?;
        let value = entry.value.load(Ordering::Relaxed);
        let age = seconds(now).wrapping_sub((value >> 32) as u32);
        let digest = value as u32 ^ key as u32;
        // Another worker's clock may be slightly ahead.
        let is_valid = age < affinity.seconds || age > u32::MAX / 2;
        backends.iter().find(|backend| is_valid && self.digest(backend) == digest)
    }

    /// This client has opened a connection to this backend.
    pub(crate) fn remember(&self, affinity: &Affinity, client: Address, backend: &Backend, now: Timestamp) {
        let key = self.key(affinity, client);
        let set = self.set(key);
        let same = set.iter().find(|entry| entry.key.load(Ordering::Relaxed) == key);
        let age = |entry: &&AffinityEntry| match entry.key.load(Ordering::Relaxed) {
            0 => u32::MAX,
            _ => seconds(now).wrapping_sub((entry.value.load(Ordering::Relaxed) >> 32) as u32).min(u32::MAX - 1),
        };
        let Some(entry) = same.or_else(|| set.iter().max_by_key(age)) else { return };
        let value = u64::from(seconds(now)) << 32 | u64::from(self.digest(backend) ^ key as u32);
        entry.key.store(key, Ordering::Relaxed);
        entry.value.store(value, Ordering::Relaxed);
    }

    /// Entries in use, whether their time has passed or not, and all.
    pub(super) fn usage(&self) -> (usize, usize) {
        let used = self.entries.iter().filter(|entry| entry.key.load(Ordering::Relaxed) != 0).count();
        (used, self.entries.len())
    }

    fn set(&self, key: u64) -> &[AffinityEntry] {
        let sets = self.entries.len() / WAYS;
        let set = (key >> 32) as usize & (sets - 1);
        &self.entries[set * WAYS..(set + 1) * WAYS]
    }

    fn key(&self, affinity: &Affinity, client: Address) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.keys[0], self.keys[1]);
        hasher.write_u64(affinity.id);
        hasher.write(&client.bits().to_ne_bytes());
        hasher.finish().max(1)
    }

    fn digest(&self, backend: &Backend) -> u32 {
        let mut hasher = SipHasher13::new_with_keys(self.keys[1], self.keys[0]);
        hasher.write(&backend.address.bits().to_ne_bytes());
        hasher.write_u16(backend.port);
        hasher.finish() as u32
    }
}

fn seconds(now: Timestamp) -> u32 {
    (now.as_millis() / 1000) as u32
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    fn backend(port: u16) -> Backend {
        Backend { address: Address::from_v4_bytes([10, 0, 0, 1]), port }
    }

    fn client(number: u32) -> Address {
        Address::from_v4_bytes(number.to_be_bytes())
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(seconds * 1000)
    }

    const OF: Affinity = Affinity { id: 7, seconds: 60 };

    #[test]
    fn affinity_lasts_from_the_clients_last_connection() {
        let table = AffinityTable::new(1024);
        let backends = [backend(1), backend(2)];
        let find = |of: &Affinity, now| table.find(of, client(1), &backends, at(now)).map(|found| found.port);
        assert_eq!(find(&OF, 100), None);
        table.remember(&OF, client(1), &backend(2), at(100));
        assert_eq!([100, 159, 160].map(|now| find(&OF, now)), [Some(2), Some(2), None]);
        table.remember(&OF, client(1), &backend(2), at(150));
        assert_eq!([209, 210].map(|now| find(&OF, now)), [Some(2), None]);
        assert_eq!(find(&Affinity { id: 8, ..OF }, 150), None, "of another port");
        assert_eq!(table.find(&OF, client(2), &backends, at(150)), None, "of another client");
        assert_eq!(table.find(&OF, client(1), &backends[..1], at(150)), None, "no longer eligible");
    }

    #[test]
    fn a_full_table_forgets_who_came_longest_ago() {
        let table = AffinityTable::new(64);
        assert_eq!(table.usage(), (0, 64));
        table.remember(&OF, client(0), &backend(1), at(0));
        table.remember(&OF, client(0), &backend(2), at(0));
        assert_eq!(table.usage(), (1, 64), "of one client, one entry");
        // One a second. Keys are random: all of the last twenty stay unless five of them meet in one of sixteen sets.
        (0..10_000).for_each(|number| table.remember(&OF, client(number), &backend(1), at(u64::from(number))));
        let known = |numbers: std::ops::Range<u32>| {
            numbers.filter(|&number| table.find(&OF, client(number), &[backend(1)], at(10_000)).is_some()).count()
        };
        assert!(known(9_980..10_000) > 10, "{}", known(9_980..10_000));
        assert!(known(0..10_000) <= 64);
    }
}
