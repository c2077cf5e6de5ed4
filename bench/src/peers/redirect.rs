//! Two pods joined by a program that does nothing but redirect: what any forwarder by tcx can reach at most on this machine.

use anyhow::Result;

use super::pod_name;
use super::tools::{find, run, version};
use crate::testbed::{Node, Pod, ScratchDir};

const PROGRAM: &str = include_str!("redirect.bpf.c");

pub(super) fn start(node: &Node, scratch: &ScratchDir) -> Result<String> {
    let pods = [node.pod(&pod_name(0))?, node.pod(&pod_name(1))?];
    let source = scratch.path().join("redirect.bpf.c");
    std::fs::write(&source, PROGRAM)?;
    for (from, to) in [(pods[0], pods[1]), (pods[1], pods[0])] {
        attach(node, scratch, from, to)?;
    }
    version("tc", "-V")
}

/// Compiles the program for what `from` sends to `to`, and attaches it.
fn attach(node: &Node, scratch: &ScratchDir, from: &Pod, to: &Pod) -> Result<()> {
    let (clang, tc) = (find("clang", "clang")?, find("tc", "iproute2")?);
    let file = |name: &str| scratch.path().join(name).display().to_string();
    let (source, object) = (file("redirect.bpf.c"), file(&format!("{}.o", from.interface())));
    let macs = [to.namespace().netlink()?.mac("eth0")?, node.netlink().mac(to.interface())?].concat();
    let macs: Vec<String> = macs.iter().map(ToString::to_string).collect();
    let (to, macs) = (format!("-DTO={}", to.interface_index()), format!("-DMACS={}", macs.join(",")));
    // Debian keeps `asm/` in a directory named after the machine, which clang does not search for this target.
    let headers = format!("/usr/include/{}-linux-gnu", std::env::consts::ARCH);
    let compile = ["-O2", "-target", "bpf", "-idirafter", &headers, &to, &macs, "-c", &source, "-o", &object];
    run(node.namespace(), &clang, &compile, "")?;
    run(node.namespace(), &tc, &["qdisc", "add", "dev", from.interface(), "clsact"], "")?;
    let filter = ["filter", "add", "dev", from.interface(), "ingress", "bpf", "da", "obj", &object, "sec", "tc"];
    run(node.namespace(), &tc, &filter, "").map(drop)
}
