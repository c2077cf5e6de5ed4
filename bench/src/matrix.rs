//! Reachability matrix: which pairs of sites may communicate, and which do.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use owo_colors::{OwoColorize, Stream, Style};

use crate::cluster::Cluster;
use crate::expectation::{Expectation, PolicyOracle};
use crate::probe::{self, Frontend, Probe, ProbeOutcome, Protocol, RetryPolicy, Site};

/// A probe with its expected and its observed result.
#[derive(Clone, Debug)]
pub struct MatrixEntry {
    pub probe: Probe,
    /// Index of the frontend that it is sent to; `None` if to the site itself.
    pub frontend: Option<usize>,
    pub expected: Expectation,
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

/// All pairs of a cluster's sites over all families and some protocols, and all sites to its Services and node ports.
pub struct Matrix {
    sites: Vec<String>,
    frontends: Vec<String>,
    protocols: Vec<Protocol>,
    entries: Vec<MatrixEntry>,
}

impl Matrix {
    /// Sends all probes and compares each with its expected result. The cluster's servers must be running.
    pub fn measure(cluster: &Cluster, oracle: &PolicyOracle, protocols: &[Protocol]) -> Result<Self> {
        Self::between(&cluster.sites, &cluster.frontends, oracle, protocols)
    }

    /// The same between any sites whose servers use the site's index as identity.
    pub fn between(
        sites: &[Site],
        frontends: &[Frontend],
        oracle: &PolicyOracle,
        protocols: &[Protocol],
    ) -> Result<Self> {
        let direct = probe::all_pairs(sites, protocols).into_iter().map(|probe| (None, probe));
        let by_frontend = probe::to_frontends(sites, frontends).into_iter().map(|(at, probe)| (Some(at), probe));
        let (at, probes): (Vec<Option<usize>>, Vec<Probe>) = direct.chain(by_frontend).unzip();
        let outcomes = probe::run(sites, &probes, RetryPolicy::default())?;
        let mut entries: Vec<MatrixEntry> = at
            .into_iter()
            .zip(probes)
            .zip(outcomes)
            .map(|((frontend, probe), outcome)| {
                let expected = expect(sites, frontend.map(|at| &frontends[at]), oracle, &probe)?;
                Ok(MatrixEntry { probe, frontend, expected, outcome })
            })
            .collect::<Result<_>>()?;
        retry_unanswered(sites, &mut entries)?;
        let sites = sites.iter().map(|site| site.name.clone()).collect();
        let frontends = frontends.iter().map(|frontend| frontend.name.clone()).collect();
        Ok(Self { sites, frontends, protocols: protocols.to_vec(), entries })
    }

    pub fn entries(&self) -> &[MatrixEntry] {
        &self.entries
    }

    /// One line for each probe whose observed result differs from the expected one.
    pub fn differences(&self) -> Vec<String> {
        let differing = self.entries.iter().filter(|entry| !entry.agrees());
        differing
            .map(|MatrixEntry { probe, frontend, expected, outcome }| {
                let to = frontend.map_or(&self.sites[probe.to], |at| &self.frontends[at]);
                let from = &self.sites[probe.from];
                let Probe { protocol, destination, .. } = probe;
                format!("{from} to {to} ({protocol}, {destination}): expected {expected}; observed {outcome}")
            })
            .collect()
    }

