//! Terminal of the demo: steps with their duration, headings, colour on a terminal only, and `KEEP=1`.

use std::fmt::Display;
use std::io::{IsTerminal, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use owo_colors::{OwoColorize, Stream};
use penstock_bench::cluster::Cluster;
use penstock_bench::testbed::{Daemon, penstock_binary};

const TIME_COLUMN: usize = 48;

pub(crate) fn heading(text: &str) {
    println!("\n{}", text.if_supports_color(Stream::Stdout, |text| text.bold()));
}

pub(crate) fn good(text: &str) -> String {
    text.if_supports_color(Stream::Stdout, |text| text.green()).to_string()
}

pub(crate) fn bad(text: &str) -> String {
    text.if_supports_color(Stream::Stdout, |text| text.red()).to_string()
}

/// Runs a step: prints its description, then its duration and result.
pub(crate) fn step<T, D: Display>(what: &str, work: impl FnOnce() -> Result<(T, D)>) -> Result<T> {
    print!("  {what:TIME_COLUMN$}");
    // Errors of the progress display are ignored.
    let _ = std::io::stdout().flush();
    let start = Instant::now();
    match work() {
        Ok((value, detail)) => {
            println!("{}  {detail}", good(&seconds(start.elapsed())));
            Ok(value)
        }
        Err(error) => {
            println!("{}", bad("failed"));
            Err(error)
        }
    }
}

fn seconds(time: Duration) -> String {
    format!("{:5.2} s", time.as_secs_f64())
}

pub(crate) fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

/// Prints how to enter the pods and waits for Enter. Ctrl-C and SIGTERM end the process and undo everything.
pub(crate) fn wait_for_enter(cluster: &Cluster, daemon: &Daemon, manifests: &Path, admin: &Path) -> Result<()> {
    heading("The node keeps running (KEEP=1)");
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
