//! The control side's table of open ports: numbers, and the socket and worker of each pair.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::MAX_PORTS;
use super::statistics::{KernelDrops, PortCounters};
use crate::Snapshot;
use crate::forward::PortId;
use crate::io::XskQueue;

/// The socket of a worker's pair.
#[derive(Debug)]
pub(super) struct OpenSocket {
    pub(super) worker: usize,
    /// A duplicate of its descriptor, to query it and to put it into a map while its worker uses it.
    pub(super) descriptor: OwnedFd,
}

#[derive(Debug)]
pub(super) struct OpenPort {
    pub(super) interface: String,
    /// Of a pair. Its frames are marked by the port's number.
    pub(super) socket: Option<OpenSocket>,
    /// By worker.
    pub(super) counters: Vec<Arc<PortCounters>>,
}

impl OpenPort {
    /// Packets that the kernel dropped at its socket until now.
    pub(super) fn kernel_drops(&self) -> KernelDrops {
        let mut drops = KernelDrops::default();
        let statistics = self.socket.as_ref().map(|socket| XskQueue::statistics(socket.descriptor.as_fd()));
        if let Some(Ok(statistics)) = statistics {
            drops.add(&statistics);
        }
        drops
    }
}

/// Open ports by number, and the free numbers.
#[derive(Debug, Default)]
pub(super) struct PortTable {
    ports: Vec<Option<OpenPort>>,
    retired: VecDeque<PortId>,
}

impl PortTable {
    /// A number for a new port: one that is free and does not occur in `published`.
    ///
    /// A number must not be reused for another port while a worker may still forward by a table that contains the old
    /// one. Workers reload the table after they are informed of a port, so it suffices that the last published table
    /// does not contain it.
    pub(super) fn vacant(&mut self, published: &Snapshot) -> Option<PortId> {
        let clear = self.retired.iter().position(|&id| published.forwarding.port(id).is_none());
        if let Some(id) = clear.and_then(|position| self.retired.remove(position)) {
            return Some(id);
        }
        if self.ports.len() == MAX_PORTS {
            return None;
        }
        self.ports.push(None);
        Some(PortId((self.ports.len() - 1) as u16))
    }

    /// Returns an unused number.
    pub(super) fn retire(&mut self, id: PortId) {
        self.retired.push_back(id);
    }

    pub(super) fn insert(&mut self, id: PortId, port: OpenPort) {
        self.ports[id.index()] = Some(port);
    }

    pub(super) fn get(&self, id: PortId) -> Option<&OpenPort> {
        self.ports.get(id.index())?.as_ref()
    }

    /// Removes a port; retire its number when its frames are free.
    pub(super) fn remove(&mut self, id: PortId) -> Option<OpenPort> {
        self.ports.get_mut(id.index())?.take()
    }

    /// Open ports in the order of their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PortId, &OpenPort)> {
        self.ports.iter().enumerate().filter_map(|(index, port)| Some((PortId(index as u16), port.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::{Forwarding, Mac, Port, PortKind};

    fn snapshot_with(ids: &[u16]) -> Snapshot {
        let mut forwarding = Forwarding::new([]);
        for &id in ids {
            let (own_mac, peer_mac) = (Mac::default(), Mac::default());
            let port = Port::new(PortKind::Pod, own_mac, peer_mac, 1500, Vec::new());
            forwarding.insert(PortId(id), port).unwrap();
        }
        Snapshot { forwarding, ..Snapshot::default() }
    }

    #[test]
    fn a_port_number_is_reused_once_it_is_unpublished() {
        let mut table = PortTable::default();
        let none = snapshot_with(&[]);
        assert_eq!(table.vacant(&none), Some(PortId(0)));
        assert_eq!(table.vacant(&none), Some(PortId(1)));
        table.retire(PortId(0));
        table.retire(PortId(1));
        assert_eq!(table.vacant(&snapshot_with(&[0, 1])), Some(PortId(2)));
        assert_eq!(table.vacant(&snapshot_with(&[0])), Some(PortId(1)));
        assert_eq!(table.vacant(&none), Some(PortId(0)));
        assert_eq!(table.vacant(&none), Some(PortId(3)));
    }

    #[test]
    fn ports_are_bounded() {
        let mut table = PortTable::default();
        let none = snapshot_with(&[]);
        for _ in 0..MAX_PORTS {
            assert!(table.vacant(&none).is_some());
        }
        assert_eq!(table.vacant(&none), None);
    }
}
