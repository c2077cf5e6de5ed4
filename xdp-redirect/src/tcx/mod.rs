//! The tcx programs at pods' veths, for packets that are whole: not segmented, and on the kernel's side of its translation.
//!
//! One set of programs serves all pods; what they must know of an interface is in maps. [`TcxPrograms::attach_pod`]
//! attaches it to a pod's veth, where everything is dropped until [`PodVeth::serve`]. Packets go to a worker through its
//! veth pair ([`WorkerPair`]), and come back the same way.

mod host_routing;
mod maps;
mod tunnels;
mod uplink;
mod veth;

use std::io;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use host_routing::KeptBy;
use libbpf_rs::libbpf_sys::{BPF_TCX_EGRESS, BPF_TCX_INGRESS};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, libbpf_sys};
use maps::{Maps, share_maps};
pub use tunnels::RemoteNetwork;
pub use uplink::{AttachedUplink, Destination, NO_UPLINK_NUMBER, UplinkNumber};
use veth::TARGET;
pub use veth::{Filtered, PodVeth, ServedPort};

use crate::address_key;
use crate::attach::{Attachment, FilterWatch, Method, replace_program};
use crate::connection_maps::ConnectionMaps;
use crate::liveness::ProcessLiveness;
use crate::pins::{InterfaceLink, Pinned, PinnedProgram, Pins};
use crate::translation::ConnectionFunctions;
use crate::{AttachError, Interface, LoadError, ProgramOutcome, ServiceAddresses, TranslatedSources};

#[allow(missing_docs, unreachable_pub, dead_code, clippy::all, clippy::undocumented_unsafe_blocks)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/tcx.skel.rs"));
}

/// Ports that the programs tell apart, as `MAX_PORTS` in `src/bpf/tcx_maps.h`.
pub const MAX_TCX_PORTS: u16 = 4096;
/// Workers that packets can be spread over, as `MAX_WORKERS` in `src/bpf/tcx_maps.h`.
pub const MAX_TCX_WORKERS: usize = 64;
/// Addresses of a pod, its link-local ones included, as `struct pod_macs` in `src/bpf/tcx_maps.h`.
const MAX_OWN_ADDRESSES: u32 = 32;

/// CPUs whose packets have a worker of their own, as `MAX_CPUS` in `src/bpf/tcx_maps.h`.
const MAX_CPUS: usize = 1024;

/// How to load the programs.
#[derive(Clone, Debug)]
pub struct TcxOptions {
    /// How many workers there are: from 1 to [`MAX_TCX_WORKERS`].
    pub workers: usize,
    /// Whether packets pass to the kernel once the process has ended ([`TcxPrograms::alive`]); otherwise they are dropped.
    pub open_without_workers: bool,
    /// Where programs note whose packets the node has translated.
    pub sources: Option<TranslatedSources>,
    /// The addresses of Services at which egress policy is postponed until the node has translated the packet.
    pub services: Option<ServiceAddresses>,
    /// Whether packets between pods and other machines pass the node's stack by, where nothing there has a say in them.
    pub host_routing: bool,
    /// Where programs count what they send to workers, and how many packets of a pod may wait there; more are dropped.
    pub waiting: Option<(WaitingArray, u32)>,
}

impl Default for TcxOptions {
    fn default() -> Self {
        Self {
            workers: 1,
            open_without_workers: false,
            sources: None,
            services: None,
            host_routing: false,
            waiting: None,
        }
    }
}

/// The array in which programs and workers count the packets that wait for a worker: `waiting` in `src/bpf/tcx_maps.h`.
#[derive(Clone, Debug)]
pub struct WaitingArray(Arc<MapHandle>);

impl WaitingArray {
    /// A new array with an element of so many bytes for each port, [`MAX_TCX_PORTS`]. Needs CAP_BPF (or root).
    pub fn create(element: u32) -> Result<Self, LoadError> {
        let options = libbpf_sys::bpf_map_create_opts { map_flags: libbpf_sys::BPF_F_MMAPABLE, ..map_options() };
        let map = MapHandle::create(MapType::Array, Some("waiting"), 4, element, MAX_TCX_PORTS.into(), &options);
        Ok(Self(Arc::new(map.map_err(|source| LoadError::new("the array of waiting packets", source))?)))
    }

    /// Its descriptor, for mapping it.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }
}

/// The kernel did not change a map of the tcx programs.
#[derive(Debug, thiserror::Error)]
#[error(
    "{thing}: the kernel does not change the maps of the tcx programs ({source}): is memory short, or are there too many pods?"
)]
pub struct TcxMapError {
    thing: String,
    source: libbpf_rs::Error,
}

