//! Attaches the tc programs: by tcx links, or by filters of a clsact qdisc where the kernel has no tcx (before Linux 6.6).

mod clsact;
mod tcx;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

pub use clsact::FilterWatch;
use libbpf_rs::libbpf_sys::{BPF_TCX_INGRESS, bpf_attach_type};
use penstock_tc_filters::{Filters, Hook, are_forced};
pub(crate) use tcx::replace_program;

use crate::{AttachError, Interface, in_temporary_namespace};

/// How this kernel attaches tc programs.
#[derive(Clone, Debug)]
pub(crate) enum Method {
    Tcx,
    Clsact(Arc<FilterWatch>),
}

/// A program that is attached. Dropping a link detaches it; a filter stays until [`Attachment::detach`].
#[derive(Debug)]
pub(crate) enum Attachment {
    Link(OwnedFd),
    Filter { watch: Arc<FilterWatch>, interface: u32, hook: Hook, name: &'static str },
}

impl Method {
    pub(crate) fn of_kernel() -> Self {
        if tcx::is_supported() && !are_forced() { Self::Tcx } else { Self::Clsact(Arc::default()) }
    }

    pub(crate) fn watch(&self) -> Option<&Arc<FilterWatch>> {
        match self {
            Self::Tcx => None,
            Self::Clsact(watch) => Some(watch),
        }
    }

    /// Attaches a program as the first of the hook, so that no other program can pass packets before it. A filter takes the place of an
    /// earlier one with this name, at once.
    pub(crate) fn attach(
        &self,
        program: BorrowedFd<'_>,
        interface: &Interface,
        hook: bpf_attach_type,
        name: &'static str,
    ) -> Result<Attachment, AttachError> {
        match self {
            Self::Tcx => tcx::attach(program, interface, hook).map(Attachment::Link),
            Self::Clsact(watch) => {
                let hook = filter_hook(hook);
                watch.put(program, interface, hook, name)?;
                Ok(Attachment::Filter { watch: Arc::clone(watch), interface: interface.index, hook, name })
            }
        }
    }

    /// The filter that an earlier process has left there, which still runs that one's program.
    pub(crate) fn find_filter(&self, interface: u32, hook: bpf_attach_type, name: &'static str) -> Option<Attachment> {
        let (watch, hook) = (Arc::clone(self.watch()?), filter_hook(hook));
        let found = Filters::open().and_then(|filters| filters.list(interface, hook)).ok()?;
        found.iter().any(|filter| filter.name == name).then_some(Attachment::Filter { watch, interface, hook, name })
    }

    /// Whether the kernel attaches these programs at these hooks: that it loads them says nothing. Tried in a temporary network namespace where
    /// that can be made.
    pub(crate) fn try_attaching(&self, programs: [(BorrowedFd<'_>, bpf_attach_type); 2]) -> Result<(), AttachError> {
        let tried = in_temporary_namespace(|loopback| {
            programs.into_iter().try_for_each(|(program, hook)| {
                self.attach(program, loopback, hook, "penstock_tried").map(|attached| attached.detach())
            })
        });
        tried.unwrap_or(Ok(()))
    }
}

impl Attachment {
    /// Detaches the program immediately, even if others hold the link.
    pub(crate) fn detach(&self) {
        match self {
            Self::Link(link) => tcx::detach(link),
            Self::Filter { watch, interface, hook, name } => watch.remove(*interface, *hook, name),
        }
    }

    /// Leaves the program attached: from now on nobody puts it back.
    pub(crate) fn leave(&self) {
        if let Self::Filter { watch, interface, hook, .. } = self {
            watch.forget(*interface, *hook);
        }
    }
}

/// Whether somebody else has filters on an interface of the calling thread's network namespace: on what comes in by it, and on what leaves.
///
/// # Errors
/// The kernel does not list them.
pub fn filters_of_others(interface: u32) -> io::Result<[bool; 2]> {
    Filters::open()?.have_others(interface)
}

fn filter_hook(hook: bpf_attach_type) -> Hook {
    if hook == BPF_TCX_INGRESS { Hook::Ingress } else { Hook::Egress }
}
