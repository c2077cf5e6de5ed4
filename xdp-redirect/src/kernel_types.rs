//! The running kernel's description of its functions and types (BTF), which says more than its version: distributions
//! take single changes into older ones.

use std::ffi::CStr;
use std::ptr::NonNull;

use libbpf_rs::libbpf_sys;

/// The types of the kernel, or of a module.
pub(crate) struct KernelTypes(NonNull<libbpf_sys::btf>);

impl KernelTypes {
    /// Those of the kernel without its modules; `None` without CONFIG_DEBUG_INFO_BTF.
    pub(crate) fn load() -> Option<Self> {
        // SAFETY: the call takes no arguments; the result is owned by us, or null.
        NonNull::new(unsafe { libbpf_sys::btf__load_vmlinux_btf() }).map(Self)
    }

    /// Asks something of a loaded module's types; `None` if there is no such module.
    pub(crate) fn with_module<T>(&self, name: &CStr, ask: impl FnOnce(&Self) -> T) -> Option<T> {
        // SAFETY: the name ends in NUL. The result, owned by us or null, refers to `self`, which outlives it.
        let module = unsafe { libbpf_sys::btf__load_module_btf(name.as_ptr(), self.0.as_ptr()) };
        NonNull::new(module).map(|module| ask(&Self(module)))
    }

    pub(crate) fn has_function(&self, name: &CStr) -> bool {
        self.has(name, libbpf_sys::BTF_KIND_FUNC)
    }

    pub(crate) fn has_struct(&self, name: &CStr) -> bool {
        self.has(name, libbpf_sys::BTF_KIND_STRUCT)
    }

    fn has(&self, name: &CStr, kind: u32) -> bool {
        // SAFETY: the types live as long as `self`, and the name ends in NUL.
        unsafe { libbpf_sys::btf__find_by_name_kind(self.0.as_ptr(), name.as_ptr(), kind) > 0 }
    }
}

impl Drop for KernelTypes {
    fn drop(&mut self) {
        // SAFETY: we own them, and nothing refers to them any more.
        unsafe { libbpf_sys::btf__free(self.0.as_ptr()) }
    }
}

/// Whether this kernel follows a wild pointer once a stack has received what an AF_XDP socket sent in copy mode. From
/// commit 30f241fcf52a (Linux 6.16.8 and 6.17) to 0ebc27a4c67d (6.17.11 and 6.18) net/xdp/xsk.c keeps a list in the
/// packet's control block, which every receiver overwrites, and which `xsk_destruct_skb` walks. `None`: the kernel does not
/// describe its types.
pub fn panics_on_sends() -> Option<bool> {
    Some(KernelTypes::load()?.has_struct(c"xsk_addr_head"))
}
