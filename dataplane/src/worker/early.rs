//! Copies of fragments that came before their first. They are in memory of the worker: frames are what other pods receive with.

use super::long::LongPacket;
use crate::batch::Frames;
use crate::conntrack::{DatagramKey, Fragments, Timestamp};
use crate::forward::PortId;
use crate::packet::parse;
use crate::pipeline::EarlyFragments;
use crate::{DropReason, Snapshot};

const MEMORY: usize = 128 << 10;
/// Maximum sleep in milliseconds while something is held: another worker may get its first fragment.
pub(super) const SLEEP: u16 = 2;

#[derive(Debug)]
pub(super) struct EarlyPacket {
    pub(super) ingress: PortId,
    pub(super) packet: LongPacket,
}

/// A worker's copies. It allocates nothing after construction.
pub(super) struct EarlyPackets {
    held: EarlyFragments<EarlyPacket>,
    /// Buffers without a packet; one more than packets can be held.
    free: Vec<LongPacket>,
    /// Bytes of the longest packet.
    longest: usize,
}

impl EarlyPackets {
    /// For packets of at most so many bytes, Ethernet header included.
    pub(super) fn new(longest: usize) -> Self {
        let packets = (MEMORY / longest).clamp(1, EarlyFragments::<EarlyPacket>::MOST);
        let free = (0..=packets).map(|_| LongPacket::with_capacity(longest)).collect();
        Self { held: EarlyFragments::new(packets), free, longest }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Holds a copy of a batch's packet. Returns the one that it takes the place of, which is to be tried a last time.
    ///
    /// # Errors
    /// The packet cannot be held.
    pub(super) fn hold(
        &mut self,
        snapshot: &Snapshot,
        ingress: PortId,
        (batch, index): (&mut impl Frames, usize),
        now: Timestamp,
    ) -> Result<Option<EarlyPacket>, DropReason> {
        let sender = batch.stack_sender(index);
        let frame = batch.bytes(index);
        let parsed = parse(frame)?;
        let datagram = DatagramKey::of(&parsed, ingress).ok_or(DropReason::Fragment)?;
        let fits = frame.len() <= self.longest;
        let mut packet = fits.then(|| self.free.pop()).flatten().ok_or(DropReason::Fragment)?;
        packet.clear();
        packet.push(frame);
        let holder = EarlyFragments::<EarlyPacket>::holder(snapshot, ingress, sender, &parsed);
        Ok(self.held.hold(datagram, holder, now, EarlyPacket { ingress, packet }))
    }

    /// Whether some may have to be tried again.
    pub(super) fn may_be_due(&mut self, fragments: &Fragments, now: Timestamp) -> bool {
        self.held.may_be_due(fragments, now)
    }

    /// Takes the next one that is to be tried again, from this place on.
    pub(super) fn take_due(&mut self, from: &mut usize, fragments: &Fragments, now: Timestamp) -> Option<EarlyPacket> {
        self.held.take_due(from, fragments, now)
    }

    /// Returns the buffer of a packet that is passed on.
    pub(super) fn give_back(&mut self, packet: LongPacket) {
        self.free.push(packet);
    }

    /// Forgets the packets of a port that is closed; names their ingress ports and lengths.
    pub(super) fn forget(&mut self, port: PortId, mut forgotten: impl FnMut(PortId, usize)) {
        let Self { held, free, .. } = self;
        for EarlyPacket { ingress, mut packet } in held.take_of(port) {
            forgotten(ingress, packet.bytes(0).len());
            free.push(packet);
        }
    }
}
