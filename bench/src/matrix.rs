//! Reachability matrix: which pairs of sites may communicate, and which do.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use owo_colors::{OwoColorize, Stream, Style};

use crate::cluster::Cluster;
use crate::expectation::{Expectation, PolicyOracle};
use crate::probe::{self, Probe, ProbeOutcome, Protocol, RetryPolicy, Site};

/// A probe with its expected and its observed result.
#[derive(Clone, Debug)]
pub struct MatrixEntry {
    /// The probe.
    pub probe: Probe,
    /// The result that the policies imply.
    pub expected: Expectation,
    /// The result of the packets.
    pub outcome: ProbeOutcome,
}

impl MatrixEntry {
    /// Whether the results agree: an allowed probe is answered by the right server, a denied one is not answered.
    pub fn agrees(&self) -> bool {
        match self.expected {
            Expectation::Allowed => self.outcome == ProbeOutcome::Reached,
            Expectation::Denied { .. } => self.outcome == ProbeOutcome::Silent,
        }
    }
}

/// All pairs of a cluster's sites over all families and some protocols.
pub struct Matrix {
    sites: Vec<String>,
    protocols: Vec<Protocol>,
    entries: Vec<MatrixEntry>,
}

impl Matrix {
    /// Sends all probes and compares each with its expected result. The cluster's servers must be running.
    pub fn measure(cluster: &Cluster, oracle: &PolicyOracle, protocols: &[Protocol]) -> Result<Self> {
        Self::between(&cluster.sites, oracle, protocols)
    }

    /// The same between any sites whose servers use the site's index as identity.
    pub fn between(sites: &[Site], oracle: &PolicyOracle, protocols: &[Protocol]) -> Result<Self> {
        let probes = probe::all_pairs(sites, protocols);
        let outcomes = probe::run(sites, &probes, RetryPolicy::default())?;
        let mut entries: Vec<MatrixEntry> = probes
            .into_iter()
            .zip(outcomes)
            .map(|(probe, outcome)| {
                let from = &sites[probe.from];
                let source = from.address(probe.destination.is_ipv6());
                let source =
                    source.with_context(|| format!("{} lacks the family of {}", from.name, probe.destination))?;
                Ok(MatrixEntry { probe, expected: oracle.expect(source, &probe), outcome })
            })
            .collect::<Result<_>>()?;
        retry_unanswered(sites, &mut entries)?;
        let sites = sites.iter().map(|site| site.name.clone()).collect();
        Ok(Self { sites, protocols: protocols.to_vec(), entries })
    }

    /// All probes.
    pub fn entries(&self) -> &[MatrixEntry] {
        &self.entries
    }

    /// One line for each probe whose observed result differs from the expected one.
    pub fn differences(&self) -> Vec<String> {
        let differing = self.entries.iter().filter(|entry| !entry.agrees());
        differing
            .map(|MatrixEntry { probe, expected, outcome }| {
                let (from, to) = (&self.sites[probe.from], &self.sites[probe.to]);
                let Probe { protocol, destination, .. } = probe;
                format!("{from} to {to} ({protocol}, {destination}): expected {expected}; observed {outcome}")
            })
            .collect()
    }

    /// A grid of one family: a row for each source, a column for each destination, a mark for each protocol. Denied
    /// cells refer to the reason by its number in the legend.
    pub fn grid(&self, v6: bool, legend: &mut Legend) -> Vec<String> {
        let cells: Vec<Vec<Cell>> = (0..self.sites.len())
            .map(|from| (0..self.sites.len()).map(|to| self.cell(from, to, v6, legend)).collect())
            .collect();
        let label = self.sites.iter().map(String::len).max().unwrap_or(0).max("from \\ to".len());
        let widest = cells.iter().flatten().map(Cell::width).max().unwrap_or(0);
        let names = self.sites.iter().flat_map(|site| site.split('/')).map(str::len).max().unwrap_or(0);
        let width = widest.max(names) + 2;
        let mut lines = self.header(label, width);
        for (site, row) in self.sites.iter().zip(&cells) {
            let mut line = format!("  {site:label$}  ");
            for cell in row {
                let _ = write!(line, "{}{:pad$}", cell.styled(), "", pad = width - cell.width());
            }
            lines.push(line.trim_end().to_owned());
        }
        lines
    }

    fn header(&self, label: usize, width: usize) -> Vec<String> {
        let mut lines = [format!("  {:label$}  ", ""), format!("  {:label$}  ", "from \\ to")];
        for site in &self.sites {
            let (above, below) = site.split_once('/').map_or(("", site.as_str()), |(namespace, pod)| (namespace, pod));
            let _ = write!(lines[0], "{:width$}", if above.is_empty() { String::new() } else { format!("{above}/") });
            let _ = write!(lines[1], "{below:width$}");
        }
        lines
            .iter()
            .map(|line| line.trim_end().if_supports_color(Stream::Stdout, |line| line.bold()).to_string())
            .collect()
    }

    fn cell(&self, from: usize, to: usize, v6: bool, legend: &mut Legend) -> Cell {
        let mut cell = Cell::default();
        let here = |entry: &&MatrixEntry| {
            entry.probe.from == from && entry.probe.to == to && entry.probe.destination.is_ipv6() == v6
        };
        for entry in self.entries.iter().filter(here) {
            cell.marks.push(Mark::of(entry));
            if let Expectation::Denied { by } = &entry.expected {
                let number = legend.number(by);
                if !cell.reasons.contains(&number) {
                    cell.reasons.push(number);
                }
            }
        }
        cell
    }

