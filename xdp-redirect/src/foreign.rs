//! XDP programs on an interface that are not this crate's.

use std::io;

use libbpf_rs::libbpf_sys;
use libbpf_rs::query::ProgInfoIter;

/// Name of this crate's program (`src/bpf/redirect.bpf.c`).
const OWN: &[u8] = b"penstock";

/// An XDP program that somebody else has attached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForeignProgram {
    /// Its number.
    pub id: u32,
    /// Its name, if it has one and it could be read.
    pub name: Option<String>,
}

impl ForeignProgram {
    /// The program on the interface of this index, in the calling thread's network namespace, unless there is none or it
    /// is this crate's: a running daemon's, or one that a daemon left.
    ///
    /// # Errors
    /// What the kernel says where it does not tell.
    pub fn on(index: u32) -> io::Result<Option<Self>> {
        let interface = i32::try_from(index).map_err(io::Error::other)?;
        let mut id = 0;
        // SAFETY: the number is written to `id`, which lives across the call; no other memory is passed.
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
