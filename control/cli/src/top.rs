//! `penstock top`: rates and load of a running daemon, refreshed.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use penstock_admin::types::{PortStatus, Status, WorkerStatus};
use penstock_text::number::{percent, short};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Row, Table};

use super::Failure;
use super::daemon::{DaemonArgs, failure};

/// Watch a running daemon: rates by pod and port, drops by reason, load of the workers
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Keys:
  r, t, d, n  sort ports by packets received, sent, dropped per second, or by name
  p           pause
  q, Esc      quit

Exit codes:
  0  quit
  1  the terminal failed, or the daemon sent no valid answer
  2  bad input: arguments, no terminal, or no daemon listens at the socket

Examples:
  penstock top
  penstock top --interval 5")]
pub(super) struct Args {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Seconds between two queries
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum SortOrder {
    #[default]
    Received,
    Sent,
    Dropped,
    Name,
}

struct View {
    status: Status,
    /// Drops a second by reason, since the look before.
    drops: Vec<(String, f64)>,
    order: SortOrder,
    paused: bool,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let client = args.daemon.client()?;
    let query = || client.get::<Status>("/v1/status", &()).map_err(failure);
    // Before switching screens, so that errors appear on the normal screen.
    let status = query()?;
    if !io::stdout().is_terminal() {
        return Err(Failure::bad_input("standard output is not a terminal: use penstock status, which prints once"));
    }
    let mut view = View { status, drops: Vec::new(), order: SortOrder::default(), paused: false };
    let mut terminal = ratatui::try_init().map_err(|error| Failure::Failed(error.into()))?;
    let outcome = (|| {
        let interval = Duration::from_secs(args.interval);
        let mut due = Instant::now() + interval;
        loop {
            terminal.draw(|frame| view.draw(frame)).map_err(|error| Failure::Failed(error.into()))?;
            let wait = due.saturating_duration_since(Instant::now());
            if event::poll(wait).map_err(|error| Failure::Failed(error.into()))? {
                match event::read().map_err(|error| Failure::Failed(error.into()))? {
                    Event::Key(key) if key.kind == KeyEventKind::Press => {
                        let interrupted =
                            key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
                        if interrupted || !view.handle_key(key.code) {
                            return Ok(());
                        }
                    }
                    _ => {}
                }
            }
            if Instant::now() >= due {
                due = Instant::now() + interval;
                if !view.paused {
                    view.update(query()?);
                }
            }
        }
    })();
    ratatui::restore();
    outcome
}

impl View {
    /// Handles a key. Returns `false` to quit.
    fn handle_key(&mut self, key: KeyCode) -> bool {
        match key {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('r') => self.order = SortOrder::Received,
            KeyCode::Char('t') => self.order = SortOrder::Sent,
            KeyCode::Char('d') => self.order = SortOrder::Dropped,
            KeyCode::Char('n') => self.order = SortOrder::Name,
            KeyCode::Char('p') => self.paused = !self.paused,
            _ => {}
        }
        true
    }

    fn update(&mut self, status: Status) {
        let seconds = (status.uptime_seconds - self.status.uptime_seconds).max(1e-3);
        self.drops = drop_rates(&self.status.all_drops(), &status.all_drops(), seconds);
        self.status = status;
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let workers = self.status.workers.len() as u16 + 3;
        let [head, top, ports, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(workers.clamp(6, 12)),
            Constraint::Min(4),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(self.heading(), head);
        let [left, right] = Layout::horizontal([Constraint::Percentage(60), Constraint::Percentage(40)]).areas(top);
        frame.render_widget(worker_table(&self.status.workers), left);
        self.draw_drops(frame, right);
        frame.render_widget(port_table(&self.sorted()), ports);
        let keys = if self.paused {
            "paused: p goes on   q ends"
        } else {
            "q ends   p pauses   sort: r received  t sent  d dropped  n name"
        };
        frame.render_widget(Paragraph::new(keys).dim(), foot);
    }

    fn heading(&self) -> Paragraph<'_> {
        let Status { node, version, published, in_force, frames, connections, .. } = &self.status;
        let force = match in_force {
            true => Span::styled(format!("snapshot {published} in effect"), Style::new().fg(Color::Green)),
            false => Span::styled(format!("snapshot {published} not in effect yet"), Style::new().fg(Color::Yellow)),
        };
        let used = 1.0 - f64::from(frames.free) / f64::from(frames.total.max(1));
        let rest = format!(
            "   {} pods   connections {}/{}   frames in use {}",
            self.status.pods.len(),
            short(connections.entries as f64),
            short(connections.capacity as f64),
            percent(used)
        );
        Paragraph::new(Line::from(vec![
            Span::styled(format!("penstock {version} on {node}   "), Style::new().add_modifier(Modifier::BOLD)),
            force,
            Span::raw(rest),
        ]))
    }