/// Who sends a frame of [`TcxPrograms::try_frame`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TriedSender {
    Pod,
    /// The node itself, to the pod.
    Node,
    /// The node's stack, to the pod: it forwards what has entered by another interface.
    Stack,
}

/// Result of [`TcxPrograms::try_frame`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TriedFrame {
    /// The action that the program returned: `TC_ACT_*` of `linux/pkt_cls.h`.
    pub action: u32,
    /// The frame as the program left it.
    pub frame: Vec<u8>,
}

/// The loaded programs and their maps.
#[derive(Debug)]
pub struct TcxPrograms {
    /// On what a pod sends, and on what it gets.
    at_pods: [(PinnedProgram, OwnedFd, libbpf_sys::bpf_attach_type); 2],
    from_worker: OwnedFd,
    to_uplink: OwnedFd,
    from_uplink: OwnedFd,
    what_keeps: OwnedFd,
    maps: Arc<Maps>,
    liveness: ProcessLiveness,
    pins: Option<Pins>,
    method: Method,
    /// Whether they take over links of an earlier process ([`TcxPrograms::take_over`]).
    is_live: AtomicBool,
}

impl TcxPrograms {
    /// Loads the programs through the verifier, which takes two tenths of a second. Needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON (or
    /// root), and Linux 6.6 for tcx. Before one is attached, they must know the workers: [`TcxPrograms::set_pairs`].
    ///
    /// With `connections` they forward packets of established connections by themselves.
    pub fn load(options: &TcxOptions, connections: Option<&ConnectionMaps>) -> Result<Self, LoadError> {
        Self::load_with(options, connections, ConnectionFunctions::of_kernel())
    }

    /// `functions`: those that they call, which the kernel must have.
    fn load_with(
        options: &TcxOptions,
        connections: Option<&ConnectionMaps>,
        functions: ConnectionFunctions,
    ) -> Result<Self, LoadError> {
        let failed = |source| LoadError::new("the tcx programs", source);
        let mut storage = MaybeUninit::uninit();
        let mut open = skeleton::TcxSkelBuilder::default().open(&mut storage).map_err(failed)?;
        let constants = open.maps.rodata_data.as_deref_mut().expect("the skeleton maps its constants");
        constants.open_without_workers = options.open_without_workers.into();
        constants.workers = options.workers.min(MAX_TCX_WORKERS) as u32;
        // Not 0, which every packet has that nothing has marked.
        constants.passed = rand::random::<u32>() | 1;
        constants.offload = connections.is_some().into();
        let method = Method::of_kernel();
        // It reads the hooks' tcx entries to see whether others have filters there.
        constants.host_routing = (options.host_routing && method.watch().is_none()).into();
        (constants.reads_connections, constants.casts_packets) = (functions.reads.into(), functions.casts.into());
        if let Some((_, share)) = &options.waiting {
            constants.share = *share;
        }
        share_maps(&mut open.maps, options, connections).map_err(failed)?;
        let (own, outcomes) = (new_own_addresses().map_err(failed)?, new_outcomes().map_err(failed)?);
        open.maps.own_addresses.set_inner_map_fd(own.as_fd()).map_err(failed)?;
        open.maps.outcomes.set_inner_map_fd(outcomes.as_fd()).map_err(failed)?;
        let liveness = ProcessLiveness::create()?;
        open.maps.alive.reuse_fd(liveness.map().as_fd()).map_err(failed)?;
        let loaded = open.load().map_err(failed)?;
        let program = |program: BorrowedFd<'_>| program.try_clone_to_owned().map_err(|error| failed(error.into()));
        Ok(Self {
            at_pods: [
                (PinnedProgram::FromPod, program(loaded.progs.from_pod.as_fd())?, BPF_TCX_INGRESS),
                (PinnedProgram::ToPod, program(loaded.progs.to_pod.as_fd())?, BPF_TCX_EGRESS),
            ],
            from_worker: program(loaded.progs.from_worker.as_fd())?,
            to_uplink: program(loaded.progs.to_uplink.as_fd())?,
            from_uplink: program(loaded.progs.from_uplink.as_fd())?,
            what_keeps: program(loaded.progs.what_keeps.as_fd())?,
            maps: Arc::new(Maps::of(&loaded.maps).map_err(failed)?),
            liveness,
            pins: None,
            method,
            is_live: AtomicBool::new(false),
        })
    }

