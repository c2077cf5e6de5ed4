//! Connections that outlast the daemon, and whose they are.
//!
//! The connection table lives in a file ([`Mapping::File`]), so that a restarted daemon goes on with its connections.
//! Which pod had which address is written beside it: while no daemon runs, an address may become another pod's, and
//! that pod must inherit nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use penstock_dataplane::conntrack::{ConnTable, OwnerId, TableOrigin};
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
///
/// An address that its pod gives up is nobody's until the connections of that pod are gone: going through the table takes
/// tens of milliseconds, which is a thread's work of its own ([`Clearing`]), and publishing does not wait for it.
pub(super) struct Connections {
    mapping: Mapping,
    clearing: Clearing,
    /// Who has which address in the last snapshot.
    tenants: Tenants,
    /// What was last handed over to be written.
    written: Tenants,
    /// Addresses that were given up and whose connections may still be there.
    given_up: BTreeSet<IpAddr>,
    /// Those of them that a walk was asked for.
    underway: BTreeSet<IpAddr>,
    /// Whether the table's connections have been given to this process's ports.
    taken_over: bool,
}

impl Connections {
    pub(super) fn new(mapping: &Mapping, clearing: Clearing) -> Self {
        Self {
            mapping: mapping.clone(),
            clearing,
            tenants: Tenants::new(),
            written: Tenants::new(),
            given_up: BTreeSet::new(),
            underway: BTreeSet::new(),
            taken_over: false,
        }
    }

    /// Who of `wanted` has its address in the snapshot that is published next: all but those whose address still has
    /// connections of the pod that had it before.
    pub(super) fn admit(&mut self, wanted: &Tenants) -> &Tenants {
        let left = self.tenants.iter().filter(|(address, tenant)| wanted.get(address) != Some(tenant));
        self.given_up.extend(left.map(|(address, _)| *address));
        self.tenants = wanted.clone();
        self.tenants.retain(|address, _| !self.given_up.contains(address));
        &self.tenants
    }

    /// Whether one of `wanted` could have its address now and has not.
    pub(super) fn withholds(&self, wanted: &Tenants) -> bool {
        wanted.keys().any(|address| !self.tenants.contains_key(address) && !self.given_up.contains(address))
    }

    /// Who has which address in the snapshot that is published next, or was published last.
    pub(super) fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// To be called before the first snapshot is published: gives the connections that were found in the file to the
    /// ports of `forwarding`, and removes those of pods that are gone. At later calls nothing happens.
    pub(super) fn take_over(&mut self, table: &ConnTable, forwarding: &Forwarding) {
        if std::mem::replace(&mut self.taken_over, true) {
            return;
        }
        let Mapping::File(path) = &self.mapping else { return };
        let path = path.display();
        match table.origin() {
            TableOrigin::New => tracing::info!("connection table {path}: new"),
            TableOrigin::Remade(reason) => {
                tracing::warn!("connection table {path}: {reason}; a new one was made, and all connections are new");
            }
            TableOrigin::Found => {
                let found = table.len();
                let removed = self.adopt(table, forwarding);
                tracing::info!(
                    "connection table {path}: {found} connections found; {removed} of pods that are gone removed, the others go on"
                );
            }
        }
    }

    /// Gives each connection the local pod that opened it, else the one that it is for, and removes it if either end is
    /// another pod's than before, or no pod's any more. How many were removed.
    fn adopt(&self, table: &ConnTable, forwarding: &Forwarding) -> usize {
        let before = read(&self.mapping).unwrap_or_else(|error| {
            tracing::warn!(%error, "whose the connections were cannot be read: none goes on");
            BTreeMap::new()
        });
        let before: BTreeMap<Address, String> = before.into_iter().map(|(end, name)| (end.into(), name)).collect();
        let now: BTreeMap<Address, String> =
            self.tenants.iter().map(|(&end, tenant)| (end.into(), name(tenant))).collect();
        table.assign_owners(|flow| {
            let ends = [flow.src, flow.dst];
            let stayed = ends.iter().all(|end| before.get(end) == now.get(end));
            let port = ends.into_iter().find_map(|end| forwarding.pod_port(end));
            port.filter(|_| stayed).map(|port| OwnerId(port.0))
        })
    }

    /// To be called once the snapshot with [`Connections::tenants`] is published: has the connections of addresses that
    /// were given up removed. One that a worker was just entering is of an older epoch, and is evaluated again.
    pub(super) fn published(&mut self) {
        let addresses: Vec<IpAddr> = self.given_up.difference(&self.underway).copied().collect();
        if addresses.is_empty() && self.tenants == self.written {
            return;
        }
        self.underway.extend(&addresses);
        self.written.clone_from(&self.tenants);
        self.clearing.ask(Walk { addresses, tenants: self.tenants.clone() });
    }

    /// The connections of these addresses are gone.
    pub(super) fn cleared(&mut self, addresses: &[IpAddr]) {
        for address in addresses {
            self.given_up.remove(address);
            self.underway.remove(address);
        }
    }

    /// Asks for no more walks: the thread ends when it is done with those that were asked for.
    pub(super) fn end(&mut self) {
        self.clearing = Clearing::default();
    }
}

/// Work on the connection table that is to be done after a snapshot was published.
#[derive(Debug)]
struct Walk {
    /// Their connections are to be removed.
    addresses: Vec<IpAddr>,
    /// Then it is written that these have their addresses.
    tenants: Tenants,
}

/// Where walks through the connection table are asked for. The default takes none.
#[derive(Clone, Debug, Default)]
pub(super) struct Clearing(Option<mpsc::Sender<Walk>>);

/// What was asked of a [`Clearing`].
pub(super) struct Walks(mpsc::Receiver<Walk>);

