//! The path of a connection, as the kernel's programs read it, and what was forwarded of it.

use super::entry::EpochTag;
use super::sync::{AtomicU32, AtomicU64, EXCHANGE, Ordering, overwrite};
use super::time::Tick;
use crate::epoch::Epoch;
use crate::packet::{Flow, Orientation};

/// Where a connection's packets come from and go to, in one word.
///
/// | bits | |
/// |---|---|
/// | 0–20, 21–41 | index of the interface behind which the lower end is, and the higher one; 0 for the node's stack; [`BY_NODE`] |
/// | 42 | a program has forwarded the answer to the opener's SYN or datagram |
/// | 43 | a program has forwarded the acknowledgement that completes a TCP handshake |
/// | 44, 45 | a program has forwarded a FIN from the lower end, the higher; or, without a daemon, a RST of a pod: both |
/// | 46, 47 | packets of this direction go on between these interfaces: from the lower end, the higher |
/// | 48–63 | low bits of the epoch under which they do |
///
/// A worker has sent a packet of a direction on, or, with the one that opens the connection, knows where it sends the answers. A path
/// is valid for the verdict of its own epoch only: after the next evaluation of the connection, a worker has to take each direction
/// once more. What programs have [noted](Noted) stays for as long as the entry holds the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Path(u64);

const END_BITS: u32 = 21;

/// In place of an interface: the node's stack, for an address that nobody but the node may send with. What the stack forwards as it came does
/// not take such a path.
pub(crate) const BY_NODE: u32 = (1 << END_BITS) - 1;

const ENDS: u64 = (1 << (2 * END_BITS)) - 1;
const ANSWERED_AT: u32 = 42;
const CONFIRMED_AT: u32 = ANSWERED_AT + 1;
const FINISHED_AT: u32 = CONFIRMED_AT + 1;
const NOTED: u64 = 0b1111 << ANSWERED_AT;
const TAKEN_AT: u32 = 46;
const EPOCH_AT: u32 = 48;
/// A sweep clears a path this many epochs behind.
const STALE: u64 = 1 << 14;

impl Path {
    /// No path, in an entry that is claimed in this generation. It differs from that of other generations, so that a
    /// worker that is late does not write the path of the entry's last connection.
    pub(super) const fn none(generation: u64) -> Self {
        Self(generation & ENDS)
    }

    /// This path once a packet in direction `orientation` has gone from interface `from` to interface `to` under this
    /// epoch. `None` if an index has too many bits: such a connection stays with the workers.
    fn taken(self, orientation: Orientation, from: u32, to: u32, epoch: EpochTag) -> Option<Self> {
        if (from | to) >> END_BITS != 0 {
            return None;
        }
        let (low, high) = match orientation {
            Orientation::LowToHigh => (from, to),
            Orientation::HighToLow => (to, from),
        };
        let same = u64::from(low) | u64::from(high) << END_BITS | epoch.low_bits() << EPOCH_AT;
        let is_same = self.0 & !(3 << TAKEN_AT) & !NOTED == same;
        let before = if is_same { self.0 } else { same | self.0 & NOTED };
        Some(Self(before | 1 << (TAKEN_AT + orientation as u32)))
    }

    /// The path of a connection whose first packet, in direction `orientation`, has gone from the first of these interfaces to the second
    /// under this epoch, and whose answers go back: as a word. `None` as for [`Path::taken`].
    pub(super) fn of_both_ways(orientation: Orientation, (from, to): (u32, u32), epoch: Epoch) -> Option<u64> {
        let path = Self::none(0).taken(orientation, from, to, EpochTag::of(epoch))?;
        Some(path.both_ways().0)
    }

    /// From a word.
    pub(super) const fn from_word(word: u64) -> Self {
        Self(word)
    }

    pub(super) const fn word(self) -> u64 {
        self.0
    }

    /// The interfaces of the lower end and the higher one.
    pub(super) const fn ends(self) -> [u32; 2] {
        const END: u32 = (1 << END_BITS) - 1;
        [self.0 as u32 & END, (self.0 >> END_BITS) as u32 & END]
    }

    /// The same path under another epoch.
    pub(super) const fn renewed(self, epoch: EpochTag) -> Self {
        Self(self.0 & ((1 << EPOCH_AT) - 1) | epoch.low_bits() << EPOCH_AT)
    }

    /// This path, taken in both directions.
    const fn both_ways(self) -> Self {
        Self(self.0 | 0b11 << TAKEN_AT)
    }
}

