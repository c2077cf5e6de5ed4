//! The ports, the forwarding and the node's routes in step with pods and network.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use penstock_dataplane::forward::PortId;
use penstock_policy::model::{ObjectKey, Pod};

use super::Daemon;
use crate::RunError;
use crate::discovery::{HostPortError, Problem, pod_ports};
use crate::surroundings::NodeNetwork;

impl Daemon<'_> {
    /// Looks at the network again.
    pub(super) async fn look(&mut self, why: &str, seen: Instant) -> Result<(), RunError> {
        if self.read_facts().await { self.settle(why, seen).await } else { Ok(()) }
    }

    /// Reads the facts; keeps the last ones where the kernel does not tell (it is asked again soon).
    async fn read_facts(&mut self) -> bool {
        let began = Instant::now();
        match self.netlink.facts().await {
            Ok(facts) => {
                self.facts = facts;
                self.look_took = began.elapsed();
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the network could not be looked at; trying again");
                false
            }
        }
    }

    /// Makes ports, forwarding and routes what pods and facts ask for, in this order: a new pod's port is open before it is
    /// published, and one that goes is closed after a snapshot without it. Each of these steps may wait for the kernel:
    /// none is taken while the content of the [`Publisher`](crate::publisher::Publisher) is held.
    pub(super) async fn settle(&mut self, why: &str, seen: Instant) -> Result<(), RunError> {
        // Neither end is there without the other.
        if !self.facts.links.contains_key(&self.host_port.node().index) {
            return Err(RunError::failed(HostPortError::Gone(self.host_port.node().name.clone())));
        }
        self.ports.close_new(&self.facts);
        let largest = self.config.umem.frame_size.largest_packet();
        let (pods, mut problems) = self.publisher.content().objects.tenants();
        let (wanted, more) = pod_ports(&self.facts, &pods, self.config.node.as_str(), largest);
        problems.extend(more);
        self.seek(&pods, &problems).await;
        self.tell(problems);
        self.ports.update(&self.dataplane, &self.facts, wanted);
        let gone = self.ports.take_gone(&self.facts);
        let unserved = self.publisher.content().objects.pod_addresses();
        self.ports.announce(&unserved);
        self.publisher.place(self.ports.layout(), NodeNetwork::of(&self.facts), why, seen);
        self.close(gone);
        self.ports.retract();
        self.route().await;
        Ok(())
    }

    fn close(&self, gone: Vec<(PortId, String)>) {
        let ids: Vec<PortId> = gone.iter().map(|(id, _)| *id).collect();
        for ((id, interface), closed) in gone.into_iter().zip(self.dataplane.close_ports(&ids)) {
            match closed {
                Ok(()) => tracing::info!(interface, port = %id, "closed"),
                Err(error) => tracing::error!(interface, port = %id, %error, "port could not be closed"),
            }
        }
    }

    async fn route(&mut self) {
        let refused = match self.host_port.set_routes(&self.ports.pod_routes()).await {
            Ok(refused) => refused,
            Err(error) => return tracing::warn!(%error, "the node's routes could not be looked at; trying again"),
        };
        let refused: BTreeMap<IpAddr, String> =
            refused.into_iter().map(|(address, error)| (address, error.to_string())).collect();
        for (address, reason) in refused.iter().filter(|(address, reason)| self.unrouted.get(address) != Some(reason)) {
            tracing::error!(%address, reason, "the node reaches this pod past its policies; trying again");
        }
        self.unrouted = refused;
    }

    /// Has the kernel ask on bridges for the pods that nothing leads to.
    async fn seek(&self, pods: &[Pod], problems: &BTreeSet<Problem>) {
        let lost = problems.iter().filter(|problem| matches!(problem, Problem::NoRoute { .. }));
        let lost: BTreeSet<&ObjectKey> = lost.flat_map(Problem::pods).collect();
        for pod in pods.iter().filter(|pod| lost.contains(&pod.key)) {
            for &address in &pod.addresses {
                if let Some(bridge) = self.facts.bridge_of(address) {
                    self.netlink.solicit(bridge, address).await;
                }
            }
        }
    }

    /// Logs problems that are new, and those that are no more.
    fn tell(&mut self, problems: BTreeSet<Problem>) {
        for problem in problems.difference(&self.problems) {
            match problem {
                // As it is with every pod for a moment, when it comes and when it goes.
                Problem::NoRoute { .. } | Problem::NoMac { .. } => tracing::info!("{problem}"),
                _ => tracing::warn!("{problem}"),
            }
        }
        for problem in self.problems.difference(&problems) {
            tracing::info!("no longer so: {problem}");
        }
        self.publisher.content().progress.note_problems(&problems);
        self.problems = problems;
    }
}
