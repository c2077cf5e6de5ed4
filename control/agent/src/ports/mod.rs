//! The open ports: interfaces whose packets attached programs hand to the workers.
//!
//! This module keeps them in line with the pods. `open` turns an interface into a port, `addresses` sets the local pods'
//! addresses in programs and routes, `closed_interfaces` holds those whose pod is not known yet, `uplinks` attaches to interfaces to other machines, `view` gives read access.

mod addresses;
mod closed_interfaces;
mod open;
mod programs;
mod uplinks;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use penstock_dataplane::forward::{Port, PortId, PortKind};
use penstock_dataplane::io::PortError;
use penstock_dataplane::worker::{Dataplane, DataplaneStatistics, Traffic};
use penstock_policy::model::ObjectKey;
use penstock_xdp_redirect::{
    AttachError, AttachOptions, Interface, KeptBy, ModeChoice, OnMiss, Pinned, PinnedProgram, Role, TrafficCount,
};

use super::close_first::CloseFirstFds;
use super::config::{Config, FailMode};
use super::coverage::NotEnforced;
use super::reserved_descriptors::ReservedDescriptors;
use crate::discovery::{Bindings, Link, NetworkState, PodPort, Sysctls, WorkerVeth};
use addresses::Announced;
use closed_interfaces::ClosedInterfaces;
pub(super) use closed_interfaces::interface;
use open::{AttachedPort, OpenPortError, PodAttachment, mtu};
use programs::OpenPair;
pub(super) use programs::{InterfacePrograms, Programs, ProgramsBesideXdp};
use uplinks::Uplinks;
pub(super) use view::{PortRole, PortXdpCounters};

/// How long an interface's queue may be busy before that is logged: a closed queue stays busy until the kernel's
/// deferred work is done.
const BUSY_LIMIT: Duration = Duration::from_secs(3);
/// Bytes of an Ethernet header.
const ETHERNET_HEADER: u32 = 14;

/// Which ports' packets must all reach the workers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) enum CapturedPorts {
    /// None: what programs forward by themselves is not asked for.
    #[default]
    None,
    /// All pods'.
    All,
    /// This pod's.
    Pod(ObjectKey),
}

/// Interfaces without a port that policy is about.
#[derive(Debug, Default)]
pub(super) struct Unserved {
    /// Those of pods under policy.
    pub(super) restricted: BTreeSet<u32>,
    /// Those of nobody, one of which may be that of a pod without an interface.
    pub(super) unowned: BTreeSet<u32>,
    /// Those of pods that cannot be served and are under no policy.
    pub(super) hopeless: BTreeSet<u32>,
}

pub(super) struct OpenPorts {
    programs: Programs,
    on_miss: OnMiss,
    mode: ModeChoice,
    /// The longest frame, with its Ethernet header, that a socket takes.
    longest: u16,
    permanent: Vec<AttachedPort>,
    pairs: Vec<OpenPair>,
    pods: BTreeMap<u32, PodAttachment>,
    uplinks: Uplinks,
    /// Traffic without a worker of pods whose ports are closed by now.
    closed_offloaded: [TrafficCount; 2],
    closed_interfaces: ClosedInterfaces,
    /// Addresses that the programs treat as local pods', each with the longest frame for it.
    announced: BTreeMap<IpAddr, Announced>,
    /// Addresses to withdraw from the programs after the next snapshot is published.
    retracted: BTreeSet<IpAddr>,
    /// Links that could not be opened, with their pod and the reason that was logged.
    failed: BTreeMap<u32, (ObjectKey, String)>,
    /// Links that are closed because their pod is under policy and cannot be served.
    unserved: BTreeSet<u32>,
    /// Ports of bridges that are closed because a pod without an interface may be behind them.
    unowned: BTreeSet<u32>,
    /// Failures to tell the programs something, by the thing that it is about.
    untold: BTreeMap<String, String>,
    /// Links whose queue is held by another socket, and since when.
    busy: BTreeMap<u32, Instant>,
    /// How long opening waits for a busy queue.
    busy_limit: Duration,
    /// For interfaces that must be closed.
    reserved: ReservedDescriptors,
    settings: Sysctls,
    /// Whether an earlier daemon may have changed the settings.
    found_leftovers: bool,
    /// Whether another daemon runs. Until [`OpenPorts::take_over_programs`] only interfaces are touched that it has attached to: two would
    /// attach to a new one.
    is_beside: bool,
}

