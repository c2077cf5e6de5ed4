//! Publishes snapshots from one locked value, which two threads update.
//!
//! The policy thread ([`super::policy_thread`]) updates objects, the control thread ports and the node's addresses.
//! Whoever holds the lock computes and publishes; nobody waits for the kernel, a disk or a worker while holding it. So
//! nothing that the control thread does to interfaces and sockets delays a policy change.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ipnet::IpNet;
use penstock_dataplane::names::Resolvers;
use penstock_dataplane::worker::Dataplane;
use penstock_dataplane::{Epoch, Snapshot};
use penstock_policy::model::{ObjectChange, ObjectKey};
use penstock_policy::render::tables::{BuiltTables, TableJob};
use penstock_xdp_redirect::ServiceAddresses;
use tokio::sync::Notify;

use super::config::{Config, Encapsulation, Resolver};
use super::connections::{ClearingQueue, ConnectionOwners};
use super::node_context::{NodeContext, NodeNetwork, RefusedTunnels};
use super::objects::{ChangeEffect, NodeObjects};
use super::port_layout::PortLayout;
use super::postponed::PostponedAddresses;
use super::progress::EnforcementProgress;
use super::recorded_objects::StaleObjects;
use super::subscribers::{Subscriber, Subscribers, Update};

/// Entries of tables that a change builds at once: so others wait for it for about ten milliseconds at most. The largest are left
/// aside.
const ENTRIES_AT_ONCE: usize = 8192;
/// Rules that are compiled between two changes.
const RULES_AT_ONCE: usize = 256;

/// Publishes snapshots of its [`SnapshotInputs`].
pub(super) struct Publisher {
    inputs: Mutex<SnapshotInputs>,
    dataplane: Arc<Dataplane>,
    services: Vec<IpNet>,
    encapsulation: Encapsulation,
    /// Whose answers teach pods domain names.
    resolvers: Vec<Resolver>,
    /// This node's pods may have changed: ports have to follow.
    pub(super) pods: Notify,
    /// A snapshot was published that is not in effect yet, or has come into effect in the kernel's programs.
    pub(super) awaited: Arc<Notify>,
    /// Tables were left aside.
    pub(super) left_aside: Notify,
}

/// Everything that a snapshot is made of.
pub(super) struct SnapshotInputs {
    pub(super) objects: NodeObjects,
    /// Set while the objects are those of an earlier run.
    pub(super) stale: Option<StaleObjects>,
    pub(super) epoch: Epoch,
    /// Since when tables are left aside.
    left_aside: Option<Instant>,
    /// Whether nothing is published: not yet, or not any more.
    is_held: bool,
    pub(super) progress: EnforcementProgress,
    /// The ports that are open.
    layout: PortLayout,
    network: NodeNetwork,
    /// As of the last snapshot.
    node_context: NodeContext,
    connections: ConnectionOwners,
    postponed: PostponedAddresses,
    /// As of the last snapshot.
    pub(super) resolvers: Resolvers,
    subscribers: Subscribers,
}

impl Publisher {
    /// Publishes nothing before [`Publisher::begin`]. `clearing` takes work on the connection table.
    /// `services`: the map of the program on what leaves the node.
    pub(super) fn new(
        config: &Config,
        (objects, stale): (NodeObjects, Option<StaleObjects>),
        services: ServiceAddresses,
        dataplane: &Arc<Dataplane>,
        clearing: ClearingQueue,
    ) -> Self {
        let inputs = SnapshotInputs {
            stale,
            epoch: dataplane.connections().last_epoch(),
            left_aside: None,
            is_held: true,
            progress: EnforcementProgress::default(),
            layout: PortLayout::default(),
            network: NodeNetwork::default(),
            node_context: NodeContext::default(),
            connections: ConnectionOwners::new(&config.conntrack.mapping, clearing),
            postponed: PostponedAddresses::new(services),
            resolvers: Resolvers::default(),
            subscribers: Subscribers::default(),
            objects,
        };
        let awaited: Arc<Notify> = Arc::default();
        let told = Arc::clone(&awaited);
        dataplane.on_offload_in_force(move || told.notify_one());
        Self {
            inputs: Mutex::new(inputs),
            dataplane: Arc::clone(dataplane),
            services: config.service_cidrs.clone(),
            encapsulation: config.encapsulation.clone(),
            resolvers: config.domain_names.resolvers.clone(),
            pods: Notify::new(),
            awaited,
            left_aside: Notify::new(),
        }
    }

