//! The addresses at which pods may send to Services that the node's kernel translates: egress policy is postponed there until it is
//! known what answers. The program on what leaves the node has an address before policy postpones for it, and keeps it until no
//! worker does any more, so that a packet which nothing has translated is asked about as it is.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use penstock_dataplane::Epoch;
use penstock_dataplane::packet::Address;
use penstock_dataplane::policy::AddressSet;
use penstock_xdp_redirect::ServiceAddresses;

pub(super) struct PostponedAddresses {
    program: ServiceAddresses,
    /// The addresses that the program has; of those that are no Service's any more, the first snapshot without them.
    entered: BTreeMap<IpAddr, Option<Epoch>>,
    /// Addresses that could not be entered; the first was logged.
    failed: BTreeSet<IpAddr>,
    tables: Arc<AddressSet>,
}

impl PostponedAddresses {
    pub(super) fn new(program: ServiceAddresses) -> Self {
        Self { program, entered: BTreeMap::new(), failed: BTreeSet::new(), tables: Arc::default() }
    }

    /// The addresses for the snapshot of `epoch`, of those wanted.
    pub(super) fn update(&mut self, wanted: &BTreeSet<IpAddr>, epoch: Epoch) -> &Arc<AddressSet> {
        for (address, gone_since) in &mut self.entered {
            *gone_since = if wanted.contains(address) { None } else { gone_since.or(Some(epoch)) };
        }
        let had_failed = !self.failed.is_empty();
        self.failed.clear();
        for &address in wanted {
            if self.entered.contains_key(&address) {
                continue;
            }
            match self.program.insert(address) {
                Ok(()) => _ = self.entered.insert(address, None),
                Err(error) => {
                    if self.failed.is_empty() && !had_failed {
                        tracing::error!("{error}");
                    }
                    self.failed.insert(address);
                }
            }
        }
        let tables: AddressSet =
            wanted.iter().filter(|address| !self.failed.contains(address)).copied().map(Address::from).collect();
        if tables != *self.tables {
            self.tables = Arc::new(tables);
        }
        &self.tables
    }

    /// Takes addresses out of the program that no worker postpones policy at any more: `is_in_force` says whether no worker reads a
    /// snapshot before this one. Returns whether addresses that had no room may have it now.
    pub(super) fn release(&mut self, is_in_force: impl Fn(Epoch) -> bool) -> bool {
        let before = self.entered.len();
        let program = &self.program;
        self.entered.retain(|address, gone_since| {
            gone_since.is_none_or(|gone| !is_in_force(gone) || program.remove(*address).is_err())
        });
        self.entered.len() < before && !self.failed.is_empty()
    }
}
