//! Hashing: from a packet's flow to its position in the table.
//!
//! The table outlives the daemon in a file, so the hash must stay the same with every build that reads it. foldhash, which
//! takes 33 instructions for a key instead of 45, may give another hash with its next version; rapidhash v3, which is
//! fixed, takes 77.

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

use crate::packet::{Address, Flow, FlowKey, Orientation, Protocol};

/// A connection's key as stored in an entry: lower address, higher address (most significant half first), then ports
/// and protocol. IPv4 is IPv4-mapped IPv6, as in [`Address`].
pub(super) type KeyWords = [u64; 5];

/// Bits of the last word that belong to the key: two ports and the protocol.
pub(super) const PORTS_BITS: u32 = 40;
/// Mask of [`PORTS_BITS`].
pub(super) const PORTS_MASK: u64 = (1 << PORTS_BITS) - 1;

#[inline]
pub(super) fn key_words(key: &FlowKey) -> KeyWords {
    let (low, high) = (key.low.bits(), key.high.bits());
    let name = u64::from(key.low_port) | u64::from(key.high_port) << 16 | u64::from(key.protocol.0) << 32;
    [(low >> 64) as u64, low as u64, (high >> 64) as u64, high as u64, name]
}

pub(super) fn key_of(words: &KeyWords) -> FlowKey {
    let address = |high: u64, low: u64| Address::from_bits(u128::from(high) << 64 | u128::from(low));
    FlowKey {
        low: address(words[0], words[1]),
        high: address(words[2], words[3]),
        low_port: words[4] as u16,
        high_port: (words[4] >> 16) as u16,
        protocol: Protocol((words[4] >> 32) as u8),
    }
}

/// Random secrets that prevent a sender from choosing connections of one group.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Seed {
    /// Secret of the table's hash.
    pub(super) table: [u64; 6],
    /// Secret of connection ids, which are logged and must reveal nothing about the table's hash.
    pub(super) names: [u64; 2],
}

impl Seed {
    /// Number of words in a file.
    pub(super) const WORDS: usize = 8;

    pub(super) fn random() -> Self {
        Self::from_words(&std::array::from_fn(|_| rand::random()))
    }

    pub(super) fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let [table @ .., first, second] = *words;
        Self { table, names: [first, second] }
    }

    pub(super) fn words(&self) -> [u64; Self::WORDS] {
        let ([a, b, c, d, e, f], [g, h]) = (self.table, self.names);
        [a, b, c, d, e, f, g, h]
    }

    /// The connection id of a flow, the same for both directions. SipHash is a pseudorandom function with a separate
    /// secret: known ids reveal nothing about other ids or the table's hash. It takes about ten times as long as that
    /// hash, so it is only for logs.
    pub(super) fn name(&self, flow: &Flow) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.names[0], self.names[1]);
        for word in key_words(&flow.key().0) {
            hasher.write_u64(word);
        }
        hasher.finish()
    }

    /// A keyed 64-bit hash by folded multiplication; each word is combined with a secret before it is multiplied.
    #[inline]
    pub(super) fn hash(&self, key: &KeyWords) -> u64 {
        let [s0, s1, s2, s3, s4, s5] = self.table;
        let low = fold(key[0] ^ s0, key[1] ^ s1);
        let high = fold(key[2] ^ s2, key[3] ^ s3);
        let both = fold(low.rotate_left(23) ^ high ^ key[4], s4);
        fold(both ^ low, s5 | 1)
    }
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// A flow prepared for lookups by [`super::ConnTable::prepare`].
#[derive(Clone, Copy, Debug)]
pub struct PreparedFlow {
    pub(super) words: KeyWords,
    pub(super) hash: u64,
    pub(super) hint: u32,
    pub(super) orientation: Orientation,
}

pub(super) const NO_HINT: u32 = u32::MAX;

impl PreparedFlow {
    #[inline]
    pub(super) fn new(seed: &Seed, flow: &Flow) -> Self {
        let (key, orientation) = flow.key();
        let words = key_words(&key);
        Self { words, hash: seed.hash(&words), hint: NO_HINT, orientation }
    }

    /// Direction of the packet.
    #[inline]
    pub const fn orientation(&self) -> Orientation {
        self.orientation
    }

    /// Key of its connection.
    pub fn key(&self) -> FlowKey {
        key_of(&self.words)
    }

    /// The prepared flow.
    pub fn flow(&self) -> Flow {
        self.key().flow(self.orientation)
    }

    #[inline]
    pub(super) const fn protocol(&self) -> Protocol {
        Protocol((self.words[4] >> 32) as u8)
    }

    /// Its tag in its groups; never 0, which means *no entry*.
    #[inline]
    pub(super) const fn tag(&self) -> u16 {
        tag(self.hash)
    }
}

#[inline]
pub(super) const fn tag(hash: u64) -> u16 {
    let tag = hash as u16;
    if tag == 0 { 1 } else { tag }
}

/// The home group of this hash, out of `groups`.
#[inline]
pub(super) const fn home(hash: u64, groups: u32) -> u32 {
    (((hash >> 32) * groups as u64) >> 32) as u32
}

