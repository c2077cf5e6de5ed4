//! Where programs take pods' packets.

use penstock_bench::testbed::Attach;

use crate::fixture::{Fixture, pods, policy};

/// Names of the daemon's own interfaces that are there, and whether the first pod's veth has an XDP program.
fn traces(fixture: &Fixture) -> (Vec<String>, bool) {
    let node = &fixture.cluster.node;
    let mut names = node.netlink().interface_names().unwrap();
    names.retain(|name| name.starts_with("penstock"));
    names.sort();
    (names, node.netlink().has_xdp(node.pod("test/pod-0").unwrap().interface()).unwrap())
}

#[test]
fn changing_attach_keeps_policy_and_leaves_nothing_behind() {
    let closed = policy("closed", "pod-1", "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n");
    let mut fixture = Fixture::of(&(pods(3) + &closed), |_, config| config.attach = Attach::Xdp);
    let of_xdp = (vec!["penstock-host".to_owned(), "penstock0".to_owned()], true);
    // A pair for each worker, and each core has one if the process may use them all: so that of the tests.
    let workers = std::thread::available_parallelism().unwrap().get();
    let pairs =
        ["w", "x"].into_iter().flat_map(|end| (0..workers).map(move |worker| format!("penstock-{end}{worker}")));
    let mut of_tcx = (pairs.collect::<Vec<_>>(), false);
    of_tcx.0.sort();
    assert_eq!(traces(&fixture), of_xdp);
    for (attach, expected) in [(Attach::Tcx, &of_tcx), (Attach::Xdp, &of_xdp), (Attach::Tcx, &of_tcx)] {
        fixture.kill();
        fixture.change_config(|config| config.attach = attach);
        fixture.restart();
        assert_eq!(&traces(&fixture), expected, "{attach:?}");
        fixture.assert_as_expected(&fixture.matrix());
    }
}
