//! Connections that survive a restart of the daemon, and the owners of their addresses.
//!
//! The connection table outlives the daemon, so that a restarted one keeps its connections: where programs forward packets, in pinned
//! BPF maps, otherwise in a file ([`TableMapping::File`]). Beside that file stands another with the pods' addresses: while no daemon
//! runs, an address may move to another pod, which must inherit no connections.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use penstock_dataplane::conntrack::{ConnTable, KernelMapSizes, OpenError, OwnerId, TableOrigin};
use penstock_dataplane::forward::Forwarding;
use penstock_dataplane::packet::Address;
use penstock_policy::model::{Object, ObjectKey, Pod};
use penstock_xdp_redirect::ConnectionMapSizes;

use super::config::{Config, TableMapping};
use super::connection_limits::{self, NewLimits};
use super::{RunError, handover, last_good, learnt_names, new_pods, pod_bindings, recorded_objects, rule_usage};
use crate::discovery::NetworkState;
use crate::state_file::with_suffix;

/// The owner of each address: the pod, and the index of its interface; a recreated pod has a new one.
pub(super) type AddressOwners = BTreeMap<IpAddr, (ObjectKey, u32)>;

/// Suffix of the owners' file, after the name of the table's file.
const PODS: &str = ".pods";
const NEW_PODS: &str = ".pods.new";
/// Suffix of the file that locks a table in the kernel.
const LOCK: &str = ".lock";

/// Makes the directory of the connection table's file, if there is one.
pub(super) fn make_directory(mapping: &TableMapping) -> Result<(), RunError> {
    let TableMapping::File(path) = mapping else { return Ok(()) };
    let Some(directory) = path.parent() else { return Ok(()) };
    fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(|error| {
        RunError::bad_input(format!(
            "conntrack.mapping: cannot create directory {} ({error}); create it, or set another mapping",
            directory.display()
        ))
    })
}

/// Locks a connection table in the kernel against a second daemon, by a file beside the owners' file. A table in a file is
/// locked by that file, which goes if the table is in the kernel.
pub(super) fn lock(mapping: &TableMapping, is_in_kernel: bool) -> Result<Option<fs::File>, RunError> {
    let TableMapping::File(path) = mapping else { return Ok(None) };
    if !is_in_kernel {
        return Ok(None);
    }
    let name = with_suffix(path, LOCK);
    let unusable = |error: io::Error| RunError::bad_input(format!("{}: {error}", name.display()));
    let file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&name).map_err(unusable)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => {
            return Err(RunError::Occupied(OpenError::InUse { path: path.clone() }.to_string()));
        }
        Err(fs::TryLockError::Error(error)) => return Err(unusable(error)),
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(unusable(error)),
        _ => Ok(Some(file)),
    }
}

/// Sizes of the BPF maps of a table for this many connections.
pub(super) fn map_sizes(connections: usize) -> ConnectionMapSizes {
    let KernelMapSizes { groups, entries, with_openers } = KernelMapSizes::of(connections);
    ConnectionMapSizes {
        version: KernelMapSizes::VERSION,
        table: KernelMapSizes::TABLE,
        tags: (groups, KernelMapSizes::TAGS),
        entries: (with_openers, KernelMapSizes::ENTRY),
        usage: (entries, KernelMapSizes::USE),
    }
}

/// Suffixes of all files that may stand beside the table's file, and of their temporary files.
const BESIDE: [&str; 14] = [
    "",
    PODS,
    NEW_PODS,
    LOCK,
    last_good::SUFFIX,
    ".config.new",
    recorded_objects::SUFFIX,
    ".objects.new",
    rule_usage::SUFFIX,
    ".rules.new",
    learnt_names::SUFFIX,
    ".names.new",
    pod_bindings::SUFFIX,
    ".interfaces.new",
];

