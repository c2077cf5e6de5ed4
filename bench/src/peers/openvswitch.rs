//! Open vSwitch's userspace datapath, with the policy as OpenFlow rules over its connection tracker.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use penstock_dataplane::policy::{Direction, PortRange};
use penstock_policy::engine::Engine;

use super::Cores;
use super::filters::{lists, permits, protocol};
use super::policy::pod_name;
use super::tools::{find, finish, version};
use crate::testbed::{Node, Offload, Pod, ScratchDir, ServiceProcess};

const START: Duration = Duration::from_secs(10);
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";

/// One switch with its own database in its own directory.
struct Switch<'a> {
    node: &'a Node,
    directory: PathBuf,
}

pub(super) fn start(
    node: &Node,
    engine: &Engine,
    scratch: &ScratchDir,
    cores: Cores,
) -> Result<(Vec<ServiceProcess>, String)> {
    let directory = scratch.path().join("ovs");
    std::fs::create_dir(&directory)?;
    let switch = Switch { node, directory };
    // The datapath sends and receives on the pods' interfaces, so the kernel must not forward the same packets.
    node.namespace().set_sysctl("net/ipv4/ip_forward", "0")?;
    switch.run("ovsdb-tool", &["create", &switch.path("conf.db"), SCHEMA], "")?;
    let database =
        switch.start("ovsdb-server", &[&switch.path("conf.db"), &format!("--remote=p{}", switch.socket())])?;
    switch.wait_for(&switch.directory.join("db.sock"))?;
    switch.configure(&["--no-wait", "init"])?;
    let mask = format!("other_config:pmd-cpu-mask={:#x}", 1_u64 << cores.worker);
    switch.configure(&["--no-wait", "set", "Open_vSwitch", ".", &mask])?;
    let daemon = switch.start("ovs-vswitchd", &[&switch.socket()])?;
    let kind = switch.add_ports()?;
    switch.run("ovs-ofctl", &["add-flows", &switch.management(), "-"], &flows(node, engine)?)?;
    let description = version("ovs-vswitchd", "--version")?;
    Ok((vec![database, daemon], format!("{description}, ports of type {kind}")))
}

