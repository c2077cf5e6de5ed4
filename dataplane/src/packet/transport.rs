//! Transport-layer fields that the connection table needs.

/// The flag bits of a TCP header (RFC 9293 section 3.1), as in its fourteenth byte.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    pub const FIN: Self = Self(0x01);
    pub const SYN: Self = Self(0x02);
    pub const RST: Self = Self(0x04);
    pub const PSH: Self = Self(0x08);
    pub const ACK: Self = Self(0x10);
    pub const URG: Self = Self(0x20);

    #[inline]
    pub const fn contains(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// The union of these bits and those of `flags`.
    #[inline]
    pub const fn with(self, flags: Self) -> Self {
        Self(self.0 | flags.0)
    }
}

/// The TCP header fields that determine a connection's state. Numbers are in host byte order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TcpSegment {
    pub seq: u32,
    /// Acknowledgement number; meaningful with [`TcpFlags::ACK`].
    pub ack: u32,
    /// Window as in the header, unscaled.
    pub window: u16,
    pub flags: TcpFlags,
    /// Payload bytes; SYN and FIN are not counted.
    pub payload_len: u16,
    /// Shift of the window-scale option (RFC 7323), parsed on SYN segments only; at most 14.
    pub window_scale: Option<u8>,
}

impl TcpSegment {
    /// One past the last sequence number of the segment: its payload, and one each for SYN and FIN.
    #[inline]
    pub const fn end(&self) -> u32 {
        let flags = self.flags.contains(TcpFlags::SYN) as u32 + self.flags.contains(TcpFlags::FIN) as u32;
        self.seq.wrapping_add(self.payload_len as u32).wrapping_add(flags)
    }
}

/// The first chunk of an SCTP packet, as far as it affects a connection's state (RFC 9260 section 3.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SctpChunk {
    Init,
    InitAck,
    CookieEcho,
    CookieAck,
    Shutdown,
    ShutdownAck,
    ShutdownComplete,
    Abort,
    /// Data, acknowledgements, heartbeats and everything else.
    Other,
}

/// Type of a packet for the connection table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Transport {
    Tcp(TcpSegment),
    Udp,
    /// An SCTP packet and the verification tag of its common header.
    Sctp {
        /// Type of its first chunk.
        chunk: SctpChunk,
        /// Verification tag, host byte order.
        tag: u32,
    },
    /// An ICMP or ICMPv6 echo request, or another query with an identifier; it may open a connection.
    EchoRequest,
    /// An ICMP or ICMPv6 echo reply, or that of another query; it may only answer one.
    EchoReply,
    /// An ICMP or ICMPv6 error; it belongs to the connection of the quoted packet.
    IcmpError {
        /// Offset of the quoted IP header from the start of the frame, in bytes.
        quoted_at: u16,
    },
    /// A fragment other than the first, without ports.
    LaterFragment,
    /// A transport header that is cut off, or says what cannot be: identified by addresses and protocol only, and nothing that a
    /// policy could allow. Routers forward it.
    Unreadable,
    /// Any other protocol: identified by addresses and protocol only.
    #[default]
    Other,
}

impl Transport {
    /// Whether a connection may begin with such a packet; for TCP and SCTP, whether it opens one.
    #[inline]
    pub const fn may_open(&self) -> bool {
        match self {
            Self::Tcp(segment) => segment.flags.contains(TcpFlags::SYN) && !segment.flags.contains(TcpFlags::ACK),
            Self::Sctp { chunk, .. } => matches!(chunk, SctpChunk::Init),
            Self::Udp | Self::EchoRequest | Self::Other => true,
            Self::EchoReply | Self::IcmpError { .. } | Self::LaterFragment | Self::Unreadable => false,
        }
    }
}
