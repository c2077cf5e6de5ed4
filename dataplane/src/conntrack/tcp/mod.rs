//! TCP as tracked by a firewall between the ends: states and windows.
//!
//! The bounds on sequence and acknowledgement numbers are those of G. van Rooij, *Real Stateful TCP Packet Filtering in
//! IP Filter* (2001), which the kernel's `tcp_in_window` (net/netfilter/nf_conntrack_proto_tcp.c) uses too. The state
//! of a direction fits into 64 bits. Where that requires rounding, it errs towards a segment that fits.
//!
//! Numbers decide about the connection, not about the segment: one that does not fit passes and changes nothing ([`TcpStep::Pass`]), as
//! with `nf_conntrack_tcp_be_liberal`. Its receiver checks exactly, and it opens nothing there. Programs in the kernel read no numbers of an
//! established connection either, and what is dropped must not depend on who forwards it.

use super::held_syn::HeldSyn;
use super::state::TcpState;
use crate::packet::{TcpFlags, TcpSegment};

/// The effect of a segment on its connection; see [`super::track::PacketEffect`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TcpStep {
    /// New state, and the tracking words of the segment's sender and receiver.
    Accept(TcpState, u64, u64),
    /// The tracking word of the segment's sender, marked, and the held SYN.
    Hold(u64, HeldSyn),
    Pass,
    Invalid,
    Open,
    /// The tracking words of the segment's sender and receiver for the new connection.
    Restart(u64, u64),
}

/// Tracked state of the bytes that one side sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Window {
    /// One past the highest sequence number sent.
    end: u32,
    /// Highest sequence number that the other side has offered to accept; rounded up to [`LIMIT_GRAIN`].
    limit: u32,
    /// Base-2 logarithm of the largest window that it has itself offered, rounded up.
    reach: u8,
    /// Window scale of its offers; [`UNKNOWN_SCALE`] if its SYN was not seen.
    scale: u8,
    /// [`SEEN`], [`FIN`] and [`FIN_ACKED`].
    marks: u8,
}

/// Largest window (RFC 7323 section 2.3): 1 GiB.
const MAX_WINDOW: u32 = 1 << 30;
/// Largest window scale (RFC 7323 section 2.3).
const MAX_SCALE: u8 = 14;
/// An unknown window scale; treated as the largest.
const UNKNOWN_SCALE: u8 = 15;
/// Acknowledgements may be this far behind what was sent even if the window is smaller: 65,535 and a segment.
const MIN_ACK_WINDOW: u32 = 66_000;
/// A SYN may carry this much data without an offered window (RFC 7413).
const MAX_SYN_DATA: u32 = 9_000;
/// Limits are stored in 20 bits.
const LIMIT_GRAIN: u32 = 1 << 12;
/// Position of the limit in a word.
const LIMIT_MASK: u64 = 0xf_ffff << 32;

const REACH_AT: u32 = 52;
const SCALE_AT: u32 = 57;
const MARKS_AT: u32 = 61;

/// Its `end` comes from one of its own segments.
const SEEN: u8 = 1;
/// It has sent a FIN.
const FIN: u8 = 2;
/// The other side has acknowledged that FIN.
const FIN_ACKED: u8 = 4;
/// Without [`FIN`], since a FIN is not acknowledged before it is sent: a [`HeldSyn`] of this side is stored.
const HOLDS_SYN: u8 = FIN_ACKED;

/// A limit at its position in a word, rounded up.
#[inline(always)]
const fn limit_bits(limit: u32) -> u64 {
    ((limit.wrapping_add(LIMIT_GRAIN - 1) >> 12) as u64) << 32
}

/// Whether sequence number `a` is at or before `b` (RFC 9293 section 3.4: modulo 2³²).
#[inline]
const fn at_or_before(a: u32, b: u32) -> bool {
    b.wrapping_sub(a) as i32 >= 0
}

#[inline]
const fn later(a: u32, b: u32) -> u32 {
    if at_or_before(a, b) { b } else { a }
}

