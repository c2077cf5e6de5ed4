//! The control side's table of open ports: numbers, slots, sockets, and the worker of each queue.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::MAX_PORTS;
use super::statistics::{KernelDrops, PortCounters};
use crate::Snapshot;
use crate::forward::PortId;
use crate::io::{GsoPort, GsoSocket, QueueSlot, XskQueue};

/// One queue of an open port.
#[derive(Debug)]
pub(super) struct OpenQueue {
    pub(super) worker: usize,
    /// Marks its frames.
    pub(super) slot: QueueSlot,
    /// A duplicate of the socket, to query it and to put it into a map while its worker uses it.
    pub(super) socket: OwnedFd,
    /// The GSO socket if enabled, or why it is not available.
    pub(super) gso: Option<io::Result<Arc<GsoSocket>>>,
}

#[derive(Debug)]
pub(super) struct OpenPort {
    pub(super) interface: String,
    pub(super) queues: Vec<OpenQueue>,
    /// For packets that do not fit a frame; workers without a queue of the port send by it, too.
    pub(super) sender: Option<Arc<GsoPort>>,
    /// By worker.
    pub(super) counters: Vec<Arc<PortCounters>>,
}

impl OpenPort {
    /// Packets that the kernel dropped at its sockets until now.
    pub(super) fn kernel_drops(&self) -> KernelDrops {
        let mut drops = KernelDrops::default();
        for queue in &self.queues {
            if let Ok(statistics) = XskQueue::statistics(queue.socket.as_fd()) {
                drops.add(&statistics);
            }
        }
        drops
    }
}

/// Open ports by number, and the free numbers and slots.
#[derive(Debug, Default)]
pub(super) struct PortTable {
    ports: Vec<Option<OpenPort>>,
    retired: VecDeque<PortId>,
    slots_used: u16,
    free_slots: Vec<QueueSlot>,
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

    pub(super) fn take_slot(&mut self) -> Option<QueueSlot> {
        self.free_slots.pop().or_else(|| {
            (self.slots_used < QueueSlot::COUNT).then(|| {
                self.slots_used += 1;
                QueueSlot::new(self.slots_used - 1)
            })
        })
    }

    pub(super) fn give_slot(&mut self, slot: QueueSlot) {
        self.free_slots.push(slot);
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
    fn ports_are_bounded_and_slots_are_distinct() {
        let mut table = PortTable::default();
        let none = snapshot_with(&[]);
        for _ in 0..MAX_PORTS {
            assert!(table.vacant(&none).is_some());
        }
        assert_eq!(table.vacant(&none), None);
        let (one, two) = (table.take_slot().unwrap(), table.take_slot().unwrap());
        assert_ne!(one, two);
        table.give_slot(one);
        assert_eq!(table.take_slot(), Some(one));
        while table.take_slot().is_some() {}
        assert_eq!(table.slots_used, QueueSlot::COUNT);
    }
}
