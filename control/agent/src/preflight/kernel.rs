//! Checks the kernel and its limits: version, bpffs, locked memory.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use penstock_xdp_redirect::{MINIMUM_KERNEL, TranslatedSources, panics_on_sends, reads_connections};

use super::{PreflightFinding, bpffs, effective_capabilities};
use crate::config::{FailMode, OnExit};
use crate::privileges;
use crate::settings::Settings;

/// CAP_IPC_LOCK: exempt from RLIMIT_MEMLOCK.
const IPC_LOCK: u32 = 14;

/// All kernel checks; without privileges the version only, since the others would fail for that alone.
pub(super) fn findings(settings: &Settings<'_>, permitted: bool) -> Vec<PreflightFinding> {
    let release = nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
    let release = release.unwrap_or_default();
    let mut findings = vec![version(&release)];
    findings.extend(sends(&release, panics_on_sends()));
    if !permitted {
        return findings;
    }
    findings.extend(masqueraded(reads_connections() && workers_read_sources()));
    if settings.config.fail.mode == FailMode::Closed || settings.config.fail.on_exit == OnExit::Keep {
        findings.push(bpffs::finding(effective_capabilities() >> super::SYS_ADMIN & 1 == 1));
    }
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(RLIM_INFINITY, |(soft, _)| soft);
    let unlimited = effective_capabilities() >> IPC_LOCK & 1 == 1 || limit == RLIM_INFINITY;
    findings.push(memlock(settings.umem_bytes(), (!unlimited).then_some(limit)));
    findings
}

/// Numbers at the start of a kernel's release: of 6.12.43+deb12-amd64 they are 6, 12 and 43.
fn numbers(release: &str) -> impl Iterator<Item = u32> {
    release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse().ok())
}

/// The oldest kernel is the first whose verifier accepts the programs.
fn version(release: &str) -> PreflightFinding {
    let (least_major, least_minor) = MINIMUM_KERNEL;
    let mut numbers = numbers(release);
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) < MINIMUM_KERNEL => PreflightFinding::error(format!(
            "kernel {release}: its verifier does not accept the tc programs; use {least_major}.{least_minor} or later"
        )),
        (Some(_), Some(_)) => PreflightFinding::ok(format!("kernel {release}")),
        _ => PreflightFinding::warning(format!(
            "kernel {release:?}: unknown version; use {least_major}.{least_minor} or later"
        )),
    }
}

/// Kernels that panic when a worker sends. `panics`: what the kernel's types say, if it describes them; otherwise its
/// version decides ([`panics_on_sends`]). No way of sending spares them: what workers send goes through a veth, and whoever
/// receives it there overwrites what the kernel reads.
fn sends(release: &str, panics: Option<bool>) -> Option<PreflightFinding> {
    const FIRST_AND_LAST: [[u32; 3]; 2] = [[6, 16, 8], [6, 17, 10]];
    let [first, last] = FIRST_AND_LAST;
    let version: Vec<u32> = numbers(release).take(3).collect();
    let is_listed = || version.as_slice() >= &first[..] && version.as_slice() <= &last[..];
    panics.unwrap_or_else(is_listed).then(|| {
        PreflightFinding::error(format!(
            "kernel {release}: panics when an AF_XDP socket sends to a veth (its commit 30f241fcf52a, of 6.16.8 to 6.17.10); use one with 0ebc27a4c67d (6.17.11 or later), or 6.12"
        ))
    })
}

/// Programs note sources in a map, which workers read, and workers have no capability.
fn workers_read_sources() -> bool {
    TranslatedSources::open(None).is_ok_and(|sources| privileges::run_without(|| sources.is_readable()))
}

/// Without it workers do not know who sent what the node gave an address of its own, as kube-proxy does for NodePorts.
fn masqueraded(is_known: bool) -> Option<PreflightFinding> {
    (!is_known).then(|| {
        PreflightFinding::warning(
            "masquerade: the kernel does not say who sent what the node gives its own address; pods under policy take that only where a rule allows every source; use Linux 5.19 or later with CONFIG_DEBUG_INFO_BTF and connection tracking (modprobe nf_conntrack), and restart penstock",
        )
    })
}

/// The UMEM counts against the limit of the process that registers it (`xdp_umem_account_pages` in net/xdp/xdp_umem.c).
fn memlock(frames: u64, limit: Option<u64>) -> PreflightFinding {
    match limit {
        Some(limit) if limit < frames => PreflightFinding::error(format!(
            "RLIMIT_MEMLOCK: {} MiB, but umem needs {} MiB; raise it (ulimit -l unlimited, LimitMEMLOCK=infinity), or grant CAP_IPC_LOCK",
            limit >> 20,
            frames >> 20
        )),
        Some(limit) => PreflightFinding::ok(format!("RLIMIT_MEMLOCK: {} MiB", limit >> 20)),
        None => PreflightFinding::ok("RLIMIT_MEMLOCK: not limited"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::Level;

    #[test]
    fn a_too_old_kernel_is_an_error() {
        for (release, level, expected) in [
            ("4.19.0-27-amd64", Level::Error, "kernel 4.19.0-27-amd64: its verifier does not accept"),
            ("5.10.0-28-amd64", Level::Error, "kernel 5.10.0-28-amd64: "),
            ("5.15.0-100-generic", Level::Ok, "kernel 5.15.0-100-generic"),
            ("6.17.1", Level::Ok, "kernel 6.17.1"),
            ("7.0-rc1", Level::Ok, "kernel 7.0-rc1"),
            ("unknown", Level::Warning, "kernel \"unknown\": unknown version"),
        ] {
            let found = version(release);
            assert_eq!(found.level, level, "{found:?}");
            assert!(found.line.starts_with(expected), "{found:?}");
        }
    }

    #[test]
    fn a_kernel_that_panics_when_workers_send_is_an_error() {
        for (release, by_types, is_refused) in [
            ("6.16.12+deb13-amd64", None, true),
            ("6.16.12+deb13-amd64", Some(true), true),
            // A distribution's kernel has taken the commit that mends it, or the one that broke it.
            ("6.17.8", Some(false), false),
            ("6.12.0-300.el10", Some(true), true),
            ("6.16.7", None, false),
            ("6.16.8", None, true),
            ("6.17.0-14-generic", None, true),
            ("6.17.10", None, true),
            ("6.17.11", None, false),
            ("6.18.0", None, false),
            ("7.0-rc1", None, false),
            ("unknown", None, false),
        ] {
            let found = sends(release, by_types);
            assert_eq!(found.is_some(), is_refused, "{release} {by_types:?}");
            assert!(found.is_none_or(|found| found.level == Level::Error && found.line.contains("0ebc27a4c67d")));
        }
    }

    #[test]
    fn a_kernel_that_hides_who_is_masqueraded_is_a_warning() {
        assert!(workers_read_sources(), "this kernel lets threads without capabilities read maps");
        assert_eq!(masqueraded(true), None);
        let found = masqueraded(false).unwrap();
        assert!(found.level == Level::Warning && found.line.contains("modprobe nf_conntrack"), "{found:?}");
    }

    #[test]
    fn locked_memory_must_hold_the_frames() {
        assert_eq!(memlock(256 << 20, Some(8 << 20)).level, Level::Error);
        assert!(
            memlock(256 << 20, Some(8 << 20)).line.starts_with("RLIMIT_MEMLOCK: 8 MiB, but umem needs 256 MiB; raise")
        );
        assert_eq!(memlock(256 << 20, Some(256 << 20)).level, Level::Ok);
        assert_eq!(memlock(256 << 20, None).level, Level::Ok);
    }
}
