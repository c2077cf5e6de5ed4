//! Flow records of real pods.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use penstock_bench::probe::{self, EchoConnection, Protocol, RetryPolicy};
use penstock_bench::testbed::ScratchDir;
use serde_json::Value;

use crate::real_cluster::{COLLECTOR, RECORDS, RealCluster};
use crate::shell::{eventually, start};

const LIMIT: Duration = Duration::from_secs(60);

/// From one node to the other.
const FROM: (&str, usize) = ("lab/guest", 1);
const TO: (&str, usize) = ("ops/monitor", 0);
/// A connection that egress policy denies.
const DENIED: (&str, &str, u16) = ("lab/builder", "lab/guest", 9090);

/// Both nodes record a connection between them, with the pods' names and nodes; the sender's node what policy denies. A
/// collector has the records of both.
pub(crate) fn flow_records_name_pods_and_their_nodes(cluster: &mut RealCluster) -> Result<()> {
    let program = std::env::var_os("PENSTOCK_COLLECTOR").context("PENSTOCK_COLLECTOR: the program rotel")?;
    let scratch = ScratchDir::new()?;
    let log = scratch.path().join("collector.log");
    let mut collector = cluster.plane.world.command(program);
    collector.args(["start", "--otlp-http-endpoint", COLLECTOR]);
    collector.args(["--exporter", "blackhole", "--debug-log", "logs", "--debug-log-verbosity", "detailed"]);
    let _collector = start(collector, &log)?;
    cluster.switch_all_on()?;
    let to = cluster.target(TO.0, false);
    let flow = EchoConnection::open(&cluster.site(FROM.0).namespace, to, 8080, LIMIT)?;
    let denied = probe::run_one(
        cluster.site(DENIED.0),
        cluster.target(DENIED.1, false),
        Protocol::Tcp(DENIED.2),
        RetryPolicy::default(),
    )?;
    ensure!(!denied.arrived(), "egress policy of {} denies it: {denied}", DENIED.0);
    for node in [FROM.1, TO.1] {
        eventually(LIMIT, || {
            flow.wait_for(3, LIMIT)?;
            let records = records(cluster, node)?;
            let found = records.iter().find(|record| record["event"] == "interval" && is_between(record, FROM.0, TO.0));
            let found = found.with_context(|| format!("no record of the connection: {records:?}"))?;
            ensure!(found["verdict"] == "allowed" && found["node"] == node_name(node), "{found}");
            ensure!(found["from"]["node"] == node_name(FROM.1) && found["to"]["node"] == node_name(TO.1), "{found}");
            ensure!(found["sent"]["packets"].as_u64() > Some(0), "{found}");
            Ok(())
        })?;
    }
    eventually(LIMIT, || {
        let records = [records(cluster, 0)?, records(cluster, 1)?].concat();
        let found = records.iter().find(|record| record["event"] == "denied" && is_between(record, DENIED.0, DENIED.1));
        let found = found.with_context(|| format!("no record of what was denied: {records:?}"))?;
        ensure!(found["reason"] == "egress_denied" && found["packets"].as_u64() > Some(0), "{found}");
        Ok(())
    })?;
    eventually(LIMIT, || {
        let collected = std::fs::read_to_string(&log)?;
        let has = |node| collected.contains(&format!("k8s.node.name: Str({})", node_name(node)));
        let is_there = has(0) && has(1) && collected.contains("source.k8s.pod.name: Str(guest)");
        ensure!(is_there && collected.contains("EventName: penstock.flow.denied"), "the collector has {collected}");
        Ok(())
    })
}

fn records(cluster: &RealCluster, node: usize) -> Result<Vec<Value>> {
    let pod = cluster.penstock_on(node)?;
    let text = cluster.kubectl(&["-n", "kube-system", "exec", &pod, "-c", "penstock", "--", "cat", RECORDS])?;
    // The daemon may be writing the last line.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
}

fn is_between(record: &Value, from: &str, to: &str) -> bool {
    record["from"]["name"] == from && record["to"]["name"] == to
}

fn node_name(node: usize) -> String {
    format!("n{}", node + 1)
}
