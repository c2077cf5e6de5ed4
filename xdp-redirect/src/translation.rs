//! Whether programs can ask the kernel which connections it translates.

use std::ffi::CStr;

use libbpf_rs::libbpf_sys;

/// What `src/bpf/translation.h` calls.
const FUNCTIONS: [&CStr; 2] = [c"bpf_xdp_ct_lookup", c"bpf_ct_release"];
/// Where they are, if they are not in the kernel itself.
const MODULE: &CStr = c"nf_conntrack";

/// Whether the running kernel lets an XDP program look a connection up: Linux 5.18 or later, with connection tracking in it or
/// loaded, and its types (CONFIG_DEBUG_INFO_BTF). Where it does not, an uplink would hand over packets that the kernel must
/// translate first.
pub fn can_find_translated() -> bool {
    // SAFETY: the call takes nothing; what it returns is ours, or null.
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
    // SAFETY: it is ours, and nothing refers to it any more.
    unsafe { libbpf_sys::btf__free(kernel) };
    found
}

fn has(types: *const libbpf_sys::btf, function: &CStr) -> bool {
    // SAFETY: `types` is alive and the name ends in NUL; both for the length of the call.
    unsafe { libbpf_sys::btf__find_by_name_kind(types, function.as_ptr(), libbpf_sys::BTF_KIND_FUNC) > 0 }
}
