//! Reads observed flows: what `penstock flows --json` prints, records of flows, the verdict log, the lines of `penstock replay --verdicts`, and
//! captures.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use penstock_admin::client::Client;
use penstock_admin::types::{Flows, FlowsQuery};
use penstock_dataplane::packet::Protocol;
use penstock_policy::flow;
use penstock_policy::learn::{ObservedEnd, ObservedFlow, Opening, Outcome, SeenTimes};
use penstock_policy::model::{Object, ObjectKey};
use penstock_policy::state::{ClusterState, PodOrNode};
use penstock_replay::connections::{CapturedConnection, FirstPacket, connections};
use serde::Deserialize;

use crate::Failure;
use crate::daemon::failure;

#[derive(Default)]
pub(super) struct Input {
    /// The flows, in the order of the files.
    pub(super) flows: Vec<ObservedFlow>,
    /// Parts of the input that could not be used, one a line.
    pub(super) notes: Vec<String>,
}

/// One entry of a file of JSON: all of its forms.
#[derive(Deserialize)]
struct Entry {
    /// `penstock flows --json`: all connections at one time.
    flows: Option<Vec<Entry>>,
    connection: Option<String>,
    from: Option<End>,
    to: Option<End>,
    state: Option<String>,
    /// The verdict log and replay: one packet.
    time: Option<String>,
    src: Option<End>,
    dst: Option<End>,
    /// A line of the verdict log.
    outcome: Option<String>,
    /// The verdict log's line on how many it left out.
    suppressed: Option<BTreeMap<String, u64>>,
    /// A line of replay.
    verdict: Option<String>,
    reason: Option<String>,
    conn: Option<String>,
    sport: Option<u16>,
    dport: Option<u16>,
    protocol: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum End {
    Full {
        address: IpAddr,
        #[serde(default)]
        port: u16,
        name: Option<String>,
    },
    Name(String),
}

#[derive(Debug, thiserror::Error)]
enum BadEntry {
    #[error(
        "is no flow: give what `penstock flows --json`, flow records, the verdict log or `penstock replay --verdicts` write, or a capture"
    )]
    Unknown,
    #[error("has no protocol: write TCP, UDP, SCTP or a number as \"protocol\"")]
    NoProtocol,
    #[error(transparent)]
    Protocol(#[from] flow::FlowError),
    #[error("has the time {0:?}, which is not RFC 3339: write 2026-01-01T00:00:00Z")]
    Time(String),
}

/// Reads files, each by its content.
pub(super) fn read(files: &[PathBuf], state: &ClusterState, objects: &[Object]) -> Result<Input, Failure> {
    let mut input = Input::default();
    let mut captures = Vec::new();
    for file in files {
        match is_capture(file) {
            Ok(true) => captures.push(file.clone()),
            Ok(false) => read_json(file, state, &mut input)?,
            Err(error) => return Err(unreadable(file, &error)),
        }
    }
    if !captures.is_empty() {
        read_captures(&captures, objects, &mut input)?;
    }
    Ok(input)
}

pub(super) fn read_live(socket: &Path, state: &ClusterState, input: &mut Input) -> Result<(), Failure> {
    let client = Client::new(socket).map_err(|error| Failure::Failed(error.into()))?;
    let query = FlowsQuery { limit: Some(usize::MAX), ..FlowsQuery::default() };
    let Flows { matching, flows } = client.get("/v1/flows", &query).map_err(failure)?;
    if flows.len() < matching {
        let (listed, socket) = (flows.len(), socket.display());
        input.notes.push(format!("{socket}: lists {listed} of {matching} connections: use a capture, too"));
    }
    let mut reader = JsonReader::new(state);
    for flow in flows {
        let text = serde_json::to_value(&flow).and_then(serde_json::from_value::<Entry>);
        let read = text.map_err(|_| BadEntry::Unknown).and_then(|entry| reader.entry(entry));
        read.map_err(|error| Failure::bad_input(format_args!("{}: {error}", socket.display())))?;
    }
    reader.finish(&socket.display().to_string(), input);
    Ok(())
}

fn unreadable(file: &Path, error: &io::Error) -> Failure {
    Failure::bad_input(format_args!("{}: cannot be read: {error}: name a file that can", file.display()))
}

/// Whether a file begins as a pcap or pcapng does, or is compressed. Standard input is JSON.
fn is_capture(file: &Path) -> io::Result<bool> {
    const MAGIC: [[u8; 4]; 5] = [
        [0xa1, 0xb2, 0xc3, 0xd4],
        [0xd4, 0xc3, 0xb2, 0xa1],
        [0xa1, 0xb2, 0x3c, 0x4d],
        [0x4d, 0x3c, 0xb2, 0xa1],
        [10, 13, 13, 10],
    ];
    if file == Path::new("-") {
        return Ok(false);
    }
    let mut start = Vec::new();
    File::open(file)?.take(4).read_to_end(&mut start)?;
    Ok(MAGIC.iter().any(|magic| *magic == start[..]) || start.starts_with(&[0x1f, 0x8b]))
}