/// Locks the files of the connection table against a daemon that starts, to remove them. Fails if one runs.
pub(super) fn lock_for_removal(config: &Config) -> Result<Vec<fs::File>, RunError> {
    let TableMapping::File(path) = &config.conntrack.mapping else { return Ok(Vec::new()) };
    let mut locked = Vec::new();
    for name in [path.clone(), with_suffix(path, LOCK)] {
        let Ok(file) = fs::File::open(&name) else { continue };
        match file.try_lock() {
            Ok(()) => locked.push(file),
            Err(_) => return Err(RunError::Occupied(OpenError::InUse { path: name }.to_string())),
        }
    }
    Ok(locked)
}

/// Removes the state directory's files and the sockets, and the directories that are empty then. Returns how many files.
pub(super) fn remove_state(config: &Config, _locked: Vec<fs::File>) -> Result<usize, RunError> {
    let mut names = Vec::new();
    if let TableMapping::File(path) = &config.conntrack.mapping {
        names.extend(BESIDE.map(|suffix| with_suffix(path, suffix)));
    }
    // A daemon of another network namespace may listen there.
    let unused = |path: &PathBuf| UnixStream::connect(path).is_err();
    let sockets = [&config.admin.socket, &config.capture.socket].map(|socket| socket.path().map(Path::to_owned));
    let beside = [handover::path(&config.admin.socket), new_pods::path(&config.admin.socket)];
    let sockets = sockets.into_iter().chain(beside);
    names.extend(sockets.flatten().filter(unused));
    let mut removed = 0;
    for name in &names {
        match fs::remove_file(name) {
            Ok(()) => removed += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(RunError::bad_input(format!("{}: cannot be removed: {error}", name.display()))),
        }
    }
    for directory in names.iter().filter_map(|name| name.parent()) {
        // One that has other files stays, and one that a container mounts.
        let _ = fs::remove_dir(directory);
    }
    Ok(removed)
}

/// Tracks which pods' connections the table holds.
///
/// A released address has no owner until its connections are removed. A scan of the table takes tens of milliseconds,
/// so a thread of its own does it ([`ClearingQueue`]), and publishing does not wait.
pub(super) struct ConnectionOwners {
    mapping: TableMapping,
    clearing: ClearingQueue,
    /// Owners in the last snapshot.
    owners: AddressOwners,
    /// Owners that were last queued to be written.
    written: AddressOwners,
    /// Released addresses whose connections may still exist.
    released: BTreeSet<IpAddr>,
    /// Those of them that are queued for clearing.
    being_cleared: BTreeSet<IpAddr>,
    /// Whether the connections found in the table were assigned to this process's ports.
    taken_over: bool,
}

impl ConnectionOwners {
    pub(super) fn new(mapping: &TableMapping, clearing: ClearingQueue) -> Self {
        Self {
            mapping: mapping.clone(),
            clearing,
            owners: AddressOwners::new(),
            written: AddressOwners::new(),
            released: BTreeSet::new(),
            being_cleared: BTreeSet::new(),
            taken_over: false,
        }
    }

    /// Which of `wanted` own their address in the next snapshot: all but those whose address still has connections of
    /// its previous owner.
    pub(super) fn admit(&mut self, wanted: &AddressOwners) -> &AddressOwners {
        let gone = self.owners.iter().filter(|(address, owner)| wanted.get(address) != Some(owner));
        self.released.extend(gone.map(|(address, _)| *address));
        self.owners = wanted.clone();
        self.owners.retain(|address, _| !self.released.contains(address));
        &self.owners
    }

    /// Whether one of `wanted` could be admitted now and is not yet.
    pub(super) fn has_admissible(&self, wanted: &AddressOwners) -> bool {
        wanted.keys().any(|address| !self.owners.contains_key(address) && !self.released.contains(address))
    }

    /// Owners in the next snapshot, or in the last one if none is being built.
    pub(super) fn owners(&self) -> &AddressOwners {
        &self.owners
    }

