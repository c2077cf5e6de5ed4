//! A node of a cluster: kube-proxy's rules in both of its modes beside Penstock, policy by every way to a pod.

use penstock_bench::expectation::Expectation;
use penstock_bench::testbed::ProxyMode;

use crate::fixture::Fixture;

/// Services that the kernel translates, and those that workers translate.
const ENABLED: [bool; 2] = [false, true];

/// Every site of the demo to every other, to a cluster address and to a node port.
fn every_cell_is_as_expected(mode: ProxyMode) {
    for enabled in ENABLED {
        let fixture = Fixture::demo_beside(mode, enabled);
        let matrix = fixture.matrix();
        for name in ["Service/web", "NodePort/web"] {
            let at = fixture.cluster.frontends.iter().position(|frontend| frontend.name == name);
            let entries: Vec<_> = matrix.entries().iter().filter(|entry| entry.frontend == at).collect();
            let allowed = entries.iter().filter(|entry| entry.expected == Expectation::Allowed).count();
            assert!(
                at.is_some() && allowed > 10 && entries.len() - allowed > 10,
                "{name}: {allowed} of {}",
                entries.len()
            );
        }
        fixture.assert_as_expected(&matrix);
    }
}

#[test]
fn services_and_node_ports_work_and_policy_holds_beside_kube_proxy_in_iptables_mode() {
    every_cell_is_as_expected(ProxyMode::Iptables);
}

#[test]
fn services_and_node_ports_work_and_policy_holds_beside_kube_proxy_in_nftables_mode() {
    every_cell_is_as_expected(ProxyMode::Nftables);
}