fn read_json(file: &Path, state: &ClusterState, input: &mut Input) -> Result<(), Failure> {
    let name = if file == Path::new("-") { "standard input".to_owned() } else { file.display().to_string() };
    let source: Box<dyn Read> = match file == Path::new("-") {
        true => Box::new(io::stdin().lock()),
        false => Box::new(File::open(file).map_err(|error| unreadable(file, &error))?),
    };
    let mut reader = JsonReader::new(state);
    let entries = serde_json::Deserializer::from_reader(BufReader::new(source)).into_iter::<Entry>();
    for (number, entry) in (1..).zip(entries) {
        let entry = entry.map_err(|error| {
            Failure::bad_input(format_args!(
                "{name}: entry {number} is not JSON of a flow ({error}): correct it, or leave it out"
            ))
        })?;
        reader.entry(entry).map_err(|error| Failure::bad_input(format_args!("{name}: entry {number} {error}")))?;
    }
    reader.finish(&name, input);
    Ok(())
}

struct JsonReader<'a> {
    state: &'a ClusterState,
    /// Addresses by the name of a node, where an end has only that.
    nodes: Option<HashMap<String, IpAddr>>,
    flows: Vec<ObservedFlow>,
    /// Where a connection is among them. Lists that are taken one after the other have it again.
    connections: HashMap<String, usize>,
    suppressed: u64,
}

impl<'a> JsonReader<'a> {
    fn new(state: &'a ClusterState) -> Self {
        Self { state, nodes: None, flows: Vec::new(), connections: HashMap::new(), suppressed: 0 }
    }

    fn finish(self, name: &str, input: &mut Input) {
        if self.suppressed > 0 {
            let count = self.suppressed;
            input
                .notes
                .push(format!("{name}: the verdict log left out {count} packets: raise verdict_log.each_second"));
        }
        input.flows.extend(self.flows);
    }

    fn entry(&mut self, entry: Entry) -> Result<(), BadEntry> {
        if let Some(flows) = entry.flows {
            return flows.into_iter().try_for_each(|flow| self.entry(flow));
        }
        if let Some(suppressed) = entry.suppressed {
            self.suppressed += suppressed.values().sum::<u64>();
            return Ok(());
        }
        let (connection, protocol) = (entry.connection, entry.protocol);
        let (time, sport, dport) = (entry.time, entry.sport, entry.dport);
        let entry = Entry { connection: None, protocol: None, time: None, ..entry };
        let (from, to, opening, outcome) = match entry {
            // A record of what was denied has no state.
            Entry { from: Some(from), to: Some(to), verdict: Some(verdict), ref reason, .. } if verdict == "denied" => {
                let Some(outcome) = of_packet(None, Some(&verdict), reason.as_deref(), None) else { return Ok(()) };
                (from, to, Opening::Assumed, outcome)
            }
            Entry { from: Some(from), to: Some(to), ref state, .. } => {
                let (opening, outcome) = of_state(state.as_deref().unwrap_or_default());
                (from, to, opening, outcome)
            }
            Entry { ref outcome, ref verdict, ref reason, ref conn, src, dst, .. }
                if outcome.is_some() || verdict.is_some() =>
            {
                let of_packet = of_packet(outcome.as_deref(), verdict.as_deref(), reason.as_deref(), conn.as_deref());
                let (Some(src), Some(dst), Some(outcome)) = (src, dst, of_packet) else { return Ok(()) };
                (src, dst, Opening::Assumed, outcome)
            }
            _ => return Err(BadEntry::Unknown),
        };
        let protocol = self::protocol(protocol.as_deref().ok_or(BadEntry::NoProtocol)?)?;
        let seen = time.as_deref().map(self::time).transpose()?;
        let (from, to) = (self.end(from, sport), self.end(to, dport));
        self.add(connection, ObservedFlow { from, to, protocol, opening, outcome, seen });
        Ok(())
    }

    /// Adds a flow, or what is newer about one that is known.
    fn add(&mut self, connection: Option<String>, flow: ObservedFlow) {
        let place = self.flows.len();
        let known = connection.map_or(place, |connection| *self.connections.entry(connection).or_insert(place));
        let Some(before) = self.flows.get_mut(known) else { return self.flows.push(flow) };
        let first = before.seen.map(|seen| seen.first);
        *before = flow;
        if let (Some(first), Some(seen)) = (first, &mut before.seen) {
            seen.first = first.min(seen.first);
        }
    }

