//! What the connection table needs to know of a packet beyond its flow.

/// The flag bits of a TCP header (RFC 9293 section 3.1), as its fourteenth octet holds them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    /// No more data from the sender.
    pub const FIN: Self = Self(0x01);
    /// Synchronise sequence numbers.
    pub const SYN: Self = Self(0x02);
    /// Reset the connection.
    pub const RST: Self = Self(0x04);
    /// Push.
    pub const PSH: Self = Self(0x08);
    /// The acknowledgement field is significant.
    pub const ACK: Self = Self(0x10);
    /// The urgent pointer is significant.
    pub const URG: Self = Self(0x20);

    /// Whether all bits of `flags` are set.
    #[inline]
    pub const fn contains(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// These bits and those of `flags`.
    #[inline]
    pub const fn with(self, flags: Self) -> Self {
        Self(self.0 | flags.0)
    }
}

/// The fields of a TCP header that decide about a connection's state. Numbers are in host byte order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TcpSegment {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number; meaningful with [`TcpFlags::ACK`].
    pub ack: u32,
    /// Window as in the header, not scaled.
    pub window: u16,
    /// Control bits.
    pub flags: TcpFlags,
    /// Octets of payload; SYN and FIN are not counted.
    pub payload_len: u16,
    /// Shift count of the window-scale option (RFC 7323), looked for on SYN segments only; at most 14.
    pub window_scale: Option<u8>,
}

impl TcpSegment {
    /// One past the last sequence number that the segment takes: its payload, and one each for SYN and FIN.
    #[inline]
    pub const fn end(&self) -> u32 {
        let flags = self.flags.contains(TcpFlags::SYN) as u32 + self.flags.contains(TcpFlags::FIN) as u32;
        self.seq.wrapping_add(self.payload_len as u32).wrapping_add(flags)
    }
}

/// The first chunk of an SCTP packet, as far as a connection's state needs it (RFC 9260 section 3.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SctpChunk {
    /// Opens an association.
    Init,
    /// Answers `Init`.
    InitAck,
    /// Third step of the handshake.
    CookieEcho,
    /// Fourth step of the handshake.
    CookieAck,
    /// Starts an orderly end.
    Shutdown,
    /// Answers `Shutdown`.
    ShutdownAck,
    /// Ends the association in order.
    ShutdownComplete,
    /// Ends the association at once.
    Abort,
    /// Data, acknowledgements, heartbeats and all else.
    Other,
}

/// What kind of packet this is to the connection table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Transport {
    /// A TCP segment.
    Tcp(TcpSegment),
    /// A UDP datagram.
    Udp,
    /// An SCTP packet and the verification tag of its common header.
    Sctp {
        /// What its first chunk does.
        chunk: SctpChunk,
        /// Verification tag, host byte order.
        tag: u32,
    },
    /// An ICMP or ICMPv6 echo request, or another query with an identifier: may open a connection.
    EchoRequest,
    /// An ICMP or ICMPv6 echo reply, or another query's: may only answer one.
    EchoReply,
    /// An ICMP or ICMPv6 error: belongs to the connection of the packet that it quotes.
    IcmpError {
        /// Offset of the quoted IP header from the start of the frame, in octets.
        quoted_at: u16,
    },
    /// A later fragment of a datagram: has no ports of its own.
    LaterFragment,
    /// Any other protocol: known by its addresses and protocol alone.
    #[default]
    Other,
}

impl Transport {
    /// Whether a connection may begin with such a packet; of TCP and SCTP, whether one does.
    #[inline]
    pub const fn may_open(&self) -> bool {
        match self {
            Self::Tcp(segment) => segment.flags.contains(TcpFlags::SYN) && !segment.flags.contains(TcpFlags::ACK),
            Self::Sctp { chunk, .. } => matches!(chunk, SctpChunk::Init),
            Self::Udp | Self::EchoRequest | Self::Other => true,
            Self::EchoReply | Self::IcmpError { .. } | Self::LaterFragment => false,
        }
    }
}