impl Window {
    #[inline(always)]
    pub(super) fn unpack(word: u64) -> Self {
        Self {
            end: word as u32,
            limit: ((word >> 32) as u32) << 12,
            reach: (word >> REACH_AT) as u8 & 31,
            scale: (word >> SCALE_AT) as u8 & 15,
            marks: (word >> MARKS_AT) as u8,
        }
    }

    #[inline(always)]
    pub(super) fn pack(self) -> u64 {
        u64::from(self.end)
            | limit_bits(self.limit)
            | u64::from(self.reach) << REACH_AT
            | u64::from(self.scale) << SCALE_AT
            | u64::from(self.marks) << MARKS_AT
    }

    /// This word with its numbers reset: the next segment of either side sets them. For a table that was found again
    /// after segments may have bypassed it.
    pub(super) fn unsynchronised(word: u64) -> u64 {
        word & !(u64::from(SEEN) << MARKS_AT)
    }

    /// Whether these are the words of a connection whose beginning was not seen, so that either end may have opened it.
    pub(super) fn are_from_the_middle([one, other]: [u64; 2]) -> bool {
        is_from_the_middle(&Self::unpack(one), &Self::unpack(other))
    }

    /// This word once a FIN of its side has bypassed us, acknowledged by the other side or not. A held SYN of the side will not
    /// be answered any more.
    pub(super) fn finished(word: u64, is_acked: bool) -> u64 {
        let marks = if is_acked { FIN | FIN_ACKED } else { FIN };
        word & !(u64::from(FIN | FIN_ACKED) << MARKS_AT) | u64::from(marks) << MARKS_AT
    }

    /// The side that sent this SYN.
    fn from_syn(segment: &TcpSegment) -> Self {
        let end = segment.end();
        Self {
            end,
            limit: end,
            reach: log2(u32::from(segment.window)),
            scale: segment.window_scale.unwrap_or(0).min(MAX_SCALE),
            marks: SEEN,
        }
    }

    /// The side that a SYN was sent to, before it answers; `ack` acknowledges the SYN. No other word of an entry is ever like this, of
    /// another SYN or another protocol: a program that forwards the answer exchanges it for one with the number of the answer, and if it comes late,
    /// nothing else changes.
    pub(super) fn unanswered(ack: u32) -> Self {
        Self { end: ack, scale: UNKNOWN_SCALE, ..Self::default() }
    }

    /// Whether the word of the side that a SYN was sent to is that of its answer.
    pub(super) fn is_answered(word: u64) -> bool {
        Self::unpack(word).reach != 0
    }

    /// The word of a side whose SYN-ACK a program has forwarded, with this as the next number. It offers no more than 64 KiB; a
    /// program does not read options, so the scale of its later offers is unknown.
    #[cfg(test)]
    pub(super) fn of_answer(next: u32) -> u64 {
        Self { end: next, limit: next, reach: 16, scale: UNKNOWN_SCALE, marks: SEEN }.pack()
    }

    /// The word of an opener, with the offer of the other side's SYN-ACK, which a program has forwarded.
    pub(super) fn answered_by(word: u64, other: u64) -> u64 {
        let (opener, other) = (Self::unpack(word), Self::unpack(other));
        Self { limit: later(opener.limit, opener.end.wrapping_add(other.offered())), ..opener }.pack()
    }

    /// Whether a [`HeldSyn`] of this side is stored.
    #[inline]
    const fn holds_syn(&self) -> bool {
        self.marks & (FIN | FIN_ACKED) == HOLDS_SYN
    }

    /// This window with a held SYN of its side.
    fn holding(self) -> Self {
        Self { marks: self.marks & SEEN | HOLDS_SYN, ..self }
    }

    /// This window as before the held SYN.
    fn without(self, held: HeldSyn) -> Self {
        if self.holds_syn() { Self { marks: self.marks & SEEN | held.marks(), ..self } } else { self }
    }

    /// The window of a side whose SYN this number acknowledges; its offer is unknown and treated as the largest.
    fn of_acked_syn(ack: u32) -> Self {
        Self { end: ack, limit: ack, reach: 16, scale: UNKNOWN_SCALE, marks: SEEN }
    }

    /// Whether `ack` acknowledges the last SYN of this side.
    #[inline]
    const fn is_syn_acked_by(&self, ack: u32) -> bool {
        self.end.wrapping_sub(ack) <= MAX_SYN_DATA
    }

