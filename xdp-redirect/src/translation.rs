//! Whether programs can query the kernel's connection tracking for translated connections.

use std::ffi::CStr;

use libbpf_rs::libbpf_sys;

/// Functions called in `src/bpf/translation.h`.
const FUNCTIONS: [&CStr; 2] = [c"bpf_xdp_ct_lookup", c"bpf_ct_release"];
/// The module that contains them if they are not built in.
const MODULE: &CStr = c"nf_conntrack";

/// Whether the running kernel lets an XDP program look up a connection: Linux 5.18 or later, with connection tracking
/// built in or loaded, and its types (CONFIG_DEBUG_INFO_BTF). Otherwise an uplink would redirect packets that the
/// kernel must translate first.
pub fn can_find_translated() -> bool {
    // SAFETY: the call takes no arguments; the result is owned by us, or null.
    let kernel = unsafe { libbpf_sys::btf__load_vmlinux_btf() };
    if kernel.is_null() {
        return false;
    }
    let has_all = |types| FUNCTIONS.iter().all(|function| has(types, function));
    // SAFETY: the name ends in NUL, and `kernel` lives until it is freed below, after the module's types.
    let in_module = || unsafe {
        let module = libbpf_sys::btf__load_module_btf(MODULE.as_ptr(), kernel);
        let found = !module.is_null() && has_all(module);
        libbpf_sys::btf__free(module);
        found
    };
    let found = has_all(kernel) || in_module();
    // SAFETY: we own it, and nothing refers to it any more.
    unsafe { libbpf_sys::btf__free(kernel) };
    found
}

fn has(types: *const libbpf_sys::btf, function: &CStr) -> bool {
    // SAFETY: `types` is alive and the name ends in NUL; both for the length of the call.
    unsafe { libbpf_sys::btf__find_by_name_kind(types, function.as_ptr(), libbpf_sys::BTF_KIND_FUNC) > 0 }
}
