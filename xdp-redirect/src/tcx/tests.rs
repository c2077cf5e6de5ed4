use super::*;
use crate::ConnectionMapSizes;

/// A group of connections.
const SIZES: ConnectionMapSizes =
    ConnectionMapSizes { version: 1, table: 136, tags: (1, 64), entries: (32, 64), usage: (32, 32) };

#[test]
fn the_tcx_programs_load_whichever_functions_the_kernel_has() {
    let connections = ConnectionMaps::open(None, &SIZES).unwrap();
    for (lookups, reads) in [(false, false), (true, false), (true, true)] {
        let functions = ConnectionFunctions { lookups, reads };
        for connections in [None, Some(&connections)] {
            let loaded = TcxPrograms::load_with(&TcxOptions::default(), connections, functions);
            loaded.unwrap_or_else(|error| panic!("{functions:?}, offload {}: {error}", connections.is_some()));
        }
    }
}