impl Clearing {
    pub(super) fn new() -> (Self, Walks) {
        let (sender, receiver) = mpsc::channel();
        (Self(Some(sender)), Walks(receiver))
    }

    fn ask(&self, walk: Walk) {
        if let Some(sender) = &self.0 {
            // The thread ends after this does.
            let _ = sender.send(walk);
        }
    }
}

impl Walks {
    /// Goes through the table for whatever was asked by then, all in one walk, until nothing can be asked any more;
    /// `cleared` hears of every walk. Reads no clock and needs no capability.
    pub(super) fn run(self, mapping: &Mapping, table: &ConnTable, mut cleared: impl FnMut(&[IpAddr])) {
        while let Ok(mut walk) = self.0.recv() {
            while let Ok(next) = self.0.try_recv() {
                walk.addresses.extend(next.addresses);
                walk.tenants = next.tenants;
            }
            if !walk.addresses.is_empty() {
                let addresses: Vec<Address> = walk.addresses.iter().map(|&address| address.into()).collect();
                let removed = table.remove_addresses(&addresses);
                tracing::debug!(?addresses, connections = removed, "connections of pods that are gone removed");
            }
            // After that: should the process end before, the addresses of pods that came or went are not those of this file,
            // and their connections are removed at the next start.
            if let Err(error) = write(mapping, &walk.tenants) {
                tracing::warn!(%error, "whose the connections are cannot be written: after a restart some will be new");
            }
            if !walk.addresses.is_empty() {
                cleared(&walk.addresses);
            }
        }
    }
}

/// A file beside the table's.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn read(mapping: &Mapping) -> io::Result<BTreeMap<IpAddr, String>> {
    let Mapping::File(path) = mapping else { return Ok(BTreeMap::new()) };
    Ok(serde_json::from_slice(&fs::read(beside(path, PODS))?)?)
}

/// Written under another name and moved into place, so that a half is never read.
fn write(mapping: &Mapping, tenants: &Tenants) -> io::Result<()> {
    let Mapping::File(path) = mapping else { return Ok(()) };
    let names: BTreeMap<&IpAddr, String> = tenants.iter().map(|(address, tenant)| (address, name(tenant))).collect();
    let (whole, part) = (beside(path, PODS), beside(path, ".pods.new"));
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    file.write_all(&serde_json::to_vec(&names)?)?;
    fs::rename(part, whole)
}

/// A tenant by a name that no other one has while the machine runs.
fn name((pod, interface): &(ObjectKey, u32)) -> String {
    format!("{pod} at interface {interface}")
}

#[cfg(test)]
mod tests {
    use penstock_dataplane::Epoch;
    use penstock_dataplane::conntrack::{Config, NewConnection, Timestamp};
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
        let new =
            NewConnection { hashed, transport, owner: OwnerId(owner), via_host: false, epoch: Epoch(1), now: NOW };
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

    /// Publishes with these tenants, and does what was asked of the thread.
    fn settle(connections: &mut Connections, walks: Walks, table: &ConnTable, wanted: &Tenants, to: &Forwarding) {
        connections.admit(wanted);
        connections.take_over(table, to);
        connections.published();
        connections.end();
        let mapping = connections.mapping.clone();
        walks.run(&mapping, table, |addresses| connections.cleared(addresses));
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
            let (clearing, walks) = Clearing::new();
            settle(&mut Connections::new(&mapping, clearing), walks, &table, &tenants, &forwarding);
            flows.iter().for_each(|flow| enter(&table, flow, 7));
        }
        let table = open(&path);
        // `old` was made again, `gone` is not here, and 5 is new; all ports have other numbers.
        let (tenants, forwarding) =
            node(&[(1, "web", 11, 31), (2, "db", 12, 32), (3, "old", 17, 33), (5, "new", 18, 35)]);
        let (clearing, walks) = Clearing::new();
        settle(&mut Connections::new(&mapping, clearing), walks, &table, &tenants, &forwarding);
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
        fs::write(beside(&path, PODS), "{\"10.0.0.1\": ").unwrap();
        let table = open(&path);
        let (tenants, forwarding) = node(&[(1, "web", 11, 1), (2, "db", 12, 2)]);
        let (clearing, walks) = Clearing::new();
        settle(&mut Connections::new(&Mapping::File(path), clearing), walks, &table, &tenants, &forwarding);
        assert!(table.is_empty());
    }

    #[test]
    fn an_address_that_was_given_up_is_nobodys_until_its_connections_are_gone() {
        let table = ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap();
        let (clearing, walks) = Clearing::new();
        let mut connections = Connections::new(&Mapping::Off, clearing);
        let (both, _) = node(&[(1, "web", 11, 1), (2, "db", 12, 2)]);
        let (again, _) = node(&[(1, "web", 11, 1), (2, "db", 13, 2)]);
        assert_eq!(connections.admit(&both), &both);
        connections.published();
        [flow(1, 2), flow(1, 9)].iter().for_each(|flow| enter(&table, flow, 1));
        for _ in 0..2 {
            let admitted = connections.admit(&again).clone();
            assert_eq!(admitted.keys().copied().collect::<Vec<_>>(), [ip(1)], "the new pod waits");
            connections.published();
            assert!(!connections.withholds(&again), "and waits for the walk");
        }
        connections.end();
        let mut walked = Vec::new();
        walks.run(&Mapping::Off, &table, |addresses| walked.push(addresses.to_vec()));
        assert_eq!(walked, [[ip(2)]], "one walk, however often it was published");
        assert_eq!(table.iter(NOW).map(|found| found.original).collect::<Vec<_>>(), [flow(1, 9)]);
        connections.cleared(&walked[0]);
        assert!(connections.withholds(&again));
        assert_eq!(connections.admit(&again), &again);
    }
}
