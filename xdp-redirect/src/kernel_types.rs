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