    fn end(&mut self, end: End, port: Option<u16>) -> ObservedEnd {
        let (address, number, name) = match end {
            End::Full { address, port, name } => (Some(address), port, name),
            End::Name(text) => match text.parse() {
                Ok(address) => (Some(address), 0, None),
                Err(_) => (None, 0, Some(text)),
            },
        };
        let pod = name.as_deref().and_then(ObjectKey::parse);
        let node = name.as_deref().and_then(|name| name.strip_prefix("node:"));
        let address = address.or_else(|| self.node(node?));
        ObservedEnd { address, port: port.unwrap_or(number), pod }
    }

    fn node(&mut self, name: &str) -> Option<IpAddr> {
        let state = self.state;
        let nodes = self.nodes.get_or_insert_with(|| {
            let named = state.addresses().filter_map(|(address, owner)| match owner {
                PodOrNode::Node(node) => Some((state.node_name(node)?.to_owned(), address)),
                PodOrNode::Pod(_) => None,
            });
            named.collect()
        });
        nodes.get(name).copied()
    }
}

fn of_state(state: &str) -> (Opening, Outcome) {
    match state {
        "PICKED_UP" => (Opening::Missing, Outcome::Passed),
        "REVOKED" => (Opening::Assumed, Outcome::Denied),
        "SYN_SENT" | "SYN_SENT2" | "SYN_RECV" | "COOKIE_WAIT" => (Opening::Assumed, Outcome::Unanswered),
        "UNREPLIED" => (Opening::Assumed, Outcome::Silent),
        _ => (Opening::Assumed, Outcome::Passed),
    }
}

/// The connection of a line about a packet; `None` if it opens none and policy does not deny it.
fn of_packet(
    outcome: Option<&str>,
    verdict: Option<&str>,
    reason: Option<&str>,
    conn: Option<&str>,
) -> Option<Outcome> {
    const DENIED: [&str; 3] = ["egress_denied", "ingress_denied", "connection_revoked"];
    match (outcome, verdict) {
        (Some("opened"), _) => Some(Outcome::Passed),
        (None, Some("allow")) => (conn == Some("new")).then_some(Outcome::Passed),
        (found, _) => found.or(reason).is_some_and(|reason| DENIED.contains(&reason)).then_some(Outcome::Denied),
    }
}

/// A protocol by its name or number, or as it is shown where it has no name: `protocol 50`.
fn protocol(text: &str) -> Result<Protocol, flow::FlowError> {
    flow::protocol(text.strip_prefix("protocol ").unwrap_or(text))
}

fn time(text: &str) -> Result<SeenTimes, BadEntry> {
    let timestamp: jiff::Timestamp = text.parse().map_err(|_| BadEntry::Time(text.to_owned()))?;
    let at = u64::try_from(timestamp.as_nanosecond()).map_err(|_| BadEntry::Time(text.to_owned()))?;
    Ok(SeenTimes { first: at, last: at })
}

fn read_captures(captures: &[PathBuf], objects: &[Object], input: &mut Input) -> Result<(), Failure> {
    let found = connections(captures, objects.iter().cloned());
    let found = found.map_err(|error| Failure::BadInput(error.to_string().lines().map(str::to_owned).collect()))?;
    input.notes.extend(found.notes);
    input.notes.extend(
        found
            .dropped
            .iter()
            .map(|(reason, count)| format!("captures: {count} packets belong to no connection ({reason}): left out")),
    );
    input.flows.extend(found.connections.iter().map(captured));
    Ok(())
}

fn captured(connection: &CapturedConnection) -> ObservedFlow {
    let CapturedConnection { flow, first_packet, is_answered, first, last } = *connection;
    let (src_port, dst_port) = flow.shown_ports();
    let end = |address: penstock_dataplane::packet::Address, port| ObservedEnd {
        address: Some(address.into()),
        port,
        pod: None,
    };
    ObservedFlow {
        from: end(flow.src, src_port),
        to: end(flow.dst, dst_port),
        protocol: flow.protocol,
        opening: match first_packet {
            FirstPacket::Opens => Opening::Seen,
            FirstPacket::MayOpen => Opening::Assumed,
            FirstPacket::MidStream => Opening::Missing,
        },
        outcome: match flow.protocol {
            Protocol::TCP | Protocol::SCTP if !is_answered && first_packet == FirstPacket::Opens => Outcome::Unanswered,
            _ => Outcome::Passed,
        },
        seen: Some(SeenTimes { first: first.0, last: last.0 }),
    }
}
