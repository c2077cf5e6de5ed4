//! `penstock-cni`: the last plugin of a node's CNI chain.
//!
//! Before a pod's containers start, it closes the node's end of the pod's veth: pinned tcx programs drop everything. The
//! daemon takes them over when it serves the pod. So a new pod sends and receives nothing that policy has not seen, also
//! while no daemon runs, and at boot before the first one. If a daemon runs, the plugin tells it the pod's addresses and waits until
//! the pod's policy is in effect, so that the first packets of the containers pass as policy says.
//!
//! The container runtime calls it with `CNI_COMMAND` and a configuration on standard input (the CNI specification,
//! versions 0.3.0 to 1.1.0). `install` and `uninstall` change the node's configuration, for the DaemonSet's init containers.

mod announce;
mod close;
mod conflist;
mod plugin;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Where container runtimes look for plugins and their configuration, unless they are told otherwise.
const BIN_DIR: &str = "/opt/cni/bin";
const CONF_DIR: &str = "/etc/cni/net.d";

#[derive(Parser)]
#[command(
    version,
    about = "Closes a new pod's interface until its policy is in effect",
    long_about = "A chained CNI plugin. The container runtime runs it last in the chain, with CNI_COMMAND in its environment.\n\
                  It puts programs on the node's end of a new pod's veth that drop everything; the Penstock daemon takes them over.\n\
                  If a daemon runs, the pod's containers start once the pod's policy is in effect, or after --wait-seconds.",
    after_help = "Examples:\n  penstock-cni install                                  on a node\n  \
                  penstock-cni install --bin-dir /host/opt/cni/bin --conf-dir /host/etc/cni/net.d   in an init container\n  \
                  penstock-cni install --wait-seconds 0                  do not wait for the daemon\n  \
                  penstock-cni uninstall\n\nExit codes: 0 done, 1 failed, 2 wrong use"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Copies this program to the node's plugins and appends it to the chain that the runtime uses
    Install(Installation),
    /// Takes it out of every chain, and removes the program
    Uninstall(Places),
}

#[derive(clap::Args)]
struct Installation {
    #[command(flatten)]
    places: Places,
    /// How long a new pod waits for its policy to be in effect before its containers start; 0: not at all
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=plugin::LONGEST_WAIT), default_value_t = plugin::WAIT)]
    wait_seconds: u64,
    /// The daemon's socket: its admin.socket with the extension cni
    #[arg(long, value_name = "PATH", default_value = penstock_admin::client::DEFAULT_CNI_SOCKET)]
    socket: PathBuf,
}

#[derive(clap::Args)]
struct Places {
    /// The folder of the runtime's CNI plugins
    #[arg(long, default_value = BIN_DIR)]
    bin_dir: PathBuf,
    /// The folder of the runtime's CNI configuration
    #[arg(long, default_value = CONF_DIR)]
    conf_dir: PathBuf,
}

fn main() -> ExitCode {
    if let Some(command) = std::env::var_os("CNI_COMMAND") {
        return plugin::run(&command.to_string_lossy());
    }
    let done = match Arguments::parse().command {
        Command::Install(installation) => conflist::install(&installation),
        Command::Uninstall(places) => conflist::uninstall(&places.bin_dir, &places.conf_dir),
    };
    match done {
        Ok(lines) => {
            lines.iter().for_each(|line| println!("{line}"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("penstock-cni: {error}");
            ExitCode::FAILURE
        }
    }
}
