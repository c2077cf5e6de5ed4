//! Fragments that came before their first: a worker holds them for a while, and so does replay, by the capture's clock.

use super::super::batch::PacketBatch;
use super::super::capture::Time;
use super::super::compare::Said;
use super::{PacketKey, Replay, ReplayError, ReplayRun};

/// A packet that is not decided under each set of objects.
pub(super) struct EarlyPacket {
    /// As captured.
    original: PacketBatch,
    /// The decisions under the first set and under the second one.
    said: [Option<Said>; 2],
}

/// A set of objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    Before,
    After,
}

impl Replay {
    const SIDES: [Side; 2] = [Side::Before, Side::After];

    fn side(&mut self, side: Side) -> Option<&mut ReplayRun> {
        match side {
            Side::Before => Some(&mut self.before),
            Side::After => self.after.as_mut().map(|(run, _)| run),
        }
    }

    /// Whether a packet of the batch that was played last is held.
    #[inline]
    pub(super) fn has_early(&self) -> bool {
        self.before.player.has_early() || self.after.as_ref().is_some_and(|(run, _)| run.player.has_early())
    }

    /// Keeps the packets of the batch that are held. Returns those that they take the place of.
    #[cold]
    pub(super) fn hold_early(&mut self, key: PacketKey) -> Vec<(Side, u64)> {
        let mut evicted = Vec::new();
        for index in 0..self.batch.packets().len() {
            let entries = [key.before, key.after.unwrap_or(key.before)];
            let is_early = Self::SIDES.map(|side| self.side(side).is_some_and(|run| run.player.is_early(index)));
            if is_early == [false; 2] {
                continue;
            }
            let member = &self.batch.packets()[index];
            let (number, original) = (member.number, self.batch.single(member));
            let mut said = [None, None];
            for (side, entry) in Self::SIDES.into_iter().zip(entries) {
                let frame = original.frame(&original.packets()[0]);
                let is_held = is_early[side as usize];
                match self.side(side) {
                    Some(run) if is_held => {
                        let instead = run.player.hold_early(entry, number, frame);
                        evicted.extend(instead.map(|number| (side, number)));
                    }
                    Some(run) => said[side as usize] = Some(Said::of(&mut run.player, entry, index, frame)),
                    None => {}
                }
            }
            self.early.insert(number, EarlyPacket { original, said });
        }
        evicted
    }

    /// Decides the packets whose first fragment has passed, or that were held for as long as a worker does.
    #[inline]
    pub(super) fn try_early(&mut self, time: Time) -> Result<(), ReplayError> {
        if self.early.is_empty() { Ok(()) } else { self.try_due(time) }
    }

    #[cold]
    fn try_due(&mut self, time: Time) -> Result<(), ReplayError> {
        for side in Self::SIDES {
            let due = self.side(side).map(|run| run.player.take_due(time)).unwrap_or_default();
            for number in due {
                self.try_again(side, number, time)?;
            }
        }
        while self.sinks.is_full() && self.try_oldest(Side::Before, time)? {}
        Ok(())
    }

    /// Decides all packets that are held: the captures have ended.
    pub(super) fn end_early(&mut self) -> Result<(), ReplayError> {
        for side in Self::SIDES {
            while self.try_oldest(side, Time::default())? {}
        }
        Ok(())
    }

    fn try_oldest(&mut self, side: Side, time: Time) -> Result<bool, ReplayError> {
        let Some(number) = self.side(side).and_then(|run| run.player.take_oldest()) else { return Ok(false) };
        self.try_again(side, number, time)?;
        Ok(true)
    }

    /// Decides a packet that was held, at this time, and writes its result.
    pub(super) fn try_again(&mut self, side: Side, number: u64, time: Time) -> Result<(), ReplayError> {
        let Some(mut early) = self.early.remove(&number) else { return Ok(()) };
        let run = match (side, &mut self.after) {
            (Side::After, Some((run, _))) => run,
            _ => &mut self.before,
        };
        let member = &early.original.packets()[0];
        let frame = early.original.frame(member);
        let entry = run.entry_point(&member.record, frame, &self.captures);
        let mut batch = early.original.single(member);
        run.player.play_again(entry, time, &mut batch);
        early.said[side as usize] = Some(Said::of(&mut run.player, entry, 0, frame));
        if side == Side::Before && !self.sinks.is_empty() {
            let interfaces = self.captures.interfaces();
            self.sinks.write_verdict(entry, &batch, &early.original, &mut self.before.player, interfaces)?;
        }
        let Some((after, comparison)) = &mut self.after else { return Ok(()) };
        if let [Some(before), Some(other)] = early.said {
            comparison.note_said(
                (&self.before.player, &before),
                (&after.player, &other),
                frame,
                member.record.original,
            );
        } else {
            self.early.insert(number, early);
        }
        Ok(())
    }
}