    /// Whether a SYN of this side, with data or not, may have had this number.
    #[inline]
    const fn has_sent_syn_at(&self, seq: u32) -> bool {
        self.end.wrapping_sub(seq) <= MAX_SYN_DATA + 1
    }

    /// The sequence number after everything it has sent, if known.
    pub(super) fn next(&self) -> Option<u32> {
        self.is(SEEN).then_some(self.end)
    }

    /// This window once its side has sent everything before this number.
    #[inline(always)]
    fn having_sent(self, end: u32) -> Self {
        Self { end: later(self.end, end), limit: later(self.limit, end), ..self }
    }

    /// Whether it has this mark.
    #[inline]
    const fn is(&self, mark: u8) -> bool {
        self.marks & mark != 0
    }

    /// The largest window that it has offered.
    #[inline]
    const fn offered(&self) -> u32 {
        1 << self.reach
    }

    /// The window offered by this segment, in bytes.
    #[inline(always)]
    fn offer(&self, segment: &TcpSegment) -> u32 {
        let shift = if segment.flags.contains(TcpFlags::SYN) { 0 } else { self.scale.min(MAX_SCALE) };
        (u32::from(segment.window) << shift).min(MAX_WINDOW)
    }
}

/// The exponent of the smallest power of two that is at least `window`; at most 30.
#[inline]
fn log2(window: u32) -> u8 {
    window.clamp(1, MAX_WINDOW).next_power_of_two().trailing_zeros() as u8
}

/// Segment type according to its flags.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SegmentKind {
    Syn,
    SynAck,
    Reset,
    /// With ACK, perhaps with FIN.
    Plain,
}

/// The segment type, or `None` for an invalid combination of flags.
#[inline]
fn kind(flags: TcpFlags) -> Option<SegmentKind> {
    const SYN: u8 = TcpFlags::SYN.0;
    const FIN: u8 = TcpFlags::FIN.0;
    const RST: u8 = TcpFlags::RST.0;
    const ACK: u8 = TcpFlags::ACK.0;
    match flags.0 & (SYN | FIN | RST | ACK) {
        // Nearly all segments are of this type.
        n if n & !FIN == ACK => Some(SegmentKind::Plain),
        SYN => Some(SegmentKind::Syn),
        n if n == SYN | ACK => Some(SegmentKind::SynAck),
        n if n & !ACK == RST => Some(SegmentKind::Reset),
        _ => None,
    }
}

/// A connection's first segment: the state that it opens, and the windows of its sender and receiver.
pub(super) fn open(segment: &TcpSegment, midstream_pickup: bool) -> Option<(TcpState, Window, Window)> {
    match kind(segment.flags)? {
        SegmentKind::Syn => Some((TcpState::SynSent, Window::from_syn(segment), Window::unanswered(segment.end()))),
        SegmentKind::Plain if midstream_pickup && !segment.flags.contains(TcpFlags::FIN) => {
            let unknown = Window { scale: UNKNOWN_SCALE, ..Window::default() };
            let offer = unknown.offer(segment);
            let reach = log2(offer).max(16);
            let end = segment.end();
            let sender = Window { end, limit: end.wrapping_add(1 << reach), reach, marks: SEEN, ..unknown };
            let limit = segment.ack.wrapping_add(offer);
            let receiver = Window { end: segment.ack, limit, reach: 16, ..unknown };
            Some((TcpState::PickedUp, sender, receiver))
        }
        _ => None,
    }
}

/// A later segment of a connection in `state`, with the tracking words of its sender and receiver.
#[inline(always)]
pub(super) fn step(
    state: TcpState,
    sender: u64,
    receiver: u64,
    from_opener: bool,
    segment: &TcpSegment,
    held: HeldSyn,
) -> TcpStep {
    // Unpacked lazily, so that those of a plain segment stay in registers.
    let windows = || (Window::unpack(sender), Window::unpack(receiver));
    match kind(segment.flags) {
        Some(SegmentKind::Plain) => plain(state, windows(), from_opener, segment, held),
        Some(SegmentKind::Syn) => syn(state, windows(), from_opener, segment, held),
        Some(SegmentKind::SynAck) => syn_ack(state, windows(), from_opener, segment, held),
        Some(SegmentKind::Reset) => reset(state, windows(), from_opener, segment, held),
        None => TcpStep::Invalid,
    }
}