    /// Call before the first snapshot is published: assigns the connections found in the file to the ports of
    /// `forwarding`, removes those of pods that are gone, and writes the owners, so that what is opened from now on has one in the file
    /// however soon this process ends. Later calls do nothing.
    pub(super) fn take_over(&mut self, table: &ConnTable, forwarding: &Forwarding) {
        if std::mem::replace(&mut self.taken_over, true) {
            return;
        }
        let TableMapping::File(path) = &self.mapping else { return };
        let path = path.display();
        match table.origin() {
            TableOrigin::New => tracing::info!("connection table {path}: new"),
            TableOrigin::Remade(reason) => {
                tracing::warn!("connection table {path}: {reason}; created a new one, all connections are new");
            }
            TableOrigin::Found => {
                table.adopt();
                let found = table.len();
                let removed = self.adopt(table, forwarding);
                tracing::info!(
                    "connection table {path}: {found} connections found; removed {removed} of pods that are gone, kept the others"
                );
            }
        }
        match write(&self.mapping, &self.owners) {
            Ok(()) => self.written.clone_from(&self.owners),
            // The clearing thread tries again, and says why if it fails.
            Err(error) => tracing::debug!(%error, "cannot write the owners of the connections"),
        }
    }

    /// Assigns each connection to the local pod that opened it, else to its local destination. Removes it if the owner
    /// of either end has changed or is gone. Returns how many were removed.
    fn adopt(&self, table: &ConnTable, forwarding: &Forwarding) -> usize {
        let before = read(&self.mapping).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the owners of the connections: none is kept");
            BTreeMap::new()
        });
        let before: BTreeMap<Address, String> = before.into_iter().map(|(end, name)| (end.into(), name)).collect();
        let now: BTreeMap<Address, String> =
            self.owners.iter().map(|(&end, owner)| (end.into(), name(owner))).collect();
        table.assign_owners(|flow| {
            let ends = [flow.src, flow.dst];
            let unchanged = ends.iter().all(|end| before.get(end) == now.get(end));
            let [opens, opened_to] = ends.map(|end| forwarding.pod_port(end));
            let owner = opens.map(|port| OwnerId::opens(port.0)).or(opened_to.map(|port| OwnerId::opened_to(port.0)));
            owner.filter(|_| unchanged)
        })
    }

    /// Call once the snapshot with [`ConnectionOwners::owners`] is published: queues the removal of connections of released
    /// addresses. A connection that a worker is inserting meanwhile has an older epoch and is re-evaluated.
    pub(super) fn published(&mut self) {
        let addresses: Vec<IpAddr> = self.released.difference(&self.being_cleared).copied().collect();
        if addresses.is_empty() && self.owners == self.written {
            return;
        }
        self.being_cleared.extend(&addresses);
        self.written.clone_from(&self.owners);
        self.clearing.push(ClearingJob { addresses, owners: self.owners.clone(), limits: Vec::new() });
    }

    /// Call after the same snapshot is published: has limits that are new count what is open.
    pub(super) fn count_open(&self, limits: Vec<NewLimits>) {
        if !limits.is_empty() {
            self.clearing.push(ClearingJob { addresses: Vec::new(), owners: self.owners.clone(), limits });
        }
    }

    pub(super) fn cleared(&mut self, addresses: &[IpAddr]) {
        for address in addresses {
            self.released.remove(address);
            self.being_cleared.remove(address);
        }
    }

    /// By which the thread is kept from the table.
    pub(super) fn use_of_table(&self) -> TableUse {
        self.clearing.in_use.clone()
    }

    /// Queues no more jobs: the thread ends after the queued ones.
    pub(super) fn end(&mut self) {
        self.clearing = ClearingQueue::default();
    }
}