impl OpenPorts {
    /// No ports yet. The interfaces in `netstate` existed before, and those that are no pod's stay open; an earlier daemon may have left its settings on them
    /// (`found_leftovers`).
    pub(super) fn new(
        programs: Programs,
        config: &Config,
        netstate: &NetworkState,
        found_leftovers: bool,
        is_beside: bool,
    ) -> Self {
        Self {
            programs,
            on_miss: match config.fail.mode {
                FailMode::Closed => OnMiss::Drop,
                FailMode::Open => OnMiss::Pass,
            },
            mode: config.xdp.mode.choice(),
            longest: mtu(config.umem.frame_size.largest_packet() + ETHERNET_HEADER),
            permanent: Vec::new(),
            pairs: Vec::new(),
            pods: BTreeMap::new(),
            uplinks: Uplinks::default(),
            closed_offloaded: Default::default(),
            closed_interfaces: ClosedInterfaces::new(config, netstate),
            announced: BTreeMap::new(),
            retracted: BTreeSet::new(),
            failed: BTreeMap::new(),
            unserved: BTreeSet::new(),
            unowned: BTreeSet::new(),
            untold: BTreeMap::new(),
            busy: BTreeMap::new(),
            busy_limit: BUSY_LIMIT,
            reserved: ReservedDescriptors::hold(),
            settings: Sysctls::default(),
            found_leftovers,
            is_beside,
        }
    }

    /// Whether another daemon may be about to attach to this interface.
    pub(super) fn is_left_to_other(&self, interface: u32) -> bool {
        self.is_beside
            && !self.programs.pins().is_some_and(|pins| pins.has(Pinned { program: PinnedProgram::FromPod, interface }))
    }

    /// Opens the host veth: packets sent through it arrive at the node's end.
    pub(super) fn open_host(
        &mut self,
        dataplane: &Dataplane,
        workers: &Link,
        node: &Link,
    ) -> Result<(), OpenPortError> {
        let port = Port::new(PortKind::Host, workers.mac, node.mac, mtu(node.mtu), Vec::new());
        let open = self.open(dataplane, workers, self.options(Role::Host), |_, _| port)?;
        self.permanent.push(open);
        Ok(())
    }

    /// From now on the programs drop packets of the node's stack with a local pod's source address, except those from
    /// the workers. `node` is the node's end of the pair; the calling thread is in the node's namespace.
    pub(super) fn check_sources(&self, node: &Link) -> Result<(), AttachError> {
        self.permanent.iter().try_for_each(|open| match &open.programs {
            InterfacePrograms::Xdp { attached, .. } => attached.check_sources_on(&interface(node)),
            InterfacePrograms::Tcx { .. } | InterfacePrograms::Pairs(_) => Ok(()),
        })
    }

    /// Opens the workers' pairs, and the node's stack through them.
    pub(super) fn open_pairs(&mut self, dataplane: &Dataplane, pairs: &[WorkerVeth]) -> Result<(), OpenPortError> {
        for (worker, pair) in pairs.iter().enumerate() {
            let open = self.open_pair(dataplane, worker, pair)?;
            self.pairs.push(open);
        }
        if let Some(first) = pairs.first() {
            let node = self.open_node_by_pairs(dataplane, &first.node)?;
            self.permanent.push(node);
        }
        Ok(())
    }

