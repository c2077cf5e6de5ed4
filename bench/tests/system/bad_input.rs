//! Bad input ends the daemon with exit code 2 and one line that names the cause, and leaves nothing attached.

use std::time::Duration;

use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::testbed::{Daemon, DaemonConfig, Privileges, ScratchDir, network_state};

use crate::fixture::pods;

/// A node whose daemon is not yet started.
struct UnstartedNode {
    cluster: Cluster,
    config: DaemonConfig,
    privileges: Privileges,
    _scratch: ScratchDir,
}

impl UnstartedNode {
    fn new() -> Self {
        let scratch = ScratchDir::new().unwrap();
        let manifests = scratch.path().join("manifests");
        std::fs::create_dir(&manifests).unwrap();
        std::fs::write(manifests.join("all.yaml"), pods(2)).unwrap();
        let cluster = Cluster::build(&read_objects(&manifests).unwrap()).unwrap();
        let config = DaemonConfig::new(&cluster.name, &manifests);
        Self { cluster, config, privileges: Privileges::All, _scratch: scratch }
    }
}

/// Name, the error to introduce, and what the line must contain.
type BadInput = (&'static str, fn(&mut UnstartedNode), &'static [&'static str]);

const CASES: &[BadInput] = &[
    ("no privileges", |node| node.privileges = Privileges::None, &["CAP_NET_ADMIN", "root"]),
    ("an unknown key", |node| node.config.keys = "nonsense = 1\n".into(), &["penstock.toml:2", "nonsense"]),
    (
        "a core that does not exist",
        |node| node.config.sections += "[workers]\ncores = [999]\n",
        &["workers.cores", "999"],
    ),
    (
        "a directory that is not there",
        |node| node.config.manifests = "/nonexistent/manifests".into(),
        &["/nonexistent/manifests"],
    ),
];

#[test]
fn bad_input_ends_with_code_2_and_one_line_and_leaves_nothing() {
    for (what, break_it, named) in CASES {
        let mut node = UnstartedNode::new();
        break_it(&mut node);
        let before = network_state(node.cluster.node.netlink()).unwrap();
        let namespace = node.cluster.node.namespace();
        let daemon = Daemon::launch(namespace, &node.config.to_toml(), node.privileges).unwrap();
        let (status, lines) = daemon.wait(Duration::from_secs(30)).unwrap();
        assert_eq!(status.code(), Some(2), "{what}: {}", lines.join("\n"));
        assert_eq!(lines.len(), 1, "{what}: {}", lines.join("\n"));
        for name in *named {
            assert!(lines[0].contains(name), "{what}: \"{name}\" is not in: {}", lines[0]);
        }
        let after = network_state(node.cluster.node.netlink()).unwrap();
        assert_eq!(after, before, "{what}");
    }
}