    /// Locks the inputs. Hold the lock for computing only.
    pub(super) fn inputs(&self) -> MutexGuard<'_, SnapshotInputs> {
        // A panic of the other thread ends the daemon; until then the published state stays valid.
        self.inputs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies changed objects, and publishes if they may change the policy. Ports follow later.
    pub(super) fn apply_changes(&self, changes: Vec<ObjectChange>, seen: Instant) {
        if changes.is_empty() {
            return;
        }
        let mut inputs = self.inputs();
        let changes = inputs.objects.complete(changes);
        self.apply(&mut inputs, changes, seen);
    }

    /// Applies all objects of the source, as changes of those of an earlier run, which are stale no more.
    pub(super) fn replace_stale(&self, changes: Vec<ObjectChange>, seen: Instant) {
        let mut inputs = self.inputs();
        inputs.stale = None;
        tracing::info!("the API server has been read: objects of the last run are replaced by its own");
        let changes = inputs.objects.complete(changes);
        self.apply(&mut inputs, changes, seen);
    }

    /// A CNI plugin has given these addresses to a pod of this node. Says what is awaited until the pod's policy is in effect on
    /// every worker.
    pub(super) fn announce(&self, pod: &ObjectKey, addresses: &[IpAddr]) -> Result<(), String> {
        let mut inputs = self.inputs();
        let inputs = &mut *inputs;
        let change = inputs.objects.announce(pod, addresses).map_err(|error| error.to_string())?;
        if let Some(change) = change {
            self.apply(inputs, vec![change], Instant::now());
        }
        if !inputs.objects.has_pod(pod) {
            return Err("the source has not told of the pod yet".to_owned());
        }
        if !inputs.progress.has_addresses(pod, addresses) {
            return Err(inputs.progress.waiting(pod, false));
        }
        if inputs.objects.engine().is_waiting(pod) {
            return Err("the tables of its policies are being built".to_owned());
        }
        // Not all that was published: where pods come and go all the time, something is always awaited.
        match inputs.progress.changed(pod) {
            Some(changed) if self.dataplane.is_in_force(changed) => Ok(()),
            _ => Err("the workers have not taken its policy yet".to_owned()),
        }
    }

    fn apply(&self, inputs: &mut SnapshotInputs, changes: Vec<ObjectChange>, seen: Instant) {
        let what = summary(&changes);
        inputs.progress.times.changes.inc_by(changes.len() as u64);
        let began = Instant::now();
        let ChangeEffect { policy, pods, nodes, services } = inputs.objects.apply(changes, &inputs.network.addresses);
        inputs.progress.times.compile.observe(began.elapsed().as_secs_f64());
        self.note_left_aside(inputs, seen);
        let services_changed = inputs.objects.refresh_service_addresses();
        inputs.objects.note_unmet_claims();
        // Even if a local pod has no port yet: from this snapshot on nobody else may use its address.
        let context_changed = (pods || nodes) && inputs.refresh_node_context(&self.encapsulation);
        let resolvers_changed = services && self.find_resolvers(inputs) != inputs.resolvers;
        if policy || context_changed || services_changed || resolvers_changed {
            self.publish(inputs, &what, seen);
        } else {
            tracing::debug!("no effect on the tables: {what}");
        }
        self.tell(inputs);
        // A pod that is not served is closed if policy is about it from now on.
        if pods || (policy && inputs.progress.has_waiting()) {
            self.pods.notify_one();
        }
    }

    /// Publishes what is known by now, and each change from now on.
    pub(super) fn begin(&self, why: &str, seen: Instant) {
        let mut inputs = self.inputs();
        inputs.is_held = false;
        inputs.objects.refresh_service_addresses();
        // Not before: what a daemon starts with is in effect as a whole, so that no connection is cut for a table that is still built.
        inputs.objects.build_aside(ENTRIES_AT_ONCE);
        // A daemon that ran until now has published more.
        inputs.epoch = self.dataplane.connections().last_epoch();
        self.publish(&mut inputs, why, seen);
        self.tell(&mut inputs);
    }

    /// Publishes nothing any more, and has the connection table left alone: another process is about to have it.
    pub(super) fn hold(&self) {
        let mut inputs = self.inputs();
        inputs.is_held = true;
        let in_use = inputs.connections.use_of_table();
        // The clearing thread tells of what it has done.
        drop(inputs);
        in_use.end();
    }

    /// Applies the open ports and the node's network, and publishes if either changed. After it returns, ports that are
    /// not in `layout` may be closed.
    pub(super) fn update_ports(&self, layout: PortLayout, network: NodeNetwork, why: &str, seen: Instant) -> bool {
        let mut inputs = self.inputs();
        let inputs = &mut *inputs;
        let policy = inputs.objects.apply_addresses(&network.addresses)
            || inputs.network.watches_uplinks != network.watches_uplinks;
        let services_changed = inputs.objects.refresh_service_addresses();
        inputs.objects.note_unmet_claims();
        inputs.network = network;
        let context_changed = inputs.refresh_node_context(&self.encapsulation);
        let layout_changed = layout != inputs.layout;
        let resolvers_changed = self.find_resolvers(inputs) != inputs.resolvers;
        if policy || layout_changed || context_changed || services_changed || resolvers_changed {
            inputs.layout = layout;
            self.publish(inputs, why, seen);
        }
        self.tell(inputs);
        self.note_left_aside(inputs, seen);
        layout_changed
    }

