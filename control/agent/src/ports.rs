//! The ports that are open: each an interface with its sockets in the workers and the program attached.
//!
//! Here they are kept in step with the pods; `open` makes an interface a port, `addresses` says whose addresses are local
//! pods', `view` is what others read.

mod addresses;
mod open;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use penstock_dataplane::forward::{Port, PortId, PortKind};
use penstock_dataplane::io::PortError;
use penstock_dataplane::worker::Dataplane;
use penstock_xdp_redirect::{AttachError, AttachOptions, Attached, Interface, ModeChoice, OnMiss, Redirect, Role};

use super::config::{Config, FailMode};
use super::first_closed::FirstClosed;
use super::waiting::{Waiting, interface};
use crate::discovery::{Facts, Link, PodPort, Sysctls};
use open::{Open, OpenError, PodSide, mtu};
pub(super) use view::Counted;

/// How long an interface's queue may be busy until that is logged: a queue that was closed a moment ago is, as long as the
/// kernel's deferred work takes.
const PATIENCE: Duration = Duration::from_secs(3);
/// Octets of an Ethernet header.
const ETHERNET_HEADER: u32 = 14;

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

    fn tell(&mut self, index: u32, reason: &str) {
        if self.refused.get(&index).is_none_or(|told| told != reason) {
            let now = if self.waiting.has(index) { "its packets are dropped" } else { "NO POLICY IS ENFORCED on it" };
            tracing::error!(reason, "interface could not be attached: {now}; trying again");
            self.refused.insert(index, reason.to_owned());
        }
    }
}
