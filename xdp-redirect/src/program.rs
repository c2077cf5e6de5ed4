//! One loaded instance of the program.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapHandle, OpenObject};

use crate::alive::Alive;
use crate::{AttachOptions, LoadError, LocalPods, OnMiss, Role};

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::undocumented_unsafe_blocks)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/redirect.skel.rs"));
}
use skeleton::{RedirectSkel, RedirectSkelBuilder};

/// How many RX queues of a port can have a socket, as `sockets` in `src/bpf/redirect.bpf.c`.
pub const MAX_QUEUES: u32 = 64;

/// The maps that all instances have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) local_pods: LocalPods,
    pub(crate) alive: Alive,
}

impl Shared {
    pub(crate) fn create() -> Result<Self, LoadError> {
        Ok(Self { local_pods: LocalPods::create()?, alive: Alive::create()? })
    }
}

/// An instance in the kernel; it and its maps live as long as these descriptors or an attachment.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) fd: OwnedFd,
    pub(crate) sockets: MapHandle,
    pub(crate) outcomes: MapHandle,
    pub(crate) own: MapHandle,
    /// The program for the node's end of the host port; only where the role is that.
    pub(crate) leave: Option<OwnedFd>,
}

impl Program {
    pub(crate) fn load(options: AttachOptions, shared: &Shared) -> Result<Self, LoadError> {
        let mut storage = MaybeUninit::uninit();
        let loaded = load_skeleton(&mut storage, options, shared)?;
        let duplicated = |source: std::io::Error| LoadError::new("the program", source.into());
        let handle = |map| MapHandle::try_from(map).map_err(|source| LoadError::new("the program's maps", source));
        Ok(Self {
            fd: loaded.progs.penstock.as_fd().try_clone_to_owned().map_err(duplicated)?,
            sockets: handle(&*loaded.maps.sockets)?,
            outcomes: handle(&*loaded.maps.outcomes)?,
            own: handle(&*loaded.maps.own)?,
            leave: match options.role {
                Role::Host => Some(loaded.progs.penstock_leave.as_fd().try_clone_to_owned().map_err(duplicated)?),
                Role::Pod | Role::Uplink => None,
            },
        })
    }
}

/// Sets the program's constants, gives it the shared maps, and passes it through the verifier.
fn load_skeleton<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    options: AttachOptions,
    shared: &Shared,
) -> Result<RedirectSkel<'a>, LoadError> {
    let failed = |source| LoadError::new("the XDP program", source);
    let mut open = RedirectSkelBuilder::default().open(storage).map_err(failed)?;
    let constants = open.maps.rodata_data.as_deref_mut().expect("the skeleton maps its constants");
    constants.on_miss = match options.on_miss {
        OnMiss::Drop => libbpf_rs::libbpf_sys::XDP_DROP,
        OnMiss::Pass => libbpf_rs::libbpf_sys::XDP_PASS,
    };
    constants.uplink = u32::from(options.role == Role::Uplink);
    constants.pod = u32::from(options.role == Role::Pod);
    constants.bridged = u32::from(options.bridge.is_some());
    // As it stands in a frame, whatever the machine's byte order.
    let [a, b, c, d, e, f] = options.bridge.unwrap_or_default();
    constants.bridge_mac = [[a, b], [c, d], [e, f]].map(u16::from_ne_bytes);
    open.progs.penstock_leave.set_autoload(options.role == Role::Host);
    open.maps.local_pods.reuse_fd(shared.local_pods.map().as_fd()).map_err(failed)?;
    open.maps.alive.reuse_fd(shared.alive.map().as_fd()).map_err(failed)?;
    open.load().map_err(failed)
}

#[cfg(test)]
mod tests;