/// Leaves out this node's pods of an earlier run whose address is behind another interface now: another pod may have it, which
/// must not count as theirs. Without the owners' file that is every pod with an interface.
pub(super) fn without_moved_pods(config: &Config, netstate: &NetworkState, objects: Vec<Object>) -> Vec<Object> {
    let before = read(&config.conntrack.mapping).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot read the owners of pods' addresses");
        BTreeMap::new()
    });
    let behind = netstate.behind();
    let has_moved = |pod: &Pod| {
        let is_served = pod.node.as_deref() == Some(config.node.as_str()) && !pod.host_network && !pod.finished;
        let elsewhere = |address: &IpAddr| {
            behind.get(address).is_some_and(|&link| before.get(address) != Some(&name(&(pod.key.clone(), link))))
        };
        is_served && pod.addresses.iter().any(elsewhere)
    };
    let stays = |object: &Object| match object {
        Object::Pod(pod) if has_moved(pod) => {
            let pod = &pod.key;
            tracing::warn!(%pod, "its address is behind another interface than in the last run: closed until the API server is read");
            false
        }
        _ => true,
    };
    objects.into_iter().filter(stays).collect()
}

/// Work on the connection table after a snapshot is published.
#[derive(Debug)]
struct ClearingJob {
    /// Remove the connections of these addresses.
    addresses: Vec<IpAddr>,
    /// Then write these owners to the file.
    owners: AddressOwners,
    /// Have these count what is open.
    limits: Vec<NewLimits>,
}

/// Queues jobs for the clearing thread. The default drops them.
#[derive(Clone, Debug, Default)]
pub(super) struct ClearingQueue {
    jobs: Option<mpsc::Sender<ClearingJob>>,
    in_use: TableUse,
}

pub(super) struct ClearingJobs {
    jobs: mpsc::Receiver<ClearingJob>,
    in_use: TableUse,
}

/// Whether the clearing thread may still change the connection table; locked while it does.
#[derive(Clone, Debug)]
pub(super) struct TableUse(Arc<Mutex<bool>>);

impl Default for TableUse {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(true)))
    }
}