    /// A grid of one family: a row for each source, a column for each destination, a mark for each protocol. Denied
    /// cells refer to the reason by its number in the legend.
    pub fn grid(&self, v6: bool, legend: &mut Legend) -> Vec<String> {
        let cells: Vec<Vec<Cell>> = (0..self.sites.len())
            .map(|from| self.destinations().map(|to| self.cell(from, to, v6, legend)).collect())
            .collect();
        let label = self.sites.iter().map(String::len).max().unwrap_or(0).max("from \\ to".len());
        let widest = cells.iter().flatten().map(Cell::width).max().unwrap_or(0);
        let names = self.names().flat_map(|name| name.split('/')).map(str::len).max().unwrap_or(0);
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

    /// The columns: sites, then frontends.
    fn destinations(&self) -> impl Iterator<Item = Destination> {
        let sites = (0..self.sites.len()).map(Destination::Site);
        sites.chain((0..self.frontends.len()).map(Destination::Frontend))
    }

    fn names(&self) -> impl Iterator<Item = &String> {
        self.sites.iter().chain(&self.frontends)
    }

    fn header(&self, label: usize, width: usize) -> Vec<String> {
        let mut lines = [format!("  {:label$}  ", ""), format!("  {:label$}  ", "from \\ to")];
        for site in self.names() {
            let (above, below) = site.split_once('/').map_or(("", site.as_str()), |(namespace, pod)| (namespace, pod));
            let _ = write!(lines[0], "{:width$}", if above.is_empty() { String::new() } else { format!("{above}/") });
            let _ = write!(lines[1], "{below:width$}");
        }
        lines
            .iter()
            .map(|line| line.trim_end().if_supports_color(Stream::Stdout, |line| line.bold()).to_string())
            .collect()
    }

    fn cell(&self, from: usize, to: Destination, v6: bool, legend: &mut Legend) -> Cell {
        let mut cell = Cell::default();
        let here = |entry: &&MatrixEntry| {
            entry.probe.from == from && Destination::of(entry) == to && entry.probe.destination.is_ipv6() == v6
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
        for (v6, family) in [(false, "IPv4"), (true, "IPv6")] {
            let of_family = |entry: &&MatrixEntry| entry.probe.destination.is_ipv6() == v6;
            for &protocol in &self.protocols {
                let here = |entry: &&MatrixEntry| entry.frontend.is_none() && entry.probe.protocol == protocol;
                let entries = self.entries.iter().filter(of_family).filter(here).collect();
                lines.push(summary_line(&format!("{family} {protocol}"), &entries));
            }
            for (at, name) in self.frontends.iter().enumerate() {
                let here = |entry: &&MatrixEntry| entry.frontend == Some(at);
                let entries = self.entries.iter().filter(of_family).filter(here).collect();
                lines.push(summary_line(&format!("{family} {name}"), &entries));
            }
        }
        lines
    }
}

fn summary_line(name: &str, entries: &Vec<&MatrixEntry>) -> String {
    let count = |test: fn(&&&MatrixEntry) -> bool| entries.iter().filter(test).count();
    let differences = count(|entry| !entry.agrees());
    let line = format!(
        "  {name:18} {:>8} {:>18} {:>18} {differences:>13}",
        entries.len(),
        count(|entry| entry.expected == Expectation::Allowed),
        count(|entry| entry.outcome.arrived()),
    );
    let style = if differences == 0 { Style::new() } else { Style::new().red().bold() };
    line.if_supports_color(Stream::Stdout, |line| line.style(style)).to_string()
}

/// Evaluates policy for a probe: for who sent it and where it arrives.
fn expect(sites: &[Site], frontend: Option<&Frontend>, oracle: &PolicyOracle, probe: &Probe) -> Result<Expectation> {
    let lacks = |site: &Site| format!("{} lacks the family of {}", site.name, probe.destination);
    let (from, to) = (&sites[probe.from], &sites[probe.to]);
    let v6 = probe.destination.is_ipv6();
    let source = from.address(v6).with_context(|| lacks(from))?;
    let Some(frontend) = frontend else { return Ok(oracle.expect(source, probe)) };
    let arrives = frontend.ports.iter().find(|(sent, _)| *sent == probe.protocol);
    let (_, protocol) = arrives.with_context(|| format!("{} has no {}", frontend.name, probe.protocol))?;
    let backend = (to.address(v6).with_context(|| lacks(to))?, *protocol);
    Ok(oracle.expect_at(source, backend))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Destination {
    Site(usize),
    Frontend(usize),
}

impl Destination {
    fn of(entry: &MatrixEntry) -> Self {
        entry.frontend.map_or(Self::Site(entry.probe.to), Self::Frontend)
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

pub fn key(protocols: &[Protocol]) -> Vec<String> {
    let order = protocols.iter().map(Protocol::to_string).collect::<Vec<_>>().join(", ");
    let mark = |mark: Mark| mark.styled();
    vec![
        format!("  the marks of a cell are, in order: {order}; a Service and its NodePort have no ICMP"),
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