/// Fast path of [`step`] for nearly every segment: no SYN, FIN or RST, on an established connection of which both sides
/// were seen and neither has ended. Returns the new tracking words of sender and receiver; `None` if the segment is of
/// another type, widens its sender's window, or is invalid, all of which [`step`] handles.
///
/// It works on the packed words: unpacking and packing doubles the instructions of a segment.
#[inline(always)]
pub(super) fn fast_step(sender: u64, receiver: u64, segment: &TcpSegment) -> Option<(u64, u64)> {
    const BITS: u8 = TcpFlags::SYN.0 | TcpFlags::FIN.0 | TcpFlags::RST.0 | TcpFlags::ACK.0;
    let seen = u64::from(SEEN);
    if segment.flags.0 & BITS != TcpFlags::ACK.0 || sender >> MARKS_AT != seen || receiver >> MARKS_AT != seen {
        return None;
    }
    let (from, to) = (Window::unpack(sender), Window::unpack(receiver));
    let (end, ack, offer) = (segment.end(), segment.ack, from.offer(segment));
    if offer > from.offered() || !fits(&from, &to, segment.seq, end, ack) {
        return None;
    }
    let numbers = u64::from(later(from.end, end)) | limit_bits(later(from.limit, end));
    let kept = sender >> REACH_AT << REACH_AT;
    let limit = limit_bits(later(to.limit, ack.wrapping_add(offer.max(1))));
    Some((kept | numbers, receiver & !LIMIT_MASK | limit))
}

/// The windows of a segment's sender and receiver.
type Windows = (Window, Window);

#[inline(always)]
fn accept(state: TcpState, sender: Window, receiver: Window) -> TcpStep {
    TcpStep::Accept(state, sender.pack(), receiver.pack())
}

#[inline(never)]
fn syn(
    state: TcpState,
    (sender, receiver): Windows,
    from_opener: bool,
    segment: &TcpSegment,
    held: HeldSyn,
) -> TcpStep {
    match state {
        // A retransmission, or a new attempt with another initial sequence number.
        TcpState::SynSent if from_opener => accept(state, Window::from_syn(segment), Window::unanswered(segment.end())),
        TcpState::SynSent => accept(TcpState::SynSent2, Window::from_syn(segment), receiver),
        TcpState::SynSent2 if segment.end() == sender.end => accept(state, sender, receiver),
        TcpState::TimeWait | TcpState::Close | TcpState::PickedUp => TcpStep::Open,
        // A retransmission.
        TcpState::SynReceived if segment.end() == sender.end => TcpStep::Pass,
        _ if sender.holds_syn() => TcpStep::Hold(sender.pack(), HeldSyn::new(segment, held.marks())),
        // RFC 9293 section 3.10.7.4, RFC 5961 section 4: a receiver that still has the connection replies with an ACK.
        // If the sender has lost the connection, it replies to that ACK with a RST. A receiver that has lost it too
        // replies with a SYN-ACK.
        _ => TcpStep::Hold(sender.holding().pack(), HeldSyn::new(segment, sender.marks & (FIN | FIN_ACKED))),
    }
}

#[inline(never)]
fn syn_ack(
    state: TcpState,
    (sender, receiver): Windows,
    from_opener: bool,
    segment: &TcpSegment,
    held: HeldSyn,
) -> TcpStep {
    match state {
        TcpState::SynSent | TcpState::SynSent2
            if receiver.is_syn_acked_by(segment.ack)
                && if state == TcpState::SynSent { !from_opener } else { sender.has_sent_syn_at(segment.seq) } =>
        {
            let before = sender.next().unwrap_or(segment.end());
            let (sender, receiver) = answered(receiver, segment);
            accept(TcpState::SynReceived, Window { end: later(sender.end, before), ..sender }, receiver)
        }
        // The answer to another SYN: its receiver resets it.
        TcpState::SynSent | TcpState::SynSent2 => TcpStep::Pass,
        _ if receiver.holds_syn() && held.is_acked_by(segment.ack) => {
            let (sender, receiver) = answered(Window::of_acked_syn(segment.ack), segment);
            TcpStep::Restart(sender.pack(), receiver.pack())
        }
        // Once more, or of a SYN that was not seen: it opens nothing at its receiver, which answers it by a RST or an ACK.
        _ => TcpStep::Pass,
    }
}

