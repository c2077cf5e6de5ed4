//! Capabilities of the daemon, and when it drops them.
//!
//! The daemon starts with [`STARTUP`], whatever it was granted: memory, priority and namespaces need more once. When it
//! is ready, the one thread that opens ports keeps [`RUNTIME`], and every other thread has none, but for the one that puts filters back
//! where the kernel has no tcx: the kernel then denies privileged calls of a worker, which parses what pods send. Threads share their memory, so this is no full barrier;
//! the barrier is that the process has no more than [`RUNTIME`]. No executed program gains any back (`no_new_privs`);
//! the only one is the token plugin that a kubeconfig may name.
use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
pub(crate) use penstock_dataplane::{drop_capabilities as drop_all, without_capabilities as run_without};

/// Needed to start: the systemd unit and the DaemonSet grant these.
pub const STARTUP: [Capability; 7] = [
    // Interfaces, their settings, and the programs on them.
    Capability::CAP_NET_ADMIN,
    // AF_XDP sockets.
    Capability::CAP_NET_RAW,
    // BPF programs, maps and pinned links.
    Capability::CAP_BPF,
    // Without it the verifier adds barriers against speculation to the programs.
    Capability::CAP_PERFMON,
    // Memory for frames beyond RLIMIT_MEMLOCK.
    Capability::CAP_IPC_LOCK,
    // Workers run before ordinary processes on their cores.
    Capability::CAP_SYS_NICE,
    // The private netns, and mounting the BPF file system.
    Capability::CAP_SYS_ADMIN,
];

/// Kept by the control thread of a ready daemon: attaching a new pod needs all of them.
pub const RUNTIME: [Capability; 4] =
    [Capability::CAP_NET_ADMIN, Capability::CAP_NET_RAW, Capability::CAP_BPF, Capability::CAP_PERFMON];

/// Drops all but [`STARTUP`]. Call it before other threads start: they inherit the rest.
pub fn drop_to_startup() -> anyhow::Result<()> {
    nix::sys::prctl::set_no_new_privs()?;
    // Before Linux 5.11 programs and maps count against the limit too. Without CAP_SYS_RESOURCE it stays as it is;
    // preflight checks it.
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    // The bounding set limits executed programs. Without CAP_SETPCAP it stays as it is, which does no harm.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        for capability in caps::all().into_iter().filter(|capability| !RUNTIME.contains(capability)) {
            // The kernel rejects numbers that it does not know, which is fine.
            let _ = caps::drop(None, CapSet::Bounding, capability);
        }
    }
    caps::clear(None, CapSet::Ambient)?;
    caps::clear(None, CapSet::Inheritable)?;
    limit_to(&STARTUP)?;
    Ok(())
}

/// Drops all but [`RUNTIME`] from the calling thread.
pub fn drop_to_runtime() -> Result<(), CapsError> {
    limit_to(&RUNTIME)
}

/// Drops all but `CAP_NET_ADMIN` from the calling thread: enough to put a filter back.
pub(crate) fn drop_to_filters() -> Result<(), CapsError> {
    limit_to(&[Capability::CAP_NET_ADMIN])
}

fn limit_to(wanted: &[Capability]) -> Result<(), CapsError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    let left: CapsHashSet = wanted.iter().copied().filter(|capability| permitted.contains(capability)).collect();
    caps::set(None, CapSet::Effective, &left)?;
    caps::set(None, CapSet::Permitted, &left)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn of_this_thread(set: CapSet) -> CapsHashSet {
        caps::read(None, set).unwrap()
    }

    #[test]
    fn runtime_capabilities_are_a_subset_of_startup_capabilities() {
        assert!(RUNTIME.iter().all(|capability| STARTUP.contains(capability)));
    }

    #[test]
    fn a_thread_drops_capabilities_and_children_inherit_no_more() {
        // Capabilities belong to a thread: the test's other threads keep theirs.
        thread::scope(|scope| {
            scope.spawn(|| {
                let before = of_this_thread(CapSet::Permitted);
                let of = |list: &[Capability]| list.iter().copied().filter(|one| before.contains(one)).collect();
                let kept: CapsHashSet = of(&RUNTIME);
                for (list, wanted) in [(&STARTUP[..], of(&STARTUP)), (&RUNTIME[..], kept.clone())] {
                    limit_to(list).unwrap();
                    assert_eq!(of_this_thread(CapSet::Permitted), wanted);
                    assert_eq!(of_this_thread(CapSet::Effective), wanted);
                }
                let started = run_without(|| thread::spawn(|| of_this_thread(CapSet::Permitted)));
                assert_eq!(started.join().unwrap(), CapsHashSet::new());
                assert_eq!(of_this_thread(CapSet::Permitted), kept, "the caller keeps its own");
                drop_all();
                assert_eq!(of_this_thread(CapSet::Permitted), CapsHashSet::new());
            });
        });
    }
}
