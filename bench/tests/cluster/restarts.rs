//! The daemon is restarted in several ways while pods talk.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use penstock_bench::load::segments;
use penstock_bench::probe::{EchoConnection, Protocol, Series};
use serde_json::Value;

use crate::real_cluster::RealCluster;
use crate::shell::eventually;
use crate::whole::expect_reached;

/// A connection without an answer for this long counts as cut.
const SILENCE: Duration = Duration::from_secs(30);
/// How often each end of an open connection may have sent again (RFC 6298: on Linux the second time after 600 ms). Counted, since time
/// passes on a busy machine whether packets do or not.
const MOST_SENT_AGAIN: u64 = 2;
/// How many new connections may have to send their SYN again while one node's daemon is replaced, of those that are opened one after the
/// other: the one that comes while no worker reads its port, and one that comes with it.
const MOST_DELAYED: u32 = 2;

/// Connections on one node and between both.
fn connections(cluster: &RealCluster) -> Result<Vec<(&'static str, EchoConnection)>> {
    let pairs = [("shop/web", "shop/api", 8080), ("lab/guest", "ops/monitor", 8080), ("ops/monitor", "ops/dash", 9090)];
    let open = |(from, to, port)| {
        let namespace = &cluster.site(from).namespace;
        Ok((from, EchoConnection::open(namespace, cluster.target(to, false), port, SILENCE)?))
    };
    pairs.into_iter().map(open).collect()
}

/// Fails if a connection was cut, or had to send again more often than [`MOST_SENT_AGAIN`].
fn expect_undisturbed(connections: &[(&str, EchoConnection)]) -> Result<()> {
    for (from, connection) in connections {
        connection.wait_for(100, SILENCE).with_context(|| format!("the connection of {from}"))?;
        let again = connection.retransmitted()?;
        ensure!(again <= MOST_SENT_AGAIN, "the connection of {from} sent {again} segments again");
    }
    Ok(())
}

/// The daemon's process on a node, as seen from outside.
fn daemon_on(cluster: &RealCluster, node: usize) -> Result<Pid> {
    let pod = cluster.get(&["pod", "-n", "kube-system", &cluster.penstock_on(node)?])?;
    let uid = pod["metadata"]["uid"].as_str().context("a pod has a UID")?;
    cluster.nodes[node]
        .processes_of(uid)
        .into_iter()
        .find(|process| {
            let command = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
            command.starts_with(b"/usr/local/bin/penstock\0run\0")
        })
        .context("no daemon there")
}

/// How often the daemon's container was restarted.
fn restarts(cluster: &RealCluster, node: usize) -> Result<u64> {
    let pod = cluster.get(&["pod", "-n", "kube-system", &cluster.penstock_on(node)?])?;
    let containers = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
    let daemon = containers.into_iter().find(|container| container["name"] == "penstock");
    daemon.and_then(|container| container["restartCount"].as_u64()).context("no status of the daemon")
}

pub(crate) fn connections_outlast_a_killed_daemon(cluster: &mut RealCluster) -> Result<()> {
    let connections = connections(cluster)?;
    let before = restarts(cluster, 0)?;
    kill(daemon_on(cluster, 0)?, Signal::SIGKILL)?;
    eventually(Duration::from_secs(60), || match restarts(cluster, 0)? > before {
        true => Ok(()),
        false => bail!("the kubelet does not start it again"),
    })?;
    cluster.wait_for_penstock()?;
    expect_undisturbed(&connections)?;
    expect_reached(cluster, "shop/web", "shop/api", 8080, true)?;
    expect_reached(cluster, "lab/guest", "shop/api", 8080, false)
}

pub(crate) fn connections_outlast_a_rolling_restart(cluster: &mut RealCluster) -> Result<()> {
    let connections = connections(cluster)?;
    let began = Instant::now();
    cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "daemonset/penstock"])?;
    cluster.wait_for_penstock()?;
    eprintln!("a rolling restart of {} nodes: {:.1?}", cluster.nodes.len(), began.elapsed());
    expect_undisturbed(&connections)?;
    expect_reached(cluster, "shop/web", "shop/api", 8080, true)?;
    expect_reached(cluster, "lab/guest", "shop/api", 8080, false)
}

/// Pairs that open a connection every second or more seldom: nothing but what the programs repeat opens them while a node has no daemon.
pub(crate) fn a_rolling_restart_loses_no_connection_of_slow_pairs(cluster: &mut RealCluster) -> Result<()> {
    let pairs = [("shop/web", "shop/api"), ("ops/monitor", "shop/web"), ("ops/monitor", "ops/dash")];
    let intervals = [Duration::from_secs(1), Duration::from_secs(3)];
    let mut series = Vec::new();
    for ((from, to), interval) in pairs.into_iter().flat_map(|pair| intervals.map(|interval| (pair, interval))) {
        let identity = cluster.target(to, false).0 as usize;
        let started = Series::start(cluster.site(from), cluster.site(to), identity, Protocol::Tcp(8080), interval)?;
        let first = started.wait_for(Instant::now(), true, SILENCE)?;
        ensure!(first.is_some(), "{from} does not reach {to} before the restart");
        series.push((format!("{from} to {to}, each {interval:?}"), started));
    }
    let began = Instant::now();
    cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "daemonset/penstock"])?;
    cluster.wait_for_penstock()?;
    for (name, series) in series {
        let points = series.end()?;
        let during: Vec<_> = points.iter().filter(|point| point.at > began).collect();
        let lost = during.iter().filter(|point| !point.reached).count();
        eprintln!("{name}: {lost} of {} connections lost", during.len());
        ensure!(lost == 0 && during.len() > 1, "{name}: {lost} of {} connections lost", during.len());
    }
    Ok(())
}

