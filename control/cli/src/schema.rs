//! `penstock schema`: the JSON schema of the configuration file.

use penstock_agent::config::schema;

use super::Failure;
use penstock_text::number::json;

/// Print the JSON schema of the configuration file
///
/// Editors use it to complete and validate the file. Those with taplo (Even Better TOML) find it by the file's first line:
/// `#:schema PATH`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  printed
  1  the output cannot be written
  2  bad arguments

Examples:
  penstock schema > /etc/penstock/penstock.schema.json")]
pub(super) struct Args {}

pub(super) fn run(Args {}: Args) -> Result<(), Failure> {
    Failure::print(json(&schema::schema()))
}
