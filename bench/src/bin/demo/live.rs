//! Edits a policy while a connection is open.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::expectation::PolicyOracle;
use penstock_bench::matrix::Matrix;
use penstock_bench::probe::{EchoConnection, Protocol, time_until_reached};
use penstock_bench::testbed::ScratchDir;

use super::terminal::{good, heading, milliseconds, step};
use super::{PROTOCOLS, compare};

/// The policy file, the text to replace, and its replacement.
const FILE: &str = "13-shop-api.yaml";
const OLD: &str = "port: 8080";
const NEW: &str = "port: 9090";
const OLD_PORT: u16 = 8080;
const NEW_PORT: u16 = 9090;
const CLIENT: &str = "shop/web";
const SERVER: &str = "shop/api";
/// Without a reply for this long, a connection counts as blocked.
const SILENCE: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(5);

pub(crate) fn edit_while_connected(cluster: &Cluster, scratch: &ScratchDir, manifests: &Path) -> Result<()> {
    let (client, server) = (cluster.site(CLIENT)?, cluster.site(SERVER)?);
    let address = cluster.sites[server].address(false).context("the server has no IPv4 address")?;
    let namespace = &cluster.sites[client].namespace;
    let target = (server as u32, address);
    heading(&format!("A policy is edited while {CLIENT} has a connection to {SERVER}"));
    let flow = step(&format!("Connecting to {SERVER}, port {OLD_PORT}"), || {
        let flow = EchoConnection::open(namespace, target, OLD_PORT, SILENCE)?;
        flow.wait_for(200, LIMIT)?;
        let exchanges = flow.exchanges();
        Ok((flow, format!("{exchanges} requests answered, and it goes on")))
    })?;

    let file = manifests.join(FILE);
    let old = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    ensure!(old.contains(OLD), "{FILE} has no \"{OLD}\" that could be edited");
    let new = old.replace(OLD, NEW);
    let (saved, cut, opened) = std::thread::scope(|scope| {
        let opening = scope
            .spawn(|| time_until_reached(namespace, target, Protocol::Tcp(NEW_PORT), Duration::from_millis(2), LIMIT));
        // Let the attempts at the new port begin: all before the save are denied.
        std::thread::sleep(Duration::from_millis(50));
        let saved = Instant::now();
        let written = scratch.save(&file, &new);
        let cut = flow.wait_until_blocked(LIMIT);
        let opened = opening.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        written.and(opened).map(|opened| (saved, cut, opened))
    })?;
    println!("  {FILE} is saved: \"{OLD}\" becomes \"{NEW}\"");
    let cut = cut.context("the open connection is not revoked")?;
    ensure!(cut >= saved, "the connection was blocked before the policy was edited");
    println!("    {} from save to the first byte that is not answered", time(saved, cut));
    let opened = opened.with_context(|| format!("port {NEW_PORT} does not open"))?;
    ensure!(opened >= saved, "port {NEW_PORT} was open before the policy was edited");
    println!("    {} from save to the first connection that port {NEW_PORT} accepts", time(saved, opened));
    drop(flow);

    step("Sending all probes again under the new policy", || {
        let matrix = Matrix::measure(cluster, &PolicyOracle::new(&read_objects(manifests)?), &PROTOCOLS)?;
        compare(&matrix)?;
        Ok(((), format!("{} probes, no difference", matrix.entries().len())))
    })?;

    let saved = Instant::now();
    scratch.save(&file, &old)?;
    let reached = time_until_reached(namespace, target, Protocol::Tcp(OLD_PORT), Duration::from_millis(2), LIMIT)?;
    let reached = reached.with_context(|| format!("port {OLD_PORT} does not open again"))?;
    println!("  {FILE} is saved as it was");
    println!("    {} from save to the first connection that port {OLD_PORT} accepts again", time(saved, reached));
    Ok(())
}

fn time(from: Instant, to: Instant) -> String {
    good(&format!("{:>9}", milliseconds(to.saturating_duration_since(from))))
}
