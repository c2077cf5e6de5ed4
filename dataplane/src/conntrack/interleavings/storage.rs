//! Entries and tags of loom atomics; each run creates its own.

use crate::conntrack::config::TableMemory;
use crate::conntrack::entry::TableEntry;
use crate::conntrack::hash::Seed;
use crate::conntrack::opener::Opener;
use crate::conntrack::origin::{OpenError, TableOrigin};
use crate::conntrack::path::KernelUse;
use crate::conntrack::shared::SharedMaps;
use crate::conntrack::tags::{LANES, Tags};

pub(in crate::conntrack) struct Storage {
    entries: Box<[TableEntry]>,
    tags: Box<[Tags]>,
    /// Only of a table whose configuration names a file: fewer words, fewer interleavings.
    uses: Option<Box<[KernelUse]>>,
    /// No run asks who opened a connection.
    openers: [Opener; 0],
}

impl Storage {
    pub(in crate::conntrack) fn open(
        groups: u32,
        memory: &TableMemory,
    ) -> Result<(Self, Seed, TableOrigin), OpenError> {
        let entries = (0..groups * LANES).map(|_| TableEntry::new()).collect();
        let tags = (0..groups).map(|_| Tags::new()).collect();
        // Every run must be identical.
        let seed = Seed::from_words(&[3, 5, 7, 11, 13, 17, 19, 23].map(|n: u64| n.wrapping_mul(0x2545_f491_4f6c_dd1d)));
        let has_uses = matches!(memory, TableMemory::File(_));
        let uses = has_uses.then(|| (0..groups * LANES).map(|_| KernelUse::new()).collect());
        Ok((Self { entries, tags, uses, openers: [] }, seed, TableOrigin::New))
    }

    pub(in crate::conntrack) fn entries(&self) -> &[TableEntry] {
        &self.entries
    }

    pub(in crate::conntrack) fn tags(&self) -> &[Tags] {
        &self.tags
    }

    pub(in crate::conntrack) fn uses(&self) -> Option<&[KernelUse]> {
        self.uses.as_deref()
    }

    pub(in crate::conntrack) fn openers(&self) -> &[Opener] {
        &self.openers
    }

    pub(in crate::conntrack) fn shared(&self) -> Option<&SharedMaps> {
        None
    }
}