/// With the component `surge`: the new daemon starts beside the old one and takes over from it.
pub(crate) fn connections_pass_while_a_daemon_takes_over(cluster: &mut RealCluster) -> Result<()> {
    let cluster = &*cluster;
    let folder = cluster.manifests("surge-installed", "")?;
    let kustomization = format!("{folder}/kustomization.yaml");
    let text = fs::read_to_string(&kustomization)?;
    fs::write(&kustomization, format!("{text}components: [surge]\n"))?;
    cluster.kubectl(&["apply", "-k", &folder])?;
    cluster.wait_for_penstock()?;

    let connections = connections(cluster)?;
    let ends = AtomicBool::new(false);
    let (opened, delayed) = thread::scope(|scope| {
        let opening = scope.spawn(|| open_until(cluster, &ends));
        let restarted = cluster
            .kubectl(&["-n", "kube-system", "rollout", "restart", "daemonset/penstock"])
            .and_then(|_| cluster.wait_for_penstock());
        ends.store(true, Ordering::Relaxed);
        let opened = opening.join().expect("it does not panic");
        restarted.and(opened)
    })?;
    eprintln!("an update with surge: of {opened} new connections {delayed} sent their SYN again");
    ensure!(opened > 100, "{opened} connections were opened meanwhile");
    let most = MOST_DELAYED * cluster.nodes.len() as u32;
    ensure!(delayed <= most, "{delayed} of {opened} new connections sent their SYN again, of at most {most}");
    expect_undisturbed(&connections)?;
    expect_reached(cluster, "lab/guest", "shop/api", 8080, false)?;
    cluster.install()
}

/// Opens connections on one node and to the other one, one after the other, until `ends` is set. Returns how many, and how many
/// of them had to send their SYN again.
fn open_until(cluster: &RealCluster, ends: &AtomicBool) -> Result<(u32, u32)> {
    let namespace = &cluster.site("ops/monitor").namespace;
    let addresses = ["shop/web", "ops/dash"].map(|to| SocketAddr::new(cluster.target(to, false).1, 8080));
    let (mut opened, mut delayed) = (0, 0);
    while !ends.load(Ordering::Relaxed) {
        for address in addresses {
            let stream = namespace
                .run(|| TcpStream::connect_timeout(&address, SILENCE))
                .with_context(|| format!("connection {opened}, to {address}"))?;
            delayed += u32::from(segments(&stream)?.1 > 0);
            opened += 1;
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok((opened, delayed))
}

pub(crate) fn policy_is_in_force_without_api_server(cluster: &mut RealCluster) -> Result<()> {
    let connections = connections(cluster)?;
    let daemon = daemon_on(cluster, 0)?;
    cluster.plane.stop_api_server();
    kill(daemon, Signal::SIGKILL)?;
    // The kubelet restarts a container without the API server, after a pause where it has restarted it before.
    let restarted = || expect_reached(cluster, "ops/monitor", "shop/web", 8080, true);
    let result = eventually(Duration::from_secs(60), restarted)
        .and_then(|()| expect_reached(cluster, "lab/guest", "shop/api", 8080, false));
    cluster.plane.start_api_server()?;
    result?;
    cluster.wait_for_penstock()?;
    expect_undisturbed(&connections)
}

pub(crate) fn a_wrong_configuration_leaves_the_last_good_one(cluster: &mut RealCluster) -> Result<()> {
    let connections = connections(cluster)?;
    let folder = cluster.manifests("wrong", "")?;
    fs::write(format!("{folder}/penstock.toml"), "node = \"set-by-the-environment\"\n[source]\nin_clustr = true\n")?;
    cluster.kubectl(&["apply", "-k", &folder])?;
    // One node has the new pod, which runs with the last good configuration and says so; the other one waits for it.
    eventually(Duration::from_secs(90), || {
        let pods = cluster.get(&["pods", "-n", "kube-system", "-l", "app.kubernetes.io/name=penstock"])?;
        let is_waiting = |pod: &&Value| {
            let containers = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
            containers.into_iter().any(|one| one["ready"] == false && one["state"]["running"].is_object())
        };
        match pods["items"].as_array().into_iter().flatten().filter(is_waiting).count() {
            1 => Ok(()),
            other => bail!("{other} daemons run without being ready"),
        }
    })?;
    for (from, to, reached) in
        [("shop/web", "shop/api", true), ("ops/dash", "shop/web", true), ("lab/guest", "shop/api", false)]
    {
        expect_reached(cluster, from, to, 8080, reached)?;
    }
    cluster.install()?;
    expect_undisturbed(&connections)
}