    /// For each family and protocol: how many probes should arrive, and how many did.
    pub fn summary(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "  {:18} {:>8} {:>18} {:>18} {:>13}",
            "", "probes", "allowed: expected", "allowed: observed", "differences"
        )];
        for v6 in [false, true] {
            for &protocol in &self.protocols {
                let entries: Vec<&MatrixEntry> = self
                    .entries
                    .iter()
                    .filter(|entry| entry.probe.destination.is_ipv6() == v6 && entry.probe.protocol == protocol)
                    .collect();
                let count = |test: fn(&&&MatrixEntry) -> bool| entries.iter().filter(test).count();
                let differences = count(|entry| !entry.agrees());
                let line = format!(
                    "  {:18} {:>8} {:>18} {:>18} {differences:>13}",
                    format!("{} {protocol}", if v6 { "IPv6" } else { "IPv4" }),
                    entries.len(),
                    count(|entry| entry.expected == Expectation::Allowed),
                    count(|entry| entry.outcome.arrived()),
                );
                let style = if differences == 0 { Style::new() } else { Style::new().red().bold() };
                lines.push(line.if_supports_color(Stream::Stdout, |line| line.style(style)).to_string());
            }
        }
        lines
    }
}

/// Repeats probes that should have been answered and were not, with a longer timeout: on a busy machine a packet may
/// take a second, which is not a denial.
fn retry_unanswered(sites: &[Site], entries: &mut [MatrixEntry]) -> Result<()> {
    let late =
        |entry: &&mut MatrixEntry| entry.expected == Expectation::Allowed && entry.outcome == ProbeOutcome::Silent;
    let mut late: Vec<&mut MatrixEntry> = entries.iter_mut().filter(late).collect();
    let probes: Vec<Probe> = late.iter().map(|entry| entry.probe).collect();
    let patience = RetryPolicy { timeout: Duration::from_secs(1), attempts: 3 };
    let outcomes = probe::run(sites, &probes, patience)?;
    late.iter_mut().zip(outcomes).for_each(|(entry, outcome)| entry.outcome = outcome);
    Ok(())
}

/// The reasons why cells are denied, numbered in order of appearance.
#[derive(Default)]
pub struct Legend {
    reasons: Vec<String>,
}

impl Legend {
    fn number(&mut self, reason: &str) -> usize {
        let known = self.reasons.iter().position(|known| known == reason);
        known.unwrap_or_else(|| {
            self.reasons.push(reason.into());
            self.reasons.len() - 1
        }) + 1
    }

    /// One line for each: number and reason.
    pub fn lines(&self) -> Vec<String> {
        self.reasons.iter().enumerate().map(|(index, reason)| format!("  {:>2}  {reason}", index + 1)).collect()
    }
}

/// Explains the marks of a grid.
pub fn key(protocols: &[Protocol]) -> Vec<String> {
    let order = protocols.iter().map(Protocol::to_string).collect::<Vec<_>>().join(", ");
    let mark = |mark: Mark| mark.styled();
    vec![
        format!("  the marks of a cell are, in order: {order}"),
        format!("  {} reached, as expected     {} denied, as expected", mark(Mark::Reached), mark(Mark::Denied)),
        format!(
            "  {} reached, though denied    {} not reached, though allowed    numbers: denied by, see below",
            mark(Mark::WronglyReached),
            mark(Mark::WronglyDenied)
        ),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mark {
    Reached,
    Denied,
    WronglyReached,
    WronglyDenied,
}

impl Mark {
    fn of(entry: &MatrixEntry) -> Self {
        match (&entry.expected, entry.agrees()) {
            (Expectation::Allowed, true) => Self::Reached,
            (Expectation::Allowed, false) => Self::WronglyDenied,
            (Expectation::Denied { .. }, true) => Self::Denied,
            (Expectation::Denied { .. }, false) => Self::WronglyReached,
        }
    }

    fn styled(self) -> String {
        let (mark, style) = match self {
            Self::Reached => ("●", Style::new().green()),
            Self::Denied => ("·", Style::new().yellow()),
            Self::WronglyReached => ("▲", Style::new().white().on_red().bold()),
            Self::WronglyDenied => ("▼", Style::new().white().on_red().bold()),
        };
        mark.if_supports_color(Stream::Stdout, |mark| mark.style(style)).to_string()
    }
}

/// One pair of sites in one family. Empty on the diagonal.
#[derive(Default)]
struct Cell {
    marks: Vec<Mark>,
    reasons: Vec<usize>,
}

impl Cell {
    fn reasons(&self) -> String {
        let numbers: Vec<String> = self.reasons.iter().map(usize::to_string).collect();
        if numbers.is_empty() { String::new() } else { format!(" {}", numbers.join(",")) }
    }

    /// Width in terminal columns.
    fn width(&self) -> usize {
        self.marks.len().max(1) + self.reasons().len()
    }

    fn styled(&self) -> String {
        if self.marks.is_empty() {
            return "-".if_supports_color(Stream::Stdout, |dash| dash.dimmed()).to_string();
        }
        let marks: String = self.marks.iter().map(|mark| mark.styled()).collect();
        let reasons = self.reasons();
        format!("{marks}{}", reasons.if_supports_color(Stream::Stdout, |reasons| reasons.dimmed()))
    }
}