impl TableUse {
    /// Once this returns, the thread changes nothing any more: another process has the table.
    pub(super) fn end(&self) {
        *self.lock() = false;
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClearingQueue {
    pub(super) fn new() -> (Self, ClearingJobs) {
        let (sender, jobs) = mpsc::channel();
        let in_use = TableUse::default();
        (Self { jobs: Some(sender), in_use: in_use.clone() }, ClearingJobs { jobs, in_use })
    }

    fn push(&self, job: ClearingJob) {
        if let Some(sender) = &self.jobs {
            // Sending fails only if the thread has ended.
            let _ = sender.send(job);
        }
    }
}

impl ClearingJobs {
    /// Processes jobs, all queued ones in one scan, until the queue is closed; calls `cleared` after each scan. Reads
    /// no clock and needs no capability.
    pub(super) fn run(self, mapping: &TableMapping, table: &ConnTable, mut cleared: impl FnMut(&[IpAddr])) {
        while let Ok(mut job) = self.jobs.recv() {
            while let Ok(next) = self.jobs.try_recv() {
                job.addresses.extend(next.addresses);
                job.limits.extend(next.limits);
                job.owners = next.owners;
            }
            let may_change = self.in_use.lock();
            if !*may_change {
                return;
            }
            if !job.addresses.is_empty() {
                let addresses: Vec<Address> = job.addresses.iter().map(|&address| address.into()).collect();
                let removed = table.remove_addresses(&addresses);
                tracing::debug!(?addresses, connections = removed, "removed connections of released addresses");
            }
            if !job.limits.is_empty() {
                connection_limits::adopt(table, &job.limits);
            }
            // Written after the removal: if the process ends in between, the file still has the old owners, and the
            // next start removes the connections of addresses whose owner differs.
            if let Err(error) = write(mapping, &job.owners) {
                tracing::warn!(%error, "cannot write the owners of the connections: a restart will drop some");
            }
            drop(may_change);
            if !job.addresses.is_empty() {
                cleared(&job.addresses);
            }
        }
    }
}

fn read(mapping: &TableMapping) -> io::Result<BTreeMap<IpAddr, String>> {
    let TableMapping::File(path) = mapping else { return Ok(BTreeMap::new()) };
    Ok(serde_json::from_slice(&fs::read(with_suffix(path, PODS))?)?)
}

/// Writes a temporary file and renames it, so that nobody reads half a file.
fn write(mapping: &TableMapping, owners: &AddressOwners) -> io::Result<()> {
    let TableMapping::File(path) = mapping else { return Ok(()) };
    let names: BTreeMap<&IpAddr, String> = owners.iter().map(|(address, owner)| (address, name(owner))).collect();
    let (path, temporary) = (with_suffix(path, PODS), with_suffix(path, NEW_PODS));
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(&serde_json::to_vec(&names)?)?;
    fs::rename(temporary, path)
}

/// A name of the owner that is unique while the machine runs.
fn name((pod, interface): &(ObjectKey, u32)) -> String {
    format!("{pod} at interface {interface}")
}

#[cfg(test)]
mod tests {
    use penstock_dataplane::Epoch;
    use penstock_dataplane::conntrack::{Config, NewConnection, TableMemory, Timestamp};
    use penstock_dataplane::forward::{Port, PortId, PortKind};
    use penstock_dataplane::packet::{Flow, Protocol, Transport};

    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_000_000);

    fn open(path: &Path) -> ConnTable {
        ConnTable::new(&Config { entries: 1024, memory: TableMemory::File(path.to_owned()), ..Config::default() })
            .unwrap()
    }

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn flow(from: u8, to: u8) -> Flow {
        Flow { src: ip(from).into(), dst: ip(to).into(), protocol: Protocol::UDP, src_port: 1000, dst_port: 53 }
    }

    fn enter(table: &ConnTable, flow: &Flow, owner: u16) {
        let (transport, hashed) = (&Transport::Udp, &table.prepare(flow));
        let new = NewConnection {
            hashed,
            transport,
            owner: OwnerId(owner),
            via_host: false,
            opener: None,
            epoch: Epoch(1),
            now: NOW,
        };
        assert!(table.insert(&new).is_ok());
    }

    /// Pods by the last byte of their addresses, with interface and port.
    fn node(pods: &[(u8, &str, u32, u16)]) -> (AddressOwners, Forwarding) {
        let (mut owners, mut forwarding) = (AddressOwners::new(), Forwarding::default());
        for &(last, name, interface, port) in pods {
            let key = ObjectKey { namespace: "shop".into(), name: name.into() };
            owners.insert(ip(last), (key, interface));
            let addresses = vec![ip(last).into()];
            let mac = Default::default();
            let behind = Port::new(PortKind::Pod, mac, mac, 1500, addresses);
            forwarding.insert(PortId(port), behind).unwrap();
        }
        (owners, forwarding)
    }

    /// Publishes with these owners and runs the queued jobs.
    fn settle(
        connections: &mut ConnectionOwners,
        jobs: ClearingJobs,
        table: &ConnTable,
        wanted: &AddressOwners,
        to: &Forwarding,
    ) {
        connections.admit(wanted);
        connections.take_over(table, to);
        connections.published();
        connections.end();
        let mapping = connections.mapping.clone();
        jobs.run(&mapping, table, |addresses| connections.cleared(addresses));
    }

    #[test]
    fn after_a_restart_no_other_pod_inherits_connections() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("conntrack");
        let mapping = TableMapping::File(path.clone());
        const OUTSIDE: u8 = 99;
        let flows =
            [flow(1, 2), flow(OUTSIDE, 1), flow(1, 3), flow(1, 4), flow(OUTSIDE, 3), flow(4, OUTSIDE), flow(2, 5)];
        {
            let table = open(&path);
            let (owners, forwarding) =
                node(&[(1, "web", 11, 1), (2, "db", 12, 2), (3, "old", 13, 3), (4, "gone", 14, 4)]);
            let (clearing, jobs) = ClearingQueue::new();
            settle(&mut ConnectionOwners::new(&mapping, clearing), jobs, &table, &owners, &forwarding);
            flows.iter().for_each(|flow| enter(&table, flow, 7));
        }
        let table = open(&path);
        // `old` was recreated, `gone` is not here, and 5 is new; all ports have other numbers.
        let (owners, forwarding) =
            node(&[(1, "web", 11, 31), (2, "db", 12, 32), (3, "old", 17, 33), (5, "new", 18, 35)]);
        let (clearing, jobs) = ClearingQueue::new();
        settle(&mut ConnectionOwners::new(&mapping, clearing), jobs, &table, &owners, &forwarding);
        let remaining: Vec<(Flow, OwnerId)> = table.iter(NOW).map(|found| (found.original, found.owner)).collect();
        assert_eq!(remaining.len(), 2, "{remaining:?}");
        let shares = [OwnerId::opens(31), OwnerId::opened_to(31)];
        for kept in [(flow(1, 2), shares[0]), (flow(OUTSIDE, 1), shares[1])] {
            assert!(remaining.contains(&kept), "{kept:?} of {remaining:?}");
        }
        assert_eq!((table.len(), shares.map(|owner| table.len_of(owner)), table.len_of(OwnerId(7))), (2, [1, 1], 0));
    }