    /// Where the kernel has no tcx: the filters, which somebody has to watch.
    pub fn filter_watch(&self) -> Option<&Arc<FilterWatch>> {
        self.method.watch()
    }

    /// Whether the kernel attaches the programs: tried on an interface of a temporary network namespace where that can be
    /// made (CAP_SYS_ADMIN).
    pub fn try_attaching(&self) -> Result<(), AttachError> {
        self.method.try_attaching(self.at_pods.each_ref().map(|(_, program, hook)| (program.as_fd(), *hook)))
    }

    /// Pins links from now on, so that they outlast the process.
    pub fn with_pins(self, pins: Option<Pins>) -> Self {
        Self { pins, ..self }
    }

    /// Says where workers are. `pairs`, by worker: interface index of the node's end of its pair, of as many as the programs were
    /// loaded for. `cpus`, by worker: the CPU whose packets it gets. Packets that other CPUs send go to the worker that their
    /// connection's hash names.
    pub fn set_pairs(&self, pairs: &[u32], cpus: &[usize]) -> Result<(), TcxMapError> {
        let (mut of_workers, mut of_cpus) = ([0; MAX_TCX_WORKERS], [0; MAX_CPUS]);
        of_workers.iter_mut().zip(pairs).for_each(|(place, &pair)| *place = pair);
        for (&cpu, &pair) in cpus.iter().zip(pairs.iter().take(MAX_TCX_WORKERS)) {
            // Packets of a CPU behind the last go by hash.
            of_cpus.get_mut(cpu).into_iter().for_each(|place| *place = pair);
        }
        let all: Vec<u8> = of_workers.iter().chain(&of_cpus).copied().flat_map(u32::to_ne_bytes).collect();
        let failed = |source| TcxMapError { thing: "the workers' pairs".to_owned(), source };
        self.maps.pairs.update(&0_u32.to_ne_bytes(), &all, MapFlags::ANY).map_err(failed)
    }

