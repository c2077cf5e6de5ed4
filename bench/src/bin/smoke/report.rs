//! The results as a table and as ratios against their thresholds.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};

use penstock_bench::peers::Cores;

/// Result of one measurement, in packets per second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    pub(crate) offered: f64,
    pub(crate) received: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum SmokeCase {
    Penstock,
    Forward,
    Kernel { steered: bool },
    Nftables { steered: bool },
}

impl SmokeCase {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Penstock => "(a) Penstock: policy and connections",
            Self::Forward => "(b) Penstock: raw forward",
            Self::Kernel { steered: false } => "(c) kernel forwarding",
            Self::Kernel { steered: true } => "(c) kernel forwarding, RPS",
            Self::Nftables { steered: false } => "(d) kernel with nftables and conntrack",
            Self::Nftables { steered: true } => "(d) kernel with nftables and conntrack, RPS",
        }
    }

    /// Whether the kernel's work is moved to the worker's core.
    pub(crate) fn steered(self) -> bool {
        matches!(self, Self::Kernel { steered: true } | Self::Nftables { steered: true })
    }
}

pub(crate) fn introduce(cores: Cores) {
    println!("Penstock bench-smoke: one UDP connection between two pods of one node, frames of 64 bytes");
    println!("  generator (AF_PACKET past the queueing discipline) on core {},", cores.generator);
    println!("  Penstock's worker on core {}; counted is what reached the receiver's UDP sockets", cores.worker);
    println!("  kernel cases: as a node has it, all on the sender's core; and with RPS on the sender's veth, which");
    println!("  gives the forwarding core {} as Penstock has it", cores.worker);
    println!("  (d) enforces the policy of (a) as an nftables ruleset: conntrack, sets, verdict maps");
    println!("  each configuration was seen to pass an allowed packet first, and (a) and (d) to drop a denied one\n");
    if let Some(load) = load().filter(|load| *load > BUSY) {
        println!("  This machine is busy (load average {load:.1}): the figures below are unreliable.\n");
    }
}

/// Received share of the offered packets from which the generator is the bottleneck.
const GENERATOR_BOUND: f64 = 0.97;
/// Load above which a machine of two cores is too busy for the benchmark.
const BUSY: f64 = 0.7;

/// The load average of the last minute.
fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

#[derive(Default)]
pub(crate) struct Report {
    measured: BTreeMap<SmokeCase, Vec<Rates>>,
}

impl Report {
    pub(crate) fn add(&mut self, case: SmokeCase, rates: Rates) {
        self.measured.entry(case).or_default().push(rates);
    }

    pub(crate) fn progress(&self, done: u32, of: u32) {
        let mut output = std::io::stdout();
        if output.is_terminal() {
            let end = if done == of { "\r\x1b[K" } else { "" };
            print!("\rrepetition {done} of {of}{end}");
            // Errors of the progress display are ignored.
            let _ = output.flush();
        }
    }

    pub(crate) fn print(&self) {
        println!("{:46} {:>13} {:>19} {:>13}", "packets per second", "median", "lowest to highest", "offered");
        for (case, rates) in &self.measured {
            let received = sorted(rates.iter().map(|rates| rates.received));
            let offered = sorted(rates.iter().map(|rates| rates.offered));
            let spread = format!("{} to {}", thousands(received[0]), thousands(received[received.len() - 1]));
            println!(
                "{:46} {:>13} {:>19} {:>13}",
                case.name(),
                thousands(median(&received)),
                spread,
                thousands(median(&offered))
            );
        }
        println!();
        for (steered, with) in [(false, ""), (true, ", RPS")] {
            self.ratio(&format!("(a)/(d)  kernel doing the same{with}"), SmokeCase::Nftables { steered }, 1.75);
            self.ratio(&format!("(a)/(c)  kernel doing less{with}"), SmokeCase::Kernel { steered }, 1.3);
        }
        self.ratio("(a)/(b)  of what raw forwarding reaches", SmokeCase::Forward, 0.9);
        if let Some(share) = self.share(SmokeCase::Penstock).filter(|share| *share > GENERATOR_BOUND) {
            println!("\n(a) received {:.1} % of what was offered: the generator is its limit.", share * 100.0);
        }
    }

    fn ratio(&self, what: &str, of: SmokeCase, threshold: f64) {
        match self.median(SmokeCase::Penstock).zip(self.median(of)) {
            Some((penstock, of)) => {
                let ratio = penstock / of;
                let verdict = if ratio >= threshold { "meets" } else { "falls short" };
                println!("{what:46} {ratio:>13.2} {:>19} {verdict:>13}", format!("bar {threshold:.2}"));
            }
            None => println!("{what:46} {:>13}", "not measured"),
        }
    }

    fn median(&self, case: SmokeCase) -> Option<f64> {
        self.measured.get(&case).map(|rates| median(&sorted(rates.iter().map(|rates| rates.received))))
    }

    /// Received share of the offered packets, as a median.
    fn share(&self, case: SmokeCase) -> Option<f64> {
        self.measured.get(&case).map(|rates| median(&sorted(rates.iter().map(|rates| rates.received / rates.offered))))
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The middle value of a sorted list that is not empty; of an even number, the mean of the middle two.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

fn thousands(value: f64) -> String {
    format!("{:.0} k", value / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_lists() {
        for (values, expected) in [(vec![5.0], 5.0), (vec![3.0, 1.0, 2.0], 2.0), (vec![4.0, 1.0, 2.0, 3.0], 2.5)] {
            assert_eq!(median(&sorted(values.into_iter())), expected);
        }
    }

    #[test]
    fn the_median_received_rate_counts() {
        let mut report = Report::default();
        for (offered, received) in [(10.0, 4.0), (20.0, 9.0), (10.0, 5.0)] {
            report.add(SmokeCase::Penstock, Rates { offered, received });
        }
        assert_eq!(report.median(SmokeCase::Penstock), Some(5.0));
        assert_eq!(report.share(SmokeCase::Penstock), Some(0.45));
        assert_eq!(report.median(SmokeCase::Forward), None);
    }
}
