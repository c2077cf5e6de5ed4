//! SCTP associations as tracked by a firewall between the ends: states and verification tags (RFC 9260).
//!
//! The tag that a side must put into every packet is chosen by the other side, in a chunk that is not parsed. It is
//! learnt from the first packet that carries it. The state of a side is that tag and a bit that it is known.

use super::state::SctpState;
use crate::packet::SctpChunk;

/// The effect of a packet on its association; see [`super::track::PacketEffect`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SctpStep {
    /// New state, and the tracking words of the packet's sender and receiver.
    Accept(SctpState, u64, u64),
    Pass,
    Invalid,
    Open,
}

const KNOWN: u64 = 1 << 32;

/// The first packet of an association: its state and the tracking words of sender and receiver.
pub(super) fn open(chunk: SctpChunk, tag: u32, midstream_pickup: bool) -> Option<(SctpState, u64, u64)> {
    match chunk {
        // RFC 9260 section 8.5.1: INIT carries the tag 0.
        SctpChunk::Init => (tag == 0).then_some((SctpState::CookieWait, 0, 0)),
        SctpChunk::Other if midstream_pickup && tag != 0 => Some((SctpState::PickedUp, KNOWN | u64::from(tag), 0)),
        _ => None,
    }
}

/// A later packet of an association in `state`.
pub(super) fn step(
    state: SctpState,
    sender: u64,
    receiver: u64,
    from_opener: bool,
    chunk: SctpChunk,
    tag: u32,
) -> SctpStep {
    if chunk == SctpChunk::Init {
        return init(state, sender, receiver, from_opener, tag);
    }
    let known = KNOWN | u64::from(tag);
    let fits = match chunk {
        _ if tag == 0 => false,
        // RFC 9260 section 8.5.1: with the T bit set these reflect the tag of the packet that they answer.
        SctpChunk::Abort | SctpChunk::ShutdownComplete => {
            sender == known || receiver == known || (sender == 0 && receiver == 0)
        }
        _ => sender == 0 || sender == known,
    };
    if !fits {
        return SctpStep::Invalid;
    }
    let sender = if sender == 0 && receiver != known { known } else { sender };
    let both_heard = sender != 0 && receiver != 0;
    let state = if state == SctpState::PickedUp && both_heard { SctpState::Established } else { state };
    match after(state, from_opener, chunk) {
        Some(state) => SctpStep::Accept(state, sender, receiver),
        None => SctpStep::Invalid,
    }
}

fn init(state: SctpState, sender: u64, receiver: u64, from_opener: bool, tag: u32) -> SctpStep {
    match state {
        _ if tag != 0 => SctpStep::Invalid,
        SctpState::Closed | SctpState::PickedUp => SctpStep::Open,
        SctpState::CookieWait if from_opener => SctpStep::Accept(state, sender, receiver),
        // A peer that restarted, or INITs that crossed (RFC 9260 section 5.2): the receiver decides by its own state.
        _ => SctpStep::Pass,
    }
}

