//! The ports that are open: each an interface with its sockets in the workers and the program attached.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use penstock_dataplane::forward::{Port, PortId, PortKind};
use penstock_dataplane::io::PortError;
use penstock_dataplane::packet::Address;
use penstock_dataplane::worker::{Dataplane, PortRequest};
use penstock_xdp_redirect::{
    AttachError, AttachOptions, Attached, Interface, ModeChoice, OnMiss, Redirect, Role, SocketError, XdpMode,
    XdpOutcomeCounts,
};

use super::config::{Config, FailMode};
use super::first_closed::FirstClosed;
use super::layout::{Layout, OpenPort, Served};
use super::waiting::{Waiting, interface};
use crate::discovery::{Facts, Link, PodPort, PodRoute, Sysctls, keep_answering_arp};
use crate::model::ObjectKey;

/// How long an interface's queue may be busy until that is logged: a queue that was closed a moment ago is, as long as the
/// kernel's deferred work takes.
const PATIENCE: Duration = Duration::from_secs(3);
/// Octets of an Ethernet header.
const ETHERNET_HEADER: u32 = 14;

/// Why an interface could not be made a port.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error(transparent)]
    Port(#[from] PortError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// An interface whose packets the workers get. Dropping it detaches the program; the port is closed by [`Ports`].
struct Open {
    id: PortId,
    attached: Attached,
    port: Port,
}

/// A pod's interface. Once attached it stays so while it exists: if its pod goes first, its packets are dropped, not
/// left to the kernel.
struct PodSide {
    open: Open,
    /// What was last known of it; its pod may be gone.
    last: PodPort,
    served: bool,
}

/// All open ports.
pub(super) struct Ports {
    redirect: Redirect,
    on_miss: OnMiss,
    mode: ModeChoice,
    /// The longest frame, with its Ethernet header, that a socket takes.
    longest: u16,
    fixed: Vec<Open>,
    pods: BTreeMap<u32, PodSide>,
    waiting: Waiting,
    /// Addresses that the programs know as local pods', each with the longest frame for it.
    announced: BTreeMap<IpAddr, u16>,
    /// Those that are none any more, until the next snapshot is published.
    retracted: BTreeSet<IpAddr>,
    /// Links that could not be opened, with the reason that was logged.
    refused: BTreeMap<u32, String>,
    /// Links whose queue another socket has, and since when.
    busy: BTreeMap<u32, Instant>,
    /// How long opening waits for a queue that is busy.
    patience: Duration,
    settings: Sysctls,
    /// Whether an earlier daemon may have made the settings.
    follows: bool,
}

/// A port's name and counters for the statistics.
pub(super) struct Counted {
    pub(super) id: PortId,
    pub(super) kind: PortKind,
    pub(super) pod: Option<ObjectKey>,
    pub(super) mode: XdpMode,
    pub(super) outcomes: Option<XdpOutcomeCounts>,
}

impl Ports {
    /// None yet. Interfaces that the facts name were there before; an earlier daemon may have left its settings on them
    /// (`follows`).
    pub(super) fn new(redirect: Redirect, config: &Config, facts: &Facts, follows: bool) -> Self {
        Self {
            redirect,
            on_miss: match config.fail.mode {
                FailMode::Closed => OnMiss::Drop,
                FailMode::Open => OnMiss::Pass,
            },
            mode: config.xdp.mode.choice(),
            longest: mtu(config.umem.frame_size.largest_packet() + ETHERNET_HEADER),
            fixed: Vec::new(),
            pods: BTreeMap::new(),
            waiting: Waiting::new(config, facts),
            announced: BTreeMap::new(),
            retracted: BTreeSet::new(),
            refused: BTreeMap::new(),
            busy: BTreeMap::new(),
            patience: PATIENCE,
            settings: Sysctls::default(),
            follows,
        }
    }

    /// Opens the host port: what goes out of it arrives at the node's end.
    pub(super) fn open_host(&mut self, dataplane: &Dataplane, workers: &Link, node: &Link) -> Result<(), OpenError> {
        let port = Port {
            kind: PortKind::Host,
            own_mac: workers.mac,
            peer_mac: node.mac,
            mtu: mtu(node.mtu),
            addresses: Vec::new(),
        };
        let open = self.open(dataplane, workers, self.options(Role::Host), port)?;
        self.fixed.push(open);
        Ok(())
    }

    /// From now on nothing comes from the node's stack in a local pod's name that did not come from the workers. `node` is the
    /// node's end of the pair; the calling thread is in the node's namespace.
    pub(super) fn check_sources(&self, node: &Link) -> Result<(), AttachError> {
        self.fixed.iter().try_for_each(|open| open.attached.check_sources_on(&interface(node)))
    }

    /// What the kernel is to close first when this process dies, so that all is open at once then: the last one first.
    pub(super) fn hold_host(&self, dataplane: &Dataplane, first: &mut FirstClosed) -> io::Result<()> {
        for open in &self.fixed {
            dataplane.each_descriptor(open.id, |file| first.hold(file))?;
        }
        first.hold(self.redirect.alive())
    }

    /// Opens an uplink: packets for local pods come from it, and none are sent by it.
    pub(super) fn open_uplink(&mut self, dataplane: &Dataplane, link: &Link) -> Result<(), OpenError> {
        let port = Port {
            kind: PortKind::Uplink,
            own_mac: link.mac,
            peer_mac: Default::default(),
            mtu: mtu(link.mtu),
            addresses: Vec::new(),
        };
        let open = self.open(dataplane, link, self.options(Role::Uplink), port)?;
        self.fixed.push(open);
        Ok(())
    }

    /// Closes new interfaces that may be a pod's, until it is known whose they are.
    pub(super) fn close_new(&mut self, facts: &Facts) {
        self.waiting.let_go(facts);
        for interface in self.waiting.new_interfaces(facts) {
            if !self.pods.contains_key(&interface.index) {
                self.close(&interface, facts);
            }
        }
    }

    /// Takes over what an earlier daemon left pinned and nobody has opened since: pods' interfaces stay closed, others
    /// are let go.
    pub(super) fn take_over_rest(&mut self, facts: &Facts) {
        let Some(pins) = self.redirect.pins().cloned() else { return };
        let fixed: Vec<u32> = self.fixed.iter().map(|open| open.attached.interface().index).collect();
        for pinned in pins.links() {
            let index = pinned.interface;
            match facts.links.get(&index).filter(|_| pinned.role == Role::Pod) {
                Some(_) if self.pods.contains_key(&index) || self.waiting.has(index) => {}
                Some(link) => self.close(&interface(link), facts),
                None if fixed.contains(&index) => {}
                None => pins.remove(pinned),
            }
        }
    }

    /// Drops what comes from an interface.
    fn close(&mut self, interface: &Interface, facts: &Facts) {
        let bridge = facts.links.get(&interface.index).and_then(|link| facts.bridge_mac(link));
        let options = AttachOptions { on_miss: OnMiss::Drop, bridge, ..self.options(Role::Pod) };
        match self.redirect.attach(interface, options) {
            Ok(attached) => {
                tracing::info!(%interface, "closed until its pod is known");
                self.waiting.put(attached);
            }
            Err(AttachError::NoInterface { .. }) => {}
            Err(error) => {
                tracing::error!(%interface, %error, "cannot be closed until its pod is known: NO POLICY IS ENFORCED on it");
                self.waiting.leave_alone(interface.index);
            }
        }
    }

    /// Brings the pods' ports in step: opens those that are new, takes over what changed. Whether anything did.
    ///
    /// A port that cannot be opened is told in the log, and tried again at the next call.
    pub(super) fn update(&mut self, dataplane: &Dataplane, facts: &Facts, wanted: BTreeMap<u32, PodPort>) -> bool {
        let mut changed = false;
        for (_, side) in self.pods.iter_mut().filter(|(index, side)| side.served && !wanted.contains_key(index)) {
            side.give_up();
            changed = true;
        }
        self.refused.retain(|index, _| wanted.contains_key(index));
        self.busy.retain(|index, _| wanted.contains_key(index));
        for (index, port) in wanted {
            if let Some(side) = self.pods.get_mut(&index) {
                if !side.served || side.last != port {
                    side.take(port);
                    changed = true;
                }
                continue;
            }
            let Some(link) = facts.links.get(&index) else { continue };
            let options = AttachOptions { bridge: facts.bridge_mac(link), ..self.options(Role::Pod) };
            match self.open_pod(dataplane, link, options, port) {
                Ok(side) => {
                    self.refused.remove(&index);
                    self.busy.remove(&index);
                    self.pods.insert(index, side);
                    changed = true;
                }
                // It went away meanwhile: that is an event of its own.
                Err(
                    OpenError::Port(PortError::NoInterface { .. }) | OpenError::Attach(AttachError::NoInterface { .. }),
                ) => {}
                Err(error) => {
                    if self.waiting.closes() && !self.waiting.has(index) {
                        self.close(&interface(link), facts);
                    }
                    if !self.may_become_free(index, &error) {
                        self.tell(index, &error.to_string());
                    }
                }
            }
        }
        changed
    }

    /// From now on opening does not wait for a queue that is busy: [`Ports::has_busy`] says that it is to be tried again.
    pub(super) fn wait_no_more(&mut self) {
        self.patience = Duration::ZERO;
    }

    /// Whether a port could not be opened because its queue has been busy, for a short time so far. One that stays so is
    /// tried again whenever ports are brought in step.
    pub(super) fn has_busy(&self) -> bool {
        self.busy.values().any(|since| since.elapsed() < PATIENCE)
    }

    /// Whether this is no more than a queue that has been busy for a short time.
    fn may_become_free(&mut self, index: u32, error: &OpenError) -> bool {
        let OpenError::Port(PortError::QueueBusy { .. }) = error else {
            self.busy.remove(&index);
            return false;
        };
        let since = *self.busy.entry(index).or_insert_with(Instant::now);
        since.elapsed() + self.patience < PATIENCE
    }

    /// Takes out the ports whose interface is gone. They are to be closed once a snapshot without them is published.
    pub(super) fn take_gone(&mut self, facts: &Facts) -> Vec<(PortId, String)> {
        let gone: Vec<u32> = self.pods.keys().copied().filter(|index| !facts.links.contains_key(index)).collect();
        let mut closing = Vec::new();
        for index in gone {
            let Some(side) = self.pods.remove(&index) else { continue };
            self.settings.forget(&side.last.name);
            // Dropping the side detaches the program, whose interface is gone in any case.
            closing.push((side.open.id, side.last.name.clone()));
        }
        closing
    }

    /// Tells the programs which addresses are local pods', and how long packets for them may be that uplinks hand over: none
    /// for those that are not served. To be called before a snapshot with them is published, and [`Ports::retract`] after it,
    /// so that at no time somebody else passes for a pod.
    pub(super) fn announce(&mut self, unserved: &BTreeSet<IpAddr>) {
        let longest = |route: PodRoute| self.longest.min(mtu(route.mtu.saturating_add(ETHERNET_HEADER)));
        let mut wanted: BTreeMap<IpAddr, u16> = unserved.iter().map(|&address| (address, 0)).collect();
        wanted.extend(self.pod_routes().into_iter().map(|(address, route)| (address, longest(route))));
        let local = self.redirect.local_pods();
        for (&address, &longest) in
            wanted.iter().filter(|&(address, longest)| self.announced.get(address) != Some(longest))
        {
            if let Err(error) = local.insert(address, longest) {
                tracing::error!(%error, "packets from outside do not reach the pod, and may come in its name");
            }
        }
        for &address in self.announced.keys().filter(|&address| !wanted.contains_key(address)) {
            self.retracted.insert(address);
        }
        self.retracted.retain(|address| !wanted.contains_key(address));
        self.announced = wanted;
    }

    /// Has the programs forget the addresses that are no local pod's any more.
    pub(super) fn retract(&mut self) {
        for address in std::mem::take(&mut self.retracted) {
            if let Err(error) = self.redirect.local_pods().remove(address) {
                tracing::error!(%error, "packets from outside are still taken");
            }
        }
    }

    /// How the node is to reach each pod's addresses: by the workers.
    ///
    /// The addresses of a pod that is gone stay, while its interface does, unless another pod has them.
    pub(super) fn pod_routes(&self) -> BTreeMap<IpAddr, PodRoute> {
        let mut routes = BTreeMap::new();
        for served in [false, true] {
            for side in self.pods.values().filter(|side| side.served == served) {
                let route = PodRoute { link: side.last.link, mtu: side.last.mtu };
                routes.extend(side.last.addresses.iter().map(|&address| (address, route)));
            }
        }
        routes
    }

    /// What a snapshot needs to know of the ports that are open.
    pub(super) fn layout(&self) -> Layout {
        let placed = |open: &Open, pod: Option<Served>| OpenPort {
            id: open.id,
            interface: open.attached.interface().name.clone(),
            port: open.port.clone(),
            pod,
        };
        let served = |side: &PodSide| {
            let PodPort { pod, link, addresses, .. } = &side.last;
            side.served.then(|| Served { key: pod.clone(), link: *link, addresses: addresses.clone() })
        };
        let fixed = self.fixed.iter().map(|open| placed(open, None));
        Layout { ports: fixed.chain(self.pods.values().map(|side| placed(&side.open, served(side)))).collect() }
    }

    /// The port of this pod, and its interface.
    pub(super) fn port_of(&self, pod: &ObjectKey) -> Option<(PortId, &str)> {
        let side = self.pods.values().find(|side| side.served && side.last.pod == *pod)?;
        Some((side.open.id, &side.last.name))
    }

    /// The pod behind a port, if it is served.
    pub(super) fn pod_of(&self, port: PortId) -> Option<&ObjectKey> {
        self.pods.values().find(|side| side.served && side.open.id == port).map(|side| &side.last.pod)
    }

    /// Interfaces that are closed because their pod is not known, with what came from them.
    pub(super) fn waiting(&self) -> Vec<(String, XdpOutcomeCounts)> {
        self.waiting.counted()
    }

    /// Leaves the programs where they are, for the next daemon to take over: without sockets they drop.
    pub(super) fn keep(self) {
        let Self { fixed, pods, waiting, settings, .. } = self;
        let open = fixed.into_iter().chain(pods.into_values().map(|side| side.open)).map(|open| open.attached);
        open.chain(waiting.into_attached()).for_each(Attached::keep);
        settings.keep();
    }

    /// Takes all programs away.
    pub(super) fn restore(self) {
        let pins = self.redirect.pins().cloned();
        drop(self);
        if let Some(pins) = pins {
            pins.close();
        }
    }

    /// How many pods are served.
    pub(super) fn pods(&self) -> usize {
        self.pods.values().filter(|side| side.served).count()
    }

    /// Every port's name and the program's counters.
    pub(super) fn counted(&self) -> Vec<Counted> {
        let pod_of = |side: &PodSide| side.served.then(|| side.last.pod.clone());
        let pods = self.pods.values().map(|side| (&side.open, pod_of(side)));
        let all = self.fixed.iter().map(|open| (open, None)).chain(pods);
        let counted = |(open, pod): (&Open, Option<ObjectKey>)| Counted {
            id: open.id,
            kind: open.port.kind,
            pod,
            mode: open.attached.mode().clone(),
            outcomes: open.attached.outcomes().ok(),
        };
        all.map(counted).collect()
    }

    fn open_pod(
        &mut self,
        dataplane: &Dataplane,
        link: &Link,
        options: AttachOptions,
        port: PodPort,
    ) -> Result<PodSide, OpenError> {
        let open = self.open(dataplane, link, options, forwarding_port(&port))?;
        for name in std::iter::once(&port.name).chain(&port.bridge) {
            if let Err(error) = keep_answering_arp(&mut self.settings, name, self.follows) {
                tracing::warn!(interface = name, %error, "rp_filter could not be loosened: the pod's ARP may go unanswered");
            }
        }
        let side = PodSide { open, last: port, served: true };
        side.tell_own();
        tracing::info!(pod = %side.last.pod, interface = side.last.name, port = %side.open.id, "attached");
        Ok(side)
    }

    /// Sockets first, then the program, then the sockets into its map: until the last step packets are dropped.
    fn open(
        &mut self,
        dataplane: &Dataplane,
        link: &Link,
        options: AttachOptions,
        port: Port,
    ) -> Result<Open, OpenError> {
        let request = PortRequest { patience: self.patience, ..PortRequest::new(link.name.as_str()) };
        let id = dataplane.open_port(&request)?;
        if let Some(error) = dataplane.gso_refused(id) {
            tracing::warn!(
                interface = link.name,
                error,
                "TCP segments leave one by one, which makes bulk TCP slower: allow packet sockets (AF_PACKET), or set workers.gso = false"
            );
        }
        let attached = self.attach(link, options).map_err(OpenError::from).and_then(|attached| {
            let given = dataplane.with_sockets(id, |sockets| {
                sockets.iter().try_for_each(|(queue, socket)| attached.set_socket(*queue, *socket))
            });
            match given.map_err(OpenError::from).and_then(|given| Ok(given?)) {
                Ok(()) => Ok(attached),
                Err(error) => {
                    // What was closed stays closed.
                    if options.role == Role::Pod && self.waiting.closes() && options.on_miss == OnMiss::Drop {
                        self.waiting.put(attached);
                    }
                    Err(error)
                }
            }
        });
        match attached {
            Ok(attached) => Ok(Open { id, attached, port }),
            Err(error) => {
                if let Err(error) = dataplane.close_port(id) {
                    tracing::error!(interface = link.name, %error, "port could not be closed");
                }
                Err(error)
            }
        }
    }

    /// How a port of this role is attached. The host port's pair is a veth of our own, whose other end has what it sends cut
    /// into segments as long as the program is native.
    fn options(&self, role: Role) -> AttachOptions {
        let mode = match role {
            Role::Pod | Role::Uplink => self.mode,
            Role::Host => ModeChoice::NativeElseGeneric,
        };
        AttachOptions { on_miss: self.on_miss, mode, ..AttachOptions::new(role) }
    }

    fn attach(&mut self, link: &Link, options: AttachOptions) -> Result<Attached, AttachError> {
        // The program that closes it is the one that serves it, if it would be the same; else it gives its place.
        match self.waiting.take(link.index) {
            Some(closed) if closed.options() == options => return Ok(closed),
            Some(closed) => closed.keep(),
            None => {}
        }
        let attached = self.redirect.attach(&interface(link), options)?;
        tell_mode(&attached);
        Ok(attached)
    }

    fn tell(&mut self, index: u32, reason: &str) {
        if self.refused.get(&index).is_none_or(|told| told != reason) {
            let now = if self.waiting.has(index) { "its packets are dropped" } else { "NO POLICY IS ENFORCED on it" };
            tracing::error!(reason, "interface could not be attached: {now}; trying again");
            self.refused.insert(index, reason.to_owned());
        }
    }
}

impl PodSide {
    /// Its pod is gone, or is not known to be behind it any more: whatever it sends is dropped.
    fn give_up(&mut self) {
        tracing::info!(pod = %self.last.pod, interface = self.last.name, "pod gone; its interface stays closed");
        self.served = false;
        self.open.port.addresses.clear();
        self.tell_own();
    }

    /// Has the program hold the pod to its own addresses in ARP and neighbour discovery.
    fn tell_own(&self) {
        let none = BTreeSet::new();
        let addresses = if self.served { &self.last.addresses } else { &none };
        if let Err(error) = self.open.attached.set_own_addresses(self.last.peer_mac.0, addresses) {
            tracing::error!(%error, "the pod may speak for others in ARP and neighbour discovery");
        }
    }

    fn take(&mut self, port: PodPort) {
        self.open.port = forwarding_port(&port);
        self.last = port;
        self.served = true;
        self.tell_own();
    }
}

/// Says what follows from where a program runs, unless that is the driver, as it should be.
fn tell_mode(attached: &Attached) {
    let (interface, wanted) = (attached.interface(), attached.options());
    match attached.mode() {
        XdpMode::Generic { because } => {
            let reason = because.as_deref().unwrap_or("xdp.mode, now or when its link was pinned");
            let longer = match wanted.role {
                Role::Uplink => "go by the kernel",
                Role::Pod | Role::Host => {
                    "are lost; switch segmentation offloads off on the other end (ethtool -K <interface> tso off gso off)"
                }
            };
            tracing::warn!(
                %interface,
                reason,
                "attached in generic mode: slower, and packets longer than a frame {longer}"
            );
        }
        XdpMode::Native if wanted.mode == ModeChoice::Generic => tracing::warn!(
            %interface,
            "stays in native mode, in which its link was pinned; run penstock cleanup before the next start for xdp.mode to count"
        ),
        XdpMode::Native => {}
    }
}

fn forwarding_port(port: &PodPort) -> Port {
    Port {
        kind: PortKind::Pod,
        own_mac: port.own_mac,
        peer_mac: port.peer_mac,
        mtu: mtu(port.mtu),
        addresses: port.addresses.iter().copied().map(Address::from).collect(),
    }
}

/// No IP packet is longer than 65535 octets, whatever an interface says.
fn mtu(mtu: u32) -> u16 {
    mtu.try_into().unwrap_or(u16::MAX)
}
