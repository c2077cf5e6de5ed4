//! A batch of frames, which the pipeline gets of sockets or of memory.

mod memory;

pub use memory::MemoryFrames;

pub const BATCH: usize = 64;

/// The frames of one batch, all received on one port.
///
/// The pipeline accesses each frame's bytes by index, from the Ethernet header to the last byte received.
pub trait Frames {
    /// Number of frames in the batch; at most [`BATCH`].
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of frame `index`, which is below [`Frames::len`].
    fn bytes(&mut self, index: usize) -> &mut [u8];

    /// Who sent frame `index`, which came from the node's stack.
    fn stack_sender(&mut self, _index: usize) -> StackSender {
        StackSender::Unknown
    }
}

/// Who sent a packet that came from the node's stack. Kubernetes exempts the node's own processes from policy, such as the
/// kubelet with its probes, but not what the node forwards, even if it has given it an address of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StackSender {
    /// Not known: by its source address.
    #[default]
    Unknown,
    /// A process of the node.
    Process,
    /// Another machine, or a pod.
    Forwarded,
    /// The same, and the node's connection tracking knows that it leaves with the addresses and ports that it came with.
    Unchanged,
    /// The same, and it leaves with the source that it came with, as far as the node's connection tracking knows.
    Untranslated,
    /// The same, and the node has translated its source (masquerade).
    Translated,
    /// This port's pod, to its own node or to a Service. The node has given the packet the address of what answers, another machine,
    /// and perhaps an address of its own as source, or has not translated it, and sends it out by this uplink.
    Leaving { port: u16, uplink: u8 },
}

impl StackSender {
    /// Whether the node's stack has forwarded it to a pod.
    pub(crate) const fn is_forwarded(self) -> bool {
        matches!(self, Self::Forwarded | Self::Unchanged | Self::Untranslated | Self::Translated)
    }
}
