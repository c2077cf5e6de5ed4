use super::*;
use crate::ConnectionMapSizes;

const SIZES: ConnectionMapSizes =
    ConnectionMapSizes { version: 1, table: 144, tags: (1, 64), entries: (32, 64), usage: (32, 32) };

#[test]
fn the_tcx_programs_load_whichever_functions_the_kernel_has() {
    let connections = ConnectionMaps::open(None, &SIZES).unwrap();
    for (lookups, reads, casts) in
        [(false, false, false), (false, true, false), (true, true, false), (true, false, true), (true, true, true)]
    {
        let functions = ConnectionFunctions { lookups, reads, casts };
        for connections in [None, Some(&connections)] {
            let loaded = TcxPrograms::load_with(&TcxOptions::default(), connections, functions);
            loaded.unwrap_or_else(|error| panic!("{functions:?}, offload {}: {error}", connections.is_some()));
        }
    }
}

#[test]
fn a_kernel_that_loads_but_lacks_tcx_has_no_tcx() {
    let programs = TcxPrograms::load(&TcxOptions::default(), None).unwrap();
    programs.try_attaching().unwrap();
    // As a kernel before 6.6 answers, which has not heard of the hook.
    let (unknown, [from_pod, to_pod, ..]) = (libbpf_sys::bpf_attach_type::MAX, programs.pinned());
    let refused = try_links([(from_pod, BPF_TCX_INGRESS), (to_pod, unknown)]).unwrap_err();
    assert!(matches!(refused, AttachError::Tcx { .. }), "{refused}");
}
