//! A loaded instance of the program.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapHandle, OpenObject};

use crate::liveness::ProcessLiveness;
use crate::translation::ConnectionFunctions;
use crate::{AttachOptions, LoadError, LocalPods, ModeChoice, OnMiss, Role, TranslatedSources, quietly};

/// For pods' ports.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::undocumented_unsafe_blocks)]
mod pod {
    include!(concat!(env!("OUT_DIR"), "/pod.skel.rs"));
}

/// For uplinks and the host port: the same, with lookups in the kernel's connection tracking. Loading it reads all of
/// the kernel's types (BTF), which takes too long for each new pod.
#[allow(missing_docs, unreachable_pub, dead_code, clippy::all, clippy::undocumented_unsafe_blocks)]
mod node {
    include!(concat!(env!("OUT_DIR"), "/node.skel.rs"));
}

/// Maximum RX queues of a port with a socket, as `sockets` in `src/bpf/redirect.bpf.c`.
pub const MAX_QUEUES: u32 = 64;

/// The maps shared by all instances.
#[derive(Debug)]
pub(crate) struct SharedMaps {
    pub(crate) local_pods: LocalPods,
    pub(crate) liveness: ProcessLiveness,
    /// Otherwise each program has a map of its own, which nothing reads.
    pub(crate) sources: Option<TranslatedSources>,
}

impl SharedMaps {
    pub(crate) fn create() -> Result<Self, LoadError> {
        Ok(Self { local_pods: LocalPods::create()?, liveness: ProcessLiveness::create()?, sources: None })
    }
}

/// An instance in the kernel; it and its maps live as long as these descriptors or an attachment.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) fd: OwnedFd,
    pub(crate) sockets: MapHandle,
    pub(crate) outcomes: MapHandle,
    pub(crate) own: MapHandle,
    /// The program for the node's end of the host port; only for that role.
    pub(crate) egress_check: Option<OwnedFd>,
}

/// Opens a skeleton, sets the program's constants and passes the shared maps. The same for both skeletons, whose types
/// are generated separately.
macro_rules! open {
    ($builder:ty, $storage:expr, $options:expr, $shared:expr) => {{
        let failed = |source| LoadError::new("the XDP program", source);
        let mut open = <$builder>::default().open($storage).map_err(failed)?;
        let constants = open.maps.rodata_data.as_deref_mut().expect("the skeleton maps its constants");
        constants.on_miss = match $options.on_miss {
            OnMiss::Drop => libbpf_rs::libbpf_sys::XDP_DROP,
            OnMiss::Pass => libbpf_rs::libbpf_sys::XDP_PASS,
        };
        constants.uplink = u32::from($options.role == Role::Uplink);
        constants.pod = u32::from($options.role == Role::Pod);
        constants.bridge = $options.bridge.map_or(0, |bridge| bridge.index);
        open.maps.local_pods.reuse_fd($shared.local_pods.map().as_fd()).map_err(failed)?;
        open.maps.alive.reuse_fd($shared.liveness.map().as_fd()).map_err(failed)?;
        open
    }};
}

macro_rules! loaded {
    ($loaded:expr, $egress_check:expr) => {{
        let loaded = $loaded;
        let handle = |map| MapHandle::try_from(map).map_err(|source| LoadError::new("the program's maps", source));
        Ok(Self {
            fd: duplicate(loaded.progs.penstock.as_fd())?,
            sockets: handle(&*loaded.maps.sockets)?,
            outcomes: handle(&*loaded.maps.outcomes)?,
            own: handle(&*loaded.maps.own_addresses)?,
            egress_check: $egress_check(&loaded)?,
        })
    }};
}

impl Program {
    /// Loads the program of this role through the verifier.
    pub(crate) fn load(options: AttachOptions, shared: &SharedMaps) -> Result<Self, LoadError> {
        if options.role == Role::Pod {
            return with_long_packets(options.mode, |flags| Self::load_for_pod(options, shared, flags));
        }
        let functions = ConnectionFunctions::of_kernel();
        if options.role == Role::Uplink {
            // Packets longer than a frame go by the kernel.
            return Self::load_for_node(options, shared, functions, 0);
        }
        with_long_packets(options.mode, |flags| Self::load_for_node(options, shared, functions, flags))
    }

    fn load_for_pod(options: AttachOptions, shared: &SharedMaps, flags: u32) -> Result<Self, LoadError> {
        let mut storage = MaybeUninit::uninit();
        let mut open = open!(pod::RedirectSkelBuilder, &mut storage, options, shared);
        open.progs.penstock.set_flags(flags);
        let loaded = open.load().map_err(|source| LoadError::new("the XDP program", source))?;
        loaded!(loaded, |_: &pod::RedirectSkel<'_>| Ok(None))
    }

    /// The same for an uplink or the host port. `functions`: those that it calls, which the kernel must have.
    fn load_for_node(
        options: AttachOptions,
        shared: &SharedMaps,
        functions: ConnectionFunctions,
        flags: u32,
    ) -> Result<Self, LoadError> {
        let failed = |source| LoadError::new("the XDP program", source);
        let mut storage = MaybeUninit::uninit();
        let mut open = open_for_node(&mut storage, options, shared)?;
        let constants = open.maps.rodata_data.as_deref_mut().expect("the skeleton maps its constants");
        constants.finds_connections = functions.lookups.into();
        constants.reads_connections = functions.reads.into();
        constants.casts_packets = functions.casts.into();
        if let Some(sources) = &shared.sources {
            open.maps.sources.reuse_fd(sources.map().as_fd()).map_err(failed)?;
        }
        open.progs.penstock.set_flags(flags);
        let is_host = options.role == Role::Host;
        open.progs.penstock_leave.set_autoload(is_host);
        loaded!(open.load().map_err(failed)?, |loaded: &node::RedirectSkel<'_>| {
            is_host.then(|| duplicate(loaded.progs.penstock_leave.as_fd())).transpose()
        })
    }
}

/// Loads a program that takes packets of several buffers. Kernels before 5.18 know none (BPF_F_XDP_HAS_FRAGS in linux/bpf.h).
/// Where it runs in generic mode, the pod's stack hands over what it would segment, which is no packet.
/// An error of the first attempt is in no log: it would be there for each pod, and the second attempt meets it again if it matters.
fn with_long_packets(mode: ModeChoice, load: impl Fn(u32) -> Result<Program, LoadError>) -> Result<Program, LoadError> {
    if mode == ModeChoice::Generic {
        return load(0);
    }
    quietly(|| load(libbpf_rs::libbpf_sys::BPF_F_XDP_HAS_FRAGS)).or_else(|_| load(0))
}

fn open_for_node<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    options: AttachOptions,
    shared: &SharedMaps,
) -> Result<node::OpenRedirectSkel<'a>, LoadError> {
    Ok(open!(node::RedirectSkelBuilder, storage, options, shared))
}

fn duplicate(program: BorrowedFd<'_>) -> Result<OwnedFd, LoadError> {
    program.try_clone_to_owned().map_err(|source| LoadError::new("the program", source.into()))
}

#[cfg(test)]
mod tests;
