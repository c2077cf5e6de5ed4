//! Whose answers count.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use rustc_hash::FxHashSet;

use crate::packet::Address;

/// The servers whose answers teach pods names. The default: none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Resolvers {
    addresses: Arc<FxHashSet<Address>>,
    blocks: Arc<[IpNet]>,
    are_all: bool,
}

impl Resolvers {
    pub fn new(addresses: impl IntoIterator<Item = Address>, blocks: impl IntoIterator<Item = IpNet>) -> Self {
        let addresses = Arc::new(addresses.into_iter().collect());
        Self { addresses, blocks: blocks.into_iter().collect(), are_all: false }
    }

    /// Whoever answers from a DNS server's port.
    pub fn all() -> Self {
        Self { are_all: true, ..Self::default() }
    }

    pub fn is_empty(&self) -> bool {
        !self.are_all && self.addresses.is_empty() && self.blocks.is_empty()
    }

    pub fn contains(&self, address: Address) -> bool {
        let is_in_block = || {
            let address = IpAddr::from(address);
            self.blocks.iter().any(|block| block.contains(&address))
        };
        self.are_all || self.addresses.contains(&address) || is_in_block()
    }
}
