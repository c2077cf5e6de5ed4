//! Frames in ordinary memory: for tests, replay and the fuzzer, which have no socket.

use super::{BATCH, Frames};

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MemoryFrames {
    frames: Vec<Vec<u8>>,
}

impl MemoryFrames {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a frame, starting with its Ethernet header. Returns it if the batch is full.
    pub fn push(&mut self, frame: Vec<u8>) -> Result<(), Vec<u8>> {
        if self.frames.len() == BATCH {
            return Err(frame);
        }
        self.frames.push(frame);
        Ok(())
    }

    /// Removes all frames, in order.
    pub fn drain(&mut self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.frames.drain(..)
    }

    /// The bytes of frame `index`, or `None` beyond the last.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        self.frames.get(index).map(Vec::as_slice)
    }
}

impl Frames for MemoryFrames {
    fn len(&self) -> usize {
        self.frames.len()
    }

    fn bytes(&mut self, index: usize) -> &mut [u8] {
        &mut self.frames[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_holds_as_many_frames_as_the_pipeline_takes_in_order() {
        let mut frames = MemoryFrames::new();
        assert!(frames.is_empty());
        for number in 0..BATCH {
            assert_eq!(frames.push(vec![number as u8]), Ok(()));
        }
        assert_eq!(frames.push(vec![255]), Err(vec![255]));
        frames.bytes(3)[0] = 77;
        assert_eq!(frames.get(3), Some(&[77u8][..]));
        assert_eq!(frames.get(BATCH), None);
        let all: Vec<u8> = frames.drain().map(|frame| frame[0]).collect();
        let expected: Vec<u8> = (0..BATCH as u8).map(|number| if number == 3 { 77 } else { number }).collect();
        assert_eq!(all, expected);
        assert_eq!(frames.len(), 0);
    }
}
