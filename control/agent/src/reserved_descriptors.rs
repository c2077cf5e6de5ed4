//! Descriptors that are held for the moment in which none is left: a new pod's interface must still be closed then.

use std::fs::File;

/// Enough for the programs and maps of some interfaces.
const COUNT: usize = 64;

/// Descriptors of nothing.
#[derive(Debug, Default)]
pub(super) struct ReservedDescriptors(Vec<File>);

impl ReservedDescriptors {
    /// As many as there are, if not all.
    pub(super) fn hold() -> Self {
        let mut reserved = Self::default();
        reserved.refill();
        reserved
    }

    /// Sets them free, for what cannot wait. Returns whether there were any.
    pub(super) fn release(&mut self) -> bool {
        !std::mem::take(&mut self.0).is_empty()
    }

    /// Holds those again that are free meanwhile.
    pub(super) fn refill(&mut self) {
        while self.0.len() < COUNT {
            let Ok(file) = File::open("/dev/null") else { return };
            self.0.push(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_released_is_held_again() {
        let mut reserved = ReservedDescriptors::hold();
        assert!(reserved.release() && !reserved.release());
        reserved.refill();
        assert_eq!(reserved.0.len(), COUNT);
    }
}
