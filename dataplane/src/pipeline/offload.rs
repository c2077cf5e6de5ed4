//! After the last stage: which connections the kernel's programs may forward from now on by themselves.

use super::{AdmittedPacket, BATCH, Verdict};
use crate::Snapshot;
use crate::conntrack::ConnTable;
use crate::forward::{Port, PortKind};
use crate::packet::Transport;

/// Notes the path of each packet that is forwarded, so that the kernel's programs forward the next ones of its direction
/// alike. They do so for TCP and UDP in states in which every such packet passes, and decide that for themselves.
pub(super) fn offload(
    connections: &ConnTable,
    snapshot: &Snapshot,
    from: &Port,
    slots: &[AdmittedPacket],
    verdicts: &[Verdict; BATCH],
) {
    let Some(from) = interface(from) else { return };
    for slot in slots {
        if let Verdict::Forward(egress) = verdicts[slot.index]
            && slot.packet.fragment.is_none()
            && matches!(slot.packet.transport, Transport::Tcp(_) | Transport::Udp)
            && let Some(to) = snapshot.forwarding.port(egress).and_then(interface)
        {
            connections.take_path(&slot.hashed, (from, to), snapshot.epoch);
        }
    }
}

/// The interface of a port, as a path names it. `None`: it has none that the programs know.
fn interface(port: &Port) -> Option<u32> {
    match port.kind {
        PortKind::Pod => (port.interface != 0).then_some(port.interface),
        PortKind::Host => Some(0),
        PortKind::Uplink => None,
    }
}
