//! Clause 11: a rule's action applies cluster-wide. The tests are the examples of the Contrail firewall policy.

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_dataplane::policy::DirectionVerdict;
use penstock_policy::engine::Engine;
use penstock_policy::model::*;

use super::build::*;

const A: &str = "10.0.1.1";
const B: &str = "10.0.1.2";
const X: &str = "10.0.2.1";

fn engine(policies: impl IntoIterator<Item = Object>) -> Engine {
    let pods = [("ns1/a", A), ("ns1/b", B), ("other/x", X)];
    let pods = pods.map(|(name, address)| {
        let (_, short) = name.split_once('/').expect("namespace/name");
        Object::Pod(pod(name, &format!("is={short}"), &[address], &[]))
    });
    let namespaces = [namespace("ns1", ""), namespace("other", "")];
    cluster_wide(namespaces.into_iter().chain(pods).chain(policies))
}

fn check(engine: &Engine, expected: &[(&str, &str, bool)]) {
    for (from, to, allowed) in expected {
        let address = |text: &str| text.parse::<std::net::IpAddr>().unwrap().into();
        let flow =
            Flow { src: address(from), dst: address(to), protocol: Protocol::TCP, src_port: 40000, dst_port: 80 };
        let explanation = engine.explain(&flow);
        assert_eq!(explanation.verdict.is_allowed(), *allowed, "{from} to {to}: {explanation:?}");
        let by_peer = [&explanation.egress, &explanation.ingress]
            .into_iter()
            .find(|side| matches!(side.verdict, DirectionVerdict::AllowedByPeer(_)));
        assert!(by_peer.is_none_or(|side| side.rule.is_some()), "the other side's rule is named");
    }
}

#[test]
fn clause_11_a_to_b_overrules_b_from_c_only() {
    let send = policy("ns1/one", "is=a", None, Some(vec![rule(&["pods is=b"], &[])]));
    let receive = policy("ns1/two", "is=b", Some(vec![rule(&["namespaces / pods is=x"], &[])]), None);
    check(&engine([send, receive]), &[(A, B, true), ("10.9.9.9", B, false), (A, X, false)]);
}

#[test]
fn clause_11_illustration_1_egress_all_and_ingress_none() {
    let both = policy("ns1/p", "", Some(vec![]), Some(vec![rule(&[], &[])]));
    check(&engine([both]), &[(A, B, true), (B, A, true), (X, A, false), (X, B, false)]);
}

#[test]
fn clause_11_illustration_2_ingress_all_and_egress_none() {
    let both = policy("ns1/p", "", Some(vec![rule(&[], &[])]), Some(vec![]));
    check(&engine([both]), &[(A, B, true), (B, A, true), (A, X, false), (B, X, false), (X, A, true)]);
}

#[test]
fn clause_11_illustration_3_egress_to_a_closed_pods_block() {
    let send = policy("ns1/one", "is=a", None, Some(vec![rule(&["10.0.1.2/32"], &[])]));
    let deny = policy("ns1/two", "", Some(vec![]), None);
    check(&engine([send, deny]), &[(A, B, true), (B, A, false), (X, A, false), (X, B, false)]);
}
