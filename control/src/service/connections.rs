//! Connections that outlast the daemon, and whose they are.
//!
//! The connection table lives in a file ([`Mapping::File`]), so that a restarted daemon goes on with its connections.
//! Which pod had which address is written beside it: while no daemon runs, an address may become another pod's, and
//! that pod must inherit nothing.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use penstock_dataplane::conntrack::{ConnTable, Opened, OwnerId};
use penstock_dataplane::forward::Forwarding;
use penstock_dataplane::packet::Address;

use super::RunError;
use super::config::Mapping;
use crate::model::ObjectKey;

/// Who has each address: the pod, and the index of its interface, which a pod that is made again has anew.
pub(super) type Tenants = BTreeMap<IpAddr, (ObjectKey, u32)>;

/// What the name of the file with the tenants ends in, behind that of the table's file.
const PODS: &str = ".pods";

/// Makes the directory of the connection table's file, if there is to be one.
pub(super) fn make_directory(mapping: &Mapping) -> Result<(), RunError> {
    let Mapping::File(path) = mapping else { return Ok(()) };
    let Some(directory) = path.parent() else { return Ok(()) };
    fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(|error| {
        RunError::bad_input(format!(
            "conntrack.mapping: directory {} cannot be made ({error}); make it, or set another mapping",
            directory.display()
        ))
    })
}

/// Keeps the connections with the pods that they are of.
pub(super) struct Connections {
    mapping: Mapping,
    /// As of the last snapshot.
    tenants: Tenants,
    /// Whether the table's connections have been given to this process's ports.
    taken_over: bool,
}

impl Connections {
    pub(super) fn new(mapping: &Mapping) -> Self {
        Self { mapping: mapping.clone(), tenants: Tenants::new(), taken_over: false }
    }

    /// To be called before the first snapshot is published: gives the connections that were found in the file to the
    /// ports of `forwarding`, and removes those of pods that are gone. At later calls nothing happens.
    pub(super) fn take_over(&mut self, table: &ConnTable, tenants: &Tenants, forwarding: &Forwarding) {
        if std::mem::replace(&mut self.taken_over, true) {
            return;
        }
        let Mapping::File(path) = &self.mapping else { return };
        let path = path.display();
        match table.opened() {
            Opened::New => tracing::info!("connection table {path}: new"),
            Opened::Remade(reason) => {
                tracing::warn!("connection table {path}: {reason}; a new one was made, and all connections are new");
            }
            Opened::Found => {
                let found = table.len();
                let removed = self.adopt(table, tenants, forwarding);
                tracing::info!(
                    "connection table {path}: {found} connections found; {removed} of pods that are gone removed, the others go on"
                );
            }
        }
    }

    /// Gives each connection the local pod that opened it, else the one that it is for, and removes it if either end is
    /// another pod's than before, or no pod's any more. How many were removed.
    fn adopt(&self, table: &ConnTable, tenants: &Tenants, forwarding: &Forwarding) -> usize {
        let before = self.read().unwrap_or_else(|error| {
            tracing::warn!(%error, "whose the connections were cannot be read: none goes on");
            BTreeMap::new()
        });
        let before: BTreeMap<Address, String> = before.into_iter().map(|(end, name)| (end.into(), name)).collect();
        let now: BTreeMap<Address, String> = tenants.iter().map(|(&end, tenant)| (end.into(), name(tenant))).collect();
        table.assign_owners(|flow| {
            let ends = [flow.src, flow.dst];
            let stayed = ends.iter().all(|end| before.get(end) == now.get(end));
            let port = ends.into_iter().find_map(|end| forwarding.pod_port(end));
            port.filter(|_| stayed).map(|port| OwnerId(port.0))
        })
    }

    /// To be called once a snapshot is published with these tenants: removes the connections of addresses that their
    /// pods have given up, so that the next pod inherits none. One that a worker was just entering is of an older
    /// epoch.
    pub(super) fn publish(&mut self, table: &ConnTable, tenants: Tenants) {
        let left: Vec<Address> = (self.tenants.iter())
            .filter(|(address, tenant)| tenants.get(address) != Some(tenant))
            .map(|(&address, _)| address.into())
            .collect();
        let changed = tenants != self.tenants;
        self.tenants = tenants;
        if !left.is_empty() {
            let removed = table.remove_addresses(&left);
            tracing::debug!(addresses = ?left, connections = removed, "connections of pods that are gone removed");
        }
        // Last: should the process end before, the addresses of pods that came or went are not those of this file, and
        // their connections are removed at the next start.
        if changed && let Err(error) = self.write() {
            tracing::warn!(%error, "whose the connections are cannot be written: after a restart some will be new");
        }
    }

    /// A file beside the table's.
    fn beside(path: &Path, suffix: &str) -> PathBuf {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        name.into()
    }

    fn read(&self) -> io::Result<BTreeMap<IpAddr, String>> {
        let Mapping::File(path) = &self.mapping else { return Ok(BTreeMap::new()) };
        Ok(serde_json::from_slice(&fs::read(Self::beside(path, PODS))?)?)
    }

