//! The options that name a configuration.

use std::path::PathBuf;

use penstock_agent::config::{ConfigLayers, LoadedConfig};

use super::Failure;

/// Options of the commands that read a configuration.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct ConfigArgs {
    /// The configuration file (TOML); PENSTOCK_* variables of the environment override it
    #[arg(long, value_name = "FILE")]
    pub(super) config: PathBuf,
    /// Override a key of file and environment, such as umem.memory=1GiB; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
}

impl ConfigArgs {
    /// The layers, not read yet.
    pub(super) fn layers(&self) -> Result<ConfigLayers, Failure> {
        ConfigLayers::new(&self.config, &self.settings).map_err(|errors| Failure::BadInput(errors.lines()))
    }

    pub(super) fn load(&self) -> Result<LoadedConfig, Failure> {
        self.layers()?.load().map_err(|errors| Failure::BadInput(errors.lines()))
    }
}
