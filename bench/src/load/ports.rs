//! Ports of the measurements' receivers.

use std::ops::Range;

pub const PORTS: Range<u16> = 9000..9060;
pub const PROBE_PORT: u16 = 9060;
/// Ports that serve in a measurement of connections; several, so that no client runs out of source ports.
pub(super) const SERVERS: u16 = 16;
/// Ports of servers that answer datagrams: a meter has taken those of [`PORTS`].
pub const DATAGRAM_SERVERS: Range<u16> = PROBE_PORT + 1..PROBE_PORT + 1 + SERVERS;
/// All ports that policies allow and Services have.
pub const ALL_PORTS: Range<u16> = PORTS.start..DATAGRAM_SERVERS.end;
