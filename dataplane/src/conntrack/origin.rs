//! Origin of a table, and the errors of opening one.

use std::path::PathBuf;

use super::config::ConfigError;

/// How a table was obtained.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TableOrigin {
    /// Created empty: in memory, or in a file that did not exist.
    New,
    /// Found in its file; its connections continue.
    Found,
    /// Created empty in place of an unusable file.
    Remade(UnusableFile),
}

/// Why a file is unusable as a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UnusableFile {
    /// It is not a connection table.
    #[error("the file is not a connection table")]
    Foreign,
    /// It was created by another version of the program.
    #[error("the connection table is of version {found}, not {wanted}")]
    Version {
        /// Its version.
        found: u64,
        /// The version of this program.
        wanted: u64,
    },
    /// It was created for another number of connections.
    #[error("the connection table has another size than configured")]
    Size,
    /// It is damaged.
    #[error("the connection table is damaged")]
    Torn,
    /// It was created before the machine was last booted.
    #[error("the connection table was created before the last boot")]
    OtherBoot,
}

/// Why a table could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A setting is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is not enough memory.
    #[error("connection table: no {bytes} bytes of memory ({source}): set conntrack entries lower")]
    Memory {
        /// Bytes requested.
        bytes: usize,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// The file cannot be opened, created or mapped.
    #[error("connection table {path}: {source}: make its directory, or set another mapping")]
    File {
        /// The file.
        path: PathBuf,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// The BPF arrays cannot be mapped.
    #[error("connection table: the kernel does not map its BPF arrays ({source}): set offload = false")]
    Kernel {
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// Another process uses the file.
    #[error("connection table {path} is in use by another process: stop that one, or set another mapping")]
    InUse {
        /// The file.
        path: PathBuf,
    },
}
