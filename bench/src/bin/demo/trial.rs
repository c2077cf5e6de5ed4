//! Tries an edit of a policy on open connections, then puts it into effect.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::expectation::PolicyOracle;
use penstock_bench::matrix::Matrix;
use penstock_bench::probe::EchoConnection;
use penstock_bench::testbed::{ScratchDir, penstock_binary};

use super::terminal::{heading, step};
use super::{PROTOCOLS, compare};

/// The policy that is edited, its name, and the edit.
const FILE: &str = "13-shop-api.yaml";
const NAME: &str = "name: api-from-web";
const STAGED_NAME: &str = "name: api-from-web-next, annotations: { policy.penstock.dev/staged-for: api-from-web }";
const OLD: &str = "port: 8080";
const NEW: &str = "port: 9090";
const STAGED_FILE: &str = "90-staged.yaml";
/// Client, server and port of the connection that the edit would cut, and of one that it would not.
const CUT: (&str, &str, u16) = ("shop/web", "shop/api", 8080);
const KEPT: (&str, &str, u16) = ("shop/api", "shop/db", 9090);
const SILENCE: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(10);

pub(crate) fn try_before_enforcing(
    cluster: &Cluster,
    scratch: &ScratchDir,
    manifests: &Path,
    admin: &Path,
) -> Result<()> {
    heading("An edit of a policy is tried on live traffic, then put into effect");
    let flows = step("Opening two connections", || {
        let flows = [open(cluster, CUT)?, open(cluster, KEPT)?];
        Ok((flows, format!("{} to {} and {} to {}", CUT.0, CUT.1, KEPT.0, KEPT.1)))
    })?;
    let file = manifests.join(FILE);
    let old = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    ensure!(old.contains(OLD) && old.contains(NAME), "{FILE} has no \"{OLD}\" or no \"{NAME}\"");
    let new = old.replace(OLD, NEW);
    let staged = step("Staging the edit, which nothing enforces", || {
        scratch.save(&manifests.join(STAGED_FILE), &new.replace(NAME, STAGED_NAME))?;
        let output = wait_for_change(admin)?;
        flows.iter().try_for_each(|flow| flow.wait_for(200, LIMIT))?;
        Ok((output, "both connections go on".to_owned()))
    })?;
    println!("\n  $ penstock trial status");
    staged.lines().for_each(|line| println!("  {line}"));
    println!();
    let would_cut: Vec<&str> = staged.lines().filter(|line| line.contains("  allowed (")).collect();
    ensure!(
        would_cut.len() == 1 && would_cut[0].split_whitespace().take(4).eq([CUT.0, CUT.1, "8080/TCP", "1"]),
        "another change is named than one connection of {} to {}, 8080/TCP",
        CUT.0,
        CUT.1
    );
    step("Putting it into effect", || {
        scratch.save(&file, &new)?;
        fs::remove_file(manifests.join(STAGED_FILE))?;
        let [cut, kept] = &flows;
        cut.wait_until_blocked(LIMIT).context("the connection that was named is not cut")?;
        kept.wait_for(200, LIMIT).context("the other connection is cut, too")?;
        Ok(((), "what was named is cut, the other goes on".to_owned()))
    })?;
    drop(flows);
    step("Sending all probes again under the new policy", || {
        let matrix = Matrix::measure(cluster, &PolicyOracle::new(&read_objects(manifests)?), &PROTOCOLS)?;
        compare(&matrix)?;
        Ok(((), format!("{} probes, no difference", matrix.entries().len())))
    })?;
    scratch.save(&file, &old)
}

fn open(cluster: &Cluster, (client, server, port): (&str, &str, u16)) -> Result<EchoConnection> {
    let (client, server) = (cluster.site(client)?, cluster.site(server)?);
    let address = cluster.sites[server].address(false).context("the server has no IPv4 address")?;
    let flow = EchoConnection::open(&cluster.sites[client].namespace, (server as u32, address), port, SILENCE)?;
    flow.wait_for(200, LIMIT)?;
    Ok(flow)
}

/// The output of `penstock trial status` once it names something, with exit code 3.
fn wait_for_change(admin: &Path) -> Result<String> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let Output { status, stdout, stderr } = Command::new(penstock_binary()?)
            .args(["trial", "status", "--socket"])
            .arg(admin)
            .output()
            .context("cannot run penstock trial")?;
        match status.code() {
            Some(3) => return Ok(String::from_utf8_lossy(&stdout).into_owned()),
            Some(0) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(100)),
            _ => bail!("penstock trial status: {status}: {}", String::from_utf8_lossy(&stderr)),
        }
    }
}
