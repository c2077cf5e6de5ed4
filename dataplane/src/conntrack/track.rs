//! The effect of a packet on its connection: pure state transition functions.

use std::time::Duration;

use super::entry::{ControlWord, Tracking};
use super::held_syn::HeldSyn;
use super::state::State;
use super::time::{self, Tick};
use super::{sctp, tcp};
use crate::packet::{Orientation, Protocol, SctpChunk, TcpFlags, TcpSegment, Transport};

/// The effect of a packet on its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PacketEffect {
    /// It passes, and this is the connection's new state.
    Accept(State, Tracking),
    /// A SYN on a live connection: it passes for its receiver to decide and is held with the connection, which
    /// otherwise stays unchanged.
    Hold(Tracking, HeldSyn),
    /// It passes for its receiver to decide and proves nothing: the connection stays unchanged and its timeout is not
    /// refreshed.
    Pass,
    /// It is invalid in the connection's state.
    Invalid,
    /// It opens a new connection in place of one that has ended or was never answered.
    Open,
    /// It answers a held SYN: the connection restarts in the SYN's direction, with this.
    Restart(Tracking),
}

/// The first packet of a connection: its initial state and tracking words, or `None` if it cannot open one.
pub(super) fn open(
    protocol: Protocol,
    orientation: Orientation,
    transport: &Transport,
    midstream_pickup: bool,
    now: Tick,
) -> Option<(State, Tracking)> {
    match (protocol, transport) {
        (Protocol::TCP, Transport::Tcp(segment)) => {
            let (state, sender, receiver) = tcp::open(segment, midstream_pickup)?;
            Some((State::Tcp(state), tracking(orientation, sender.pack(), receiver.pack())))
        }
        (Protocol::SCTP, Transport::Sctp { chunk, tag }) => {
            let (state, sender, receiver) = sctp::open(*chunk, *tag, midstream_pickup)?;
            Some((State::Sctp(state), tracking(orientation, sender, receiver)))
        }
        (Protocol::TCP | Protocol::SCTP, _) => None,
        (Protocol::UDP, Transport::Udp)
        | (Protocol::ICMP | Protocol::ICMPV6, Transport::EchoRequest)
        | (_, Transport::Other) => Some((State::Unreplied, [u64::from(now.0), 0])),
        _ => None,
    }
}

/// A later packet of a connection in `state`, in direction `orientation`; `original` opened it.
#[inline(always)]
pub(super) fn step(
    state: State,
    tracked: Tracking,
    original: Orientation,
    orientation: Orientation,
    transport: &Transport,
    held: HeldSyn,
    now: Tick,
) -> PacketEffect {
    let from_opener = orientation == original;
    let (sender, receiver) = (tracked[orientation as usize], tracked[orientation.opposite() as usize]);
    match (state, transport) {
        (State::Tcp(state), Transport::Tcp(segment)) => {
            match tcp::step(state, sender, receiver, from_opener, segment, held) {
                tcp::TcpStep::Accept(state, sender, receiver) => {
                    PacketEffect::Accept(State::Tcp(state), tracking(orientation, sender, receiver))
                }
                tcp::TcpStep::Hold(sender, held) => PacketEffect::Hold(tracking(orientation, sender, receiver), held),
                tcp::TcpStep::Pass => PacketEffect::Pass,
                tcp::TcpStep::Invalid => PacketEffect::Invalid,
                tcp::TcpStep::Open => PacketEffect::Open,
                tcp::TcpStep::Restart(sender, receiver) => {
                    PacketEffect::Restart(tracking(orientation, sender, receiver))
                }
            }
        }
        (State::Sctp(state), Transport::Sctp { chunk, tag }) => {
            match sctp::step(state, sender, receiver, from_opener, *chunk, *tag) {
                sctp::SctpStep::Accept(state, sender, receiver) => {
                    PacketEffect::Accept(State::Sctp(state), tracking(orientation, sender, receiver))
                }
                sctp::SctpStep::Pass => PacketEffect::Pass,
                sctp::SctpStep::Invalid => PacketEffect::Invalid,
                sctp::SctpStep::Open => PacketEffect::Open,
            }
        }
        // A later fragment passes with its first one; it only shows that the connection is in use.
        (_, Transport::LaterFragment) => PacketEffect::Accept(state, tracked),
        (State::Unreplied | State::Replied | State::Assured, transport) => match (transport, from_opener) {
            (Transport::EchoRequest | Transport::Udp | Transport::Other, true) => {
                PacketEffect::Accept(after_opener(state, tracked, now), tracked)
            }
            (Transport::EchoReply | Transport::Udp | Transport::Other, false) => {
                PacketEffect::Accept(if state == State::Unreplied { State::Replied } else { state }, tracked)
            }
            _ => PacketEffect::Invalid,
        },
        _ => PacketEffect::Invalid,
    }
}

/// Time after its first packet at which the opening side must still send for the connection to be a stream.
const STREAM: u32 = time::ticks(Duration::from_secs(2));

/// The state after another packet of the opening side, for a protocol without a handshake.
#[inline]
fn after_opener(state: State, tracked: Tracking, now: Tick) -> State {
    let began = Tick(tracked[0] as u32);
    if state == State::Replied && began.age(now) >= STREAM { State::Assured } else { state }
}

