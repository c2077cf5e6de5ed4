//! TCP connections: opened, used and ended in the ways that there are, with what is lost, repeated, late and odd.

use rand::Rng;

use super::bytes::{TCP, tcp};
use super::scripts::{Talk, except};
use super::steps::{Maker, Step};

pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const PSH: u8 = 8;
pub(super) const ACK: u8 = 16;
pub(super) const URG: u8 = 32;

/// A segment of a connection: of which end, with which flags, and bytes of payload.
type Planned = (usize, u8, usize);

impl Maker {
    /// A connection from its opening to its end, in one of the ways that TCP has, with what is lost, repeated, late and odd.
    pub(super) fn tcp(&mut self, steps: &mut Vec<Step>) {
        let mut talk = self.talk(80);
        let lives = if self.one_in(3) { 2 } else { 1 };
        for life in 0..lives {
            let mut has_sent_syn = [false; 2];
            for (by, flags, length) in self.plan() {
                if flags == SYN | ACK && has_sent_syn[by] {
                    // A simultaneous open sends the same SYN once more.
                    talk.next[by] = talk.next[by].wrapping_sub(1);
                }
                has_sent_syn[by] |= flags & SYN != 0;
                if self.one_in(12) {
                    continue;
                }
                if self.one_in(6) {
                    self.odd_segment(steps, &talk);
                }
                let count = if self.one_in(12) { 2 } else { 1 };
                for _ in 0..count {
                    let [seq, ack] = Talk::swapped(talk.next, by);
                    self.segment(steps, &talk, by, [seq, ack], flags, length, format!("of life {life}"));
                }
                let phantom = u32::from(flags & (SYN | FIN) != 0);
                talk.next[by] = talk.next[by].wrapping_add(length as u32 + phantom);
            }
            // The same ports, at once.
            talk.next = self.random.random();
        }
        if self.one_in(6) && steps.len() > 3 {
            let at = self.random.random_range(1..steps.len());
            steps.swap(at - 1, at);
        }
    }

    fn plan(&mut self) -> Vec<Planned> {
        let small = |maker: &mut Self| maker.longest();
        let mut plan: Vec<Planned> = match self.random.random_range(0..8) {
            0 => vec![(0, SYN, 0), (1, SYN, 0), (0, SYN | ACK, 0), (1, SYN | ACK, 0)],
            1 => vec![(0, SYN, 40), (1, SYN | ACK, 0), (0, ACK, 0)],
            2 => vec![(0, SYN, 40), (1, SYN | ACK, 30), (1, ACK | PSH, 50), (0, ACK, 0)],
            3 => Vec::new(),
            _ => vec![(0, SYN, 0), (1, SYN | ACK, 0), (0, ACK, 0)],
        };
        for _ in 0..self.random.random_range(0..5) {
            let by = self.random.random_range(0..2);
            let flags = self.pick(&[ACK, ACK | PSH, ACK | 0x40, ACK | 0x80, ACK | URG]);
            let length = small(self);
            plan.push((by, flags, length));
            plan.push((1 - by, ACK, 0));
        }
        let first = self.random.random_range(0..2);
        plan.extend(match self.random.random_range(0..6) {
            0 => vec![(first, RST, 0)],
            1 => vec![(first, RST | ACK, 0), (1 - first, ACK, 10)],
            // Half closed: the other end goes on.
            2 => vec![
                (first, FIN | ACK, 0),
                (1 - first, ACK, 100),
                (first, ACK, 0),
                (1 - first, ACK, 100),
                (first, ACK, 0),
            ],
            3 => vec![(first, FIN | ACK, 0), (1 - first, FIN | ACK, 0), (first, ACK, 0), (1 - first, ACK, 0)],
            4 => vec![(first, FIN | ACK, 20), (1 - first, ACK, 0), (1 - first, FIN | ACK, 0), (first, ACK, 0)],
            _ => Vec::new(),
        });
        plan
    }

    /// A segment that the connection does not expect.
    fn odd_segment(&mut self, steps: &mut Vec<Step>, talk: &Talk) {
        let by = self.random.random_range(0..2);
        let [seq, ack] = Talk::swapped(talk.next, by);
        let far: u32 = self.random.random();
        let (numbers, flags, length, what) = match self.random.random_range(0..12) {
            0 => ([seq.wrapping_sub(1), ack], ACK, 0, "a keepalive"),
            1 => ([seq.wrapping_sub(1), ack], ACK, 1, "a keepalive with a byte"),
            2 => ([far, ack], ACK, 30, "out of window"),
            3 => ([seq, far], ACK, 0, "of an odd acknowledgement"),
            4 => ([far, ack], RST, 0, "of an odd number"),
            5 => ([seq, ack], SYN, 0, "in the middle"),
            6 => ([far, ack], SYN | ACK, 0, "in the middle"),
            7 => ([seq, ack], FIN, 0, "without ACK"),
            8 => ([seq, ack], 0, 5, "without flags"),
            9 => ([seq, ack], SYN | FIN | RST | PSH | ACK | URG, 0, "of all flags"),
            10 => ([seq, ack], SYN | RST, 0, "of both"),
            _ => ([far, far], self.random.random(), 0, "of random flags"),
        };
        self.segment(steps, talk, by, numbers, flags, length, what.to_owned());
    }

    #[allow(clippy::too_many_arguments, reason = "all are parts of one segment")]
    fn segment(
        &mut self,
        steps: &mut Vec<Step>,
        talk: &Talk,
        by: usize,
        numbers: [u32; 2],
        flags: u8,
        length: usize,
        what: String,
    ) {
        let [from, to] = Talk::swapped(talk.addresses, by);
        let ends = Talk::swapped(talk.ends, by);
        let ip = self.ip(from, to, TCP);
        let options: &[u8] = match (flags & SYN != 0, self.random.random_range(0..6)) {
            (true, 0) => &[2, 4, 5, 0xb4, 4, 2, 1, 3, 3, 7, 1, 1],
            (true, 1) => &[2, 4, 35, 41, 34, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1],
            (true, 2) => &[34, 2, 1, 1],
            (_, 3) => &[1, 1, 8, 10, 0, 0, 0, 7, 0, 0, 0, 9],
            (_, 4) => &[3, 0, 9, 77],
            _ => &[],
        };
        // Without programs workers lower it, for packets that a frame holds.
        let is_lowered = options.starts_with(&[2, 4]) && self.setting.mtu.is_some() && !self.setting.offload;
        let payload = self.bytes(length);
        let window = self.random.random();
        let mut bytes = tcp(Talk::swapped(talk.ports, by), numbers, flags, window, options, &payload);
        let mut what = format!("TCP {} flags {flags:#x} numbers {numbers:?} length {length} {what}", talk.ports[0]);
        if self.one_in(30) {
            // A header that says to be longer or shorter than it can be.
            bytes[12] = self.random.random();
            what += ", of an odd header length";
        } else if self.one_in(60) {
            bytes.truncate(self.random.random_range(0..20));
            what += ", cut off";
        }
        self.send_summed(steps, (ends[0], ends[1]), &ip, (bytes, 16), what);
        except(steps, is_lowered.then_some("the segment size that a SYN offers, on links with jumbo frames"));
    }
}