fn after(state: SctpState, from_opener: bool, chunk: SctpChunk) -> Option<SctpState> {
    use SctpState as S;
    Some(match (chunk, state) {
        (SctpChunk::Abort, _) | (SctpChunk::ShutdownComplete, S::ShutdownAckSent | S::Closed) => S::Closed,
        // Until the other side has sent too.
        (_, S::PickedUp) => S::PickedUp,
        (SctpChunk::InitAck, S::CookieWait) if !from_opener => S::CookieWait,
        (SctpChunk::CookieEcho, S::CookieWait | S::CookieEchoed) if from_opener => S::CookieEchoed,
        (SctpChunk::CookieAck, S::CookieEchoed) if !from_opener => S::Established,
        // Retransmitted because the reply was lost.
        (SctpChunk::InitAck | SctpChunk::CookieEcho | SctpChunk::CookieAck, S::CookieEchoed | S::Established) => state,
        (SctpChunk::Shutdown, S::Established) => {
            if from_opener {
                S::ShutdownSent
            } else {
                S::ShutdownReceived
            }
        }
        (SctpChunk::Shutdown, S::ShutdownSent | S::ShutdownReceived | S::ShutdownAckSent) => state,
        (SctpChunk::ShutdownAck, S::ShutdownSent | S::ShutdownReceived | S::ShutdownAckSent) => S::ShutdownAckSent,
        // Data may follow COOKIE ECHO in the same packet, and its reply may follow COOKIE ACK.
        (SctpChunk::Other, S::CookieEchoed | S::Established | S::ShutdownSent | S::ShutdownReceived) => state,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use SctpChunk::*;
    use SctpState as S;

    /// Whether the opener sends it, the chunk, the tag, and the resulting state (`None`: invalid).
    type Packet = (bool, SctpChunk, u32, Option<S>);

    const HANDSHAKE: [Packet; 4] = [
        (false, InitAck, 0xa, Some(S::CookieWait)),
        (true, CookieEcho, 0xb, Some(S::CookieEchoed)),
        (false, CookieAck, 0xa, Some(S::Established)),
        (true, Other, 0xb, Some(S::Established)),
    ];

    /// Runs packets against an association that an INIT opened.
    fn run(description: &str, packets: &[Packet]) {
        let (mut state, opener, other) = open(Init, 0, false).unwrap();
        let mut kept = [opener, other];
        for (number, &(from_opener, chunk, tag, expected)) in packets.iter().enumerate() {
            let (sender, receiver) = if from_opener { (0, 1) } else { (1, 0) };
            let after = match step(state, kept[sender], kept[receiver], from_opener, chunk, tag) {
                SctpStep::Accept(next, of_sender, of_receiver) => {
                    (kept[sender], kept[receiver]) = (of_sender, of_receiver);
                    state = next;
                    Some(state)
                }
                SctpStep::Pass => Some(state),
                SctpStep::Invalid | SctpStep::Open => None,
            };
            assert_eq!(after, expected, "{description}: packet {number}, {chunk:?}");
        }
    }

    #[test]
    fn associations_change_state_with_their_packets() {
        let then = |rest: &[Packet]| [&HANDSHAKE[..], rest].concat();
        run("handshake", &HANDSHAKE);
        run(
            "lost COOKIE ACK",
            &then(&[(true, CookieEcho, 0xb, Some(S::Established)), (false, CookieAck, 0xa, Some(S::Established))]),
        );
        run(
            "shutdown by the opener",
            &then(&[
                (true, Shutdown, 0xb, Some(S::ShutdownSent)),
                (false, ShutdownAck, 0xa, Some(S::ShutdownAckSent)),
                (true, ShutdownComplete, 0xb, Some(S::Closed)),
            ]),
        );
        run(
            "shutdown by the other side, data still under way",
            &then(&[
                (false, Shutdown, 0xa, Some(S::ShutdownReceived)),
                (true, Other, 0xb, Some(S::ShutdownReceived)),
                (true, ShutdownAck, 0xb, Some(S::ShutdownAckSent)),
                (false, ShutdownComplete, 0xb, Some(S::Closed)),
            ]),
        );
        run("abort with its own tag", &then(&[(false, Abort, 0xa, Some(S::Closed))]));
        run("abort with the reflected tag", &then(&[(false, Abort, 0xb, Some(S::Closed))]));
        run("abort with neither tag", &then(&[(false, Abort, 0xc, None), (true, Other, 0xb, Some(S::Established))]));
        run("data with a wrong tag", &then(&[(true, Other, 0xa, None), (true, Other, 0, None)]));
        run("INIT again", &[(true, Init, 0, Some(S::CookieWait)), (true, Init, 7, None)]);
        run("a peer that restarts", &then(&[(true, Init, 0, Some(S::Established))]));
        run("refused", &[(false, Abort, 0xa, Some(S::Closed))]);
        run("data before the handshake", &[(true, Other, 0xb, None), (false, CookieAck, 0xa, None)]);
    }

    #[test]
    fn an_init_reopens_a_closed_association() {
        assert_eq!(step(S::Closed, KNOWN | 1, KNOWN | 2, true, Init, 0), SctpStep::Open);
    }

    #[test]
    fn mid_stream_packets_open_an_association_only_if_enabled() {
        assert_eq!(open(Other, 5, false), None);
        assert_eq!(open(Other, 0, true), None);
        assert_eq!(open(Init, 5, true), None);
        assert_eq!(open(CookieAck, 5, true), None);
        let (state, sender, receiver) = open(Other, 5, true).unwrap();
        assert_eq!((state, sender, receiver), (S::PickedUp, KNOWN | 5, 0));
        assert_eq!(step(state, sender, receiver, true, Shutdown, 5), SctpStep::Accept(S::PickedUp, sender, receiver));
        assert_eq!(step(state, sender, receiver, true, Init, 0), SctpStep::Open);
        assert_eq!(step(state, receiver, sender, false, Other, 6), SctpStep::Accept(S::Established, KNOWN | 6, sender));
        assert_eq!(
            step(state, receiver, sender, false, Abort, 5),
            SctpStep::Accept(S::Closed, receiver, sender),
            "reflected"
        );
    }
}