/// A connection that the kernel's programs forward, or open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardedConnection {
    /// The flow of the packet that opened it.
    pub(crate) original: Flow,
    /// Interfaces of that packet's source and destination; 0 for the node's stack.
    pub(crate) ends: [u32; 2],
    /// Whether its packets traverse the node's own stack.
    pub(crate) via_host: bool,
}

/// The forwarded packets of one connection, and the path by which the kernel's programs may. Workers write the path, the
/// programs what they note in it, and the ticks. Both count packets, without locked instructions in the programs: where two CPUs forward packets of
/// one direction at the same moment, a count may be lost.
#[repr(C, align(32))]
pub(super) struct KernelUse {
    path: AtomicU64,
    /// Packets by direction, modulo 2³²: the lower end's first.
    packets: [AtomicU32; 2],
    /// By direction: the tick of the last packet that a program forwarded in the low 22 bits, 0 if there was none; and bytes
    /// of IP packets modulo 2⁴² above.
    used: [AtomicU64; 2],
}

/// Packets of a TCP connection that programs have forwarded and that lead to another state: only workers write states.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Noted {
    /// The answer to the opener's SYN, or to its datagram.
    pub(super) answered: bool,
    /// The acknowledgement that completes the handshake.
    pub(super) confirmed: bool,
    /// A FIN from the lower end, from the higher one; both for a RST that a pod sent without a daemon.
    pub(super) finished: [bool; 2],
}

/// Changes of state that a program records.
#[cfg(test)]
pub(super) enum Note {
    Answer,
    #[cfg(not(feature = "loom"))]
    Confirmation,
    Fin(Orientation),
}

const BYTES_AT: u32 = Tick::BITS;

/// Traffic that workers and programs forwarded for a connection in one direction. IP packets; a long segment that the kernel cuts up
/// later counts as its segments, and with its own length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// Packets, modulo 2³².
    pub packets: u64,
    /// Their length from the IP header on, in bytes, modulo 2⁴².
    pub bytes: u64,
}

const _: () = assert!(cfg!(all(test, feature = "loom")) || size_of::<KernelUse>() == 32);

impl Traffic {
    /// Bits of a count of packets.
    pub const PACKET_BITS: u32 = 32;
    /// Bits of a count of bytes.
    pub const BYTE_BITS: u32 = u64::BITS - Tick::BITS;
}