    fn draw_drops(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows = self.drops.iter().map(|(reason, rate)| Row::new([reason.clone(), short(*rate)]));
        let table = Table::new(rows, [Constraint::Min(20), Constraint::Length(8)]);
        frame.render_widget(table.block(Block::bordered().title("drops a second, by reason")), area);
    }

    fn sorted(&self) -> Vec<&PortStatus> {
        let mut ports: Vec<&PortStatus> = self.status.ports.iter().collect();
        let key: fn(&PortStatus) -> f64 = match self.order {
            SortOrder::Received => |port| port.rate.rx_packets,
            SortOrder::Sent => |port| port.rate.tx_packets,
            SortOrder::Dropped => |port| port.rate.dropped_packets,
            SortOrder::Name => |_| 0.0,
        };
        ports.sort_by(|one, other| key(other).total_cmp(&key(one)).then_with(|| name(one).cmp(&name(other))));
        ports
    }
}

fn name(port: &PortStatus) -> String {
    port.pod.clone().unwrap_or_else(|| format!("({})", port.kind))
}

/// Causes that dropped something between two looks, the most frequent first.
fn drop_rates(before: &BTreeMap<String, u64>, now: &BTreeMap<String, u64>, seconds: f64) -> Vec<(String, f64)> {
    let more = |(reason, count): (&String, &u64)| {
        let more = count.saturating_sub(before.get(reason).copied().unwrap_or(0));
        (more > 0).then(|| (reason.clone(), more as f64 / seconds))
    };
    let mut rates: Vec<(String, f64)> = now.iter().filter_map(more).collect();
    rates.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    rates
}

fn worker_table(workers: &[WorkerStatus]) -> Table<'static> {
    const BAR: usize = 20;
    let rows = workers.iter().map(|worker| {
        let filled = ((worker.busy * BAR as f64).round() as usize).min(BAR);
        let bar = "█".repeat(filled) + &"·".repeat(BAR - filled);
        Row::new([
            format!("{} on {}", worker.worker, worker.core),
            bar,
            percent(worker.busy),
            short(worker.packets_per_second),
            format!("{:.1}", worker.packets_per_batch),
        ])
    });
    let widths = [8, BAR as u16, 8, 9, 6].map(Constraint::Length);
    let heading = Row::new(["worker", "busy", "", "packets/s", "/batch"]).bold();
    Table::new(rows, widths).header(heading).block(Block::bordered().title("workers"))
}