    /// From now on these programs run where an earlier process has left its own: first on these interfaces, then on each
    /// that is attached. Until this is called those of the earlier process run on, with its maps: what they forward
    /// without a worker passes without a gap. First on uplinks: what the programs at pods postpone must be asked there.
    pub fn take_over<'a>(
        &self,
        uplinks: impl IntoIterator<Item = &'a mut AttachedUplink>,
        veths: impl IntoIterator<Item = &'a mut PodVeth>,
    ) -> Result<(), AttachError> {
        self.is_live.store(true, Ordering::Relaxed);
        uplinks.into_iter().try_for_each(|uplink| self.take_over_uplink(uplink))?;
        veths.into_iter().try_for_each(|veth| self.take_over_veth(veth))
    }

    fn take_over_link(
        &self,
        link: &mut TcxLink,
        interface: &Interface,
        program: &OwnedFd,
        hook: libbpf_sys::bpf_attach_type,
    ) -> Result<(), AttachError> {
        if !link.is_of_earlier {
            return Ok(());
        }
        let earlier = match &link.link.attachment {
            Attachment::Link(earlier) => earlier,
            Attachment::Filter { .. } => {
                // It takes the place of the filter with this name.
                self.method.attach(program.as_fd(), interface, hook, link.pinned.program.filter())?;
                link.is_of_earlier = false;
                return Ok(());
            }
        };
        if let Err(error) = replace_program(earlier, program) {
            tracing::warn!(%interface, %error, "the pinned tcx link cannot be taken over; a new one is made");
            let new = self.new_link(interface, link.pinned, program, hook)?;
            let mut earlier = std::mem::replace(&mut link.link, new);
            earlier.attachment.detach();
            // Its pin is the new one's.
            earlier.keep();
        }
        link.is_of_earlier = false;
        Ok(())
    }

    /// Runs the program on what a pod sends (`from_pod`) or on what the node's stack sends to it, on a frame of this
    /// interface, without sending anything (`BPF_PROG_TEST_RUN`). `segment`: bytes of payload of each segment that it would
    /// become on a wire, or 0. For tests of what the programs decide.
    pub fn try_frame(&self, sender: TriedSender, interface: u32, frame: &[u8], segment: u32) -> io::Result<TriedFrame> {
        const LOOPBACK: u32 = 1;
        let (_, program, _) = &self.at_pods[usize::from(sender != TriedSender::Pod)];
        let came_by = if sender == TriedSender::Stack { LOOPBACK } else { 0 };
        self.try_program(program, interface, came_by, frame, segment)
    }

    fn try_program(
        &self,
        program: &OwnedFd,
        interface: u32,
        came_by: u32,
        frame: &[u8],
        segment: u32,
    ) -> io::Result<TriedFrame> {
        // The kernel wants the padding, too, to be zero.
        let mut context = MaybeUninit::<skeleton::types::__sk_buff>::zeroed();
        // SAFETY: numbers and pointers, for all of which zero is a valid value.
        let context = unsafe { context.assume_init_mut() };
        (context.ifindex, context.gso_size) = (interface, segment);
        context.ingress_ifindex = came_by;
        let mut after = vec![0; frame.len()];
        let mut options = libbpf_sys::bpf_test_run_opts {
            sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
            data_in: frame.as_ptr().cast(),
            data_size_in: frame.len() as u32,
            data_out: after.as_mut_ptr().cast(),
            data_size_out: after.len() as u32,
            ctx_size_in: size_of_val(context) as u32,
            ctx_in: (&raw mut *context).cast(),
            repeat: 1,
            ..Default::default()
        };
        // SAFETY: all buffers live across the call and have the lengths that the options say.
        let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut options) };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        Ok(TriedFrame { action: options.retval, frame: after })
    }

    /// Packets of established connections that the programs forwarded by themselves: from pod to pod, from a pod to the
    /// node's stack, and from there to a pod; past that, from a pod to another machine, and from there to a pod.
    pub fn offloaded(&self) -> Result<[TrafficCount; 5], libbpf_rs::Error> {
        let mut counts = [TrafficCount::default(); 5];
        for (way, count) in (0u32..).zip(&mut counts) {
            [*count] = sums(&self.maps.offloaded, way)?;
        }
        Ok(counts)
    }

    /// The programs whose links are pinned: on what a pod sends, on what the node's stack sends to it, on what it sends to another
    /// machine, and on what another machine sends.
    pub(crate) fn pinned(&self) -> [BorrowedFd<'_>; 4] {
        let [(_, from_pod, _), (_, to_pod, _)] = &self.at_pods;
        [from_pod, to_pod, &self.to_uplink, &self.from_uplink].map(AsFd::as_fd)
    }

    /// As long as this socket is open in any process, [`TcxOptions::open_without_workers`] passes nothing.
    pub fn alive(&self) -> BorrowedFd<'_> {
        self.liveness.socket()
    }

    /// From now on the programs take the process for one that has ended. For tests of what they do then.
    pub fn forget_process(&self) -> Result<(), libbpf_rs::Error> {
        self.liveness.map().delete(&0_u32.to_ne_bytes())
    }

    /// The pins, if links are pinned.
    pub fn pins(&self) -> Option<&Pins> {
        self.pins.as_ref()
    }

    /// Attaches to the node's end of a worker's pair: what the worker sends is delivered.
    pub fn attach_worker(&self, pair: &Interface) -> Result<WorkerPair, AttachError> {
        let link = self.method.attach(self.from_worker.as_fd(), pair, BPF_TCX_INGRESS, "penstock_from_worker")?;
        Ok(WorkerPair { interface: pair.clone(), _link: InterfaceLink::new(link, None) })
    }

    fn attach(
        &self,
        interface: &Interface,
        program: PinnedProgram,
        descriptor: &OwnedFd,
        hook: libbpf_sys::bpf_attach_type,
    ) -> Result<TcxLink, AttachError> {
        let pinned = Pinned { program, interface: interface.index };
        let find = |pins: &Pins| match self.method {
            Method::Tcx => pins.take(pinned).map(Attachment::Link),
            Method::Clsact(_) => self.method.find_filter(interface.index, hook, program.filter()),
        };
        if let Some(pins) = &self.pins
            && let Some(attachment) = find(pins)
        {
            let link = InterfaceLink::new(attachment, Some((pins.clone(), pinned)));
            return Ok(TcxLink { link, pinned, is_of_earlier: true });
        }
        Ok(TcxLink { link: self.new_link(interface, pinned, descriptor, hook)?, pinned, is_of_earlier: false })
    }

    fn new_link(
        &self,
        interface: &Interface,
        pinned: Pinned,
        program: &OwnedFd,
        hook: libbpf_sys::bpf_attach_type,
    ) -> Result<InterfaceLink, AttachError> {
        let attachment = self.method.attach(program.as_fd(), interface, hook, pinned.program.filter())?;
        let Some(pins) = &self.pins else { return Ok(InterfaceLink::new(attachment, None)) };
        pins.pin(pinned, &attachment)
            .map_err(|source| AttachError::Pin { interface: interface.name.clone(), source })?;
        Ok(InterfaceLink::new(attachment, Some((pins.clone(), pinned))))
    }

    /// Marks this address as a local pod's, whose packets come in by these interfaces: by any other, or if the node itself
    /// sends it, a packet to a pod with this source is dropped. `None`: no packet may have it.
    pub fn set_pod_address(&self, address: IpAddr, by: Option<Entrances>) -> Result<(), TcxMapError> {
        let Entrances { veth, stack } = by.unwrap_or(Entrances { veth: 0, stack: 0 });
        let mut value = [0; 8];
        value[..4].copy_from_slice(&veth.to_ne_bytes());
        value[4..].copy_from_slice(&stack.to_ne_bytes());
        let set = self.maps.pod_addresses.update(&address_key(address), &value, MapFlags::ANY);
        set.map_err(|source| TcxMapError { thing: format!("address {address}"), source })
    }

    /// This address is no local pod's any more. Removing a missing address is not an error.
    pub fn remove_pod_address(&self, address: IpAddr) -> Result<(), TcxMapError> {
        match self.maps.pod_addresses.delete(&address_key(address)) {
            Err(source) if source.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(TcxMapError { thing: format!("address {address}"), source })
            }
            _ => Ok(()),
        }
    }
}

