//! Writes a bundle, as objects, changes and packets come.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ipnet::IpNet;

use super::{BundleError, MANIFEST, Manifest, OBJECTS, PACKETS, TIMELINE, VERSION};

/// What is known of a bundle when its capture begins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BundleStart {
    /// The daemon's version.
    pub version: String,
    /// The node's name.
    pub node: String,
    /// When the capture began, in nanoseconds since 1970.
    pub began: u64,
    /// The epoch of the first objects.
    pub epoch: u32,
    /// How many first objects there are.
    pub objects: u64,
    /// Whether workers translate what pods send to Services.
    pub services: bool,
    /// The setting `service_cidrs`.
    pub service_cidrs: Vec<IpNet>,
}

/// A bundle that is being written. The directory and its files are their owner's alone. Without [`BundleWriter::end`] the files
/// are removed.
#[derive(Debug)]
pub struct BundleWriter {
    directory: PathBuf,
    /// Whether the directory was not there before.
    is_new: bool,
    start: Option<BundleStart>,
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

    /// Sets what is known when the capture begins.
    pub fn begin(&mut self, start: BundleStart) {
        self.start = Some(start);
    }

    /// Adds so many of the first objects, a line of JSON each.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn objects(&mut self, lines: &[u8], count: u64) -> io::Result<()> {
        self.written.0 += count;
        self.objects.write_all(lines)
    }

    /// Adds changes, a JSON array, that are in force from this epoch on, which was published at this time in nanoseconds since
    /// 1970.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn changes(&mut self, epoch: u32, time: u64, changes: &[u8]) -> io::Result<()> {
        self.written.1 += 1;
        write!(self.timeline, "{{\"epoch\":{epoch},\"time\":{time},\"changes\":")?;
        self.timeline.write_all(changes)?;
        self.timeline.write_all(b"}\n")
    }

    /// Ends the bundle at this time in nanoseconds since 1970. All packets are written: so many, and so many were lost.
    ///
    /// # Errors
    /// It cannot be written, or objects are missing.
    pub fn end(mut self, ended: u64, packets: u64, lost: u64) -> io::Result<()> {
        let Some(start) = self.start.take().filter(|start| start.objects == self.written.0) else {
            return Err(io::Error::other("it ended before all objects had come: capture again"));
        };
        self.objects.flush()?;
        self.timeline.flush()?;
        let manifest = Manifest {
            version: VERSION,
            penstock: start.version,
            node: start.node,
            began: start.began,
            ended,
            epoch: start.epoch,
            objects: self.written.0,
            changes: self.written.1,
            packets,
            lost,
            services: start.services,
            service_cidrs: start.service_cidrs,
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
        // What is left of it is no bundle. What cannot be removed has no manifest, which replay says.
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
