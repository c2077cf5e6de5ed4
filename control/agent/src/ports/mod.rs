//! The open ports: interfaces whose packets attached programs hand to the workers.
//!
//! This module keeps them in line with the pods. `open` turns an interface into a port, `addresses` sets the local pods'
//! addresses in the programs, `closed_interfaces` holds those whose pod is not known yet, `uplinks` attaches to interfaces to other machines, `view` gives read access.

mod addresses;
mod closed_interfaces;
mod open;
mod uplinks;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use penstock_dataplane::forward::PortId;
use penstock_dataplane::io::PortError;
use penstock_dataplane::worker::{Dataplane, DataplaneStatistics, Traffic};
use penstock_policy::model::ObjectKey;
use penstock_xdp_redirect::{
    AttachError, Bridge, Entrances, Interface, KeptBy, Pinned, PinnedProgram, PodVeth, TcxPrograms, TrafficCount,
};

use super::close_first::CloseFirstFds;
use super::config::Config;
use super::coverage::NotEnforced;
use super::reserved_descriptors::ReservedDescriptors;
use crate::discovery::{Bindings, Link, NetworkState, PodPort, WorkerVeth};
use closed_interfaces::ClosedInterfaces;
pub(super) use closed_interfaces::interface;
use open::{NodePort, OpenPair, OpenPortError, PodAttachment};
use uplinks::Uplinks;
pub(super) use view::{PortOutcomes, PortRole};

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
    programs: TcxPrograms,
    /// Once the pairs are open.
    node: Option<NodePort>,
    pairs: Vec<OpenPair>,
    pods: BTreeMap<u32, PodAttachment>,
    uplinks: Uplinks,
    /// Traffic without a worker of pods whose ports are closed by now.
    closed_offloaded: [TrafficCount; 2],
    closed_interfaces: ClosedInterfaces,
    /// Addresses that the programs treat as local pods', each with the interfaces by which its pod's packets come in.
    announced: BTreeMap<IpAddr, Option<Entrances>>,
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
    /// For interfaces that must be closed.
    reserved: ReservedDescriptors,
    /// Whether another daemon runs. Until [`OpenPorts::take_over_programs`] only interfaces are touched that it has attached to: two would
    /// attach to a new one.
    is_beside: bool,
}

impl OpenPorts {
    /// No ports yet. The interfaces in `netstate` existed before, and those that are no pod's stay open.
    pub(super) fn new(programs: TcxPrograms, config: &Config, netstate: &NetworkState, is_beside: bool) -> Self {
        Self {
            programs,
            node: None,
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
            reserved: ReservedDescriptors::hold(),
            is_beside,
        }
    }

    /// Whether another daemon may be about to attach to this interface.
    pub(super) fn is_left_to_other(&self, interface: u32) -> bool {
        self.is_beside
            && !self.programs.pins().is_some_and(|pins| pins.has(Pinned { program: PinnedProgram::FromPod, interface }))
    }

    /// Opens the workers' pairs, and the node's stack through them.
    pub(super) fn open_pairs(&mut self, dataplane: &Dataplane, pairs: &[WorkerVeth]) -> Result<(), OpenPortError> {
        for (worker, pair) in pairs.iter().enumerate() {
            let open = self.open_pair(dataplane, worker, pair)?;
            self.pairs.push(open);
        }
        if let Some(first) = pairs.first() {
            self.node = Some(self.open_node(dataplane, &first.node)?);
        }
        Ok(())
    }