    /// Written under another name and moved into place, so that a half is never read.
    fn write(&self) -> io::Result<()> {
        let Mapping::File(path) = &self.mapping else { return Ok(()) };
        let names: BTreeMap<&IpAddr, String> =
            self.tenants.iter().map(|(address, tenant)| (address, name(tenant))).collect();
        let (whole, part) = (Self::beside(path, PODS), Self::beside(path, ".pods.new"));
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
        file.write_all(&serde_json::to_vec(&names)?)?;
        fs::rename(part, whole)
    }
}

/// A tenant by a name that no other one has while the machine runs.
fn name((pod, interface): &(ObjectKey, u32)) -> String {
    format!("{pod} at interface {interface}")
}

#[cfg(test)]
mod tests {
    use penstock_dataplane::Epoch;
    use penstock_dataplane::conntrack::{Config, NewConn, Timestamp};
    use penstock_dataplane::forward::{Port, PortId, PortKind};
    use penstock_dataplane::packet::{Flow, Protocol, Transport};

    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_000_000);

    fn open(path: &Path) -> ConnTable {
        ConnTable::new(&Config { entries: 1024, mapping: Some(path.to_owned()), ..Config::default() }).unwrap()
    }

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn flow(from: u8, to: u8) -> Flow {
        Flow { src: ip(from).into(), dst: ip(to).into(), protocol: Protocol::UDP, src_port: 1000, dst_port: 53 }
    }

    fn enter(table: &ConnTable, flow: &Flow, owner: u16) {
        let (transport, hashed) = (&Transport::Udp, &table.prepare(flow));
        let new = NewConn { hashed, transport, owner: OwnerId(owner), via_host: false, epoch: Epoch(1), now: NOW };
        assert!(table.insert(&new).is_ok());
    }

    /// Pods by their addresses' last octet, with interface and port.
    fn node(pods: &[(u8, &str, u32, u16)]) -> (Tenants, Forwarding) {
        let (mut tenants, mut forwarding) = (Tenants::new(), Forwarding::default());
        for &(last, name, interface, port) in pods {
            let key = ObjectKey { namespace: "shop".into(), name: name.into() };
            tenants.insert(ip(last), (key, interface));
            let addresses = vec![ip(last).into()];
            let mac = Default::default();
            let behind = Port { kind: PortKind::Pod, own_mac: mac, peer_mac: mac, mtu: 1500, addresses };
            forwarding.insert(PortId(port), behind).unwrap();
        }
        (tenants, forwarding)
    }

    #[test]
    fn a_connection_goes_on_with_its_own_pod_and_no_other_inherits_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("conntrack");
        let mapping = Mapping::File(path.clone());
        const OUTSIDE: u8 = 99;
        let flows =
            [flow(1, 2), flow(OUTSIDE, 1), flow(1, 3), flow(1, 4), flow(OUTSIDE, 3), flow(4, OUTSIDE), flow(2, 5)];
        {
            let table = open(&path);
            let (tenants, forwarding) =
                node(&[(1, "web", 11, 1), (2, "db", 12, 2), (3, "old", 13, 3), (4, "gone", 14, 4)]);
            let mut connections = Connections::new(&mapping);
            connections.take_over(&table, &tenants, &forwarding);
            connections.publish(&table, tenants);
            flows.iter().for_each(|flow| enter(&table, flow, 7));
        }
        let table = open(&path);
        // `old` was made again, `gone` is not here, and 5 is new; all ports have other numbers.
        let (tenants, forwarding) =
            node(&[(1, "web", 11, 31), (2, "db", 12, 32), (3, "old", 17, 33), (5, "new", 18, 35)]);
        let mut connections = Connections::new(&mapping);
        connections.take_over(&table, &tenants, &forwarding);
        let left: Vec<(Flow, OwnerId)> = table.iter(NOW).map(|found| (found.original, found.owner)).collect();
        assert_eq!(left.len(), 2, "{left:?}");
        for kept in [(flow(1, 2), OwnerId(31)), (flow(OUTSIDE, 1), OwnerId(31))] {
            assert!(left.contains(&kept), "{kept:?} of {left:?}");
        }
        assert_eq!((table.len(), table.len_of(OwnerId(31)), table.len_of(OwnerId(7))), (2, 2, 0));
    }

    #[test]
    fn without_word_of_whose_they_were_no_connection_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("conntrack");
        enter(&open(&path), &flow(1, 2), 1);
        fs::write(Connections::beside(&path, PODS), "{\"10.0.0.1\": ").unwrap();
        let table = open(&path);
        let (tenants, forwarding) = node(&[(1, "web", 11, 1), (2, "db", 12, 2)]);
        Connections::new(&Mapping::File(path)).take_over(&table, &tenants, &forwarding);
        assert!(table.is_empty());
    }

    #[test]
    fn an_address_that_was_given_up_leaves_no_connection() {
        let table = ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap();
        let mut connections = Connections::new(&Mapping::Off);
        let (both, _) = node(&[(1, "web", 11, 1), (2, "db", 12, 2)]);
        let (again, _) = node(&[(1, "web", 11, 1), (2, "db", 13, 2)]);
        connections.publish(&table, both);
        [flow(1, 2), flow(1, 9)].iter().for_each(|flow| enter(&table, flow, 1));
        connections.publish(&table, again);
        assert_eq!(table.iter(NOW).map(|found| found.original).collect::<Vec<_>>(), [flow(1, 9)]);
    }
}