    /// Whether [`Publisher::prepare_tables`] has something to do.
    pub(super) fn has_tables_to_prepare(&self) -> bool {
        self.inputs().objects.engine().has_tables_to_prepare()
    }

    /// Compiles some rules of tables that were left aside; returns tables once all of theirs are.
    pub(super) fn prepare_tables(&self) -> Option<TableJob> {
        let mut inputs = self.inputs();
        if !inputs.objects.engine().has_tables_to_prepare() {
            return None;
        }
        inputs.objects.prepare_tables(RULES_AT_ONCE)
    }

    /// Takes tables that were left aside into effect.
    pub(super) fn take_tables(&self, built: BuiltTables) {
        let mut inputs = self.inputs();
        let seen = inputs.left_aside.unwrap_or_else(Instant::now);
        if inputs.objects.finish_tables(built) {
            self.publish(&mut inputs, "tables with many entries are built", seen);
            self.tell(&mut inputs);
        }
        self.note_left_aside(&mut inputs, Instant::now());
    }

    /// Notes whether pods wait for tables, and since when; wakes the policy thread.
    fn note_left_aside(&self, inputs: &mut SnapshotInputs, seen: Instant) {
        let pods = inputs.objects.engine().waiting_pods();
        match (inputs.left_aside, pods) {
            (None, 0) => {}
            (Some(_), 0) => {
                tracing::debug!("no table is left aside");
                inputs.left_aside = None;
            }
            (before, _) => {
                tracing::debug!(pods, "tables are left aside");
                inputs.left_aside = before.or(Some(seen));
            }
        }
        if inputs.objects.engine().has_tables_to_prepare() {
            self.left_aside.notify_one();
        }
    }

    /// The connections of these addresses are removed: publishes if a pod waited for one of them.
    pub(super) fn cleared(&self, addresses: &[IpAddr]) {
        let mut inputs = self.inputs();
        inputs.connections.cleared(addresses);
        if inputs.connections.has_admissible(&inputs.owners()) {
            self.publish(&mut inputs, "addresses are free of their last pods' connections", Instant::now());
            self.tell(&mut inputs);
        }
    }

    /// Whether a published snapshot had not been taken by every worker when last checked, and nothing else is awaited for it.
    pub(super) fn is_awaiting_workers(&self) -> bool {
        self.inputs().progress.is_awaiting_workers(&self.dataplane)
    }

    /// Checks which published snapshots are in effect.
    pub(super) fn check_in_force(&self) {
        let mut inputs = self.inputs();
        inputs.progress.check_in_force(&self.dataplane);
        if inputs.release_addresses(&self.dataplane) {
            self.publish(&mut inputs, "addresses of Services have room", Instant::now());
            self.tell(&mut inputs);
        }
    }

