//! What programs can ask the kernel's connection tracking.

use std::ffi::CStr;

use crate::kernel_types::KernelTypes;

/// Functions called in `src/bpf/translation.h`, which connection tracking has.
const LOOKUPS: [&CStr; 3] = [c"bpf_xdp_ct_lookup", c"bpf_skb_ct_lookup", c"bpf_ct_release"];
/// Gives a program the kernel's own record of a packet.
const CAST: &CStr = c"bpf_cast_to_kern_ctx";
/// The module that contains the lookups if they are not built in.
const MODULE: &CStr = c"nf_conntrack";

/// The kernel's functions for a packet's connection, which it may have or not. Programs are told by constants, with which the
/// verifier leaves out what they would call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ConnectionFunctions {
    /// A connection can be looked up by addresses and ports: Linux 5.18, with connection tracking.
    pub(crate) lookups: bool,
    /// The connection that the kernel has found for a packet can be read: Linux 6.2.
    pub(crate) reads: bool,
}

impl ConnectionFunctions {
    /// Those that the running kernel describes in its types.
    pub(crate) fn of_kernel() -> Self {
        let Some(kernel) = KernelTypes::load() else { return Self::default() };
        let has_lookups = |types: &KernelTypes| LOOKUPS.iter().all(|function| types.has_function(function));
        let lookups = has_lookups(&kernel) || kernel.with_module(MODULE, has_lookups).unwrap_or(false);
        Self { lookups, reads: lookups && kernel.has_function(CAST) }
    }
}
