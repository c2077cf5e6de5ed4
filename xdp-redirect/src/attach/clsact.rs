//! Filters of clsact qdiscs, and who puts them back: anybody may delete a filter or its qdisc, and the kernel only reports it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use libbpf_rs::libbpf_sys;
use penstock_tc_filters::{Events, Filters, Hook, Put, is_behind_others};

use crate::{AttachError, Interface};

/// The filters of this process.
#[derive(Debug, Default)]
pub struct FilterWatch {
    filters: Mutex<BTreeMap<(u32, Hook), Watched>>,
    restored: AtomicU64,
}

#[derive(Debug)]
struct Watched {
    name: &'static str,
    interface: String,
    program: OwnedFd,
    id: u32,
    /// The reason why packets may pass beside the filter.
    problem: Option<String>,
}

impl FilterWatch {
    /// How often a filter was put back.
    pub fn restored(&self) -> u64 {
        self.restored.load(Ordering::Relaxed)
    }

    /// Index and name of each interface where packets may pass beside a program, with the reason.
    pub fn problems(&self) -> Vec<(u32, (String, String))> {
        let filters = self.lock();
        let found = filters
            .iter()
            .filter_map(|((index, _), watched)| Some((*index, (watched.interface.clone(), watched.problem.clone()?))));
        found.collect()
    }

    /// What a thread has to run that puts filters of the calling thread's network namespace back. It ends with `self`.
    ///
    /// # Errors
    /// The kernel has no netlink socket for it.
    pub fn watcher(self: &Arc<Self>) -> io::Result<impl FnOnce() + Send + use<>> {
        // Bounds what a fight with somebody who deletes each filter at once may take of a core.
        const PAUSE: Duration = Duration::from_millis(1);
        let (events, filters, watch) = (Events::open()?, Filters::open()?, Arc::downgrade(self));
        Ok(move || {
            // First all: they may have changed before.
            let mut changed = None;
            while let Some(watch) = watch.upgrade() {
                let has_restored = watch.check(&filters, changed.as_ref());
                drop(watch);
                if has_restored {
                    thread::sleep(PAUSE);
                }
                changed = events.next().unwrap_or_else(|error| {
                    tracing::warn!(%error, "cannot hear of deleted filters; looking for them each second");
                    thread::sleep(Duration::from_secs(1));
                    None
                });
            }
        })
    }

    pub(super) fn put(
        &self,
        program: BorrowedFd<'_>,
        interface: &Interface,
        hook: Hook,
        name: &'static str,
    ) -> Result<(), AttachError> {
        let failed = |source| AttachError::tc(interface, source);
        let (id, owned) = (id_of(program).map_err(failed)?, program.try_clone_to_owned().map_err(failed)?);
        let mut filters = self.lock();
        let put = Filters::open().and_then(|to| to.put(interface.index, hook, name, program, Some(id)));
        let problem = preceding(&put.map_err(failed)?);
        let watched = Watched { name, interface: interface.name.clone(), program: owned, id, problem };
        filters.insert((interface.index, hook), watched);
        Ok(())
    }

    pub(super) fn remove(&self, interface: u32, hook: Hook, name: &str) {
        let mut filters = self.lock();
        filters.remove(&(interface, hook));
        if let Err(error) = Filters::open().and_then(|from| from.remove(interface, hook, name)) {
            tracing::warn!(interface, name, %error, "a filter could not be removed");
        }
    }

    pub(super) fn forget(&self, interface: u32, hook: Hook) {
        self.lock().remove(&(interface, hook));
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(u32, Hook), Watched>> {
        self.filters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts back what is missing on these interfaces, or on any. Returns whether anything was.
    fn check(&self, filters: &Filters, changed: Option<&BTreeSet<u32>>) -> bool {
        let before = self.restored();
        let is_due = |index: &u32, watched: &Watched| {
            watched.problem.is_some() || changed.is_none_or(|changed| changed.contains(index))
        };
        self.lock()
            .retain(|(index, hook), watched| !is_due(index, watched) || self.restore(filters, *index, *hook, watched));
        self.restored() != before
    }

    /// Returns whether the filter is still this process's.
    fn restore(&self, filters: &Filters, index: u32, hook: Hook, watched: &mut Watched) -> bool {
        let Watched { name, interface, program, id, problem } = watched;
        let put = match filters.list(index, hook) {
            // Another process has taken the interface over.
            Ok(found) if found.iter().any(|filter| filter.name == *name && filter.program != *id) => return false,
            Ok(found) if found.iter().any(|filter| filter.name == *name) && !is_behind_others(&found, name, 1) => {
                Ok(Put { changed: false, preceded_by: None })
            }
            Ok(_) => filters.put(index, hook, name, program.as_fd(), Some(*id)),
            Err(error) => Err(error),
        };
        let found = match put {
            Ok(put) => {
                if put.changed {
                    self.restored.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(%interface, filter = *name, "somebody deleted this filter or its qdisc, or put a filter before it: it was put back");
                }
                preceding(&put)
            }
            // The interface is gone.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return false,
            Err(error) => Some(format!(
                "its filter {name} is gone and cannot be put back ({error}): end what deletes it, or use Linux 6.6 or later"
            )),
        };
        *problem = found;
        true
    }
}

/// Others' filters that run before ours and may pass packets.
fn preceding(put: &Put) -> Option<String> {
    put.preceded_by.as_ref().map(|filter| {
        format!(
            "a {} filter of somebody else at priority {} runs before Penstock's, and packets that it accepts pass: give it another priority, or use Linux 6.6 or later",
            filter.kind, filter.priority
        )
    })
}

fn id_of(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut length = size_of::<libbpf_sys::bpf_prog_info>() as u32;
    let to = (&raw mut info).cast();
    // SAFETY: `to` points to `length` bytes that live across the call. All pointers in the structure are null, so the kernel writes nowhere else.
    match unsafe { libbpf_sys::bpf_obj_get_info_by_fd(program.as_raw_fd(), to, &mut length) } {
        0 => Ok(info.id),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}