    /// Registers the files that the kernel closes first when this process dies, so that all pods are open at once: the
    /// last added goes first.
    pub(super) fn add_close_first(&self, dataplane: &Dataplane, first: &mut CloseFirstFds) -> io::Result<()> {
        let pairs = self.pairs.iter().map(|pair| pair.id);
        for id in self.permanent.iter().map(|open| open.id).chain(pairs) {
            dataplane.each_descriptor(id, |file| first.hold(file))?;
        }
        self.programs.alive().try_for_each(|socket| first.hold(socket))
    }

    /// Opens an uplink: packets for local pods come in by it; none is sent out by it.
    pub(super) fn open_uplink(&mut self, dataplane: &Dataplane, link: &Link) -> Result<(), OpenPortError> {
        let port = Port::new(PortKind::Uplink, link.mac, Default::default(), mtu(link.mtu), Vec::new());
        let open = self.open(dataplane, link, self.options(Role::Uplink), |_, _| port)?;
        self.permanent.push(open);
        Ok(())
    }

    /// Closes new interfaces that may be a pod's until their pod is known. `bindings`: as of this state.
    pub(super) fn close_new_interfaces(&mut self, netstate: &NetworkState, bindings: &Bindings) {
        let named = &bindings.named();
        self.reserved.refill();
        self.untold.retain(|thing, _| thing.parse::<IpAddr>().is_ok() || netstate.link(thing).is_some());
        let is_no_pods = |link: &Link| bindings.is_no_pods(netstate, link);
        self.closed_interfaces.release(netstate, named, is_no_pods, &self.unserved);
        for interface in self.closed_interfaces.new_interfaces(netstate, named) {
            if !self.pods.contains_key(&interface.index) && !self.is_left_to_other(interface.index) {
                self.close(&interface, netstate);
            }
        }
    }

    /// Takes over programs that an earlier daemon pinned and this one has not opened: pods' interfaces stay closed,
    /// others are released.
    pub(super) fn take_over_pinned(&mut self, netstate: &NetworkState) {
        let Some(pins) = self.programs.pins().cloned() else { return };
        let permanent: Vec<u32> = self.permanent.iter().map(|open| open.programs.interface().index).collect();
        for pinned in pins.links() {
            let index = pinned.interface;
            // A daemon with the other `attach` has left it. It goes when this one's programs are there.
            let is_foreign = !self.programs.include(pinned.program);
            match netstate.links.get(&index).filter(|_| pinned.program.is_at_pod()) {
                Some(_) if self.pods.contains_key(&index) || self.closed_interfaces.has(index) => {}
                Some(link) => self.close(&interface(link), netstate),
                None if pinned.program.is_at_uplink() && self.uplinks.has(index) => {}
                None if permanent.contains(&index) && !is_foreign && !pinned.program.is_at_uplink() => {}
                // It is newer than what was read of the network.
                None if pinned.program.is_at_pod() && !is_foreign => {}
                None => pins.remove(pinned),
            }
            if is_foreign {
                pins.remove(pinned);
            }
        }
    }

    /// From now on the programs run where an earlier daemon left its own. Ports and policy are in place.
    pub(super) fn take_over_programs(&mut self) -> Result<(), AttachError> {
        self.is_beside = false;
        let pods = self.pods.values_mut().map(|attachment| &mut attachment.open.programs);
        self.programs.take_over(self.uplinks.attached_mut(), pods.chain(self.closed_interfaces.attached_mut()))
    }

    /// Tunnel packets of other nodes' pods that this node did not unwrap; `None` where no program sees them.
    pub(super) fn refused_tunnels(&self) -> Option<u64> {
        self.programs.tcx()?.refused_tunnels().ok()
    }

    /// Filters that somebody deleted and that were put back; `None` where programs are tcx links.
    pub(super) fn restored_filters(&self) -> Option<u64> {
        Some(self.programs.filter_watch()?.restored())
    }

