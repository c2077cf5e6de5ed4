//! How a table comes to be, and why it may not.

use std::path::PathBuf;

use super::config::ConfigError;

/// How a table came to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opened {
    /// It begins empty: in memory, or in a file that was not there.
    New,
    /// It was found in its file, and its connections go on.
    Found,
    /// What was in its place was no use, and a new one was made, empty.
    Remade(Unusable),
}

/// Why a file is no use as a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unusable {
    /// It is something else.
    #[error("the file is no connection table")]
    Foreign,
    /// Another version of the program made it.
    #[error("the connection table is of version {found}, not {wanted}")]
    Version {
        /// Its version.
        found: u64,
        /// The version of this program.
        wanted: u64,
    },
    /// It was made for another number of connections.
    #[error("the connection table is of another size than is set")]
    Size,
    /// It is not whole.
    #[error("the connection table is torn")]
    Torn,
    /// It was made before the machine was last started.
    #[error("the connection table is from before the machine was started")]
    OtherBoot,
}

/// Why a table could not be made.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A setting cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is not enough memory.
    #[error("connection table: no {bytes} octets of memory ({source}): set conntrack entries lower")]
    Memory {
        /// How much was asked for.
        bytes: usize,
        /// What the kernel says.
        source: std::io::Error,
    },
    /// The file cannot be opened, made or mapped.
    #[error("connection table {path}: {source}: make its directory, or set another mapping")]
    File {
        /// The file.
        path: PathBuf,
        /// What the kernel says.
        source: std::io::Error,
    },
    /// Another process uses the file.
    #[error("connection table {path} is in use by another process: stop that one, or set another mapping")]
    InUse {
        /// The file.
        path: PathBuf,
    },
}
