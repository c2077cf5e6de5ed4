//! Where packets go: one file for all nodes, or a bundle for each.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use penstock_admin::capture::{CaptureCounts, CaptureMessage, PacketRecord};
use penstock_replay::bundle::BundleWriter;
use penstock_replay::capture::VerdictFile;

use super::super::folder::name_of;
use super::merge::Merger;

/// How long a packet waits for older ones of other nodes.
const HOLD: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Packet {
    pub(super) record: PacketRecord,
    pub(super) frame: Vec<u8>,
    /// How many packets the node had lost until then.
    pub(super) lost: u64,
}

/// The files that the packets of all nodes are written to.
pub(super) enum Output {
    Merged { file: Box<VerdictFile<BufWriter<Box<dyn Write>>>>, merger: Merger<Packet> },
    Bundles(Vec<NodeBundle>),
}

pub(super) struct NodeBundle {
    writer: BundleWriter,
    file: VerdictFile<BufWriter<File>>,
    /// When it began, in nanoseconds since 1970 by the node's clock, and by this process's.
    began: (u64, Duration),
}

impl Output {
    /// One file for these nodes.
    pub(super) fn merged(output: Box<dyn Write>, nodes: &[String]) -> io::Result<Self> {
        let mut file = VerdictFile::of_nodes(BufWriter::with_capacity(1 << 16, output), nodes.iter().cloned())?;
        file.flush()?;
        Ok(Self::Merged { file: Box::new(file), merger: Merger::new(nodes.len(), HOLD) })
    }

    /// A folder below `directory` for each of these nodes.
    pub(super) fn bundles(directory: &Path, nodes: &[String]) -> io::Result<Self> {
        let bundle = |node: &String| {
            let folder = directory.join(name_of(node).map_err(io::Error::other)?);
            let (writer, packets) = BundleWriter::create(&folder).map_err(io::Error::other)?;
            let file = VerdictFile::new(BufWriter::with_capacity(1 << 16, packets))?;
            Ok(NodeBundle { writer, file, began: Default::default() })
        };
        Ok(Self::Bundles(nodes.iter().map(bundle).collect::<io::Result<_>>()?))
    }

    pub(super) fn packets(&self) -> u64 {
        match self {
            Self::Merged { file, .. } => file.packets(),
            Self::Bundles(bundles) => bundles.iter().map(|bundle| bundle.file.packets()).sum(),
        }
    }

    pub(super) fn packets_of(&self, node: usize) -> u64 {
        match self {
            Self::Merged { file, .. } => file.packets_of(node),
            Self::Bundles(bundles) => bundles[node].file.packets(),
        }
    }

    /// Packets that came too late for their place in the order.
    pub(super) fn late(&self) -> u64 {
        match self {
            Self::Merged { merger, .. } => merger.late(),
            Self::Bundles(_) => 0,
        }
    }

    /// Takes a packet that has arrived `now`. One of a bundle is written, unless so many are already.
    pub(super) fn packet(&mut self, node: usize, packet: Packet, now: Duration, most: Option<u64>) -> io::Result<()> {
        let is_full = most.is_some_and(|most| self.packets() >= most);
        match self {
            Self::Merged { merger, .. } => merger.push(node, packet.record.time, packet, now),
            Self::Bundles(bundles) if !is_full => {
                let Packet { record, frame, lost } = &packet;
                bundles[node].file.packet(0, record, frame, *lost)?;
            }
            Self::Bundles(_) => {}
        }
        Ok(())
    }

    /// Takes what another message says of the cluster's objects.
    pub(super) fn message(
        &mut self,
        node: usize,
        message: &CaptureMessage,
        content: &[u8],
        now: Duration,
    ) -> io::Result<()> {
        let Self::Bundles(bundles) = self else { return Ok(()) };
        if let CaptureMessage::Begin { objects: Some(objects), .. } = message {
            bundles[node].began = (objects.time, now);
        }
        bundles[node].writer.message(message, content)
    }

    /// Writes the packets of one file whose turn it is, unless so many are written.
    pub(super) fn drain(&mut self, now: Duration, most: Option<u64>) -> io::Result<()> {
        let Self::Merged { file, merger } = self else { return Ok(()) };
        let before = file.packets();
        while let Some((node, Packet { record, frame, lost })) = merger.pop(now) {
            if most.is_none_or(|most| file.packets() < most) {
                file.packet(node, &record, &frame, lost)?;
            }
        }
        if file.packets() > before { file.flush() } else { Ok(()) }
    }

    pub(super) fn ended(&mut self, node: usize) {
        if let Self::Merged { merger, .. } = self {
            merger.end(node);
        }
    }

    /// Ends what is written. By node: what it has counted, and why it ended. Returns what is wrong with a node's bundle.
    pub(super) fn end(self, ended: &[(CaptureCounts, String)], now: Duration) -> io::Result<Vec<Option<io::Error>>> {
        match self {
            Self::Merged { mut file, .. } => {
                file.end(ended)?;
                Ok(ended.iter().map(|_| None).collect())
            }
            Self::Bundles(bundles) => {
                bundles.into_iter().zip(ended).map(|(bundle, ended)| bundle.end(ended, now)).collect()
            }
        }
    }
}

impl NodeBundle {
    fn end(mut self, ended: &(CaptureCounts, String), now: Duration) -> io::Result<Option<io::Error>> {
        self.file.end(std::slice::from_ref(ended))?;
        let (began, since) = self.began;
        let time = began + now.saturating_sub(since).as_nanos() as u64;
        Ok(self.writer.end(time, self.file.packets(), ended.0.lost).err())
    }
}
