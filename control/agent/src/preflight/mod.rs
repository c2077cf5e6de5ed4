//! Checks whether this machine can run this configuration, before anything is changed.

mod bpffs;
mod interfaces;
mod kernel;

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::libc;
use penstock_policy::model::Pod;
use penstock_sources::Location;
use penstock_sources::api_server::Access;
use penstock_xdp_redirect::{MINIMUM_KERNEL, PinnedProgram, Pins, ProgramTag};

use super::settings::{Settings, list, try_tcx};
use crate::discovery::{Bindings, NetworkState, PodProblem, Sysctl, pod_ports};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    Ok,
    /// Works, with a limitation.
    Warning,
    /// Runs, and does not get ready.
    NotReady,
    /// Cannot run.
    Error,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::NotReady | Self::Error => "error",
        })
    }
}

/// The result of one check: names the thing, its value and the remedy in one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PreflightFinding {
    pub level: Level,
    pub line: String,
}

impl PreflightFinding {
    pub(super) fn ok(line: impl Into<String>) -> Self {
        Self { level: Level::Ok, line: line.into() }
    }

    pub(super) fn warning(line: impl Into<String>) -> Self {
        Self { level: Level::Warning, line: line.into() }
    }

    pub(super) fn not_ready(line: impl Into<String>) -> Self {
        Self { level: Level::NotReady, line: line.into() }
    }

    pub(super) fn error(line: impl Into<String>) -> Self {
        Self { level: Level::Error, line: line.into() }
    }
}

/// Checks privileges, kernel, memory and cores, but not the network.
pub(super) fn machine(settings: &Settings<'_>) -> Vec<PreflightFinding> {
    let config = settings.config;
    let privileges = capabilities(effective_capabilities());
    let permitted = privileges.level == Level::Ok;
    let mut findings = vec![privileges];
    // Without CAP_NET_RAW the kernel does not say whether it has AF_XDP.
    findings.extend(permitted.then(|| af_xdp(try_xdp_socket())));
    findings.push(match &settings.cores {
        Ok(cores) => PreflightFinding::ok(format!("workers.cores: {}", list(cores))),
        Err(line) => PreflightFinding::error(line),
    });
    findings.push(memory(settings, available_memory()));
    findings.extend(kernel::findings(settings, permitted));
    findings.extend(source(&config.source.location()));
    findings
}

/// Checks that the source exists, without reading it.
fn source(location: &Location) -> Option<PreflightFinding> {
    let (key, path, is_there, what) = match location {
        Location::Manifests(path) => ("manifests", path, path.is_dir(), "a directory"),
        Location::ApiServer(Access::Kubeconfig { path, .. }) => ("kubeconfig", path, path.is_file(), "a file"),
        Location::ApiServer(Access::InCluster) => return None,
    };
    let path = path.display();
    Some(match is_there {
        true => PreflightFinding::ok(format!("source.{key}: {path}")),
        false => PreflightFinding::error(format!("source.{key}: {path}: not {what}; create it, or correct the path")),
    })
}

pub(super) fn network() -> Vec<PreflightFinding> {
    let mut findings = forwarding(
        ["ipv4/ip_forward", "ipv6/conf/all/forwarding"]
            .map(|path| (path, fs::read_to_string(format!("/proc/sys/net/{path}")).ok())),
    );
    if Sysctl::v4("all", "arp_filter").read() == Some(1) {
        findings.push(PreflightFinding::warning(
            "net/ipv4/conf/all/arp_filter = 1: ARP from pods may go unanswered; set it to 0, or set it on single interfaces only",
        ));
    }
    findings
}

