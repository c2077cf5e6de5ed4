//! Pods on a bridge, whose packets br_netfilter shows to the node's rules.

use std::path::Path;
use std::time::Duration;

use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy};

use crate::fixture::{Fixture, pods, policy};
use crate::services::service::{WEB, service, translate};

/// The rules translate a packet that the bridge forwards: it reaches the other pod without having entered the node's stack.
#[test]
fn a_service_to_the_same_bridge_is_judged_by_its_sender() {
    if !Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables").exists() {
        println!("this kernel has no br_netfilter: kube-proxy does not work with bridges there either");
        return;
    }
    let only_pod_0 = policy("served", "pod-1", "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n");
    let fixture = Fixture::bridged(&(pods(3) + &only_pod_0), |cluster, _| {
        for setting in ["bridge-nf-call-iptables", "bridge-nf-call-ip6tables"] {
            cluster.node.namespace().set_sysctl(&format!("net/bridge/{setting}"), "1").unwrap();
        }
        translate(cluster.node.namespace(), &cluster.sites[cluster.site("test/pod-1").unwrap()]);
    });
    // Pods on a bridge are found shortly after the daemon is ready.
    let served = fixture.daemon.log().wait_for_after(0, "pods=3 ", Duration::from_secs(10));
    assert!(served.is_ok(), "{}", fixture.daemon.log().lines().join("\n"));
    let (identity, _) = fixture.target("test/pod-1", false);
    for v6 in [false, true] {
        for protocol in [Protocol::Tcp(WEB), Protocol::Udp(WEB)] {
            for (from, expected) in [("test/pod-0", ProbeOutcome::Reached), ("test/pod-2", ProbeOutcome::Silent)] {
                let to = (identity, service(v6));
                let outcome = probe::run_one(fixture.site(from), to, protocol, RetryPolicy::default()).unwrap();
                assert_eq!(outcome, expected, "{from}, {protocol}, IPv6: {v6}\n{}", fixture.statistics().join("\n"));
            }
        }
    }
}