impl KernelUse {
    /// Without a path, and without packets.
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self { path: zero(), packets: [AtomicU32::new(0), AtomicU32::new(0)], used: [zero(), zero()] }
    }

    /// Empty, for a connection that is about to be written in this generation of the entry. A program that is counting
    /// a packet of the last connection may still add it.
    pub(super) fn reset(&self, generation: u64) {
        // Who reads this sees that the entry was claimed before.
        overwrite(&self.path, Path::none(generation).0, Ordering::Release);
        self.packets.iter().for_each(|packets| packets.store(0, Ordering::Relaxed));
        self.used.iter().for_each(|used| used.store(0, Ordering::Relaxed));
    }

    /// Notes that a packet has gone from one interface to the other. `knows_answers`: asked if that is new, whether packets of the
    /// other direction go back there. `is_still`: whether the entry still holds the packet's connection with the verdict of this epoch.
    /// Returns whether that is new.
    pub(super) fn take_path(
        &self,
        orientation: Orientation,
        (from, to): (u32, u32),
        epoch: EpochTag,
        knows_answers: impl FnOnce() -> bool,
        is_still: impl FnOnce() -> bool,
    ) -> bool {
        let before = self.path.load(Ordering::Acquire);
        let Some(mut after) = Path(before).taken(orientation, from, to, epoch).filter(|after| after.0 != before) else {
            return false;
        };
        if knows_answers() {
            after = after.both_ways();
        }
        // If it fails, another worker has just noted something else, and the next packet meets a worker again.
        is_still() && self.path.compare_exchange(before, after.0, EXCHANGE, Ordering::Relaxed).is_ok()
    }

    /// The path as a program reads it for a packet in direction `orientation`: the interfaces that it comes from and goes
    /// to, and the low bits of the epoch. `None`: no worker has taken it.
    #[cfg(all(test, feature = "loom"))]
    pub(super) fn read_path(&self, orientation: Orientation) -> Option<(u32, u32, u64)> {
        let path = self.path.load(Ordering::Acquire);
        let end = |at: u32| (path >> at) as u32 & ((1 << END_BITS) - 1);
        let (from, to) = match orientation {
            Orientation::LowToHigh => (end(0), end(END_BITS)),
            Orientation::HighToLow => (end(END_BITS), end(0)),
        };
        (path >> (TAKEN_AT + orientation as u32) & 1 == 1).then_some((from, to, path >> EPOCH_AT))
    }

    /// The path if it was taken under this epoch, in either direction, with the interfaces of the lower end and the higher
    /// one.
    pub(super) fn path_under(&self, epoch: EpochTag) -> Option<(Path, [u32; 2])> {
        let path = Path(self.path.load(Ordering::Acquire));
        let is_valid = path.0 >> TAKEN_AT & 3 != 0 && path.0 >> EPOCH_AT == epoch.low_bits();
        is_valid.then(|| (path, path.ends()))
    }

    /// Makes this path one of another epoch, unless a worker has just changed it.
    pub(super) fn renew(&self, path: Path, epoch: EpochTag) {
        // If it fails, the connection's next packet meets a worker.
        let _ = self.path.compare_exchange(path.0, path.renewed(epoch).0, EXCHANGE, Ordering::Relaxed);
    }

    /// Clears a path that was taken under an epoch so far behind `now` that its low bits may be reused.
    pub(super) fn clear_stale(&self, generation: u64, now: EpochTag) {
        let path = self.path.load(Ordering::Acquire);
        let behind = now.low_bits().wrapping_sub(path >> EPOCH_AT) & 0xffff;
        if path >> TAKEN_AT & 3 != 0 && (STALE..=u64::from(u16::MAX) - STALE).contains(&behind) {
            // If it fails, a worker has just taken it under a newer epoch.
            let none = Path::none(generation).0 | path & NOTED;
            let _ = self.path.compare_exchange(path, none, EXCHANGE, Ordering::Relaxed);
        }
    }

    /// The connection begins anew in the same entry: its path has to be taken again, and nothing of before is noted.
    pub(super) fn restart(&self, generation: u64) {
        overwrite(&self.path, Path::none(generation).0, Ordering::Release);
    }

    /// The changes that programs have recorded.
    #[inline]
    pub(super) fn noted(&self) -> Noted {
        let path = self.path.load(Ordering::Acquire);
        let bit = |at: u32| path >> at & 1 == 1;
        let finished = [bit(FINISHED_AT), bit(FINISHED_AT + 1)];
        Noted { answered: bit(ANSWERED_AT), confirmed: bit(CONFIRMED_AT), finished }
    }

    /// Records as a program does the change by a packet that it forwards. `is_still`: as for [`KernelUse::take_path`]. False: the packet is for a worker.
    #[cfg(test)]
    pub(super) fn note(&self, what: Note, is_still: impl FnOnce() -> bool) -> bool {
        let bit = match what {
            Note::Answer => ANSWERED_AT,
            #[cfg(not(feature = "loom"))]
            Note::Confirmation => CONFIRMED_AT,
            Note::Fin(from) => FINISHED_AT + from as u32,
        };
        let before = self.path.load(Ordering::Acquire);
        is_still() && self.path.compare_exchange(before, before | 1 << bit, EXCHANGE, Ordering::Relaxed).is_ok()
    }

    /// Counts a packet of `bytes` that a program forwards at this time.
    #[cfg(all(test, not(feature = "loom")))]
    pub(super) fn count_by_program(&self, orientation: Orientation, bytes: u16, now: Tick) {
        self.count(orientation, bytes);
        self.used[orientation as usize].fetch_or(now.0.into(), Ordering::Relaxed);
    }

    /// Whether programs have forwarded nothing but of a handshake, whose numbers workers know: the answer to the SYN, and its end, or
    /// that met a worker.
    pub(super) fn is_only_handshake(&self, original: Orientation) -> bool {
        let sent = |from: Orientation| self.packets[from as usize].load(Ordering::Relaxed);
        let by_program = |from: Orientation| self.used[from as usize].load(Ordering::Relaxed) as u32 & Tick::MASK != 0;
        let Noted { answered, confirmed, .. } = self.noted();
        let has_ended = if confirmed { sent(original) == 2 } else { answered && !by_program(original) };
        has_ended && sent(original.opposite()) == 1
    }

    /// The ticks of the last packets that the kernel forwarded, by direction.
    #[inline]
    pub(super) fn ticks(&self) -> impl Iterator<Item = Tick> {
        let ticks = self.used.iter().map(|used| used.load(Ordering::Relaxed) as u32 & Tick::MASK);
        ticks.filter(|tick| *tick != 0).map(Tick)
    }

    /// Counts a packet that a worker forwards. `bytes`: of the IP packet.
    #[inline]
    pub(super) fn count(&self, orientation: Orientation, bytes: u16) {
        self.packets[orientation as usize].fetch_add(1, Ordering::Relaxed);
        self.used[orientation as usize].fetch_add(u64::from(bytes) << BYTES_AT, Ordering::Relaxed);
    }

    /// Traffic from the lower end, and from the higher one.
    pub(super) fn traffic(&self) -> [Traffic; 2] {
        std::array::from_fn(|direction| Traffic {
            packets: self.packets[direction].load(Ordering::Relaxed).into(),
            bytes: self.used[direction].load(Ordering::Relaxed) >> BYTES_AT,
        })
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use Orientation::{HighToLow, LowToHigh};

    use super::*;

    fn epoch(number: u32) -> EpochTag {
        EpochTag::of(Epoch(number))
    }

    #[test]
    fn each_direction_of_a_path_is_taken_for_itself() {
        let there = Path::none(3).taken(LowToHigh, 7, 9, epoch(5)).unwrap();
        assert_eq!(there.0, 7 | 9 << 21 | 1 << 46 | 5 << 48);
        let both = there.taken(HighToLow, 9, 7, epoch(5)).unwrap();
        assert_eq!(both.0, there.0 | 1 << 47);
        assert_eq!(both.taken(LowToHigh, 7, 9, epoch(5)), Some(both));
        // By another interface, or under another epoch: the other direction has to be seen again.
        for (from, to, number) in [(9, 0, 5), (0, 7, 5), (9, 7, 6)] {
            let again = there.taken(HighToLow, from, to, epoch(number)).unwrap();
            let ends = u64::from(to) | u64::from(from) << 21;
            assert_eq!(again.0, ends | 1 << 47 | u64::from(number) << 48);
        }
    }

    #[test]
    fn the_path_of_answers_is_taken_with_the_question() {
        let entry = KernelUse::new();
        assert!(entry.take_path(LowToHigh, (7, 9), epoch(5), || true, || true));
        let taken = entry.path.load(Ordering::Relaxed);
        assert_eq!(taken, 7 | 9 << 21 | 0b11 << 46 | 5 << 48);
        let asked = || panic!("the path is known");
        assert!(!entry.take_path(LowToHigh, (7, 9), epoch(5), asked, || true));
        // By another way the answers are asked for again.
        assert!(entry.take_path(LowToHigh, (7, 8), epoch(5), || false, || true));
        assert_eq!(entry.path.load(Ordering::Relaxed), 7 | 8 << 21 | 1 << 46 | 5 << 48);
    }

    #[test]
    fn an_interface_whose_index_has_too_many_bits_has_no_path() {
        for (from, to) in [(1 << 21, 0), (0, 1 << 21), (u32::MAX, 1)] {
            assert_eq!(Path::none(0).taken(LowToHigh, from, to, epoch(1)), None);
        }
        assert!(Path::none(0).taken(LowToHigh, (1 << 21) - 1, (1 << 21) - 1, epoch(1)).is_some());
    }

    #[test]
    fn a_path_is_cleared_before_the_bits_of_its_epoch_are_reused() {
        for (behind, is_cleared) in [(0, false), (1, false), (0x3fff, false), (0x4000, true), (0xbfff, true)] {
            let entry = KernelUse::new();
            entry.take_path(LowToHigh, (7, 9), epoch(0x1_fff0), || false, || true);
            let taken = entry.path.load(Ordering::Relaxed);
            entry.clear_stale(4, epoch(0x1_fff0 + behind));
            let expected = if is_cleared { Path::none(4).0 } else { taken };
            assert_eq!(entry.path.load(Ordering::Relaxed), expected, "{behind:#x}");
        }
    }

    #[test]
    fn a_late_worker_writes_no_path_into_the_next_connections_entry() {
        let entry = KernelUse::new();
        entry.reset(1);
        // Between its look at the path and the exchange, the entry is claimed for another connection.
        let reset = || {
            entry.reset(2);
            true
        };
        entry.take_path(LowToHigh, (7, 9), epoch(5), || true, reset);
        assert_eq!(entry.path.load(Ordering::Relaxed), Path::none(2).0);
        entry.take_path(LowToHigh, (7, 9), epoch(5), || true, || false);
        assert_eq!(entry.path.load(Ordering::Relaxed), Path::none(2).0);
        entry.take_path(LowToHigh, (7, 9), epoch(5), || false, || true);
        assert_eq!(
            Some(entry.path.load(Ordering::Relaxed)),
            Path::none(2).taken(LowToHigh, 7, 9, epoch(5)).map(|path| path.0)
        );
    }
}
