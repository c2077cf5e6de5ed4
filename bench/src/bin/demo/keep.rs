//! `KEEP=1`: keeps the node running for inspection.

use std::io::{IsTerminal, Read};
use std::path::Path;

use anyhow::Result;
use penstock_bench::cluster::Cluster;
use penstock_bench::testbed::{Daemon, penstock_binary};

use super::screen::heading;

/// Prints how to enter the pods and waits for Enter. Ctrl-C and SIGTERM end the process and undo everything.
pub(crate) fn until_told(cluster: &Cluster, daemon: &Daemon, manifests: &Path, admin: &Path) -> Result<()> {
    heading("The node stays up (KEEP=1)");
    for site in &cluster.sites {
        let addresses: Vec<String> = site.addresses.iter().map(ToString::to_string).collect();
        println!("  {:12} nsenter --net={} bash", site.name, site.namespace.path().display());
        println!("  {:12}   {}", "", addresses.join(", "));
    }
    println!("\n  ip netns exec NAME works as well, where there is an ip command.");
    println!("  Manifests, watched: {}", manifests.display());
    println!("  The daemon: {} status --socket {}", penstock_binary()?.display(), admin.display());
    println!("  and in place of status: flows, top, explain --live");
    if std::io::stdin().is_terminal() {
        println!("  Press Enter or Ctrl-C to end all of it.");
        let _ = std::io::stdin().read(&mut [0; 1])?;
    } else {
        println!("  End all of it with: kill {}", std::process::id());
        loop {
            std::thread::park();
        }
    }
    println!("\n  The daemon's log:");
    daemon.log().lines().iter().for_each(|line| println!("    {line}"));
    Ok(())
}
