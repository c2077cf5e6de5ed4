//! The node, its pods and its daemon, which is restarted from time to time.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use penstock_admin::client::Client;
use penstock_admin::types::Status;
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::probe::{EchoServers, EchoService, Site};
use penstock_bench::testbed::{Daemon, DaemonConfig, ScratchDir, network_state};

use crate::log;

const PODS: u8 = 6;
/// Ports of datagrams that policy allows and denies.
pub(crate) const ALLOWED: u16 = 7000;
pub(crate) const DENIED: u16 = 7001;
const END: Duration = Duration::from_secs(10);
/// Packets in flight when the daemon is killed are lost; after the next start some arrive late.
const UNDER_WAY: Duration = Duration::from_millis(10);
const SETTLE: Duration = Duration::from_millis(250);

/// A time without a daemon, since the start of the run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outage {
    pub(crate) from: Duration,
    pub(crate) to: Duration,
}

impl Outage {
    /// Whether something that happened from `start` to `end` may overlap it.
    pub(crate) fn meets(&self, start: Duration, end: Duration) -> bool {
        end >= self.from && start <= self.to
    }
}

pub(crate) struct Fixture {
    pub(crate) cluster: Cluster,
    pub(crate) daemon: Daemon,
    pub(crate) epoch: Instant,
    pub(crate) outages: Vec<Outage>,
    warnings: Vec<String>,
    scratch: ScratchDir,
    manifests: PathBuf,
    config: DaemonConfig,
    before: Vec<String>,
    _servers: Vec<EchoServers>,
}

impl Fixture {
    /// `is_last`: no other daemon follows this one.
    pub(crate) fn start(is_last: bool) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let manifests = scratch.path().join("manifests");
        std::fs::create_dir(&manifests)?;
        std::fs::write(manifests.join("all.yaml"), objects())?;
        std::fs::write(manifests.join("policy.yaml"), policy(1))?;
        let cluster = Cluster::build(&read_objects(&manifests)?)?;
        let before = network_state(cluster.node.netlink())?;
        let mut config = DaemonConfig::new(&cluster.name, &manifests);
        config.admin = Some(scratch.path().join("admin.sock"));
        config.conntrack = format!(
            "mapping = \"{}/conntrack\"\nentries = 65536\nmidstream_pickup = \"0s\"\n",
            scratch.path().display()
        );
        config.sections += on_exit(is_last);
        let services = [EchoService::Tcp(8080), EchoService::Udp(53)];
        let servers = EchoServers::start_all(&cluster.sites, &services)?;
        let daemon = Daemon::start(cluster.node.namespace(), &config)?;
        let (epoch, outages, warnings) = (Instant::now(), Vec::new(), Vec::new());
        Ok(Self { cluster, daemon, epoch, outages, warnings, scratch, manifests, config, before, _servers: servers })
    }

    pub(crate) fn site(&self, name: &str) -> Result<&Site> {
        Ok(&self.cluster.sites[self.cluster.site(name)?])
    }

    /// A site's address of a family, with a port.
    pub(crate) fn address(&self, name: &str, v6: bool, port: u16) -> Result<SocketAddr> {
        let address = self.site(name)?.address(v6).context("every site has both families")?;
        Ok(SocketAddr::new(address, port))
    }

    pub(crate) fn save(&self, file: &str, content: &str) -> Result<()> {
        self.scratch.save(&self.manifests.join(file), content)
    }

    pub(crate) fn remove(&self, file: &str) -> Result<()> {
        Ok(std::fs::remove_file(self.manifests.join(file))?)
    }

    pub(crate) fn status(&self) -> Result<Status> {
        let socket = self.config.admin.as_deref().context("the admin API is on")?;
        Ok(Client::new(socket)?.get("/v1/status", &())?)
    }

    /// Ends the daemon, by a kill or by an update, and starts the next one.
    pub(crate) fn restart(&mut self, kill: bool, is_last: bool) -> Result<()> {
        let from = self.epoch.elapsed().saturating_sub(UNDER_WAY);
        self.daemon.signal(if kill { Signal::SIGKILL } else { Signal::SIGTERM })?;
        let status = self.daemon.wait_until_ended(END)?;
        ensure!(kill || status.success(), "the daemon ended with {status} at {from:?}");
        self.warnings.extend(log::unexpected(&self.daemon.log().lines()).cloned());
        self.config.sections = self.config.sections.replace(on_exit(false), on_exit(is_last));
        self.daemon = Daemon::start(self.cluster.node.namespace(), &self.config)?;
        self.outages.push(Outage { from, to: self.epoch.elapsed() + SETTLE });
        Ok(())
    }

    /// Ends the last daemon. Returns what was wrong with its exit and what it left behind, and what all daemons have warned of.
    pub(crate) fn stop(mut self) -> Result<(Vec<Outage>, Vec<String>, Vec<String>)> {
        let (status, log) = self.daemon.stop()?;
        self.warnings.extend(log::unexpected(&log).cloned());
        let mut wrong = Vec::new();
        if !status.success() {
            wrong.push(format!("the daemon ended with {status}: {}", log.join("\n")));
        }
        wrong.extend(log.iter().filter(|line| line.contains("panicked") || line.contains("NOT balanced")).cloned());
        // The kernel removes some objects a little later.
        let deadline = Instant::now() + Duration::from_secs(3);
        let mut after = network_state(self.cluster.node.netlink())?;
        while after != self.before && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
            after = network_state(self.cluster.node.netlink())?;
        }
        wrong
            .extend(after.iter().filter(|line| !self.before.contains(line)).map(|line| format!("left behind: {line}")));
        wrong.extend(self.before.iter().filter(|line| !after.contains(line)).map(|line| format!("gone: {line}")));
        Ok((self.outages, wrong, self.warnings))
    }
}

/// An update keeps pods closed; the last daemon restores the node.
fn on_exit(is_last: bool) -> &'static str {
    if is_last { "[fail]\non_exit = \"restore\"\n" } else { "[fail]\non_exit = \"keep\"\n" }
}

fn objects() -> String {
    let mut yaml = String::from(
        "{apiVersion: v1, kind: Namespace, metadata: {name: test}}\n---\napiVersion: v1\nkind: Node\n\
         metadata: {name: node}\nstatus: {addresses: [{type: InternalIP, address: 172.18.0.2}, \
         {type: InternalIP, address: \"fd00:172:18::2\"}]}\n",
    );
    for number in 0..PODS {
        let _ = write!(yaml, "---\n{}", pod(&format!("pod-{number}"), 10 + number));
    }
    yaml
}

/// A pod, and the last part of its addresses.
pub(crate) fn pod(name: &str, number: u8) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{namespace: test, name: {name}, labels: {{app: {name}}}}}\n\
         spec: {{nodeName: node, containers: [{{name: main, image: example.invalid/soak}}]}}\n\
         status: {{phase: Running, podIPs: [{{ip: 10.244.1.{number}}}, {{ip: \"fd00:10:244:1::{number}\"}}]}}\n"
    )
}

/// `pod-1` admits `pod-0`, and everyone on a port that changes; `pod-2` may send anywhere.
pub(crate) fn policy(changing: u16) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{namespace: test, name: only}}\n\
         spec:\n  podSelector: {{matchLabels: {{app: pod-1}}}}\n\
         \u{20} ingress: [{{from: [{{podSelector: {{matchLabels: {{app: pod-0}}}}}}]}}, \
         {{ports: [{{port: {changing}, protocol: SCTP}}]}}]\n"
    )
}
