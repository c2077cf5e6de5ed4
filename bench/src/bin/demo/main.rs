//! `make demo`: a node with pods in network namespaces, the real daemon and real packets. Compares expected with
//! observed results, changes a policy while a connection is open, and tries another edit before it is in effect.

mod live;
mod terminal;
mod trial;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::expectation::PolicyOracle;
use penstock_bench::matrix::{self, Legend, Matrix};
use penstock_bench::probe::{EchoServers, EchoService, Protocol};
use penstock_bench::testbed::{CleanupGuard, Daemon, DaemonConfig, Inventory, ProxyMode, ScratchDir};
use penstock_dataplane::worker::available_cores;

use terminal::{bad, good, heading, step};

const SERVICES: [EchoService; 3] = [EchoService::Tcp(8080), EchoService::Tcp(9090), EchoService::Udp(53)];
pub(crate) const PROTOCOLS: [Protocol; 4] =
    [Protocol::Tcp(8080), Protocol::Tcp(9090), Protocol::Udp(53), Protocol::Icmp];

fn main() -> ExitCode {
    let before = match Inventory::take() {
        Ok(before) => before,
        Err(error) => return failed(&error),
    };
    // Made first, so it runs last: on Ctrl-C it compares after everything else is undone.
    let outcome = Arc::new(Mutex::new(None));
    let last = CleanupGuard::new({
        let outcome = outcome.clone();
        move || *outcome.lock().expect("no thread panics while holding it") = Some(report_leftovers(&before))
    });
    let result = run();
    drop(last);
    let clean = outcome.lock().expect("no thread panics while holding it").unwrap_or(false);
    match result {
        Ok(()) if clean => {
            println!("{}", good("The demo passed: everything observed is as expected."));
            ExitCode::SUCCESS
        }
        Ok(()) => ExitCode::FAILURE,
        Err(error) => failed(&error),
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("{}", bad(&format!("demo: {error:#}")));
    ExitCode::FAILURE
}

/// Compares the machine with its earlier state and prints leftovers; returns whether there are none.
fn report_leftovers(before: &Inventory) -> bool {
    // An interrupted step leaves its line open.
    println!();
    match Inventory::take().map(|after| after.difference(before)) {
        Ok(difference) if difference.is_empty() => {
            println!("Nothing is left behind: no namespace, link, address, route, pinned object or process.");
            true
        }
        Ok(difference) => {
            difference.iter().for_each(|line| eprintln!("{}", bad(line)));
            false
        }
        Err(error) => {
            eprintln!("{}", bad(&format!("cannot determine what is left behind: {error:#}")));
            false
        }
    }
}

fn run() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let manifests = scratch.copy_in(&manifests()?, "manifests")?;
    let admin = scratch.path().join("admin.sock");
    let objects = read_objects(&manifests)?;
    let oracle = PolicyOracle::new(&objects);

    heading("Penstock demo: NetworkPolicy enforced in userspace, on a node made of network namespaces");
    let mut cluster = step("Building the node and its pods", || {
        let cluster = Cluster::build(&objects)?;
        let pods = cluster.node.pods().len();
        Ok((cluster, format!("{pods} pods, each a namespace with a veth")))
    })?;
    step("Installing kube-proxy's rules (iptables mode)", || {
        cluster.proxy_services(&manifests, ProxyMode::Iptables)?;
        Ok(((), "a Service, its NodePort, masquerade for outside".to_owned()))
    })?;
    let _servers = step("Starting servers on every pod and on the node", || {
        let servers = EchoServers::start_all(&cluster.sites, &SERVICES)?;
        Ok((servers, "TCP 8080, TCP 9090, UDP 53".to_owned()))
    })?;
    let daemon = step("Starting the daemon", || {
        let mut config = DaemonConfig::new(&cluster.name, &manifests);
        config.admin = Some(admin.clone());
        // Two workers if there are two cores: the two directions of a connection may then be on different workers that
        // share one table.
        let cores: Vec<String> = available_cores().iter().take(2).map(|core| core.0.to_string()).collect();
        config.sections += &format!("[workers]\ncores = [{}]\n", cores.join(", "));
        let daemon = Daemon::start(cluster.node.namespace(), &config)?;
        let workers = if cores.len() > 1 { "two workers" } else { "one worker" };
        let command = format!("penstock run --config {}, {workers}", daemon.config().display());
        Ok((daemon, command))
    })?;
    let result = show(&cluster, &oracle, &scratch, &manifests, &admin);
    if let Err(error) = &result {
        println!("\n{}", bad(&format!("demo: {error:#}")));
        println!("The daemon's last lines, with its statistics:");
        daemon.signal(Signal::SIGUSR1)?;
        let _ = daemon.log().wait_for_after(0, "frames: total", Duration::from_secs(2));
        daemon.log().lines().iter().rev().take(30).rev().for_each(|line| println!("  {line}"));
    }
    if std::env::var_os("KEEP").is_some_and(|keep| !keep.is_empty() && keep != "0") {
        terminal::wait_for_enter(&cluster, &daemon, &manifests, &admin)?;
    }
    step("Ending the daemon", || {
        let (status, _) = daemon.stop()?;
        if !status.success() {
            bail!("the daemon ended with {status}");
        }
        Ok(((), "SIGTERM, exit code 0".to_owned()))
    })?;
    result.context("the demo failed; see the reason above")
}

fn show(cluster: &Cluster, oracle: &PolicyOracle, scratch: &ScratchDir, manifests: &Path, admin: &Path) -> Result<()> {
    let matrix = step("Sending real packets between all of them", || {
        let matrix = Matrix::measure(cluster, oracle, &PROTOCOLS)?;
        let probes = matrix.entries().len();
        Ok((matrix, format!("{probes} probes")))
    })?;
    print(&matrix);
    compare(&matrix)?;
    live::edit_while_connected(cluster, scratch, manifests)?;
    trial::try_before_enforcing(cluster, scratch, manifests, admin)
}

fn print(matrix: &Matrix) {
    let mut legend = Legend::default();
    for v6 in [false, true] {
        heading(if v6 { "Reachability over IPv6" } else { "Reachability over IPv4" });
        matrix.grid(v6, &mut legend).iter().for_each(|line| println!("{line}"));
    }
    println!();
    matrix::key(&PROTOCOLS).iter().for_each(|line| println!("{line}"));
    heading("Denied by");
    legend.lines().iter().for_each(|line| println!("{line}"));
    heading("Expected (by the policy evaluator) against observed (by the packets)");
    matrix.summary().iter().for_each(|line| println!("{line}"));
}

pub(crate) fn compare(matrix: &Matrix) -> Result<()> {
    let differences = matrix.differences();
    if differences.is_empty() {
        return Ok(());
    }
    differences.iter().for_each(|line| println!("  {}", bad(line)));
    bail!("{} of {} probes differ from what is expected", differences.len(), matrix.entries().len())
}

/// The demo's manifests, in this repository or in the working directory.
fn manifests() -> Result<PathBuf> {
    let inside = Path::new("configs/demo");
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/demo"));
    [inside, source]
        .into_iter()
        .find(|path| path.is_dir())
        .map(Path::to_path_buf)
        .context("no configs/demo here; run the demo from the repository's top directory")
}
