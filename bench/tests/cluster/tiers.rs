//! ClusterNetworkPolicies of a real API server.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use penstock_bench::probe::{self, Protocol, RetryPolicy};

use crate::real_cluster::RealCluster;
use crate::shell::eventually;
use crate::whole::expect_reached;

/// The daemons look for the kind every ten seconds, and write an Event within five.
const LIMIT: Duration = Duration::from_secs(60);

/// The kind, with any field: as a cluster with a newer version of the API would have it.
const DEFINITION: &str = "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: clusternetworkpolicies.policy.networking.k8s.io
  annotations: {api-approved.kubernetes.io: unapproved}
spec:
  group: policy.networking.k8s.io
  scope: Cluster
  names: {kind: ClusterNetworkPolicy, listKind: ClusterNetworkPolicyList, plural: clusternetworkpolicies, singular: clusternetworkpolicy}
  versions:
    - name: v1alpha2
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
";

/// A policy of the Admin tier about `ops/monitor`, on which no NetworkPolicy is.
fn policy(peer: &str) -> String {
    format!(
        "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {{name: no-guests}}\n\
         spec:\n  tier: Admin\n  priority: 10\n\
         \x20 subject: {{pods: {{namespaceSelector: {{matchLabels: {{tier: ops}}}}, podSelector: {{matchLabels: {{app: monitor}}}}}}}}\n\
         \x20 ingress: [{{name: lab, action: Deny, from: [{peer}]}}]\n"
    )
}

/// It is followed once the cluster has the kind. One that is not understood fails closed, and an Event says so on the object.
pub(crate) fn cluster_network_policies_are_in_force(cluster: &mut RealCluster) -> Result<()> {
    let reaches_as = |from_lab, from_ops| {
        eventually(LIMIT, || {
            expect_reached(cluster, "lab/guest", "ops/monitor", 8080, from_lab)?;
            expect_reached(cluster, "ops/dash", "ops/monitor", 8080, from_ops)
        })
    };
    reaches_as(true, true)?;
    cluster.apply(DEFINITION)?;
    let tested = (|| {
        eventually(LIMIT, || cluster.apply(&policy("{namespaces: {matchLabels: {tier: lab}}}")))?;
        reaches_as(false, true)?;
        cluster.apply(&policy("{stars: {matchLabels: {tier: lab}}}"))?;
        reaches_as(false, false)?;
        eventually(LIMIT, || {
            let events = cluster.get(&["events", "-n", "default", "--field-selector", "reason=NotUnderstood"])?;
            let events = events["items"].as_array().context("items")?;
            ensure!(events.len() == 1, "one Event of two nodes: {events:#?}");
            ensure!(events[0]["involvedObject"]["name"] == "no-guests", "{}", events[0]);
            ensure!(events[0]["message"].as_str().is_some_and(|it| it.contains("stars")), "{}", events[0]);
            Ok(())
        })?;
        let described = cluster.kubectl(&["describe", "clusternetworkpolicy", "no-guests"])?;
        ensure!(described.contains("NotUnderstood"), "{described}");
        cluster.kubectl(&["delete", "clusternetworkpolicy", "no-guests"])?;
        reaches_as(true, true)?;
        namespaces_are_kept_apart(cluster)
    })();
    cluster.kubectl(&["delete", "crd", "clusternetworkpolicies.policy.networking.k8s.io", "--timeout=60s"])?;
    tested?;
    reaches_as(true, true)
}

/// A Deny of the Admin tier holds by the pods' addresses and by those of their Services, on the client's node and on the other one.
fn namespaces_are_kept_apart(cluster: &RealCluster) -> Result<()> {
    cluster.apply(
        "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: apart}\n\
         spec:\n  tier: Admin\n  priority: 10\n  subject: {namespaces: {matchLabels: {tier: lab}}}\n\
         \x20 egress: [{name: not to ops, action: Deny, to: [{namespaces: {matchLabels: {tier: ops}}}]}]\n",
    )?;
    let services =
        [("ops/monitor", cluster.cluster_ip("ops", "near")?), ("ops/dash", cluster.cluster_ip("ops", "far")?)];
    for from in ["lab/guest", "lab/builder"] {
        for (to, service) in services {
            eventually(LIMIT, || expect_reached(cluster, from, to, 8080, false))?;
            let (identity, _) = cluster.target(to, false);
            for protocol in [Protocol::Tcp(80), Protocol::Udp(53)] {
                let outcome =
                    probe::run_one(cluster.site(from), (identity, service), protocol, RetryPolicy::default())?;
                ensure!(!outcome.arrived(), "{from} reaches {to} by its Service, {protocol}: {outcome}");
            }
        }
    }
    Ok(())
}
