//! From a packet's flow to its place in the table.

use crate::packet::{Address, Flow, FlowKey, Orientation, Protocol};

/// A connection's key as an entry holds it: lower address, higher address (most significant half first), then
/// ports and protocol. IPv4 is IPv4-mapped IPv6, as in [`Address`].
pub(super) type KeyWords = [u64; 5];

/// Bits of the last key word that belong to the key: two ports and the protocol.
pub(super) const NAME_BITS: u32 = 40;
/// Mask of [`NAME_BITS`].
pub(super) const NAME_MASK: u64 = (1 << NAME_BITS) - 1;

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

/// Random numbers that keep a sender from choosing connections that fall into one group of the table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Seed(pub(super) [u64; 6]);

impl Seed {
    pub(super) fn random() -> Self {
        Self(std::array::from_fn(|_| rand::random()))
    }

    /// A keyed hash of 64 bits by folded multiplication: each word meets a secret before it is multiplied.
    #[inline]
    pub(super) fn hash(&self, key: &KeyWords) -> u64 {
        let [s0, s1, s2, s3, s4, s5] = self.0;
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

/// A flow made ready for the table by [`super::ConnTable::prepare`].
#[derive(Clone, Copy, Debug)]
pub struct Hashed {
    pub(super) words: KeyWords,
    pub(super) hash: u64,
    pub(super) hint: u32,
    pub(super) orientation: Orientation,
}

/// No hint.
pub(super) const NO_HINT: u32 = u32::MAX;

impl Hashed {
    #[inline]
    pub(super) fn new(seed: &Seed, flow: &Flow) -> Self {
        let (key, orientation) = flow.key();
        let words = key_words(&key);
        Self { words, hash: seed.hash(&words), hint: NO_HINT, orientation }
    }

    /// Which way the packet travels.
    #[inline]
    pub const fn orientation(&self) -> Orientation {
        self.orientation
    }

    /// The key of its connection.
    pub fn key(&self) -> FlowKey {
        key_of(&self.words)
    }

    /// One number for all packets of its connection, in both directions, that says nothing of where it is in the table.
    pub(super) const fn id(&self) -> u64 {
        // Odd factors, so that two hashes do not share a number.
        (self.hash ^ self.hash >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    }

    /// The flow that was prepared.
    pub fn flow(&self) -> Flow {
        self.key().flow(self.orientation)
    }

    #[inline]
    pub(super) const fn protocol(&self) -> Protocol {
        Protocol((self.words[4] >> 32) as u8)
    }

    /// Its tag in the groups that it may be in; never 0, which means *no entry*.
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

/// The group that a connection of this hash belongs into first, of `groups`.
#[inline]
pub(super) const fn home(hash: u64, groups: u32) -> u32 {
    (((hash >> 32) * groups as u64) >> 32) as u32
}

/// The group that takes it when its home is crowded: another one than its home, of `groups`, which are at least 2.
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
            let seed = Seed([1, 2, 3, 5, 7, 11].map(|n: u64| n.wrapping_mul(0x2545_f491_4f6c_dd1d)));
            let (one, other) = (Hashed::new(&seed, &a), Hashed::new(&seed, &b));
            let same = a.key().0 == b.key().0;
            prop_assert_eq!(one.words == other.words, same);
            prop_assert_eq!(one.hash == other.hash, same, "64 bits of hash do not collide among so few keys");
            prop_assert_eq!(Hashed::new(&seed, &a.reversed()).hash, one.hash);
            prop_assert_eq!(one.flow(), a);
        }

        #[test]
        fn the_alternate_group_is_another_one(hash in any::<u64>(), groups in 2u32..100) {
            prop_assert!(home(hash, groups) < groups && alternate(hash, groups) < groups);
            prop_assert_ne!(home(hash, groups), alternate(hash, groups));
        }
    }

    #[test]
    fn neighbouring_flows_spread_evenly() {
        let seed = Seed::random();
        const GROUPS: u32 = 64;
        let mut counts = [0u32; GROUPS as usize];
        for n in 0..64_000u32 {
            let flow = Flow {
                src: Address::from_v4_octets([10, 0, 0, 1]),
                dst: Address::from_v4_octets((0x0a01_0000 + n / 1000).to_be_bytes()),
                protocol: Protocol::TCP,
                src_port: 1024 + (n % 1000) as u16,
                dst_port: 80,
            };
            counts[home(Hashed::new(&seed, &flow).hash, GROUPS) as usize] += 1;
        }
        // 1000 expected with a standard deviation of 31: six of them on either side.
        assert!(counts.iter().all(|count| (810..1190).contains(count)), "{counts:?}");
    }
}
