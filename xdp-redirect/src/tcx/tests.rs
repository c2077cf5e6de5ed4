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
fn programs_attach_as_tcx_links_and_as_filters() {
    let programs = TcxPrograms::load(&TcxOptions::default(), None).unwrap();
    programs.try_attaching().unwrap();
    let [from_pod, to_pod, ..] = programs.pinned();
    let filters = Method::Clsact(Arc::default());
    filters.try_attaching([(from_pod, BPF_TCX_INGRESS), (to_pod, BPF_TCX_EGRESS)]).unwrap();
}
