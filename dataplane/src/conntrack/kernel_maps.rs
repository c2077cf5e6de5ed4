//! The descriptors of a table that lies in BPF arrays.

use std::os::fd::OwnedFd;
use std::sync::Arc;

/// BPF arrays for a table (`BPF_MAP_TYPE_ARRAY` with `BPF_F_MMAPABLE`), of the sizes that [`KernelMapSizes`](super::KernelMapSizes) says.
#[derive(Clone, Debug)]
pub struct KernelMaps(pub Arc<KernelMapFds>);

/// The descriptors of the arrays. The structures in them are those of `xdp-redirect/src/bpf/conntrack_maps.h`.
#[derive(Debug)]
pub struct KernelMapFds {
    /// One element, `struct table`.
    pub table: OwnedFd,
    /// `struct tags` of each group.
    pub tags: OwnedFd,
    /// `struct entry` of each connection; behind them their openers, which only workers read.
    pub entries: OwnedFd,
    /// `struct kernel_use` of each connection.
    pub uses: OwnedFd,
}

impl PartialEq for KernelMaps {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for KernelMaps {}
