//! From an identity to the row of rules that name it as a peer.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::rows::Row;

/// The class of all pod addresses that the same selectors match. Numbered from 1; small numbers are reused first, since
/// tables are indexed by them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(transparent)]
pub struct Identity(pub NonZeroU32);

const PAGE: usize = 64;

/// A two-level array indexed by identity. A change copies one page and the list of pages; the rest is shared.
#[derive(Clone, Debug)]
pub(super) struct Peers {
    pages: Arc<[Option<Arc<[Row; PAGE]>>]>,
    /// The row of a pod whose identity no selector of this table matches.
    any_pod: Row,
}

impl Peers {
    /// No named identity; every pod has the row `any_pod`.
    pub(super) fn new(any_pod: Row) -> Self {
        Self { pages: Arc::new([]), any_pod }
    }

    /// The row of an identity; 0 stands for an address that is not a pod's.
    #[inline]
    pub(super) fn row(&self, identity: u32) -> Row {
        if identity == 0 {
            return 0;
        }
        match self.pages.get(identity as usize / PAGE) {
            Some(Some(page)) => page[identity as usize % PAGE],
            _ => self.any_pod,
        }
    }

    /// The row of a pod that no selector matches.
    pub(super) fn any_pod(&self) -> Row {
        self.any_pod
    }

    /// Changes the rows of identities. A page without named identities is freed.
    pub(super) fn with(&self, rows: impl IntoIterator<Item = (Identity, Row)>) -> Self {
        let mut pages = self.pages.to_vec();
        for (identity, row) in rows {
            let (page, slot) = (identity.0.get() as usize / PAGE, identity.0.get() as usize % PAGE);
            if pages.len() <= page {
                pages.resize(page + 1, None);
            }
            let rows = Arc::make_mut(pages[page].get_or_insert_with(|| Arc::new([self.any_pod; PAGE])));
            rows[slot] = row;
            if row == self.any_pod && rows.iter().all(|row| *row == self.any_pod) {
                pages[page] = None;
            }
        }
        while let Some(None) = pages.last() {
            pages.pop();
        }
        Self { pages: pages.into(), any_pod: self.any_pod }
    }

    /// Size of the pages in bytes.
    pub(super) fn size(&self) -> usize {
        size_of_val(&*self.pages) + self.pages.iter().flatten().count() * size_of::<[Row; PAGE]>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(number: u32) -> Identity {
        Identity(NonZeroU32::new(number).unwrap())
    }

    #[test]
    fn row_of_named_and_unnamed_identities_and_of_non_pods() {
        let peers = Peers::new(7).with([(identity(1), 2), (identity(64), 3), (identity(1000), 4)]);
        for (number, row) in [(0, 0), (1, 2), (2, 7), (63, 7), (64, 3), (1000, 4), (1001, 7), (1 << 30, 7)] {
            assert_eq!(peers.row(number), row, "identity {number}");
        }
    }

    #[test]
    fn removing_all_identities_frees_pages_but_no_older_copies() {
        let before = Peers::new(0).with([(identity(3), 2), (identity(500), 2)]);
        let after = before.with([(identity(3), 0), (identity(500), 0)]);
        assert_eq!(after.size(), 0);
        assert_eq!(before.row(500), 2);
    }
}
