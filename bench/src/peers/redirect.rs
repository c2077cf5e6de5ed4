//! Two pods, or a pod and another machine, joined by a program that does nothing but redirect: what any forwarder by tcx can reach at most on this machine.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result};

use super::tools::{find, run, version};
use super::{pod_name, policy};
use crate::testbed::{Node, Outside, Pod, ScratchDir};

const PROGRAM: &str = include_str!("redirect.bpf.c");

/// With another machine, the first pod's packets for it leave the node, and all that it sends comes to this pod.
pub(super) fn start(node: &Node, other: Option<&Outside>, scratch: &ScratchDir) -> Result<String> {
    let pods = [node.pod(&pod_name(0))?, node.pod(&pod_name(1))?];
    let source = scratch.path().join("redirect.bpf.c");
    std::fs::write(&source, PROGRAM)?;
    let leaving = other.map(|other| leaving(node, other)).transpose()?.unwrap_or_default();
    attach(node, scratch, pods[0].interface(), pods[1], &leaving)?;
    attach(node, scratch, pods[1].interface(), pods[0], &[])?;
    if let Some(other) = other {
        attach(node, scratch, other.interface(), pods[0], &[])?;
    }
    version("tc", "-V")
}

/// The definitions by which the program sends to another machine.
fn leaving(node: &Node, other: &Outside) -> Result<Vec<String>> {
    let gateway = other.addresses().iter().find_map(|address| match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    });
    let gateway = gateway.context("the node has no IPv4 address")?;
    let out = node.netlink().index(other.interface())?;
    let as_read = |address: Ipv4Addr| u32::from_ne_bytes(address.octets());
    Ok(vec![
        format!("-DREMOTE={}U", as_read(policy::REMOTE)),
        format!("-DGATEWAY={}U", as_read(gateway)),
        format!("-DOUT={out}"),
    ])
}

/// Compiles the program for what comes in by this interface and is for `to`, and attaches it.
fn attach(node: &Node, scratch: &ScratchDir, from: &str, to: &Pod, definitions: &[String]) -> Result<()> {
    let (clang, tc) = (find("clang", "clang")?, find("tc", "iproute2")?);
    let file = |name: &str| scratch.path().join(name).display().to_string();
    let (source, object) = (file("redirect.bpf.c"), file(&format!("{from}.o")));
    let macs = [to.namespace().netlink()?.mac("eth0")?, node.netlink().mac(to.interface())?].concat();
    let macs: Vec<String> = macs.iter().map(ToString::to_string).collect();
    let (to, macs) = (format!("-DTO={}", to.interface_index()), format!("-DMACS={}", macs.join(",")));
    // Debian keeps `asm/` in a directory named after the machine, which clang does not search for this target.
    let headers = format!("/usr/include/{}-linux-gnu", std::env::consts::ARCH);
    let mut compile = vec!["-O2", "-target", "bpf", "-idirafter", &headers, &to, &macs, "-c", &source, "-o", &object];
    compile.extend(definitions.iter().map(String::as_str));
    run(node.namespace(), &clang, &compile, "")?;
    run(node.namespace(), &tc, &["qdisc", "add", "dev", from, "clsact"], "")?;
    let filter = ["filter", "add", "dev", from, "ingress", "bpf", "da", "obj", &object, "sec", "tc"];
    run(node.namespace(), &tc, &filter, "").map(drop)
}
