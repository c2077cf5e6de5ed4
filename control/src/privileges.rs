//! What the daemon may do, and when it stops being able to do more.
//!
//! It begins with [`START`], whatever it was given: what memory, priority and namespaces take once. When it is ready,
//! [`KEPT`] is left to the one thread that opens ports, and no capability to any other: a call that a worker, which reads
//! what pods send, is brought to make is refused what root may do. That is no wall, since threads share their memory; the
//! wall is that the process has no more than [`KEPT`]. No program that is executed gives any back (`no_new_privs`); the only
//! one is what a kubeconfig may name to get a token.

use std::thread;

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

/// What the daemon needs to start: the systemd unit and the DaemonSet grant these.
pub const START: [Capability; 7] = [
    // Interfaces, routes and rules, their settings, and XDP programs on them.
    Capability::CAP_NET_ADMIN,
    // AF_XDP sockets.
    Capability::CAP_NET_RAW,
    // Programs and maps, and the links that are pinned.
    Capability::CAP_BPF,
    // Programs as they were written: without it the verifier adds barriers against speculation.
    Capability::CAP_PERFMON,
    // Memory for the frames beyond the limit for locked memory.
    Capability::CAP_IPC_LOCK,
    // Workers before the ordinary processes of their cores.
    Capability::CAP_SYS_NICE,
    // The network namespaces of its own, and mounting the BPF file system.
    Capability::CAP_SYS_ADMIN,
];

/// What is left to the control thread of a daemon that is ready: a pod that comes needs all of it.
pub const KEPT: [Capability; 4] =
    [Capability::CAP_NET_ADMIN, Capability::CAP_NET_RAW, Capability::CAP_BPF, Capability::CAP_PERFMON];

/// Gives up all but [`START`], before there are other threads. Threads that are started later have no more.
pub(crate) fn begin() -> anyhow::Result<()> {
    nix::sys::prctl::set_no_new_privs()?;
    // Before Linux 5.11 programs and maps count against it too. Without CAP_SYS_RESOURCE it stays as it is, which is
    // looked at beforehand.
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    // What a program that is executed could have. Without CAP_SETPCAP it stays as it was given, and does no harm.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        for capability in caps::all().into_iter().filter(|capability| !KEPT.contains(capability)) {
            // A number that this kernel does not know is refused, which is well.
            let _ = caps::drop(None, CapSet::Bounding, capability);
        }
    }
    caps::clear(None, CapSet::Ambient)?;
    caps::clear(None, CapSet::Inheritable)?;
    limit_to(&START)?;
    Ok(())
}

/// Leaves [`KEPT`] to the calling thread.
pub(crate) fn settle() -> Result<(), CapsError> {
    limit_to(&KEPT)
}

/// Leaves the calling thread without any: what it starts has none either. Giving up cannot fail.
pub(crate) fn forgo() {
    penstock_dataplane::worker::drop_capabilities();
}

/// Runs `start` on a thread without capabilities, so that a thread which it starts in a library has none.
pub(crate) fn without<T: Send>(start: impl FnOnce() -> T + Send) -> T {
    let run = || {
        forgo();
        start()
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

fn limit_to(wanted: &[Capability]) -> Result<(), CapsError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    let left: CapsHashSet = wanted.iter().copied().filter(|capability| permitted.contains(capability)).collect();
    caps::set(None, CapSet::Effective, &left)?;
    caps::set(None, CapSet::Permitted, &left)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_this_thread(set: CapSet) -> CapsHashSet {
        caps::read(None, set).unwrap()
    }

    #[test]
    fn what_is_kept_is_a_part_of_what_is_begun_with() {
        assert!(KEPT.iter().all(|capability| START.contains(capability)));
    }

    #[test]
    fn a_thread_gives_up_step_by_step_and_what_it_starts_has_no_more() {
        // Capabilities are a thread's own: the test's other threads keep theirs.
        thread::scope(|scope| {
            scope.spawn(|| {
                let before = of_this_thread(CapSet::Permitted);
                let of = |list: &[Capability]| list.iter().copied().filter(|one| before.contains(one)).collect();
                let kept: CapsHashSet = of(&KEPT);
                for (list, wanted) in [(&START[..], of(&START)), (&KEPT[..], kept.clone())] {
                    limit_to(list).unwrap();
                    assert_eq!(of_this_thread(CapSet::Permitted), wanted);
                    assert_eq!(of_this_thread(CapSet::Effective), wanted);
                }
                let started = without(|| thread::spawn(|| of_this_thread(CapSet::Permitted)));
                assert_eq!(started.join().unwrap(), CapsHashSet::new());
                assert_eq!(of_this_thread(CapSet::Permitted), kept, "not the caller's");
                forgo();
                assert_eq!(of_this_thread(CapSet::Permitted), CapsHashSet::new());
            });
        });
    }
}