fn port_table(ports: &[&PortStatus]) -> Table<'static> {
    let rows = ports.iter().map(|port| {
        let row = Row::new([
            name(port),
            port.interface.clone(),
            short(port.rate.rx_packets),
            short(port.rate.tx_packets),
            short(port.rate.rx_bytes * 8.0),
            short(port.rate.tx_bytes * 8.0),
            short(port.rate.dropped_packets),
        ]);
        if port.rate.dropped_packets > 0.0 { row.yellow() } else { row }
    });
    let widths = [
        Constraint::Min(20),
        Constraint::Length(15),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Length(8),
    ];
    let heading = ["pod", "interface", "rx/s", "tx/s", "rx bit/s", "tx bit/s", "drops/s"];
    Table::new(rows, widths).header(Row::new(heading).bold()).block(Block::bordered().title("ports"))
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use penstock_admin::types::{FrameCounts, PortRates, TableStatus};

    fn port(pod: &str, received: f64, dropped: f64) -> PortStatus {
        let rate = PortRates { rx_packets: received, dropped_packets: dropped, ..PortRates::default() };
        PortStatus {
            port: 1,
            interface: format!("veth-{pod}"),
            kind: "pod".to_owned(),
            pod: Some(format!("shop/{pod}")),
            program: "tcx".to_owned(),
            total: Default::default(),
            rate,
            drops: BTreeMap::new(),
            kernel_drops: BTreeMap::new(),
            outcomes: BTreeMap::new(),
        }
    }

    fn status(uptime: f64, denied: u64) -> Status {
        let worker = WorkerStatus {
            worker: 0,
            core: 3,
            epoch: 7,
            busy: 0.25,
            awake: 0.5,
            packets_per_second: 123_456.0,
            packets_per_batch: 4.0,
            poll_iteration_median_seconds: None,
            poll_iteration_p99_seconds: None,
            rings: Default::default(),
        };
        Status {
            not_enforced: Vec::new(),
            object_problems: Vec::new(),
            version: "1".to_owned(),
            node: "worker-1".to_owned(),
            process: 1,
            uptime_seconds: uptime,
            policies: 1,
            published: 7,
            in_force: true,
            workers: vec![worker],
            ports: vec![port("quiet", 1.0, 0.0), port("loud", 5_000.0, 0.0), port("lossy", 20.0, 9.0)],
            pods: Vec::new(),
            drops: BTreeMap::from([("ingress_denied".to_owned(), denied)]),
            kernel_drops: BTreeMap::from([("rx_ring_full".to_owned(), 2 * denied)]),
            frames: FrameCounts { total: 100, free: 75, fill: 25, in_flight: 0 },
            connections: TableStatus::default(),
            host_routing: Vec::new(),
            domain_names: None,
            configuration_refused: Vec::new(),
            refused_files: 0,
            stale: None,
            capture: None,
            flow_records: None,
            source: BTreeMap::new(),
        }
    }

    fn screen(view: &View) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(110, 24)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |y| (0..110).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..24).map(line).collect()
    }

    #[test]
    fn top_shows_rates_drops_and_worker_load() {
        let mut view =
            View { status: status(10.0, 100), drops: Vec::new(), order: SortOrder::default(), paused: false };
        view.update(status(12.0, 160));
        let shown = screen(&view).join("\n");
        for part in [
            "penstock 1 on worker-1   snapshot 7 in effect",
            "frames in use 25.0 %",
            "█████···············",
            "25.0 %",
            "123k",
        ] {
            assert!(shown.contains(part), "{part} in\n{shown}");
        }
        assert!(
            shown.lines().any(|line| line.contains("ingress_denied") && line.contains("30")),
            "60 in 2 s:\n{shown}"
        );
        assert!(
            shown.lines().any(|line| line.contains("kernel_rx_ring_full") && line.contains("60")),
            "120 in 2 s:\n{shown}"
        );
        let place = |shown: &str, pod: &str| shown.lines().position(|line| line.contains(pod)).expect(pod);
        assert!(place(&shown, "shop/loud") < place(&shown, "shop/lossy"), "{shown}");
        assert!(view.handle_key(KeyCode::Char('d')));
        let shown = screen(&view).join("\n");
        assert!(place(&shown, "shop/lossy") < place(&shown, "shop/loud"), "{shown}");
        assert!(view.handle_key(KeyCode::Char('n')));
        let shown = screen(&view).join("\n");
        assert!(place(&shown, "shop/loud") < place(&shown, "shop/quiet"), "{shown}");
        assert!(!view.handle_key(KeyCode::Char('q')));
    }
}