impl Switch<'_> {
    fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    fn socket(&self) -> String {
        format!("unix:{}", self.path("db.sock"))
    }

    fn management(&self) -> String {
        format!("unix:{}", self.path("br0.mgmt"))
    }

    fn command(&self, program: &'static str) -> Result<std::process::Command> {
        let mut command = self.node.namespace().command(find(program, "openvswitch-switch")?);
        for variable in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR"] {
            command.env(variable, &self.directory);
        }
        Ok(command)
    }

    fn run(&self, program: &'static str, arguments: &[&str], input: &str) -> Result<String> {
        let mut command = self.command(program)?;
        command.args(arguments);
        finish(command, input).with_context(|| format!("{program} {} failed", arguments.join(" ")))
    }

    fn start(&self, program: &'static str, arguments: &[&str]) -> Result<ServiceProcess> {
        let mut command = self.command(program)?;
        let log = format!("--log-file={}", self.path(&format!("{program}.log")));
        command.args(arguments).args(["--pidfile", "-vconsole:off", &log]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        ServiceProcess::start(command)
    }

    fn configure(&self, arguments: &[&str]) -> Result<String> {
        let database = format!("--db={}", self.socket());
        let arguments: Vec<&str> = [&*database, "--timeout=10"].into_iter().chain(arguments.iter().copied()).collect();
        self.run("ovs-vsctl", &arguments, "")
    }

    fn wait_for(&self, path: &Path) -> Result<()> {
        let deadline = Instant::now() + START;
        while !path.exists() {
            if Instant::now() > deadline {
                bail!("{} is not there after {START:?}", path.display());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Adds the bridge and the first two pods' interfaces: over AF_XDP if this build supports it, otherwise over packet
    /// sockets.
    fn add_ports(&self) -> Result<&'static str> {
        let bridge = ["add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev", "fail_mode=secure"];
        self.configure(&bridge)?;
        self.wait_for(&self.directory.join("br0.mgmt"))?;
        for kind in ["afxdp", "system"] {
            if self.try_ports(kind)? {
                return Ok(kind);
            }
        }
        bail!("it takes the pods' interfaces neither over AF_XDP nor over packet sockets")
    }

    fn try_ports(&self, kind: &str) -> Result<bool> {
        for number in 0..2 {
            let interface = self.node.pod(&pod_name(number))?.interface();
            let _ = self.configure(&["--if-exists", "del-port", "br0", interface]);
            let kind = format!("type={kind}");
            let request = format!("ofport_request={}", number + 1);
            self.configure(&["add-port", "br0", interface, "--", "set", "interface", interface, &kind, &request])?;
            let error = self.configure(&["get", "interface", interface, "error"])?;
            let port = self.configure(&["get", "interface", interface, "ofport"])?;
            if error.trim() != "[]" || port.trim() != (number + 1).to_string() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Packets of known connections pass; what opens one must be allowed in both directions. The switch acts as the pods'
/// router: it decrements the TTL and sets the MAC addresses. ARP is left to the node.
fn flows(node: &Node, engine: &Engine) -> Result<String> {
    let mut text = "table=0,priority=10,ip actions=ct(table=1)\ntable=0,priority=1 actions=drop\n\
                    table=1,priority=100,ct_state=+trk+est actions=goto_table:4\n\
                    table=1,priority=100,ct_state=+trk+rel actions=goto_table:4\n\
                    table=1,priority=10,ct_state=+trk+new actions=goto_table:2\n\
                    table=2,priority=1 actions=goto_table:3\n\
                    table=3,priority=1,ip actions=ct(commit),goto_table:4\n"
        .to_owned();
    for (address, list) in lists(engine) {
        let (table, own, peer, next) = match list.direction {
            Direction::Egress => (2, "nw_src", "nw_dst", "goto_table:3"),
            Direction::Ingress => (3, "nw_dst", "nw_src", "ct(commit),goto_table:4"),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "table={table},priority=10,ip,{own}={address} actions=drop");
        for entry in permits(&list) {
            let net = entry.src.or(entry.dst).filter(|net| matches!(net, IpNet::V4(_)));
            let net = net.map_or_else(String::new, |net| format!(",{peer}={net}"));
            for ports in entry.ports.as_ref().map_or_else(|| vec![",ip".to_owned()], masked) {
                let _ = writeln!(text, "table={table},priority=20{ports},{own}={address}{net} actions={next}");
            }
        }
    }
    for number in 0..2 {
        let pod = node.pod(&pod_name(number))?;
        text.push_str(&delivery(node, pod, number + 1)?);
        prepare(node, pod)?;
    }
    Ok(text)
}

fn delivery(node: &Node, pod: &Pod, port: usize) -> Result<String> {
    let mac = |mac: [u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
    let (own, peer) = (mac(node.netlink().mac(pod.interface())?), mac(pod.namespace().netlink()?.mac("eth0")?));
    let address = pod.address(false).context("the pod has no IPv4 address")?;
    Ok(format!(
        "table=4,priority=10,ip,nw_dst={address} actions=dec_ttl,mod_dl_src:{own},mod_dl_dst:{peer},output:{port}\n"
    ))
}

/// Gives the pod a permanent neighbour entry for its gateway, since nothing answers its ARP, and disables its checksum
/// offload, since nothing else completes the checksum.
pub(super) fn prepare(node: &Node, pod: &Pod) -> Result<()> {
    pod.namespace().set_offload("eth0", Offload::TxChecksum, false)?;
    let mac = node.netlink().mac(pod.interface())?.map(|byte| format!("{byte:02x}")).join(":");
    let gateway = node.gateways().v4.to_string();
    let ip = find("ip", "iproute2")?;
    let arguments = ["neighbour", "replace", &gateway, "lladdr", &mac, "dev", "eth0", "nud", "permanent"];
    super::tools::run(pod.namespace(), &ip, &arguments, "").map(drop)
}

/// A range of ports as OpenFlow expresses it: values with masks.
fn masked(ports: &PortRange) -> Vec<String> {
    let (mut next, last) = (u32::from(ports.first), u32::from(ports.last));
    let mut matches = Vec::new();
    while next <= last {
        let aligned = next.trailing_zeros().min(16);
        let fits = (last - next + 1).ilog2();
        let bits = aligned.min(fits);
        let mask = 0xffff_u32 << bits & 0xffff;
        matches.push(format!(",{},tp_dst={next:#x}/{mask:#x}", protocol(ports.protocol)));
        next += 1 << bits;
    }
    matches
}

#[cfg(test)]
mod tests {
    use penstock_dataplane::policy::PortProtocol;

    use super::*;

    #[test]
    fn a_port_range_equals_the_union_of_its_masks() {
        for (first, last) in [(0, 0), (9000, 9060), (1, 65535), (0, 65535), (80, 80), (65535, 65535)] {
            let of = masked(&PortRange { protocol: PortProtocol::Udp, first, last });
            let number = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
            let pairs = of.iter().map(|text| text.split_once("tp_dst=").unwrap().1.split_once('/').unwrap());
            let pairs: Vec<(u32, u32)> = pairs.map(|(value, mask)| (number(value), number(mask))).collect();
            for port in 0..=65535_u32 {
                let found = pairs.iter().filter(|(value, mask)| port & mask == *value).count();
                let inside = (u32::from(first)..=u32::from(last)).contains(&port);
                assert_eq!(found, usize::from(inside), "{port} of {first}-{last}");
            }
        }
    }
}
