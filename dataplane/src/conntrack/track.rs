//! What a packet does to the connection that it belongs to: pure functions from state to state.

use super::entry::Tracking;
use super::state::State;
use super::{sctp, tcp};
use crate::packet::{Orientation, Protocol, SctpChunk, TcpFlags, TcpSegment, Transport};

/// What a packet does to its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// It passes, and the connection goes on with this.
    Accept(State, Tracking),
    /// It passes for its receiver to judge, and proves nothing: the connection stays as it is and ages on.
    Pass,
    /// It does not belong into the connection as it is.
    Invalid,
    /// It opens a new connection where this one has ended.
    Reopen,
    /// Policy has ended the connection.
    Cut,
}

/// The first packet of a connection: the state and tracking that it starts with, or `None` if it cannot open one.
pub(super) fn open(
    protocol: Protocol,
    orientation: Orientation,
    transport: &Transport,
    pick_up: bool,
) -> Option<(State, Tracking)> {
    match (protocol, transport) {
        (Protocol::TCP, Transport::Tcp(segment)) => {
            let (state, sender, receiver) = tcp::open(segment, pick_up)?;
            Some((State::Tcp(state), tracking(orientation, sender.pack(), receiver.pack())))
        }
        (Protocol::SCTP, Transport::Sctp { chunk, tag }) => {
            let (state, sender, receiver) = sctp::open(*chunk, *tag, pick_up)?;
            Some((State::Sctp(state), tracking(orientation, sender, receiver)))
        }
        (Protocol::TCP | Protocol::SCTP, _) => None,
        (Protocol::UDP, Transport::Udp)
        | (Protocol::ICMP | Protocol::ICMPV6, Transport::EchoRequest)
        | (_, Transport::Other) => Some((State::Unreplied, [0; 2])),
        _ => None,
    }
}

/// A later packet of a connection in `state`, travelling `orientation` where `original` opened it.
#[inline(always)]
pub(super) fn step(
    state: State,
    tracked: Tracking,
    original: Orientation,
    orientation: Orientation,
    transport: &Transport,
) -> Step {
    let from_opener = orientation == original;
    let (sender, receiver) = (tracked[orientation as usize], tracked[orientation.opposite() as usize]);
    match (state, transport) {
        (State::Cut, transport) => after_cut(transport),
        (State::Tcp(state), Transport::Tcp(segment)) => {
            match tcp::step(state, sender, receiver, from_opener, segment) {
                tcp::Step::Accept(state, sender, receiver) => {
                    Step::Accept(State::Tcp(state), tracking(orientation, sender, receiver))
                }
                tcp::Step::Pass => Step::Pass,
                tcp::Step::Invalid => Step::Invalid,
                tcp::Step::Reopen => Step::Reopen,
            }
        }
        (State::Sctp(state), Transport::Sctp { chunk, tag }) => {
            match sctp::step(state, sender, receiver, from_opener, *chunk, *tag) {
                sctp::Step::Accept(state, sender, receiver) => {
                    Step::Accept(State::Sctp(state), tracking(orientation, sender, receiver))
                }
                sctp::Step::Pass => Step::Pass,
                sctp::Step::Invalid => Step::Invalid,
                sctp::Step::Reopen => Step::Reopen,
            }
        }
        // A later fragment has been let through by its first one; it only shows that the connection is in use.
        (_, Transport::LaterFragment) => Step::Accept(state, tracked),
        (State::Unreplied | State::Replied, Transport::EchoRequest) if from_opener => Step::Accept(state, tracked),
        (State::Unreplied | State::Replied, Transport::EchoReply) if !from_opener => {
            Step::Accept(State::Replied, tracked)
        }
        (State::Unreplied | State::Replied, Transport::Udp | Transport::Other) => {
            Step::Accept(if from_opener { state } else { State::Replied }, tracked)
        }
        _ => Step::Invalid,
    }
}

/// [`step`] for nearly every segment of an established TCP connection: what is tracked after it, or `None` where [`step`]
/// is to decide.
#[inline(always)]
pub(super) fn go_on(tracked: Tracking, orientation: Orientation, segment: &TcpSegment) -> Option<Tracking> {
    let (sender, receiver) = (tracked[orientation as usize], tracked[orientation.opposite() as usize]);
    let (sender, receiver) = tcp::go_on(sender, receiver, segment)?;
    Some(tracking(orientation, sender, receiver))
}

/// Nothing of a connection passes that policy has cut. What opens another one between the same ports is judged anew,
/// in its own direction.
fn after_cut(transport: &Transport) -> Step {
    match transport {
        Transport::Tcp(segment) if segment.flags.contains(TcpFlags::SYN) && !segment.flags.contains(TcpFlags::ACK) => {
            Step::Reopen
        }
        Transport::Sctp { chunk: SctpChunk::Init, .. } => Step::Reopen,
        _ => Step::Cut,
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

    #[test]
    fn only_a_request_opens_and_a_reply_only_answers() {
        for protocol in [Protocol::ICMP, Protocol::ICMPV6] {
            assert_eq!(open(protocol, LowToHigh, &Transport::EchoReply, true), None);
            assert_eq!(open(protocol, LowToHigh, &Transport::IcmpError { quoted_at: 0 }, true), None);
            assert_eq!(open(protocol, LowToHigh, &Transport::LaterFragment, true), None);
            let (state, tracking) = open(protocol, HighToLow, &Transport::EchoRequest, true).unwrap();
            assert_eq!(state, State::Unreplied);
            let step = |orientation, transport| step(state, tracking, HighToLow, orientation, &transport);
            assert_eq!(step(HighToLow, Transport::EchoRequest), Step::Accept(State::Unreplied, tracking));
            assert_eq!(step(LowToHigh, Transport::EchoReply), Step::Accept(State::Replied, tracking));
            assert_eq!(step(HighToLow, Transport::EchoReply), Step::Invalid, "a reply from the asker");
            assert_eq!(step(LowToHigh, Transport::EchoRequest), Step::Invalid, "a request from the asked");
        }
    }

    #[test]
    fn a_datagram_from_the_answering_side_is_a_reply() {
        for (protocol, transport) in [(Protocol::UDP, Transport::Udp), (Protocol(47), Transport::Other)] {
            let (state, tracking) = open(protocol, LowToHigh, &transport, false).unwrap();
            assert_eq!(state, State::Unreplied);
            let step = |state, orientation| step(state, tracking, LowToHigh, orientation, &transport);
            assert_eq!(step(state, LowToHigh), Step::Accept(State::Unreplied, tracking));
            assert_eq!(step(state, HighToLow), Step::Accept(State::Replied, tracking));
            assert_eq!(step(State::Replied, LowToHigh), Step::Accept(State::Replied, tracking));
        }
    }

    #[test]
    fn a_packet_of_another_kind_than_its_connection_is_invalid() {
        let (state, tracking) = open(Protocol::UDP, LowToHigh, &Transport::Udp, true).unwrap();
        let segment = Transport::Tcp(crate::packet::TcpSegment::default());
        assert_eq!(step(state, tracking, LowToHigh, LowToHigh, &segment), Step::Invalid);
        assert_eq!(open(Protocol::TCP, LowToHigh, &Transport::Udp, true), None);
        assert_eq!(open(Protocol::TCP, LowToHigh, &Transport::LaterFragment, true), None);
        assert_eq!(
            step(state, tracking, LowToHigh, LowToHigh, &Transport::LaterFragment),
            Step::Accept(state, tracking)
        );
    }
}
