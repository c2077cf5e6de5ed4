//! What is published, and all that it is made of: one value that two threads take turns with.
//!
//! The policy thread ([`super::follow`]) brings objects, the control thread brings ports and the node's addresses. Whoever
//! has the value computes and publishes; nobody waits for the kernel, a disk or a worker while holding it. So nothing
//! that the control thread does to interfaces and sockets comes between a change of policy and the workers.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ipnet::IpNet;
use penstock_dataplane::worker::Dataplane;
use penstock_dataplane::{Epoch, Snapshot};
use penstock_policy::model::Change;
use tokio::sync::Notify;

use super::config::{Config, Encapsulation};
use super::connections::{Clearing, Connections};
use super::layout::Layout;
use super::objects::{Effect, Objects};
use super::progress::Progress;
use super::surroundings::{NodeNetwork, Surroundings};

/// Publishes what its [`Content`] comes to.
pub(super) struct Publisher {
    content: Mutex<Content>,
    dataplane: Arc<Dataplane>,
    services: Vec<IpNet>,
    encapsulation: Encapsulation,
    /// This node's pods may be others: ports have to follow.
    pub(super) pods: Notify,
    /// A snapshot was published that is not in force everywhere yet.
    pub(super) awaited: Notify,
}

/// All that a snapshot is made of.
pub(super) struct Content {
    pub(super) objects: Objects,
    pub(super) epoch: Epoch,
    pub(super) progress: Progress,
    /// The ports that are open.
    layout: Layout,
    network: NodeNetwork,
    /// As in the last snapshot.
    around: Surroundings,
    connections: Connections,
}

impl Publisher {
    /// Nothing is published before the first [`Publisher::place`]. `clearing` takes the work on the connection table.
    pub(super) fn new(config: &Config, objects: Objects, dataplane: &Arc<Dataplane>, clearing: Clearing) -> Self {
        let content = Content {
            objects,
            epoch: Epoch::default(),
            progress: Progress::new(),
            layout: Layout::default(),
            network: NodeNetwork::default(),
            around: Surroundings::default(),
            connections: Connections::new(&config.conntrack.mapping, clearing),
        };
        Self {
            content: Mutex::new(content),
            dataplane: Arc::clone(dataplane),
            services: config.service_cidrs.clone(),
            encapsulation: config.encapsulation.clone(),
            pods: Notify::new(),
            awaited: Notify::new(),
        }
    }

    /// The value. To be held for computing only.
    pub(super) fn content(&self) -> MutexGuard<'_, Content> {
        // A panic of the other thread ends the daemon; until then what was published stays.
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes changed objects in and publishes, if the policy may be another. Ports follow later.
    pub(super) fn change(&self, changes: Vec<Change>, seen: Instant) {
        if changes.is_empty() {
            return;
        }
        let what = summary(&changes);
        let mut content = self.content();
        let content = &mut *content;
        content.progress.times.changes.inc_by(changes.len() as u64);
        let began = Instant::now();
        let Effect { policy, pods, nodes } = content.objects.apply(changes, &content.network.addresses);
        content.progress.times.compile.observe(began.elapsed().as_secs_f64());
        // Also where a pod here has no port yet: nobody else passes for it then.
        let around = (pods || nodes) && content.look_around(&self.encapsulation);
        if policy || around {
            self.publish(content, &what, seen);
        } else {
            tracing::debug!("no effect on the tables: {what}");
        }
        if pods {
            self.pods.notify_one();
        }
    }

    /// Takes in which ports are open and what the node's network is. Published is what differs from before, once this
    /// returns: a port that `layout` has not may be closed then.
    pub(super) fn place(&self, layout: Layout, network: NodeNetwork, why: &str, seen: Instant) -> bool {
        let mut content = self.content();
        let content = &mut *content;
        let policy = content.objects.apply_addresses(&network.addresses);
        content.network = network;
        let around = content.look_around(&self.encapsulation);
        let moved = layout != content.layout;
        let first = content.epoch == Epoch::default();
        if policy || moved || first || around {
            content.layout = layout;
            self.publish(content, why, seen);
        }
        moved
    }

    /// The connections of these addresses are gone: whoever waits for one of them gets it.
    pub(super) fn cleared(&self, addresses: &[IpAddr]) {
        let mut content = self.content();
        content.connections.cleared(addresses);
        if content.connections.withholds(&content.tenants()) {
            self.publish(&mut content, "addresses are free of their last pods' connections", Instant::now());
        }
    }

    /// Whether a snapshot is published that is not in force everywhere, as far as was seen.
    pub(super) fn awaits(&self) -> bool {
        self.content().progress.awaits()
    }

    /// Sees whether what was published is in force everywhere.
    pub(super) fn look(&self) {
        self.content().progress.look(&self.dataplane);
    }

    /// Takes no more work on the connection table.
    pub(super) fn end(&self) {
        self.content().connections.end();
    }

    fn publish(&self, content: &mut Content, why: &str, seen: Instant) {
        content.epoch = content.epoch.next();
        let (began, policy) = (Instant::now(), content.objects.policy_set());
        let wanted = content.tenants();
        let admitted = content.connections.admit(&wanted);
        let forwarding = content.layout.forwarding(&content.around, &self.services, &wanted, admitted);
        content.connections.take_over(self.dataplane.connections(), &forwarding);
        let served = content.layout.served(content.connections.tenants());
        content.progress.published(content.epoch, &policy, served, seen);
        self.dataplane.publish(Snapshot { epoch: content.epoch, policy, forwarding });
        content.connections.published();
        content.progress.times.publish.observe(began.elapsed().as_secs_f64());
        content.progress.follow(&self.dataplane);
        if content.progress.awaits() {
            self.awaited.notify_one();
        }
        tracing::info!(
            epoch = content.epoch.0,
            pods = content.layout.pods(),
            policies = content.objects.policies(),
            microseconds = seen.elapsed().as_micros() as u64,
            "published: {why}"
        );
    }
}

impl Content {
    /// Whether what surrounds the ports has changed.
    fn look_around(&mut self, encapsulation: &Encapsulation) -> bool {
        let around = Surroundings::of(encapsulation, &self.network, &self.objects);
        let changed = around != self.around;
        self.around = around;
        changed
    }

    /// Who is to have each address: the pod behind an open port, if the objects say that the address is this pod's. They
    /// may be ahead of the ports: what was another pod's before is nobody's then, until its port is there.
    fn tenants(&self) -> super::connections::Tenants {
        let mut tenants = self.layout.tenants();
        tenants.retain(|&address, (pod, _)| self.objects.has(pod, address));
        tenants
    }
}

/// What changed, in a few words.
fn summary(changes: &[Change]) -> String {
    const SHOWN: usize = 4;
    let name = |change: &Change| match change {
        Change::Set(object) => object.reference().to_string(),
        Change::Delete(reference) => format!("{reference} deleted"),
    };
    let mut names: Vec<String> = changes.iter().take(SHOWN).map(name).collect();
    if changes.len() > SHOWN {
        names.push(format!("and {} more", changes.len() - SHOWN));
    }
    names.join(", ")
}
