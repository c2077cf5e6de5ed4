//! A Deployment behind a Service is updated while a client talks to it through the workers.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use penstock_bench::probe::{self, EchoServers, EchoService, ProbeOutcome, Protocol, RetryPolicy, Site};
use serde_json::Value;

use crate::real_cluster::RealCluster;
use crate::shell::eventually;

/// The Deployment's replicas.
const REPLICAS: u64 = 4;
/// For all replicas to be there, or to be replaced.
const ROLLOUT: Duration = Duration::from_secs(240);
/// The time that an answer may take.
const ANSWER: Duration = Duration::from_secs(5);

/// A connection through a Service, to the server that it got.
struct ClientConnection {
    stream: TcpStream,
    server: u32,
}

impl ClientConnection {
    fn open(from: &Site, service: IpAddr) -> Result<Self> {
        let connect = || -> Result<TcpStream> {
            let stream = TcpStream::connect_timeout(&SocketAddr::new(service, 80), ANSWER)?;
            stream.set_read_timeout(Some(ANSWER))?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        let mut stream = from.namespace.run(connect).context("a connection to the Service fails")?;
        let mut greeting = [0; 4];
        stream.read_exact(&mut greeting).context("the Service's server does not greet")?;
        Ok(Self { stream, server: u32::from_be_bytes(greeting) })
    }

    /// Whether its server answers.
    fn answers(&mut self) -> bool {
        let (request, mut reply) = ([0x5a; 8], [0; 8]);
        let exchanged = self.stream.write_all(&request).and_then(|()| self.stream.read_exact(&mut reply));
        exchanged.is_ok() && reply == request.map(|byte| !byte)
    }
}

/// The Deployment's pods with their servers, by the servers' identities.
struct Deployment<'c> {
    cluster: &'c RealCluster,
    servers: BTreeMap<u32, (String, EchoServers)>,
}

impl Deployment<'_> {
    fn pods(&self) -> Result<Vec<Value>> {
        let pods = self.cluster.get(&["pods", "-n", "roll", "-l", "app=server"])?;
        Ok(pods["items"].as_array().cloned().unwrap_or_default())
    }

    /// Starts the servers of new pods. Returns the identities of the pods that nobody has ended.
    fn serve(&mut self) -> Result<BTreeSet<u32>> {
        let mut living = BTreeSet::new();
        for pod in self.pods()? {
            if pod["status"]["phase"] != "Running" || !pod["metadata"]["deletionTimestamp"].is_null() {
                continue;
            }
            let uid = pod["metadata"]["uid"].as_str().context("a pod has a UID")?;
            let known = self.servers.iter().find(|(_, (of, _))| of == uid).map(|(identity, _)| *identity);
            let identity = known.unwrap_or(1000 + self.servers.len() as u32);
            if known.is_none() {
                let server = EchoServers::start(&self.cluster.enter(&pod)?, identity, &[EchoService::Tcp(8080)])?;
                self.servers.insert(identity, (uid.to_owned(), server));
            }
            living.insert(identity);
        }
        Ok(living)
    }

    /// Whether all replicas are of the newest kind, and available.
    fn is_complete(&self) -> Result<bool> {
        let deployment = self.cluster.get(&["deployment", "-n", "roll", "server"])?;
        let status = &deployment["status"];
        let counts = ["replicas", "updatedReplicas", "availableReplicas"].map(|count| status[count].as_u64());
        let is_seen = status["observedGeneration"].as_u64() >= deployment["metadata"]["generation"].as_u64();
        Ok(is_seen && counts == [Some(REPLICAS); 3])
    }
}

/// Where workers translate: connections through a Service end only with the pod that serves them, and new ones always find one
/// that does.
pub(crate) fn a_rolling_update_cuts_only_connections_of_ended_pods(cluster: &mut RealCluster) -> Result<()> {
    let cluster = &*cluster;
    cluster.apply(include_str!("rolling.yaml"))?;
    let result = cluster.switch_all_on().and_then(|()| updated_under_load(cluster));
    cluster.kubectl(&["delete", "namespace", "roll", "--timeout=120s"])?;
    result
}

fn updated_under_load(cluster: &RealCluster) -> Result<()> {
    let mut deployment = Deployment { cluster, servers: BTreeMap::new() };
    eventually(ROLLOUT, || {
        deployment.serve()?;
        ensure!(deployment.is_complete()?, "not all replicas are available");
        Ok(())
    })?;
    let client = cluster.enter(&eventually(Duration::from_secs(60), || cluster.running("roll", "client"))?)?;
    let service = cluster.cluster_ip("roll", "server")?;
    eventually(Duration::from_secs(60), || ClientConnection::open(&client, service).map(drop))?;
    names_are_resolved_by_the_allowed_pods_alone(cluster, &client)?;
    a_client_keeps_its_backend(&client, cluster.cluster_ip("roll", "sticky")?)?;

    let first: BTreeSet<u32> = deployment.serve()?;
    let open = |_| ClientConnection::open(&client, service);
    let mut connections = (0..16).map(open).collect::<Result<Vec<_>>>()?;
    let reached: BTreeSet<u32> = connections.iter().map(|connection| connection.server).collect();
    ensure!(reached.len() > 1, "16 connections have one backend of {REPLICAS}: {reached:?}");
    cluster.kubectl(&["-n", "roll", "rollout", "restart", "deployment/server"])?;
    let (deadline, mut ended) = (Instant::now() + ROLLOUT, 0);
    loop {
        let living = deployment.serve()?;
        let before = connections.len();
        connections.retain(|connection| living.contains(&connection.server));
        ended += before - connections.len();
        for connection in &mut connections {
            // A pod may be ended just now.
            if !connection.answers() && deployment.serve()?.contains(&connection.server) {
                bail!("a connection to the server {} was cut, whose pod is there", connection.server);
            }
        }
        connections.push(ClientConnection::open(&client, service).context("during the update")?);
        if deployment.is_complete()? && living.is_disjoint(&first) {
            break;
        }
        ensure!(Instant::now() < deadline, "the update is not complete within {ROLLOUT:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
    let living = deployment.serve()?;
    let (kept, cut): (Vec<_>, Vec<_>) = connections.into_iter().partition(|it| living.contains(&it.server));
    let silent = kept.into_iter().filter_map(|mut it| (!it.answers()).then_some(it.server)).collect::<Vec<_>>();
    ensure!(silent.is_empty(), "after the update connections to these servers are cut: {silent:?}");
    ensure!(ended + cut.len() >= 16, "the first {} connections end with their pods, not {ended}", 16);
    Ok(())
}

/// Egress is denied but to the pods of one DNS Service.
fn names_are_resolved_by_the_allowed_pods_alone(cluster: &RealCluster, client: &Site) -> Result<()> {
    for (service, pod, expected) in
        [("near", "ops/monitor", ProbeOutcome::Reached), ("far", "ops/dash", ProbeOutcome::Silent)]
    {
        let (identity, address) = (cluster.target(pod, false).0, cluster.cluster_ip("ops", service)?);
        let outcome = probe::run_one(client, (identity, address), Protocol::Udp(53), RetryPolicy::default())?;
        ensure!(outcome == expected, "a query to ops/{service}: {outcome}, expected: {expected}");
    }
    Ok(())
}

fn a_client_keeps_its_backend(client: &Site, sticky: IpAddr) -> Result<()> {
    let servers =
        (0..12).map(|_| Ok(ClientConnection::open(client, sticky)?.server)).collect::<Result<BTreeSet<_>>>()?;
    ensure!(servers.len() == 1, "12 connections of one client to a Service with affinity have {servers:?}");
    Ok(())
}
