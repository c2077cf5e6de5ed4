//! Cost of policy: the lookup for a new connection, and a change from event to published tables.
//!
//! Everything runs on one CPU in one process. Compared measurements alternate and the best round of each counts, so
//! that disturbances by other processes cancel out. Each row ends in `meets` or `falls short`.

mod alternatives;
mod beside;
mod cluster;
mod lookup;
mod scale;

use std::process::ExitCode;

/// Prints one row; returns whether it meets its threshold.
fn row(measure: &str, figure: String, bound: &str, meets: bool) -> bool {
    println!("{measure:<78} {figure:>22}  {bound:<10} {}", if meets { "meets" } else { "falls short" });
    meets
}

fn main() -> ExitCode {
    // Set by `cargo test --benches`, which only checks that the benchmark runs.
    let smoke = std::env::args().any(|argument| argument == "--test");
    if let Some(cores) = core_affinity::get_core_ids().filter(|cores| !cores.is_empty()) {
        core_affinity::set_for_current(cores[cores.len() - 1]);
    }
    let size = if smoke { scale::ClusterScale::SMOKE } else { scale::ClusterScale::FULL };
    let rounds = if smoke { 2 } else { 200 };
    // First, while the process has touched no other memory.
    let scale = scale::run(size);
    let beside = beside::run(if smoke { beside::Load::SMOKE } else { beside::Load::FULL });
    let lookup = lookup::run(rounds);
    // A row that falls short is a result; only an aborted run is a failure.
    println!(
        "{} of {} rows meet their bounds",
        scale.iter().chain(&beside).chain(&lookup).filter(|meets| **meets).count(),
        scale.len() + beside.len() + lookup.len()
    );
    ExitCode::SUCCESS
}
