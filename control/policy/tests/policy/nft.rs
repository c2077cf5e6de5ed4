//! The nftables ruleset: `nft` accepts it. Tests with real traffic check its effect on packets.

use std::io::Write;
use std::process::{Command, Stdio};

use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::*;
use penstock_policy::render::nft;

use super::build::*;

fn example() -> Vec<Object> {
    let into = vec![
        rule(&["pods app=web", "172.16.0.0/12 except 172.16.1.0/24", "fd00::/8"], &["tcp/80", "tcp/81-90", "udp"]),
        rule(&["namespaces"], &["sctp/7", "tcp/http"]),
        rule(&[], &["udp/53"]),
        rule(&["pods app=nothing"], &[]),
    ];
    let out = vec![
        rule(&["namespaces"], &["tcp/http"]),
        rule(&["0.0.0.0/0 except 10.0.0.0/8"], &[]),
        rule(&[], &["tcp/1-1000", "tcp/500-2000"]),
    ];
    vec![
        namespace("shop", ""),
        node("n1", &["192.168.0.1", "fd00:1::1"]),
        Object::Pod(pod("shop/web", "app=web", &["10.0.1.1", "fd00::1:1"], &["http:tcp/80"])),
        Object::Pod(pod("shop/db", "app=db", &["10.0.1.2", "fd00::1:2"], &["http:tcp/8080"])),
        Object::Pod(Pod { node: Some("n2".to_owned()), ..pod("shop/far", "", &["10.0.2.2"], &[]) }),
        policy("shop/in", "app=db", Some(into), None),
        policy("shop/out", "", None, Some(out)),
        policy("shop/all", "app=web", Some(vec![rule(&[], &[])]), None),
    ]
}

/// Whether `nft` is installed and can check (it needs its own network namespace, hence root).
fn nft_check(text: &str) -> Option<(bool, String)> {
    let mut command = Command::new("unshare");
    command.args(["--net", "nft", "--check", "--file", "-"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().ok()?;
    child.stdin.take()?.write_all(text.as_bytes()).ok()?;
    let output = child.wait_with_output().ok()?;
    Some((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn nft_accepts_the_ruleset_of_a_node() {
    assert_eq!(
        nft_check("table inet penstock { }\n").map(|(accepted, _)| accepted),
        Some(true),
        "needs root and nftables"
    );
    let (refused, _) = nft_check("table inet penstock { nonsense }\n").expect("it worked above");
    assert!(!refused, "the check does check");
    for settings in
        [EngineSettings::for_node("n1"), EngineSettings::for_all_pods(), EngineSettings::for_node("nowhere")]
    {
        let mut engine = Engine::new(settings);
        engine.apply(example().into_iter().map(ObjectChange::Set));
        let text = nft::render(engine.state(), engine.tables());
        let (accepted, errors) = nft_check(&text).expect("it worked above");
        assert!(accepted, "{errors}\n{text}");
    }
}

#[test]
fn only_pods_of_the_node_are_in_its_ruleset() {
    let mut engine = Engine::new(EngineSettings::for_node("n1"));
    engine.apply(example().into_iter().map(ObjectChange::Set));
    let text = nft::render(engine.state(), engine.tables());
    assert!(text.contains("10.0.1.2 : jump side_"), "{text}");
    assert!(!text.contains("10.0.2.2 : jump side_"), "{text}");
    assert!(text.contains("tcp dport { 1-2000 }"), "{text}");
}

#[test]
fn nft_accepts_the_ruleset_of_tiers() {
    use penstock_policy::model::RuleAction::{Accept, Deny, Pass};
    assert_eq!(
        nft_check("table inet penstock { }\n").map(|(accepted, _)| accepted),
        Some(true),
        "needs root and nftables"
    );
    let egress = vec![
        ordered(Pass, &["namespaces"], &["tcp/1-1000", "udp/http"]),
        ordered(Deny, &["networks 10.0.0.0/8 fd00::/8"], &["sctp/7"]),
        ordered(Accept, &["nodes"], &[]),
        ClusterRule { is_understood: false, ..ordered(Deny, &[], &[]) },
    ];
    let ingress =
        || vec![ordered(Pass, &["namespaces"], &["tcp/80"]), ordered(Deny, &["namespaces / pods app=web"], &[])];
    let tiers = [
        cluster_policy("Admin 1 first", "app=db", ingress(), egress),
        cluster_policy("Admin 1 second", "app=web", vec![], vec![ordered(Deny, &["networks 0.0.0.0/0"], &[])]),
        cluster_policy("Baseline 1 last", "", ingress(), vec![ordered(Pass, &["nodes"], &[])]),
    ];
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    engine.apply(example().into_iter().chain(tiers).map(ObjectChange::Set));
    let text = nft::render(engine.state(), engine.tables());
    let (accepted, errors) = nft_check(&text).expect("it worked above");
    assert!(accepted, "{errors}\n{text}");
    assert!(text.contains("goto next_") && text.contains("@own_node_v4 return"), "{text}");
}