/// Checks that the programs pinned for this network namespace, by a running or dead daemon, are this binary's.
pub(super) fn programs(settings: &Settings<'_>) -> Option<PreflightFinding> {
    if capabilities(effective_capabilities()).level != Level::Ok {
        return None;
    }
    let at = settings.config.fail.pins.display();
    let tags = Pins::at(&settings.config.fail.pins).ok()?.tags();
    let [from_pod, to_pod, to_uplink, from_uplink] = match ProgramTag::own() {
        Ok(own) => own,
        Err(error) => return Some(PreflightFinding::error(error.to_string())),
    };
    let own = |program| match program {
        PinnedProgram::FromPod => from_pod,
        PinnedProgram::ToPod => to_pod,
        PinnedProgram::ToUplink => to_uplink,
        PinnedProgram::FromUplink => from_uplink,
    };
    for (pinned, tag) in &tags {
        let own = own(pinned.program);
        let problem = match tag {
            Ok(tag) if *tag == own => continue,
            Ok(tag) => format!("differs from this binary's ({tag}, not {own}); restart penstock to replace it"),
            Err(error) => format!("cannot be read ({error}); run as root"),
        };
        return Some(PreflightFinding::warning(format!(
            "{at}: the program on interface {} {problem}",
            pinned.interface
        )));
    }
    Some(PreflightFinding::ok(match tags.len() {
        0 => format!("tc programs: {from_pod} and {to_pod}; none is pinned"),
        count => format!("tc programs: {from_pod} and {to_pod}, and so are all {count} that are pinned"),
    }))
}

/// Checks that the kernel accepts the programs that are attached.
pub(super) fn attachable(settings: &Settings<'_>) -> PreflightFinding {
    match try_tcx(settings.offloads()) {
        Ok(()) => PreflightFinding::ok("tc programs: the kernel accepts them"),
        Err(error) => PreflightFinding::error(format!("tc programs: {error}")),
    }
}

/// Checks for each local pod whether its interface can be served.
pub(super) fn pods(
    settings: &Settings<'_>,
    netstate: &NetworkState,
    bindings: &Bindings,
    (pods, mut problems): (Vec<Pod>, BTreeSet<PodProblem>),
) -> Vec<PreflightFinding> {
    let (ports, more) = pod_ports(netstate, bindings, &pods, settings.port_limits());
    problems.extend(more);
    let found = problems.iter().map(|problem| PreflightFinding::warning(problem.to_string()));
    found.chain(ports.values().flat_map(interfaces::pod)).collect()
}

/// Required capabilities, by their number in linux/capability.h.
const NEEDED: [(u32, &str); 3] = [(12, "CAP_NET_ADMIN"), (13, "CAP_NET_RAW"), (BPF, "CAP_BPF")];
const BPF: u32 = 39;
/// CAP_SYS_ADMIN, which includes CAP_BPF.
const SYS_ADMIN: u32 = 21;

fn effective_capabilities() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|value| u64::from_str_radix(value.trim(), 16).ok()).unwrap_or(0)
}

fn capabilities(effective: u64) -> PreflightFinding {
    let has = |number: u32| effective >> number & 1 == 1;
    let granted = |number: u32| has(number) || number == BPF && has(SYS_ADMIN);
    let missing: Vec<&str> = NEEDED.iter().filter(|(number, _)| !granted(*number)).map(|(_, name)| *name).collect();
    if missing.is_empty() {
        PreflightFinding::ok("capabilities: CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF")
    } else {
        PreflightFinding::error(format!(
            "capabilities: {} missing (CapEff {effective:016x}); run as root, or grant them",
            missing.join(", ")
        ))
    }
}

/// Abilities of this kernel's AF_XDP sockets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct XdpSocket {
    /// One system call can send more than 32 packets (`XDP_MAX_TX_SKB_BUDGET`).
    has_budget: bool,
}

fn try_xdp_socket() -> io::Result<XdpSocket> {
    const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;
    // SAFETY: no memory is passed.
    let socket = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just returned this descriptor, and nobody else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let budget: u32 = 64;
    // SAFETY: the value lives across the call, and its length is given.
    let result = unsafe {
        let length = size_of_val(&budget) as libc::socklen_t;
        let value = (&raw const budget).cast();
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, value, length)
    };
    // A kernel that has the option refuses it here for want of a TX ring.
    let is_unknown = result != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOPROTOOPT);
    Ok(XdpSocket { has_budget: !is_unknown })
}

fn af_xdp(tried: io::Result<XdpSocket>) -> PreflightFinding {
    match tried {
        Ok(XdpSocket { has_budget: true }) => PreflightFinding::ok("AF_XDP: supported"),
        Ok(XdpSocket { has_budget: false }) => PreflightFinding::warning(
            "AF_XDP: sends at most 32 packets per wake-up, which slows bulk traffic; Linux 6.17 or later sends more",
        ),
        Err(error) => PreflightFinding::error(format!(
            "AF_XDP: cannot open a socket ({error}); use Linux {}.{} or later with CONFIG_XDP_SOCKETS",
            MINIMUM_KERNEL.0, MINIMUM_KERNEL.1
        )),
    }
}

fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

fn memory(settings: &Settings<'_>, available: Option<u64>) -> PreflightFinding {
    let config = settings.config;
    // Programs that forward packets count them in a record of their own, and need more of the table in one piece.
    let connections = u64::from(config.conntrack.entries) * if settings.offloads() { 118 } else { 82 };
    let needed = (settings.umem_bytes() + connections) >> 20;
    match available.map(|bytes| bytes >> 20) {
        Some(available) if available < needed => PreflightFinding::error(format!(
            "umem and conntrack: need {needed} MiB, but only {available} MiB available; lower umem.memory or conntrack.entries"
        )),
        _ => PreflightFinding::ok(format!("umem and conntrack: {needed} MiB")),
    }
}

fn forwarding(settings: [(&str, Option<String>); 2]) -> Vec<PreflightFinding> {
    let finding = |(path, value): (&str, Option<String>)| match value?.trim() {
        "0" => Some(PreflightFinding::warning(format!(
            "net/{path} = 0: pods reach neither Services nor other nodes; set it to 1 (sysctl -w net/{path}=1)"
        ))),
        _ => Some(PreflightFinding::ok(format!("net/{path}"))),
    };
    settings.into_iter().filter_map(finding).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    fn config(more: &str) -> Config {
        let text = format!("node = \"a\"\n{more}\n[source]\nmanifests = \"/tmp\"\n");
        Config::parse(&text, Path::new("/tmp/penstock.toml")).unwrap()
    }

    #[test]
    fn each_missing_capability_is_named() {
        let all = 1 << 12 | 1 << 13 | 1 << 39;
        for (effective, level, line) in [
            (u64::MAX, Level::Ok, "capabilities: CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF"),
            (all, Level::Ok, "capabilities: CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF"),
            (1 << 12 | 1 << 13 | 1 << 21, Level::Ok, "capabilities: CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF"),
            (all & !(1 << 13), Level::Error, "capabilities: CAP_NET_RAW missing"),
            (
                0,
                Level::Error,
                "capabilities: CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF missing (CapEff 0000000000000000); run as root",
            ),
        ] {
            let found = capabilities(effective);
            assert_eq!(found.level, level, "{found:?}");
            assert!(found.line.starts_with(line), "{found:?}");
        }
    }

    #[test]
    fn a_kernel_without_af_xdp_is_an_error() {
        let found = af_xdp(Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)));
        assert_eq!(found.level, Level::Error);
        assert!(found.line.contains("Address family not supported") && found.line.contains("CONFIG_XDP_SOCKETS"));
    }

    #[test]
    fn the_budget_of_a_send_is_tried_on_a_socket() {
        assert_eq!(af_xdp(Ok(XdpSocket { has_budget: true })), PreflightFinding::ok("AF_XDP: supported"));
        let without = af_xdp(Ok(XdpSocket { has_budget: false }));
        assert!(without.level == Level::Warning && without.line.contains("at most 32 packets"), "{without:?}");
    }

    #[test]
    fn too_little_memory_is_an_error() {
        let memory = |more, available| {
            let config = config(more);
            memory(&Settings::of(&config, vec![0], Some(1)), available)
        };
        let found = memory("umem.memory = \"2GiB\"\nconntrack.entries = 262144", Some(1 << 30));
        assert_eq!(found.level, Level::Error);
        assert!(found.line.starts_with("umem and conntrack: need 2077 MiB, but only 1024 MiB available;"), "{found:?}");
        assert_eq!(memory("", None).level, Level::Ok);
    }

    #[test]
    fn a_node_without_forwarding_is_a_warning() {
        let found = forwarding([("ipv4/ip_forward", Some("0\n".into())), ("ipv6/conf/all/forwarding", None)]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].level, Level::Warning);
        assert!(found[0].line.starts_with("net/ipv4/ip_forward = 0: "), "{found:?}");
        let found =
            forwarding([("ipv4/ip_forward", Some("1\n".into())), ("ipv6/conf/all/forwarding", Some("1".into()))]);
        assert!(found.iter().all(|finding| finding.level == Level::Ok) && found.len() == 2);
    }
}