    /// Packets that programs forwarded without a worker: from pod to pod, from a pod to the node's stack, and from there
    /// to a pod; past the stack, to another machine and from there. `None` with XDP.
    pub(super) fn offloaded(&self) -> Option<[TrafficCount; 5]> {
        self.programs.offloaded()
    }

    /// For each interface to other machines, what keeps pods' packets that come in there to the node's stack, by family: IPv4, IPv6.
    pub(super) fn kept_by(&self) -> Vec<(&str, [Option<KeptBy>; 2])> {
        match &self.programs {
            Programs::Tcx { tcx, .. } => self.uplinks.kept_by(tcx),
            Programs::Xdp { .. } => Vec::new(),
        }
    }

    /// Adds what programs forwarded without a worker to the workers' counters.
    pub(super) fn add_offloaded(&self, statistics: &mut DataplaneStatistics) {
        let Some([_, to_stack, from_stack, to_uplink, from_uplink]) = self.offloaded() else { return };
        let mut by_port: BTreeMap<PortId, [TrafficCount; 2]> =
            self.pods.values().map(|pod| (pod.open.id, pod.open.programs.offloaded())).collect();
        // The port of the node's stack is that of other machines.
        let of_node = [sum(from_stack, from_uplink), sum(to_stack, to_uplink)];
        by_port.extend(self.permanent.iter().map(|open| (open.id, of_node)));
        for port in &mut statistics.ports {
            add(&mut port.traffic, by_port.get(&port.port).unwrap_or(&Default::default()));
        }
        add(&mut statistics.closed, &self.closed_offloaded);
    }

    /// From now on all packets of these ports reach the workers, and programs forward only others' by themselves.
    pub(super) fn set_captured(&mut self, ports: &CapturedPorts) {
        for attachment in self.pods.values_mut() {
            let is_captured = match ports {
                CapturedPorts::None => false,
                CapturedPorts::All => true,
                CapturedPorts::Pod(pod) => attachment.served && attachment.last.pod == *pod,
            };
            if let Err(error) = attachment.open.programs.set_captured(is_captured) {
                let interface = &attachment.last.name;
                tracing::warn!(interface, %error, "established connections are not in the capture, or stay with the workers");
            }
        }
    }

    /// Attaches a program that drops everything from an interface.
    fn close(&mut self, interface: &Interface, netstate: &NetworkState) {
        let bridge = netstate.links.get(&interface.index).and_then(|link| netstate.bridge(link));
        let options = AttachOptions { on_miss: OnMiss::Drop, bridge, ..self.options(Role::Pod) };
        let mut attached = self.programs.attach(interface, options);
        if !matches!(attached, Ok(_) | Err(AttachError::NoInterface { .. })) && self.reserved.release() {
            attached = self.programs.attach(interface, options);
        }
        self.untold.remove(&interface.name);
        match attached {
            Ok(attached) => {
                tracing::info!(%interface, "closed until its pod is known");
                self.closed_interfaces.put(attached);
            }
            Err(AttachError::NoInterface { .. }) => {}
            // The next reconciliation tries again.
            Err(error) => {
                let reason =
                    format!("interface {interface}: cannot close it until its pod is known: {error}; trying again");
                self.untold.insert(interface.name.clone(), reason);
            }
        }
    }