/// The windows of a SYN-ACK's sender and of its receiver, whose SYN it acknowledges.
fn answered(mut receiver: Window, segment: &TcpSegment) -> Windows {
    let mut sender = Window::from_syn(segment);
    if segment.window_scale.is_none() {
        // RFC 7323 section 2.2: both sides scale, or neither does.
        (sender.scale, receiver.scale) = (0, 0);
    }
    receiver.limit = later(receiver.limit, segment.ack.wrapping_add(u32::from(segment.window)));
    (sender, receiver)
}

#[inline(never)]
fn reset(
    state: TcpState,
    (sender, receiver): Windows,
    from_opener: bool,
    segment: &TcpSegment,
    held: HeldSyn,
) -> TcpStep {
    let has_ack = segment.flags.contains(TcpFlags::ACK);
    if state == TcpState::SynSent {
        return match from_opener {
            // It gives up.
            true if segment.seq == sender.end => accept(TcpState::Close, sender, receiver),
            // RFC 9293 section 3.10.7.3: a rejection acknowledges the SYN.
            false if has_ack && receiver.is_syn_acked_by(segment.ack) => accept(TcpState::Close, sender, receiver),
            // With another number it replies to something that was not seen here: its receiver decides.
            _ => TcpStep::Pass,
        };
    }
    if receiver.holds_syn() && has_ack && held.is_acked_by(segment.ack) {
        // It rejects the SYN that passed: it has no connection.
        return accept(TcpState::Close, sender, receiver);
    }
    // Some stacks set ACK and leave the number zero.
    let ack = if has_ack && segment.ack != 0 { segment.ack } else { receiver.end };
    if !fits(&sender, &receiver, segment.seq, segment.end(), ack) {
        return TcpStep::Pass;
    }
    // RFC 5961 section 3.2: only the number that the receiver expects next resets. That is mostly `sender.end`; it is
    // lower if bytes were lost behind this point, which cannot be seen here.
    let exact = sender.is(SEEN) && segment.seq == sender.end;
    match state {
        TcpState::Established | TcpState::Resetting if !exact => accept(TcpState::Resetting, sender, receiver),
        _ => accept(TcpState::Close, sender, receiver),
    }
}

#[inline(always)]
fn plain(
    state: TcpState,
    (sender, receiver): Windows,
    from_opener: bool,
    segment: &TcpSegment,
    held: HeldSyn,
) -> TcpStep {
    let has_fin = segment.flags.contains(TcpFlags::FIN);
    if matches!(state, TcpState::SynSent | TcpState::SynSent2) {
        // A segment of an older connection (RFC 9293 section 3.5.1): who does not have it will reset it.
        return TcpStep::Pass;
    }
    let as_before = (sender, receiver);
    // A segment that fits shows that its sender still has the connection: a held SYN on it will not be answered any
    // more.
    let (mut sender, mut receiver) = (sender.without(held), receiver.without(held));
    let (mut seq, mut end, ack) = (segment.seq, segment.end(), segment.ack);
    if !sender.is(SEEN) && receiver.is(SEEN) {
        // Packets that it has received may have bypassed us, and those that were seen may be retransmitted.
        receiver.end = later(receiver.end, ack);
    }
    if !fits(&sender, &receiver, seq, end, ack) {
        if is_from_the_middle(&sender, &receiver) {
            // The numbers were taken from a stray segment, or went another way since.
            sender.marks &= !SEEN;
            receiver.marks &= !SEEN;
        } else if seq == end {
            // Without data only what it acknowledges counts.
            (seq, end) = (sender.end, sender.end);
        }
    }
    if !fits(&sender, &receiver, seq, end, ack) {
        let is_ahead = is_a_little_ahead(&sender, &receiver, seq, ack);
        return if is_ahead { accept(state, as_before.0.having_sent(end), as_before.1) } else { TcpStep::Pass };
    }
    let offer = sender.offer(segment);
    sender.reach = sender.reach.max(log2(offer));
    if sender.is(SEEN) {
        sender = sender.having_sent(end);
    } else {
        let end = resume(sender.end, end, receiver.offered());
        sender = Window { end, limit: end.wrapping_add(receiver.offered()), marks: sender.marks | SEEN, ..sender };
    }
    if !receiver.is(SEEN) {
        receiver.end = resume(receiver.end, ack, sender.offered().max(MIN_ACK_WINDOW));
    }
    receiver.limit = later(receiver.limit, ack.wrapping_add(offer.max(1)));
    if has_fin {
        sender.marks |= FIN;
    }
    if receiver.is(FIN) && ack == receiver.end {
        receiver.marks |= FIN_ACKED;
    }
    accept(after_plain(state, &sender, &receiver, from_opener), sender, receiver)
}