    /// Registers the files that the kernel closes first when this process dies, so that all pods are open at once: the
    /// last added goes first.
    pub(super) fn add_close_first(&self, dataplane: &Dataplane, first: &mut CloseFirstFds) -> io::Result<()> {
        for pair in &self.pairs {
            dataplane.each_descriptor(pair.id, |file| first.hold(file))?;
        }
        first.hold(self.programs.alive())
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
                self.close(&interface);
            }
        }
    }

    /// Takes over programs that an earlier daemon pinned and this one has not opened: pods' interfaces stay closed,
    /// others are released.
    pub(super) fn take_over_pinned(&mut self, netstate: &NetworkState) {
        let Some(pins) = self.programs.pins().cloned() else { return };
        for pinned in pins.links() {
            let index = pinned.interface;
            match netstate.links.get(&index).filter(|_| pinned.program.is_at_pod()) {
                Some(_) if self.pods.contains_key(&index) || self.closed_interfaces.has(index) => {}
                Some(link) => self.close(&interface(link)),
                None if pinned.program.is_at_uplink() && self.uplinks.has(index) => {}
                // It is newer than what was read of the network.
                None if pinned.program.is_at_pod() => {}
                None => pins.remove(pinned),
            }
        }
    }

    /// From now on the programs run where an earlier daemon left its own. Ports and policy are in place.
    pub(super) fn take_over_programs(&mut self) -> Result<(), AttachError> {
        self.is_beside = false;
        let pods = self.pods.values_mut().map(|attachment| &mut attachment.veth);
        self.programs.take_over(self.uplinks.attached_mut(), pods.chain(self.closed_interfaces.attached_mut()))
    }

    /// Tunnel packets of other nodes' pods that this node did not unwrap.
    pub(super) fn refused_tunnels(&self) -> Option<u64> {
        self.programs.refused_tunnels().ok()
    }

    /// Filters that somebody deleted and that were put back; `None` where programs are tcx links.
    pub(super) fn restored_filters(&self) -> Option<u64> {
        Some(self.programs.filter_watch()?.restored())
    }

    /// Packets that programs forwarded without a worker: from pod to pod, from a pod to the node's stack, and from there
    /// to a pod; past the stack, to another machine and from there.
    pub(super) fn offloaded(&self) -> Option<[TrafficCount; 5]> {
        self.programs.offloaded().ok()
    }

    /// For each interface to other machines, what keeps pods' packets that come in there to the node's stack, by family: IPv4, IPv6.
    pub(super) fn kept_by(&self) -> Vec<(&str, [Option<KeptBy>; 2])> {
        self.uplinks.kept_by(&self.programs)
    }

    /// Adds what programs forwarded without a worker to the workers' counters.
    pub(super) fn add_offloaded(&self, statistics: &mut DataplaneStatistics) {
        let Some([_, to_stack, from_stack, to_uplink, from_uplink]) = self.offloaded() else { return };
        let mut by_port: BTreeMap<PortId, [TrafficCount; 2]> =
            self.pods.values().map(|pod| (pod.id, pod.offloaded())).collect();
        // The port of the node's stack is that of other machines.
        let of_node = [sum(from_stack, from_uplink), sum(to_stack, to_uplink)];
        by_port.extend(self.node.iter().map(|node| (node.id, of_node)));
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
            if let Err(error) = attachment.veth.set_captured(is_captured) {
                let interface = &attachment.last.name;
                tracing::warn!(interface, %error, "established connections are not in the capture, or stay with the workers");
            }
        }
    }

    /// Attaches a program that drops everything from an interface.
    fn close(&mut self, interface: &Interface) {
        let mut attached = self.programs.attach_pod(interface);
        if !matches!(attached, Ok(_) | Err(AttachError::NoInterface { .. })) && self.reserved.release() {
            attached = self.programs.attach_pod(interface);
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
            let (bridge, pod): (Option<Bridge>, _) = (netstate.bridge(link), port.pod.clone());
            match self.open_pod(dataplane, link, bridge, port) {
                Ok(attachment) => {
                    self.failed.remove(&index);
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
                        self.close(&interface(link));
                    }
                    self.log_failure(index, pod, &error.to_string());
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
            self.close(&interface(link));
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
        if let Some(veth) = self.closed_interfaces.take(index) {
            self.closed_interfaces.ignore(index);
            tracing::info!(interface = %veth.interface(), "{why}");
        }
    }

    /// Whether what the pod behind this interface sends and gets is dropped.
    pub(super) fn is_closed(&self, index: u32) -> bool {
        self.closed_interfaces.has(index) || self.pods.get(&index).is_some_and(|attachment| !attachment.served)
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

    /// Removes the ports whose interface is gone. Close them once a snapshot without them is published.
    pub(super) fn remove_gone(&mut self, netstate: &NetworkState) -> Vec<(PortId, String)> {
        let gone: Vec<u32> = self.pods.keys().copied().filter(|index| !netstate.links.contains_key(index)).collect();
        let mut closing = Vec::new();
        for index in gone {
            let Some(attachment) = self.pods.remove(&index) else { continue };
            for (sum, count) in self.closed_offloaded.iter_mut().zip(attachment.offloaded()) {
                sum.packets += count.packets;
                sum.bytes += count.bytes;
            }
            // Dropping it detaches the program; the interface is gone anyway.
            closing.push((attachment.id, attachment.last.name.clone()));
        }
        closing
    }

    /// Leaves the programs attached for the next daemon: without sockets they drop.
    pub(super) fn keep(self) {
        let Self { pods, uplinks, closed_interfaces, .. } = self;
        uplinks.keep();
        let open = pods.into_values().map(|attachment| attachment.veth);
        open.chain(closed_interfaces.into_attached()).for_each(PodVeth::keep);
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
