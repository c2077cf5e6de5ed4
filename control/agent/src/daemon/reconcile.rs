//! Reconciles ports and forwarding with pods and network.

use std::collections::BTreeSet;
use std::time::Instant;

use penstock_dataplane::forward::PortId;
use penstock_policy::model::{ObjectKey, Pod};
use penstock_sources::api_server::PodNotEnforced;

use tracing::Level;

use super::Daemon;
use crate::RunError;
use crate::coverage::{self, NotEnforced, PodCoverage};
use crate::discovery::{Netlink, NetworkState, PodProblem, has_network_on, pod_ports};
use crate::node_context::NodeNetwork;
use crate::ports::Unserved;

impl Daemon<'_> {
    pub(super) async fn refresh(&mut self, why: &str, seen: Instant) -> Result<(), RunError> {
        if self.read_network_state().await { self.reconcile(why, seen).await } else { Ok(()) }
    }

    /// Reads the network state. On an error the last state stays; the next event or interval reads it again.
    async fn read_network_state(&mut self) -> bool {
        let began = Instant::now();
        match self.netlink.network_state().await {
            Ok(netstate) => {
                self.netstate = netstate;
                self.read_took = began.elapsed();
                true
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read the network state; trying again");
                false
            }
        }
    }

    /// Brings ports and forwarding in line with pods and network, in this order: a new pod's port is open
    /// before the pod is published, and a gone pod's port is closed after a snapshot without it. Each step may wait for
    /// the kernel, so none runs while [`Publisher`](crate::publisher::Publisher) inputs are locked.
    pub(super) async fn reconcile(&mut self, why: &str, seen: Instant) -> Result<(), RunError> {
        self.pairs.check(&self.netstate).map_err(RunError::failed)?;
        let (pods, mut problems) = self.publisher.inputs().objects.resolved_pods();
        let bindings = self.bindings.follow(&self.netstate, &pods);
        self.ports.close_new_interfaces(&self.netstate, bindings);
        let (wanted, more) = pod_ports(&self.netstate, bindings, &pods, self.settings.port_limits());
        problems.extend(more);
        self.bindings.keep();
        self.solicit_neighbours(&pods, &problems).await;
        self.log_problems(&pods, &problems);
        self.follow_hidden_pods(&problems);
        self.ports.update(&self.dataplane, &self.netstate, wanted);
        let under_policy = self.close_unserved(&pods, &problems);
        let gone = self.ports.remove_gone(&self.netstate);
        let unserved = self.publisher.inputs().objects.pod_addresses();
        self.ports.announce(&unserved);
        self.ports.follow_uplinks(&self.netstate);
        let network = NodeNetwork::of(&self.netstate, self.ports.watches_uplinks());
        self.publisher.update_ports(self.ports.layout(), network, why, seen);
        let tunnels = self.publisher.inputs().refused_tunnels();
        self.ports.refuse_tunnels(&tunnels);
        self.close_ports(gone);
        self.ports.retract();
        self.follow_capture();
        // Ports that the running daemon has attached to since are taken later.
        if !self.is_beside {
            self.note_not_enforced(&under_policy);
        }
        Ok(())
    }

    /// Closes interfaces of pods under policy that are not served, and opens those that cannot be served and are under none. Returns
    /// the pods under policy.
    fn close_unserved(&mut self, pods: &[Pod], problems: &BTreeSet<PodProblem>) -> Vec<Pod> {
        let restricted = self.publisher.inputs().objects.pods_under_policy();
        let is_under_policy =
            |pod: &&Pod| has_network_on(pod, self.config.node.as_str()) && restricted.contains(&pod.key);
        let under_policy: Vec<Pod> = pods.iter().filter(is_under_policy).cloned().collect();
        let bindings = self.bindings.bindings();
        let links = under_policy.iter().flat_map(|pod| bindings.links_of(&pod.key)).collect();
        let lasting = problems.iter().filter(|problem| problem.keeps_from_service());
        let unserved: BTreeSet<&ObjectKey> = lasting.flat_map(PodProblem::pods).collect();
        let others = pods.iter().filter(|pod| unserved.contains(&pod.key) && !restricted.contains(&pod.key));
        let hopeless = others.flat_map(|pod| bindings.links_of(&pod.key)).collect();
        let unowned = self.ports_of_hidden_pods(pods, &under_policy);
        self.ports.close_unserved(&self.netstate, &Unserved { restricted: links, unowned, hopeless });
        under_policy
    }

    /// Pods without an interface are hidden at the start, which has waited for their neighbours, and later where that lasts.
    fn follow_hidden_pods(&mut self, problems: &BTreeSet<PodProblem>) {
        let is_without = |problem: &&PodProblem| matches!(problem, PodProblem::NoRoute { .. });
        let without: BTreeSet<&ObjectKey> = problems.iter().filter(is_without).flat_map(PodProblem::pods).collect();
        let lasting = self.problems.lasting().filter(is_without).flat_map(PodProblem::pods);
        let mut hidden: BTreeSet<ObjectKey> = lasting.cloned().collect();
        hidden.extend(without.into_iter().filter(|&pod| self.is_starting || self.hidden.contains(pod)).cloned());
        self.hidden = hidden;
    }

    /// The ports that belong to no pod, of pods' bridges on which policy selects a pod and a pod's interface is not known. A pod may keep its own
    /// unknown: it answers no ARP request, or with an address that nobody has. Other systems may have ports there, too, and are closed only
    /// where this lasts.
    fn ports_of_hidden_pods(&self, pods: &[Pod], under_policy: &[Pod]) -> BTreeSet<u32> {
        let bindings = self.bindings.bindings();
        let hidden = pods.iter().filter(|pod| self.hidden.contains(&pod.key) && !pod.lifetime.leaving);
        let bridges: BTreeSet<u32> = hidden.filter_map(|pod| bindings.bridge_of_hidden(&self.netstate, pod)).collect();
        let restricted = under_policy.iter().flat_map(|pod| &pod.addresses);
        let restricted: BTreeSet<u32> = restricted.filter_map(|&address| self.netstate.bridge_of(address)).collect();
        let bridges = bridges.intersection(&restricted).filter(|&&bridge| self.is_pod_bridge(bridge));
        bridges.flat_map(|&bridge| bindings.unowned_ports(&self.netstate, bridge)).collect()
    }

    fn is_pod_bridge(&self, bridge: u32) -> bool {
        let name = self.netstate.links.get(&bridge).map(|link| &link.name);
        name.is_some_and(|name| self.config.pod_bridges.iter().any(|pattern| pattern.matches(name)))
    }

    /// Says what is not enforced: in the log when it is new, and to all who ask.
    fn note_not_enforced(&mut self, under_policy: &[Pod]) {
        let coverage = PodCoverage {
            bindings: self.bindings.bindings(),
            lasting: self.problems.lasting().collect(),
            is_served: &|pod| self.ports.port_of(pod).is_some(),
            is_closed: &|link| self.ports.is_closed(link),
            is_pod_bridge: &|bridge| self.is_pod_bridge(bridge),
            netstate: &self.netstate,
        };
        let mut found = coverage::of_pods(under_policy, &coverage);
        found.extend(self.ports.not_enforced());
        let mut inputs = self.publisher.inputs();
        let manifests = self.operation.source.unreadable();
        let manifests = manifests.map(|reason| format!("manifests: {reason}; the last good objects stay in effect"));
        let of_node = inputs.objects.problems().into_iter().chain(manifests);
        found.extend(of_node.map(|reason| NotEnforced { pod: None, reason }));
        let closed = inputs.objects.engine().closed_pods().into_iter();
        found
            .extend(closed.map(|(pod, reason)| NotEnforced { reason: format!("pod {pod}: {reason}"), pod: Some(pod) }));
        for new in found.difference(inputs.progress.not_enforced()) {
            tracing::error!(pod = new.pod.as_ref().map(ToString::to_string), "POLICY IS NOT ENFORCED: {}", new.reason);
            if let Some(pod) = &new.pod {
                // The log has what does not fit.
                let _ = self.tell_events.try_send(PodNotEnforced { pod: pod.clone(), reason: new.reason.clone() });
            }
        }
        inputs.progress.note_not_enforced(found);
    }

    fn close_ports(&self, gone: Vec<(PortId, String)>) {
        let ids: Vec<PortId> = gone.iter().map(|(id, _)| *id).collect();
        for ((id, interface), closed) in gone.into_iter().zip(self.dataplane.close_ports(&ids)) {
            match closed {
                Ok(()) => tracing::info!(interface, port = %id, "closed"),
                Err(error) => tracing::error!(interface, port = %id, %error, "cannot close the port"),
            }
        }
    }

    /// Has the kernel send ARP or neighbour solicitations on bridges for pods that have no route and no neighbour
    /// entry.
    async fn solicit_neighbours(&self, pods: &[Pod], problems: &BTreeSet<PodProblem>) {
        let without_route = problems.iter().filter(|problem| matches!(problem, PodProblem::NoRoute { .. }));
        let without_route: BTreeSet<&ObjectKey> = without_route.flat_map(PodProblem::pods).collect();
        solicit(&self.netlink, &self.netstate, pods.iter().filter(|pod| without_route.contains(&pod.key))).await;
    }

    /// Logs problems that are new, that last, and that are over.
    fn log_problems(&mut self, pods: &[Pod], problems: &BTreeSet<PodProblem>) {
        let leaving = pods.iter().filter(|pod| pod.lifetime.leaving).map(|pod| pod.key.clone()).collect();
        for (level, line) in self.problems.update(problems, &leaving, Instant::now()) {
            match level {
                Level::WARN => tracing::warn!("{line}"),
                Level::INFO => tracing::info!("{line}"),
                _ => tracing::debug!("{line}"),
            }
        }
        self.publisher.inputs().progress.note_problems(problems);
    }
}

/// Has the kernel resolve the addresses of these pods on bridges.
pub(super) async fn solicit(netlink: &Netlink, netstate: &NetworkState, pods: impl Iterator<Item = &Pod>) {
    for &address in pods.flat_map(|pod| &pod.addresses) {
        if let Some(bridge) = netstate.bridge_of(address) {
            netlink.solicit(bridge, address).await;
        }
    }
}
