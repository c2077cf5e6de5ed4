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
    /// Addresses that could not be entered, which was logged.
    failed: BTreeSet<IpAddr>,
    tables: Arc<AddressSet>,
}

impl PostponedAddresses {
    pub(super) fn new(program: ServiceAddresses) -> Self {
        Self { program, entered: BTreeMap::new(), failed: BTreeSet::new(), tables: Arc::default() }
    }

    /// The addresses for the snapshot of `epoch`, of those wanted. `is_in_force`: whether no worker reads a snapshot before this one.
    pub(super) fn update(
        &mut self,
        wanted: &BTreeSet<IpAddr>,
        epoch: Epoch,
        is_in_force: impl Fn(Epoch) -> bool,
    ) -> &Arc<AddressSet> {
        let program = &self.program;
        self.failed.retain(|address| wanted.contains(address));
        for &address in wanted {
            if let Some(gone_since) = self.entered.get_mut(&address) {
                *gone_since = None;
                continue;
            }
            match program.insert(address) {
                Ok(()) => {
                    self.failed.remove(&address);
                    self.entered.insert(address, None);
                }
                Err(error) if self.failed.insert(address) => tracing::error!("{error}"),
                Err(_) => {}
            }
        }
        self.entered.retain(|address, gone_since| match *gone_since {
            _ if wanted.contains(address) => true,
            Some(gone) if is_in_force(gone) => program.remove(*address).is_err(),
            known => {
                *gone_since = known.or(Some(epoch));
                true
            }
        });
        let held = |address: &&IpAddr| self.entered.contains_key(*address);
        let tables: AddressSet = wanted.iter().filter(held).copied().map(Address::from).collect();
        if tables != *self.tables {
            self.tables = Arc::new(tables);
        }
        &self.tables
    }
}
