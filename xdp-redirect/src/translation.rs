//! Functions of the kernel by which programs ask about a packet's connection.

use std::ffi::CStr;

use crate::kernel_types::KernelTypes;

/// Gives a program the kernel's own record of a packet.
const CAST: &CStr = c"bpf_cast_to_kern_ctx";
const READ: [&CStr; 2] = [c"sk_buff", c"nf_conn"];
/// The module that may alone describe the structures, if they are not built in.
const MODULE: &CStr = c"nf_conntrack";

/// Which of this the kernel has. Programs read it from constants, with which the verifier leaves out what they would
/// call or read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ConnectionFunctions {
    /// The connection that the kernel has found for a packet can be read.
    pub(crate) reads: bool,
    /// The packet's record can be loaded from, and need not be copied: Linux 6.2.
    pub(crate) casts: bool,
}

impl ConnectionFunctions {
    /// Those that the running kernel describes in its types.
    pub(crate) fn of_kernel() -> Self {
        let Some(kernel) = KernelTypes::load() else { return Self::default() };
        let has_structs = |types: &KernelTypes| READ.iter().all(|structure| types.has_struct(structure));
        // A module's types include the kernel's.
        let reads = has_structs(&kernel) || kernel.with_module(MODULE, has_structs).unwrap_or(false);
        Self { reads, casts: kernel.has_function(CAST) }
    }
}
