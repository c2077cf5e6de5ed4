//! Writes a bundle, as objects, changes and packets come.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use penstock_admin::capture::{CaptureMessage, ObjectsInForce};

use super::{BundleError, MANIFEST, Manifest, OBJECTS, PACKETS, TIMELINE, VERSION};

#[derive(Debug)]
struct Start {
    node: String,
    objects: ObjectsInForce,
    service_cidrs: Vec<IpNet>,
}

/// A bundle that is being written. The directory and its files are their owner's alone. Without [`BundleWriter::end`] the files
/// are removed.
#[derive(Debug)]
pub struct BundleWriter {
    directory: PathBuf,
    /// Whether the directory was not there before.
    is_new: bool,
    start: Option<Start>,
    objects: BufWriter<File>,
    timeline: BufWriter<File>,
    /// Objects and changes so far.
    written: (u64, u64),
    is_ended: bool,
}

impl BundleWriter {
    /// Begins a bundle in a directory that is empty, or is not there, and returns the file for its packets.
    ///
    /// # Errors
    /// The directory has files, or cannot be written.
    pub fn create(directory: &Path) -> Result<(Self, File), BundleError> {
        let uncreated = |cause| BundleError::Uncreated { file: directory.to_owned(), cause };
        let is_new = match DirBuilder::new().mode(0o700).create(directory) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                match std::fs::read_dir(directory).map_err(uncreated)?.next() {
                    None => false,
                    Some(_) => return Err(BundleError::NotEmpty(directory.to_owned())),
                }
            }
            Err(error) => return Err(uncreated(error)),
        };
        let create = |name: &str| create(&directory.join(name));
        let writer = Self {
            directory: directory.to_owned(),
            is_new,
            start: None,
            objects: BufWriter::new(create(OBJECTS)?),
            timeline: BufWriter::new(create(TIMELINE)?),
            written: (0, 0),
            is_ended: false,
        };
        let packets = create(PACKETS)?;
        Ok((writer, packets))
    }

    /// Takes what a message of the daemon says of the cluster's objects, with the bytes that follow it.
    ///
    /// # Errors
    /// It cannot be written, or is not understood.
    pub fn message(&mut self, message: &CaptureMessage, content: &[u8]) -> io::Result<()> {
        match message {
            CaptureMessage::Begin { node, objects: Some(objects) } => {
                let blocks = objects.service_cidrs.iter().map(|block| block.parse().map_err(io::Error::other));
                let service_cidrs = blocks.collect::<io::Result<_>>()?;
                self.start = Some(Start { node: node.clone(), objects: objects.clone(), service_cidrs });
                Ok(())
            }
            CaptureMessage::Objects { count } => {
                self.written.0 += count;
                self.objects.write_all(content)
            }
            CaptureMessage::Changes { epoch, time } => {
                self.written.1 += 1;
                write!(self.timeline, "{{\"epoch\":{epoch},\"time\":{time},\"changes\":")?;
                self.timeline.write_all(content)?;
                self.timeline.write_all(b"}\n")
            }
            CaptureMessage::Begin { objects: None, .. }
            | CaptureMessage::Packet(_)
            | CaptureMessage::Progress(_)
            | CaptureMessage::End { .. } => Ok(()),
        }
    }

    /// Ends the bundle at this time in nanoseconds since 1970. All packets are written: so many, and so many were lost.
    ///
    /// # Errors
    /// It cannot be written, or objects are missing.
    pub fn end(mut self, ended: u64, packets: u64, lost: u64) -> io::Result<()> {
        let Some(start) = self.start.take().filter(|start| start.objects.count == self.written.0) else {
            return Err(io::Error::other("it ended before all objects had come: capture again"));
        };
        self.objects.flush()?;
        self.timeline.flush()?;
        let manifest = Manifest {
            version: VERSION,
            penstock: start.objects.version,
            node: start.node,
            began: start.objects.time,
            ended,
            epoch: start.objects.epoch,
            objects: self.written.0,
            changes: self.written.1,
            packets,
            lost,
            service_cidrs: start.service_cidrs,
            midstream_pickup: start.objects.midstream_pickup,
        };
        let text = serde_json::to_string_pretty(&manifest)? + "\n";
        let mut file = create(&self.directory.join(MANIFEST)).map_err(io::Error::other)?;
        file.write_all(text.as_bytes())?;
        self.is_ended = true;
        Ok(())
    }
}

impl Drop for BundleWriter {
    fn drop(&mut self) {
        if self.is_ended {
            return;
        }
        // The rest of it is no bundle. Without its manifest replay refuses what cannot be removed.
        for name in [MANIFEST, PACKETS, OBJECTS, TIMELINE] {
            let _ = std::fs::remove_file(self.directory.join(name));
        }
        if self.is_new {
            let _ = std::fs::remove_dir(&self.directory);
        }
    }
}

fn create(file: &Path) -> Result<File, BundleError> {
    let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
    created.map_err(|cause| BundleError::Uncreated { file: file.to_owned(), cause })
}
