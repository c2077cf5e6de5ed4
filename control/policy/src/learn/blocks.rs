//! Groups addresses outside of the cluster into few blocks.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use penstock_dataplane::packet::Address;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Block {
    pub cidr: IpNet,
    /// How many of its addresses were seen, at least 1.
    pub seen: u64,
}

impl Block {
    /// How many addresses it holds. `::/0` has one more than this type can count, and is one less here.
    pub fn holds(&self) -> u128 {
        holds(self.cidr)
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BlockLimits {
    /// The most addresses that were not seen which a block may add.
    pub widening: u64,
    /// Addresses that no block of more than one may hold: those of the cluster's own objects. Sorted.
    pub never: Vec<Address>,
    /// Networks that no block of more than one address may touch.
    pub never_in: Vec<IpNet>,
}

impl BlockLimits {
    fn permit(&self, block: Block) -> bool {
        let (first, last) = (Address::from(block.cidr.network()), Address::from(block.cidr.broadcast()));
        let next = self.never.partition_point(|address| *address < first);
        let holds_own = self.never.get(next).is_some_and(|address| *address <= last);
        let touches = |net: &IpNet| net.contains(&block.cidr) || block.cidr.contains(net);
        block.holds() == 1
            || block.holds() - u128::from(block.seen) <= u128::from(self.widening)
                && !holds_own
                && !self.never_in.iter().any(touches)
    }
}

fn holds(cidr: IpNet) -> u128 {
    let free = u32::from(cidr.max_prefix_len() - cidr.prefix_len());
    1u128.checked_shl(free).unwrap_or(u128::MAX)
}

/// The largest blocks within the limits that hold these addresses, sorted. The addresses are sorted, each once.
pub fn cover(addresses: &[IpAddr], limits: &BlockLimits) -> Vec<Block> {
    let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) = addresses.iter().partition(|address| address.is_ipv4());
    let mut blocks = Vec::new();
    [v4, v6].iter().for_each(|family| split(family, limits, &mut blocks));
    blocks
}

/// Takes the smallest block that holds these addresses of one family, or else those of its halves.
fn split(addresses: &[IpAddr], limits: &BlockLimits, into: &mut Vec<Block>) {
    let (Some(first), Some(last)) = (addresses.first(), addresses.last()) else { return };
    let cidr = smallest(*first, *last);
    let block = Block { cidr, seen: addresses.len() as u64 };
    if limits.permit(block) {
        into.push(block);
        return;
    }
    // A block of one address is within every limit, so this one has two halves with addresses in both.
    let half = cidr.prefix_len() + 1;
    let below = addresses.partition_point(|address| prefix(*address, half).network() == prefix(*first, half).network());
    split(&addresses[..below], limits, into);
    split(&addresses[below..], limits, into);
}

/// The smallest block with both addresses, which are of one family.
fn smallest(first: IpAddr, last: IpAddr) -> IpNet {
    let same = (Address::from(first).bits() ^ Address::from(last).bits()).leading_zeros() as u8;
    // An IPv4 address is the end of the 128 bits.
    prefix(first, if first.is_ipv4() { same - 96 } else { same })
}

/// The block of this prefix length, which is within the family's, around an address.
fn prefix(address: IpAddr, length: u8) -> IpNet {
    match address {
        IpAddr::V4(address) => IpNet::V4(Ipv4Net::new_assert(address, length).trunc()),
        IpAddr::V6(address) => IpNet::V6(Ipv6Net::new_assert(address, length).trunc()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(addresses: &[&str], limits: &BlockLimits) -> Vec<(String, u64)> {
        let mut addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
        addresses.sort();
        cover(&addresses, limits).iter().map(|block| (block.cidr.to_string(), block.seen)).collect()
    }

    #[test]
    fn blocks_are_the_largest_within_the_limits() {
        let seen = ["203.0.113.5", "203.0.113.6", "203.0.113.200", "198.51.100.1", "2001:db8::1", "2001:db8::2"];
        for (widening, expected) in [
            (
                0,
                vec![
                    "198.51.100.1/32",
                    "203.0.113.5/32",
                    "203.0.113.6/32",
                    "203.0.113.200/32",
                    "2001:db8::1/128",
                    "2001:db8::2/128",
                ],
            ),
            (2, vec!["198.51.100.1/32", "203.0.113.4/30", "203.0.113.200/32", "2001:db8::/126"]),
            (253, vec!["198.51.100.1/32", "203.0.113.0/24", "2001:db8::/126"]),
            (u64::MAX, vec!["192.0.0.0/4", "2001:db8::/126"]),
        ] {
            let found = blocks(&seen, &BlockLimits { widening, ..BlockLimits::default() });
            let found: Vec<&str> = found.iter().map(|(cidr, _)| cidr.as_str()).collect();
            assert_eq!(found, expected, "{widening}");
        }
        let every = ["0.0.0.0", "255.255.255.255", "::", "ffff::"];
        let found = blocks(&every, &BlockLimits { widening: u64::MAX, ..BlockLimits::default() });
        assert_eq!(found, [("0.0.0.0/0".to_owned(), 2), ("::/128".to_owned(), 1), ("ffff::/128".to_owned(), 1)]);
    }

    #[test]
    fn no_block_of_more_than_one_holds_an_address_of_the_cluster() {
        let never = vec![Address::from("203.0.113.64".parse::<IpAddr>().unwrap())];
        let never_in = vec!["203.0.113.192/26".parse().unwrap()];
        let limits = BlockLimits { widening: u64::MAX, never, never_in };
        let found = blocks(&["203.0.113.1", "203.0.113.63", "203.0.113.130", "203.0.113.200"], &limits);
        let expected = [("203.0.113.0/26", 2), ("203.0.113.130/32", 1), ("203.0.113.200/32", 1)];
        assert_eq!(found, expected.map(|(cidr, seen)| (cidr.to_owned(), seen)));
    }
}
