//! Reconciles ports, forwarding and the node's routes with pods and network.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use penstock_dataplane::forward::PortId;
use penstock_policy::model::{ObjectKey, Pod};

use tracing::Level;

use super::Daemon;
use crate::RunError;
use crate::discovery::{PodProblem, pod_ports};
use crate::node_context::NodeNetwork;

impl Daemon<'_> {
    /// Reads the network state and reconciles with it.
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

    /// Brings ports, forwarding and routes in line with pods and network, in this order: a new pod's port is open
    /// before the pod is published, and a gone pod's port is closed after a snapshot without it. Each step may wait for
    /// the kernel, so none runs while [`Publisher`](crate::publisher::Publisher) inputs are locked.
    pub(super) async fn reconcile(&mut self, why: &str, seen: Instant) -> Result<(), RunError> {
        self.node_path.check(&self.netstate).map_err(RunError::failed)?;
        self.ports.close_new_interfaces(&self.netstate);
        let largest = self.config.umem.frame_size.largest_packet();
        let (pods, mut problems) = self.publisher.inputs().objects.resolved_pods();
        let (wanted, more) = pod_ports(&self.netstate, &pods, self.config.node.as_str(), largest);
        problems.extend(more);
        self.solicit_neighbours(&pods, &problems).await;
        self.log_problems(&pods, &problems);
        self.ports.update(&self.dataplane, &self.netstate, wanted);
        let gone = self.ports.remove_gone(&self.netstate);
        let unserved = self.publisher.inputs().objects.pod_addresses();
        self.ports.announce(&unserved);
        self.ports.follow_uplinks(&self.netstate);
        let network = NodeNetwork::of(&self.netstate, self.ports.watches_uplinks());
        self.publisher.update_ports(self.ports.layout(), network, why, seen);
        self.close_ports(gone);
        self.ports.retract();
        self.follow_capture();
        self.update_routes().await;
        Ok(())
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

    async fn update_routes(&mut self) {
        let rejected = match self.node_path.set_routes(&self.ports.pod_routes()).await {
            Ok(rejected) => rejected,
            Err(error) => return tracing::warn!(%error, "cannot read the node's routes; trying again"),
        };
        let rejected: BTreeMap<IpAddr, String> =
            rejected.into_iter().map(|(address, error)| (address, error.to_string())).collect();
        for (address, reason) in rejected.iter().filter(|(address, reason)| self.unrouted.get(address) != Some(reason))
        {
            tracing::error!(%address, reason, "cannot route this pod through the workers: the node reaches it past its policies; trying again");
        }
        self.unrouted = rejected;
    }

    /// Has the kernel send ARP or neighbour solicitations on bridges for pods that have no route and no neighbour
    /// entry.
    async fn solicit_neighbours(&self, pods: &[Pod], problems: &BTreeSet<PodProblem>) {
        let without_route = problems.iter().filter(|problem| matches!(problem, PodProblem::NoRoute { .. }));
        let without_route: BTreeSet<&ObjectKey> = without_route.flat_map(PodProblem::pods).collect();
        for pod in pods.iter().filter(|pod| without_route.contains(&pod.key)) {
            for &address in &pod.addresses {
                if let Some(bridge) = self.netstate.bridge_of(address) {
                    self.netlink.solicit(bridge, address).await;
                }
            }
        }
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
