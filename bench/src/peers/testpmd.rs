//! DPDK's testpmd over AF_XDP: forwards from one pod to the other without inspecting packets.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::Cores;
use super::openvswitch::prepare;
use super::policy::pod_name;
use super::tools::find;
use crate::testbed::{Node, ScratchDir, ServiceProcess};

const START: Duration = Duration::from_secs(20);

pub(super) fn start(node: &Node, scratch: &ScratchDir, cores: Cores) -> Result<(ServiceProcess, String)> {
    let program = find("dpdk-testpmd", "dpdk-dev librte-net-af-xdp23 librte-mempool-ring23")?;
    let mut command = node.namespace().command(program);
    let prefix = format!("penstock-{}", std::process::id());
    // One core for its commands, one for forwarding. It runs without huge pages, so the machine needs no setup.
    let lcores = format!("{}@{},{}@{}", 0, cores.generator, 1, cores.worker);
    command.args([
        "--lcores",
        &lcores,
        "--no-huge",
        "-m",
        "512",
        "--no-pci",
        "--no-telemetry",
        "--file-prefix",
        &prefix,
    ]);
    for number in 0..2 {
        let interface = node.pod(&pod_name(number))?.interface();
        command.args(["--vdev", &format!("net_af_xdp{number},iface={interface}")]);
    }
    command.args([
        "--",
        "--forward-mode=mac",
        "--auto-start",
        "--nb-cores=1",
        "--stats-period=3600",
        "--no-lsc-interrupt",
        "--total-num-mbufs=32768",
    ]);
    for number in 0..2 {
        let pod = node.pod(&pod_name(number))?;
        let mac = pod.namespace().netlink()?.mac("eth0")?.map(|byte| format!("{byte:02x}")).join(":");
        command.arg(format!("--eth-peer={number},{mac}"));
        prepare(node, pod)?;
    }
    let log = scratch.path().join("testpmd.log");
    let output = std::fs::File::create(&log)?;
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).env("RUNTIME_DIRECTORY", scratch.path());
    let service = ServiceProcess::start(command)?;
    let deadline = Instant::now() + START;
    loop {
        let text = std::fs::read_to_string(&log).context("testpmd writes no log")?;
        if text.contains("Port statistics") || text.contains("mac packet forwarding") {
            return Ok((service, "DPDK testpmd".to_owned()));
        }
        if service.has_ended() || Instant::now() > deadline {
            let tail: Vec<&str> = text.lines().rev().take(4).collect();
            bail!("testpmd does not forward: {}", tail.into_iter().rev().collect::<Vec<_>>().join("; "));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