/// Whether neither SYN was read: nobody knows the numbers with which the connection began, and how the windows are scaled. The kernel lets
/// segments of such a connection pass whatever their numbers (`IP_CT_TCP_FLAG_BE_LIBERAL` in `tcp_new`,
/// net/netfilter/nf_conntrack_proto_tcp.c).
#[inline]
const fn is_from_the_middle(sender: &Window, receiver: &Window) -> bool {
    sender.scale == UNKNOWN_SCALE && receiver.scale == UNKNOWN_SCALE
}

/// Position of a side that is seen again: the reported one, unless it is so little behind the known one that the
/// segment is a retransmission or an acknowledgement from before a gap. Data sent beyond it may have arrived.
#[inline]
fn resume(known: u32, reported: u32, window: u32) -> u32 {
    if known.wrapping_sub(reported) <= window { known } else { reported }
}

#[inline(always)]
fn after_plain(state: TcpState, sender: &Window, receiver: &Window, from_opener: bool) -> TcpState {
    match (state, sender.is(FIN), receiver.is(FIN)) {
        (TcpState::Close, ..) => TcpState::Close,
        (TcpState::PickedUp, ..) if !(sender.is(SEEN) && receiver.is(SEEN)) => TcpState::PickedUp,
        (TcpState::SynReceived, false, false) if !from_opener => TcpState::SynReceived,
        (_, false, false) => TcpState::Established,
        (_, true, true) if sender.is(FIN_ACKED) && receiver.is(FIN_ACKED) => TcpState::TimeWait,
        (_, true, true) => TcpState::LastAck,
        _ if sender.is(FIN_ACKED) || receiver.is(FIN_ACKED) => TcpState::CloseWait,
        _ => TcpState::FinWait,
    }
}

/// Whether a segment lies within what both sides have sent and offered. A side that was not seen yet sets no bounds.
#[inline(always)]
fn fits(sender: &Window, receiver: &Window, seq: u32, end: u32, ack: u32) -> bool {
    let sent = !sender.is(SEEN)
        // Not beyond the offered window, and not so old that the receiver cannot still be missing it.
        || (at_or_before(seq, sender.limit) && at_or_before(sender.end.wrapping_sub(receiver.offered()), end));
    let acknowledged = !receiver.is(SEEN)
        // Nothing that was never sent, and not so old that it is meaningless.
        || (at_or_before(ack, receiver.end)
            && at_or_before(receiver.end.wrapping_sub(sender.offered().max(MIN_ACK_WINDOW)), ack));
    sent && acknowledged
}

/// Whether a segment begins beyond the offered window, by less than another one: there are stacks that send more than they may, and
/// receivers that take it (`tcp_in_window` in the kernel).
#[inline]
fn is_a_little_ahead(sender: &Window, receiver: &Window, seq: u32, ack: u32) -> bool {
    let spare = receiver.offered().max(MIN_ACK_WINDOW);
    let is_acked = !receiver.is(SEEN) || at_or_before(ack, receiver.end);
    is_acked && !at_or_before(seq, sender.limit) && at_or_before(seq, sender.limit.wrapping_add(spare))
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
