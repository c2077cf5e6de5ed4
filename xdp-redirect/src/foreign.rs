//! XDP programs of others on an interface.

use std::io;

use libbpf_rs::libbpf_sys;
use libbpf_rs::query::ProgInfoIter;

/// Name of this crate's program (`src/bpf/redirect.bpf.c`).
const OWN: &[u8] = b"penstock";

/// An XDP program attached by another application.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForeignProgram {
    pub id: u32,
    /// Its name, if it has one and it could be read.
    pub name: Option<String>,
}

impl ForeignProgram {
    /// The program on the interface with this index, in the calling thread's network namespace; `None` if there is none
    /// or it belongs to this crate (of a running or an earlier daemon).
    pub fn on(index: u32) -> io::Result<Option<Self>> {
        let interface = i32::try_from(index).map_err(io::Error::other)?;
        let mut id = 0;
        // SAFETY: the id is written to `id`, which lives across the call; no other memory is passed.
        match unsafe { libbpf_sys::bpf_xdp_query_id(interface, 0, &mut id) } {
            0 if id == 0 => return Ok(None),
            0 => {}
            error => return Err(io::Error::from_raw_os_error(-error)),
        }
        let found = ProgInfoIter::default().find(|program| program.id == id);
        match found {
            Some(program) if program.name.to_bytes() == OWN => Ok(None),
            program => Ok(Some(Self { id, name: program.map(|program| program.name.to_string_lossy().into_owned()) })),
        }
    }
}
