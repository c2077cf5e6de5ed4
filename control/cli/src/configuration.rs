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
    /// Reads all layers.
    pub(super) fn load(&self) -> Result<(ConfigLayers, LoadedConfig), Failure> {
        let layers = ConfigLayers::new(&self.config, &self.settings).map_err(Failure::bad_input)?;
        let loaded = layers.load().map_err(Failure::bad_input)?;
        Ok((layers, loaded))
    }
}