    /// Subscribes what `begin` makes of what is published now: it is told of each update from then on.
    pub(super) fn subscribe<S, T>(&self, begin: impl FnOnce(&Update<'_>) -> (S, T)) -> T
    where
        S: Subscriber + 'static,
    {
        let mut inputs = self.inputs();
        let snapshot = || self.dataplane.snapshot();
        let now = Update { epoch: inputs.epoch, changes: &[], engine: inputs.objects.engine(), snapshot: &snapshot };
        let (subscriber, begun) = begin(&now);
        inputs.subscribers.add(subscriber);
        inputs.objects.keep_changes(true);
        begun
    }

    /// Tells the subscribers what is published, for one that has changed what it wants of it.
    pub(super) fn tell_subscribers(&self) {
        self.tell(&mut self.inputs());
    }

    /// Not before the first snapshot: they would judge by one that knows no pod.
    fn tell(&self, inputs: &mut SnapshotInputs) {
        if inputs.is_held {
            return;
        }
        let changes = inputs.objects.take_changes();
        let snapshot = || self.dataplane.snapshot();
        let engine = inputs.objects.engine();
        inputs.subscribers.tell(&Update { epoch: inputs.epoch, changes: &changes, engine, snapshot: &snapshot });
        inputs.objects.keep_changes(inputs.subscribers.want_changes());
    }

    fn find_resolvers(&self, inputs: &SnapshotInputs) -> Resolvers {
        inputs.objects.resolvers(&self.resolvers, &inputs.network.local_prefixes)
    }

    /// Takes no more work on the connection table.
    pub(super) fn end(&self) {
        self.inputs().connections.end();
    }

    /// Publishes the inputs under the next epoch, unless workers would read the same as before: an epoch ends what the
    /// programs answer by themselves, and has each connection evaluated again.
    fn publish(&self, inputs: &mut SnapshotInputs, why: &str, seen: Instant) {
        let began = Instant::now();
        let epoch = inputs.epoch.next();
        let wanted = inputs.owners();
        let admitted = inputs.connections.admit(&wanted);
        let forwarding = inputs.layout.forwarding(&inputs.node_context, &self.services, &wanted, admitted);
        inputs.postpone(epoch, &self.dataplane);
        let policy = inputs.objects.policy_set(&forwarding);
        if inputs.is_held {
            // It is compiled by now, so that what is published first does not wait for it.
            return;
        }
        let (limits, new_limits) = inputs.objects.limited_pods(&forwarding);
        inputs.resolvers = self.find_resolvers(inputs);
        let snapshot =
            Snapshot::new(epoch, policy, forwarding).with_limits(limits).with_resolvers(inputs.resolvers.clone());
        // The first one is always published: until then workers have none, and drop everything.
        let is_published = |last: &Snapshot| last.epoch != Epoch::default() && snapshot.is_same(last);
        if is_published(&self.dataplane.snapshot()) {
            tracing::debug!("workers read nothing of it: {why}");
            return;
        }
        inputs.epoch = epoch;
        inputs.connections.take_over(self.dataplane.connections(), &snapshot.forwarding);
        let served = inputs.layout.served(inputs.connections.owners());
        inputs.progress.published(epoch, &snapshot.policy, served, seen);
        self.dataplane.publish(snapshot);
        inputs.connections.published();
        inputs.connections.count_open(new_limits);
        inputs.progress.times.publish.observe(began.elapsed().as_secs_f64());
        inputs.progress.wait_in_force(&self.dataplane);
        if inputs.release_addresses(&self.dataplane) || inputs.progress.is_awaiting() {
            self.awaited.notify_one();
        }
        tracing::info!(
            epoch = inputs.epoch.0,
            pods = inputs.layout.pods(),
            policies = inputs.objects.policies(),
            microseconds = seen.elapsed().as_micros() as u64,
            "published: {why}"
        );
    }
}

impl SnapshotInputs {
    /// Postpones egress policy at the addresses of Services, as far as the program on what leaves the node asks then.
    fn postpone(&mut self, epoch: Epoch, dataplane: &Dataplane) {
        let none = BTreeSet::new();
        let wanted = if self.network.watches_uplinks { self.objects.service_addresses() } else { &none };
        self.postponed.release(|epoch| dataplane.is_in_force(epoch));
        let postponed = self.postponed.update(wanted, epoch);
        self.objects.postpone_at(postponed);
    }

    /// Takes addresses out of the program that no worker postpones policy at any more. Returns whether others wait for their room.
    fn release_addresses(&mut self, dataplane: &Dataplane) -> bool {
        self.postponed.release(|epoch| dataplane.is_in_force(epoch))
    }

    /// The tunnel packets that this node does not unwrap, as of the last snapshot.
    pub(super) fn refused_tunnels(&self) -> Arc<RefusedTunnels> {
        Arc::clone(self.node_context.tunnels())
    }

    /// Recomputes the node context. Returns whether it changed.
    fn refresh_node_context(&mut self, encapsulation: &Encapsulation) -> bool {
        let node_context = NodeContext::of(encapsulation, &self.network, &self.objects);
        let changed = node_context != self.node_context;
        self.node_context = node_context;
        changed
    }

    /// The owner of each address: the pod behind an open port, if the objects agree that the address is that pod's. The
    /// objects may be ahead of the ports; an address that has just moved to another pod has no owner until that pod's
    /// port is open.
    fn owners(&self) -> super::connections::AddressOwners {
        let mut owners = self.layout.owners();
        owners.retain(|&address, (pod, _)| self.objects.has(pod, address));
        owners
    }
}

/// Names what changed, in a few words, for the log.
fn summary(changes: &[ObjectChange]) -> String {
    const SHOWN: usize = 4;
    let name = |change: &ObjectChange| match change {
        ObjectChange::Set(object) => object.reference().to_string(),
        ObjectChange::Delete(reference) => format!("{reference} deleted"),
    };
    let mut names: Vec<String> = changes.iter().take(SHOWN).map(name).collect();
    if changes.len() > SHOWN {
        names.push(format!("and {} more", changes.len() - SHOWN));
    }
    names.join(", ")
}