/// Indices of the interfaces by which a pod's packets come to another pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entrances {
    /// The node's end of its veth: a bridge forwards by it, also what br_netfilter has translated.
    pub veth: u32,
    /// By which they enter the node's stack: the veth, or the bridge of which it is a port.
    pub stack: u32,
}

/// Packets, as segments on a wire, and their bytes, Ethernet headers of long segments counted once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TrafficCount {
    pub packets: u64,
    pub bytes: u64,
}

/// Sums of an element of a map with counters by CPU.
fn sums<const N: usize>(map: &MapHandle, key: u32) -> Result<[TrafficCount; N], libbpf_rs::Error> {
    let mut sums = [TrafficCount::default(); N];
    for of_cpu in map.lookup_percpu(&key.to_ne_bytes(), MapFlags::ANY)?.unwrap_or_default() {
        let words = of_cpu.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("chunks of eight")));
        for (at, word) in words.enumerate().take(2 * N) {
            let sum = &mut sums[at / 2];
            *(if at % 2 == 0 { &mut sum.packets } else { &mut sum.bytes }) += word;
        }
    }
    Ok(sums)
}

impl Maps {
    fn interfaces_remove(&self, interface: u32) {
        // It may not be there.
        let _ = self.interfaces.delete(&interface.to_ne_bytes());
    }

    /// Sets what the programs counted for this port to 0: it belonged to another pod.
    fn clear_offloaded(&self, port: u16) -> Result<(), libbpf_rs::Error> {
        let key = u32::from(port).to_ne_bytes();
        let zeros: Vec<Vec<u8>> = match self.offloaded_ports.lookup_percpu(&key, MapFlags::ANY)? {
            Some(values) => values.iter().map(|value| vec![0; value.len()]).collect(),
            None => return Ok(()),
        };
        self.offloaded_ports.update_percpu(&key, &zeros, MapFlags::ANY)
    }

    fn set_target(&self, port: u16, target: &[u8; TARGET]) -> Result<(), libbpf_rs::Error> {
        self.targets.update(&u32::from(port).to_ne_bytes(), target, MapFlags::ANY)
    }
}

/// A pair of a worker, attached. Dropping it detaches the program.
#[derive(Debug)]
pub struct WorkerPair {
    interface: Interface,
    _link: InterfaceLink,
}

impl WorkerPair {
    /// The node's end.
    pub fn interface(&self) -> &Interface {
        &self.interface
    }
}

#[derive(Debug)]
struct TcxLink {
    link: InterfaceLink,
    pinned: Pinned,
    /// It still runs the program of the process that made it.
    is_of_earlier: bool,
}

fn new_own_addresses() -> Result<MapHandle, libbpf_rs::Error> {
    MapHandle::create(MapType::Hash, Some("own"), 16, 6, MAX_OWN_ADDRESSES, &map_options())
}

fn new_outcomes() -> Result<MapHandle, libbpf_rs::Error> {
    MapHandle::create(MapType::PercpuArray, Some("outcomes"), 4, 8, ProgramOutcome::COUNT as u32, &map_options())
}

fn map_options() -> libbpf_sys::bpf_map_create_opts {
    libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests;