    /// Opens ports for new pods and updates changed ones. Returns whether anything changed.
    ///
    /// Logs a port that cannot be opened; the next call tries it again.
    pub(super) fn update(
        &mut self,
        dataplane: &Dataplane,
        netstate: &NetworkState,
        wanted: BTreeMap<u32, PodPort>,
    ) -> bool {
        let mut changed = false;
        for (_, attachment) in
            self.pods.iter_mut().filter(|(index, attachment)| attachment.served && !wanted.contains_key(index))
        {
            attachment.release_pod();
            changed = true;
        }
        self.failed.retain(|index, _| wanted.contains_key(index));
        self.busy.retain(|index, _| wanted.contains_key(index));
        self.attach_ahead(netstate, &wanted);
        for (index, port) in wanted {
            if let Some(attachment) = self.pods.get_mut(&index) {
                if !attachment.served || attachment.last != port {
                    attachment.take(port);
                    changed = true;
                }
                continue;
            }
            let Some(link) = netstate.links.get(&index).filter(|_| !self.is_left_to_other(index)) else { continue };
            let options = AttachOptions { bridge: netstate.bridge(link), ..self.options(Role::Pod) };
            let pod = port.pod.clone();
            match self.open_pod(dataplane, link, options, port) {
                Ok(attachment) => {
                    self.failed.remove(&index);
                    self.busy.remove(&index);
                    self.pods.insert(index, attachment);
                    changed = true;
                }
                // The interface is gone, which raises an event of its own.
                Err(
                    OpenPortError::Port(PortError::NoInterface { .. })
                    | OpenPortError::Attach(AttachError::NoInterface { .. }),
                ) => {}
                Err(error) => {
                    if self.closed_interfaces.closes() && !self.closed_interfaces.has(index) {
                        self.close(&interface(link), netstate);
                    }
                    if !self.is_briefly_busy(index, &error) {
                        self.log_failure(index, pod, &error.to_string());
                    }
                }
            }
        }
        changed
    }

    /// Closes interfaces that are not served and must not be open. [`Unserved::hopeless`] are open.
    pub(super) fn close_unserved(&mut self, netstate: &NetworkState, found: &Unserved) {
        self.unserved.retain(|index| netstate.links.contains_key(index) && !self.pods.contains_key(index));
        let needless: Vec<u32> = self.unowned.difference(&found.unowned).copied().collect();
        for index in needless {
            self.unowned.remove(&index);
            if !found.restricted.contains(&index) {
                self.reopen(index, "no pod is looked for behind it any more: open");
            }
        }
        let closed = found.restricted.iter().map(|&index| (index, false));
        for (index, is_unowned) in closed.chain(found.unowned.iter().map(|&index| (index, true))) {
            let is_attached = self.pods.contains_key(&index) || self.closed_interfaces.has(index);
            let is_open = !is_attached && !self.is_left_to_other(index);
            let Some(link) = netstate.links.get(&index).filter(|link| link.veth && is_open) else { continue };
            self.close(&interface(link), netstate);
            if self.closed_interfaces.has(index) {
                if is_unowned { &mut self.unowned } else { &mut self.unserved }.insert(index);
            }
        }
        for &index in found.hopeless.difference(&found.restricted) {
            self.unserved.remove(&index);
            self.reopen(index, "its pod cannot be served, and no policy is about it: open");
        }
    }

    fn reopen(&mut self, index: u32, why: &'static str) {
        if let Some(programs) = self.closed_interfaces.take(index) {
            self.closed_interfaces.ignore(index);
            tracing::info!(interface = %programs.interface(), "{why}");
        }
    }

    /// Whether what the pod behind this interface sends and gets is dropped.
    pub(super) fn is_closed(&self, index: u32) -> bool {
        self.closed_interfaces.has(index) || self.pods.get(&index).is_some_and(|attachment| !attachment.served)
    }

    /// Whether programs see all that a bridge sends out by pods' interfaces, wherever it came in.
    pub(super) fn watches_bridges(&self) -> bool {
        self.programs.tcx().is_some()
    }

    /// Whether programs see all that comes in by an interface, because it is a pod's, or closed.
    pub(super) fn has_programs(&self, index: u32) -> bool {
        self.pods.contains_key(&index) || self.closed_interfaces.has(index)
    }