    #[test]
    fn connections_are_kept_however_soon_the_daemon_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("conntrack");
        let mapping = TableMapping::File(path.clone());
        let (owners, forwarding) = node(&[(1, "web", 11, 1), (2, "db", 12, 2)]);
        for found in [0, 1] {
            let table = open(&path);
            // Its jobs never run.
            let (clearing, _jobs) = ClearingQueue::new();
            let mut connections = ConnectionOwners::new(&mapping, clearing);
            connections.admit(&owners);
            connections.take_over(&table, &forwarding);
            assert_eq!(table.len(), found);
            if found == 0 {
                enter(&table, &flow(1, 2), 7);
            }
        }
    }

    #[test]
    fn without_a_readable_owners_file_no_connection_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("conntrack");
        enter(&open(&path), &flow(1, 2), 1);
        fs::write(with_suffix(&path, PODS), "{\"10.0.0.1\": ").unwrap();
        let table = open(&path);
        let (owners, forwarding) = node(&[(1, "web", 11, 1), (2, "db", 12, 2)]);
        let (clearing, jobs) = ClearingQueue::new();
        settle(&mut ConnectionOwners::new(&TableMapping::File(path), clearing), jobs, &table, &owners, &forwarding);
        assert!(table.is_empty());
    }

    #[test]
    fn a_released_address_waits_for_its_connections_removal() {
        let table = ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap();
        let (clearing, jobs) = ClearingQueue::new();
        let mut connections = ConnectionOwners::new(&TableMapping::Off, clearing);
        let (both, _) = node(&[(1, "web", 11, 1), (2, "db", 12, 2)]);
        let (again, _) = node(&[(1, "web", 11, 1), (2, "db", 13, 2)]);
        assert_eq!(connections.admit(&both), &both);
        connections.published();
        [flow(1, 2), flow(1, 9)].iter().for_each(|flow| enter(&table, flow, 1));
        for _ in 0..2 {
            let admitted = connections.admit(&again).clone();
            assert_eq!(admitted.keys().copied().collect::<Vec<_>>(), [ip(1)], "the new pod waits");
            connections.published();
            assert!(!connections.has_admissible(&again), "and waits for the clearing job");
        }
        connections.end();
        let mut cleared = Vec::new();
        jobs.run(&TableMapping::Off, &table, |addresses| cleared.push(addresses.to_vec()));
        assert_eq!(cleared, [[ip(2)]], "one job, however often it was published");
        assert_eq!(table.iter(NOW).map(|found| found.original).collect::<Vec<_>>(), [flow(1, 9)]);
        connections.cleared(&cleared[0]);
        assert!(connections.has_admissible(&again));
        assert_eq!(connections.admit(&again), &again);
    }
}