/// The alternate group, used when the home group is crowded; different from it. `groups` is at least 2.
#[inline]
pub(super) const fn alternate(hash: u64, groups: u32) -> u32 {
    let other = home(hash.wrapping_mul(0x9e37_79b9_7f4a_7c15), groups);
    if other != home(hash, groups) {
        other
    } else if other + 1 < groups {
        other + 1
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    prop_compose! {
        fn any_flow()(src in 0u128..3, dst in 0u128..3, v6 in any::<bool>(), protocol in 0u8..3, ports in any::<[bool; 4]>()) -> Flow {
            let address = |n: u128| Address::from_bits(if v6 { n << 64 } else { 0xffff_0000_0000 | n });
            let port = |a: bool, b: bool| u16::from(a) << 15 | u16::from(b);
            Flow {
                src: address(src), dst: address(dst), protocol: Protocol(protocol),
                src_port: port(ports[0], ports[1]), dst_port: port(ports[2], ports[3]),
            }
        }
    }

    proptest! {
        #[test]
        fn equality_and_hash_of_the_key_agree(a in any_flow(), b in any_flow()) {
            let seed = Seed::from_words(&[1, 2, 3, 5, 7, 11, 13, 17].map(|n: u64| n.wrapping_mul(0x2545_f491_4f6c_dd1d)));
            let (one, other) = (PreparedFlow::new(&seed, &a), PreparedFlow::new(&seed, &b));
            let same = a.key().0 == b.key().0;
            prop_assert_eq!(one.words == other.words, same);
            prop_assert_eq!(one.hash == other.hash, same, "64 bits of hash do not collide among so few keys");
            prop_assert_eq!(PreparedFlow::new(&seed, &a.reversed()).hash, one.hash);
            prop_assert_eq!(one.flow(), a);
        }

        #[test]
        fn the_alternate_group_differs_from_home(hash in any::<u64>(), groups in 2u32..100) {
            prop_assert!(home(hash, groups) < groups && alternate(hash, groups) < groups);
            prop_assert_ne!(home(hash, groups), alternate(hash, groups));
        }
    }

    /// Inverse of the formula that once derived the logged id from the table's hash.
    fn hash_of_old_number(number: u64) -> u64 {
        const FACTOR: u64 = 0xbf58_476d_1ce4_e5b9;
        // Newton's iteration doubles the correct bits: 3, 6, … 96.
        let inverse = (0..5).fold(FACTOR, |x, _| x.wrapping_mul(2u64.wrapping_sub(FACTOR.wrapping_mul(x))));
        let mixed = number.wrapping_mul(inverse);
        mixed ^ mixed >> 29 ^ mixed >> 58
    }

    #[test]
    fn a_connection_id_reveals_nothing_about_the_table_position() {
        const GROUPS: u32 = 64;
        let seed = Seed::random();
        let flow = |n: u32| Flow {
            src: Address::from_v4_bytes([10, 0, 0, 1]),
            dst: Address::from_v4_bytes((0x0a01_0000 + n / 1000).to_be_bytes()),
            protocol: Protocol::TCP,
            src_port: 1024 + (n % 1000) as u16,
            dst_port: 80,
        };
        let old = 0x1234_5678_9abc_def0_u64;
        assert_eq!(hash_of_old_number((old ^ old >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)), old, "it is the inverse");
        // Three ways to guess a group from an id. Each succeeds by chance for one in 64: 1000 of 64,000 with a standard
        // deviation of 31; six of them on either side.
        let guesses: [fn(u64) -> u32; 3] = [
            |number| home(hash_of_old_number(number), GROUPS),
            |number| home(number, GROUPS),
            |number| number as u32 % GROUPS,
        ];
        let mut right = [0u32; 3];
        // How the ids of one group's connections are distributed over 64 ranges.
        let mut ranges = [0u32; GROUPS as usize];
        for n in 0..64_000 {
            let group = home(PreparedFlow::new(&seed, &flow(n)).hash, GROUPS);
            let number = seed.name(&flow(n));
            for (right, guess) in right.iter_mut().zip(guesses) {
                *right += u32::from(guess(number) == group);
            }
            if group < 32 {
                ranges[home(number, GROUPS) as usize] += 1;
            }
        }
        assert!(right.iter().all(|right| (810..1190).contains(right)), "{right:?}");
        // 500 expected with a standard deviation of 22.
        assert!(ranges.iter().all(|count| (366..634).contains(count)), "{ranges:?}");
    }

    #[test]
    fn a_connection_id_is_equal_both_ways_and_of_the_seed() {
        let flow = Flow { src_port: 1000, dst_port: 80, protocol: Protocol::TCP, ..Flow::default() };
        let (one, other) = (Seed::random(), Seed::random());
        assert_eq!(one.name(&flow), one.name(&flow.reversed()));
        assert_ne!(one.name(&flow), one.name(&Flow { dst_port: 81, ..flow }));
        assert_ne!(one.name(&flow), other.name(&flow));
        assert_ne!(one.name(&flow), Seed { names: other.names, ..one }.name(&flow), "it has a key of its own");
        assert_eq!(one.name(&flow), Seed { table: other.table, ..one }.name(&flow));
        assert_eq!(one.name(&flow), Seed::from_words(&one.words()).name(&flow));
    }

    #[test]
    fn neighbouring_flows_spread_evenly() {
        let seed = Seed::random();
        const GROUPS: u32 = 64;
        let mut counts = [0u32; GROUPS as usize];
        for n in 0..64_000u32 {
            let flow = Flow {
                src: Address::from_v4_bytes([10, 0, 0, 1]),
                dst: Address::from_v4_bytes((0x0a01_0000 + n / 1000).to_be_bytes()),
                protocol: Protocol::TCP,
                src_port: 1024 + (n % 1000) as u16,
                dst_port: 80,
            };
            counts[home(PreparedFlow::new(&seed, &flow).hash, GROUPS) as usize] += 1;
        }
        // 1000 expected with a standard deviation of 31: six of them on either side.
        assert!(counts.iter().all(|count| (810..1190).contains(count)), "{counts:?}");
    }
}