    /// Settings that policy needs and the kernel did not accept.
    pub(super) fn not_enforced(&self) -> impl Iterator<Item = NotEnforced> {
        let open = self.failed.iter().filter(|(index, _)| !self.closed_interfaces.has(**index));
        let of_pods = open.map(|(_, (pod, reason))| NotEnforced { pod: Some(pod.clone()), reason: reason.clone() });
        let untold = self.untold.values().chain(self.uplinks.problems());
        let filters = self.programs.filter_watch().map(|watch| watch.problems()).unwrap_or_default().into_iter();
        let filters = filters.map(|(index, (interface, reason))| NotEnforced {
            pod: self.pods.get(&index).map(|attachment| attachment.last.pod.clone()),
            reason: format!("interface {interface}: {reason}"),
        });
        of_pods.chain(untold.map(|reason| NotEnforced { pod: None, reason: reason.clone() })).chain(filters)
    }

    /// From now on opening does not wait for a busy queue: [`OpenPorts::has_busy`] says that it must be tried again.
    pub(super) fn stop_waiting_for_queues(&mut self) {
        self.busy_limit = Duration::ZERO;
    }

    /// Whether a port could not be opened because its queue has been busy for a short time. One that stays busy is
    /// tried again at every reconciliation.
    pub(super) fn has_busy(&self) -> bool {
        self.busy.values().any(|since| since.elapsed() < BUSY_LIMIT)
    }

    /// Whether the error is only a queue that has been busy for a short time.
    fn is_briefly_busy(&mut self, index: u32, error: &OpenPortError) -> bool {
        let OpenPortError::Port(PortError::QueueBusy { .. }) = error else {
            self.busy.remove(&index);
            return false;
        };
        let since = *self.busy.entry(index).or_insert_with(Instant::now);
        since.elapsed() + self.busy_limit < BUSY_LIMIT
    }

    /// Removes the ports whose interface is gone. Close them once a snapshot without them is published.
    pub(super) fn remove_gone(&mut self, netstate: &NetworkState) -> Vec<(PortId, String)> {
        let gone: Vec<u32> = self.pods.keys().copied().filter(|index| !netstate.links.contains_key(index)).collect();
        let mut closing = Vec::new();
        for index in gone {
            let Some(attachment) = self.pods.remove(&index) else { continue };
            self.settings.forget(&attachment.last.name);
            for (sum, count) in self.closed_offloaded.iter_mut().zip(attachment.open.programs.offloaded()) {
                sum.packets += count.packets;
                sum.bytes += count.bytes;
            }
            // Dropping it detaches the program; the interface is gone anyway.
            closing.push((attachment.open.id, attachment.last.name.clone()));
        }
        closing
    }

    /// Leaves the programs attached for the next daemon: without sockets they drop.
    pub(super) fn keep(self) {
        let Self { permanent, pods, uplinks, closed_interfaces, settings, .. } = self;
        uplinks.keep();
        let open =
            permanent.into_iter().chain(pods.into_values().map(|attachment| attachment.open)).map(|open| open.programs);
        open.chain(closed_interfaces.into_attached()).for_each(InterfacePrograms::keep);
        settings.keep();
    }

    /// Detaches all programs.
    pub(super) fn restore(self) {
        let pins = self.programs.pins().cloned();
        drop(self);
        if let Some(pins) = pins {
            pins.close();
        }
    }

    fn log_failure(&mut self, index: u32, pod: ObjectKey, reason: &str) {
        if self.failed.get(&index).is_none_or(|(_, logged)| logged != reason) {
            let now = if self.closed_interfaces.has(index) {
                "its packets are dropped"
            } else {
                "NO POLICY IS ENFORCED on it"
            };
            tracing::error!(reason, "cannot attach the interface: {now}; trying again");
            self.failed.insert(index, (pod, reason.to_owned()));
        }
    }
}

/// Adds what a port's pod sent and received without a worker.
fn sum(one: TrafficCount, other: TrafficCount) -> TrafficCount {
    TrafficCount { packets: one.packets + other.packets, bytes: one.bytes + other.bytes }
}

fn add(traffic: &mut Traffic, [sent, received]: &[TrafficCount; 2]) {
    traffic.rx_packets += sent.packets;
    traffic.rx_bytes += sent.bytes;
    traffic.tx_packets += received.packets;
    traffic.tx_bytes += received.bytes;
}