/// Fast path of [`step`] for nearly every segment of an established TCP connection: the new tracking words, or `None`
/// if [`step`] must decide.
#[inline(always)]
pub(super) fn fast_step(tracked: Tracking, orientation: Orientation, segment: &TcpSegment) -> Option<Tracking> {
    let (sender, receiver) = (tracked[orientation as usize], tracked[orientation.opposite() as usize]);
    let (sender, receiver) = tcp::fast_step(sender, receiver, segment)?;
    Some(tracking(orientation, sender, receiver))
}

/// [`step`] for nearly every UDP packet: the state of its connection if it changes neither that nor what is tracked, or
/// `None` where [`step`] is to decide.
#[inline(always)]
pub(super) fn go_on_udp(control: ControlWord, orientation: Orientation) -> Option<State> {
    let from_opener = orientation == control.original();
    [(State::Assured, true), (State::Unreplied, from_opener), (State::Replied, !from_opener)]
        .into_iter()
        .find_map(|(state, stays)| (stays && control.is_in(state.code())).then_some(state))
}

/// Whether a packet opens a connection by itself, so that it is evaluated in its own direction where another connection
/// has ended. By other protocols any packet could: none of them ends what policy has cut.
pub(super) fn opens(transport: &Transport) -> bool {
    match transport {
        Transport::Tcp(segment) => segment.flags.contains(TcpFlags::SYN) && !segment.flags.contains(TcpFlags::ACK),
        Transport::Sctp { chunk, .. } => *chunk == SctpChunk::Init,
        _ => false,
    }
}

#[inline]
fn tracking(orientation: Orientation, sender: u64, receiver: u64) -> Tracking {
    match orientation {
        Orientation::LowToHigh => [sender, receiver],
        Orientation::HighToLow => [receiver, sender],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Orientation::{HighToLow, LowToHigh};

    const NOW: Tick = Tick(1000);

    #[test]
    fn a_request_opens_and_a_reply_only_answers() {
        for protocol in [Protocol::ICMP, Protocol::ICMPV6] {
            for other in [Transport::EchoReply, Transport::IcmpError { quoted_at: 0 }, Transport::LaterFragment] {
                assert_eq!(open(protocol, LowToHigh, &other, true, NOW), None);
            }
            let (state, tracking) = open(protocol, HighToLow, &Transport::EchoRequest, true, NOW).unwrap();
            assert_eq!(state, State::Unreplied);
            let step = |orientation, transport| {
                step(state, tracking, HighToLow, orientation, &transport, HeldSyn::default(), NOW)
            };
            assert_eq!(step(HighToLow, Transport::EchoRequest), PacketEffect::Accept(State::Unreplied, tracking));
            assert_eq!(step(LowToHigh, Transport::EchoReply), PacketEffect::Accept(State::Replied, tracking));
            assert_eq!(step(HighToLow, Transport::EchoReply), PacketEffect::Invalid, "a reply from the asker");
            assert_eq!(step(LowToHigh, Transport::EchoRequest), PacketEffect::Invalid, "a request from the asked");
        }
    }

    #[test]
    fn a_datagram_back_is_a_reply_and_two_seconds_a_stream() {
        for (protocol, transport) in [(Protocol::UDP, Transport::Udp), (Protocol(47), Transport::Other)] {
            let (state, tracking) = open(protocol, LowToHigh, &transport, false, NOW).unwrap();
            let step = |state, orientation, after: u32| match step(
                state,
                tracking,
                LowToHigh,
                orientation,
                &transport,
                HeldSyn::default(),
                Tick(NOW.0 + after),
            ) {
                PacketEffect::Accept(state, after) if after == tracking => state,
                other => panic!("{other:?}"),
            };
            assert_eq!(state, State::Unreplied);
            assert_eq!(step(State::Unreplied, LowToHigh, 100), State::Unreplied);
            assert_eq!(step(State::Unreplied, HighToLow, 100), State::Replied);
            assert_eq!(step(State::Replied, HighToLow, 100), State::Replied, "the answering side alone proves nothing");
            assert_eq!([3, 4].map(|after| step(State::Replied, LowToHigh, after)), [State::Replied, State::Assured]);
            assert_eq!([LowToHigh, HighToLow].map(|way| step(State::Assured, way, 100)), [State::Assured; 2]);
        }
    }

    #[test]
    fn a_packet_of_another_type_than_its_connection_is_invalid() {
        let (state, tracking) = open(Protocol::UDP, LowToHigh, &Transport::Udp, true, NOW).unwrap();
        let segment = Transport::Tcp(TcpSegment::default());
        let step = |transport| step(state, tracking, LowToHigh, LowToHigh, &transport, HeldSyn::default(), NOW);
        assert_eq!(step(segment), PacketEffect::Invalid);
        assert_eq!(step(Transport::LaterFragment), PacketEffect::Accept(state, tracking));
        for other in [Transport::Udp, Transport::LaterFragment] {
            assert_eq!(open(Protocol::TCP, LowToHigh, &other, true, NOW), None);
        }
    }
}
