//! Windows as words.

use proptest::prelude::*;

use super::super::*;
use crate::conntrack::state::TcpState::Established;

#[test]
fn a_window_survives_packing() {
    for limit in [0, 1, 4095, 4096, 4097, 0xffff_ffff] {
        let window = Window { end: 0xdead_beef, limit, reach: 30, scale: 15, marks: SEEN | FIN_ACKED };
        let unpacked = Window::unpack(window.pack());
        assert_eq!(Window { limit, ..unpacked }, window);
        assert!(unpacked.limit.wrapping_sub(limit) < LIMIT_GRAIN, "rounded up, {limit}");
        assert_eq!(Window::unpack(Window::unsynchronised(window.pack())), Window { marks: FIN_ACKED, ..unpacked });
        for marks in [0, FIN, FIN | FIN_ACKED] {
            let window = Window { marks: SEEN | marks, ..unpacked };
            let held = HeldSyn::new(&TcpSegment { seq: 7, ..TcpSegment::default() }, marks);
            let holding = Window::unpack(window.holding().pack());
            assert!(holding.holds_syn() && !window.holds_syn() && held.is_acked_by(8) && held.0 < 128);
            assert_eq!(holding.without(held), window);
        }
    }
    assert_eq!([0, 1, 2, 3, 1024, 1025, u32::MAX].map(log2), [0, 0, 1, 2, 10, 11, 30]);
}

prop_compose! {
    /// A window near sequence number 2³², for both sides of a connection.
    fn any_window()(end in 0u32..40_000, ahead in 0u32..80_000, reach in 8u8..20, scale in 0u8..=UNKNOWN_SCALE, marks in prop_oneof![8 => Just(SEEN), 1 => 0u8..8]) -> Window {
        let end = end.wrapping_sub(20_000);
        Window { end, limit: end.wrapping_add(ahead), reach, scale, marks }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]
    #[test]
    fn the_fast_path_agrees_with_step(
        sender in any_window(), receiver in any_window(), seq in 0u32..60_000, ack in 0u32..60_000, window: u16,
        flags in prop_oneof![4 => Just(TcpFlags::ACK), 1 => any::<u8>().prop_map(TcpFlags)],
        payload_len in prop_oneof![Just(0u16), 0u16..3000], from_opener: bool,
    ) {
        let (seq, ack) = (seq.wrapping_sub(30_000), ack.wrapping_sub(30_000));
        let segment = TcpSegment { seq, ack, window, flags, payload_len, window_scale: None };
        let (sender, receiver) = (sender.pack(), receiver.pack());
        let whole = step(Established, sender, receiver, from_opener, &segment, HeldSyn::default());
        match fast_step(sender, receiver, &segment) {
            Some((sender, receiver)) => prop_assert_eq!(whole, TcpStep::Accept(Established, sender, receiver)),
            None => {
                let from = Window::unpack(sender);
                let wider = from.offer(&segment) > from.offered();
                let both = from.marks == SEEN && Window::unpack(receiver).marks == SEEN;
                let plain = kind(flags) == Some(SegmentKind::Plain) && flags.0 & TcpFlags::FIN.0 == 0;
                let to = Window::unpack(receiver);
                let fits = fits(&from, &to, segment.seq, segment.end(), segment.ack);
                prop_assert!(!fits || wider || !both || !plain, "left to step, which says {whole:?}");
            }
        }
    }
}
