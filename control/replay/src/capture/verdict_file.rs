//! The pcapng file of a daemon's capture, or of several daemons': each packet with what was decided on it.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, Write};

use penstock_admin::capture::{CaptureCounts, PacketRecord};

use super::{CaptureInterface, CaptureWriter, InterfaceId, LinkType, Record, Time};

/// A capture that is being written. Each pod's port is an interface.
pub struct VerdictFile<W: Write> {
    writer: CaptureWriter<W>,
    nodes: Vec<Node>,
    interfaces: Vec<Interface>,
    /// By node, port and what is behind it: a port's number may be another's later.
    numbers: HashMap<(usize, u16, String), usize>,
    packets: u64,
    last: Time,
}

#[derive(Default)]
struct Node {
    name: Option<String>,
    /// Packets that the comments have said to be lost.
    said: u64,
    packets: u64,
}

struct Interface {
    node: usize,
    described: CaptureInterface,
    packets: u64,
}

impl<W: Write> VerdictFile<W> {
    /// Starts the file of one daemon, node 0, whose name is in no packet.
    pub fn new(output: W) -> io::Result<Self> {
        Self::with_nodes(output, vec![Node::default()])
    }

    /// Starts the file of these nodes' daemons.
    pub fn of_nodes(output: W, names: impl IntoIterator<Item = String>) -> io::Result<Self> {
        let node = |name| Node { name: Some(name), ..Node::default() };
        Self::with_nodes(output, names.into_iter().map(node).collect())
    }

    fn with_nodes(output: W, nodes: Vec<Node>) -> io::Result<Self> {
        let (interfaces, numbers) = Default::default();
        Ok(Self { writer: CaptureWriter::new(output)?, nodes, interfaces, numbers, packets: 0, last: Time::default() })
    }

    pub fn packets(&self) -> u64 {
        self.packets
    }

    pub fn packets_of(&self, node: usize) -> u64 {
        self.nodes[node].packets
    }

    /// Writes a packet of a node, which has lost so many until then. The comment says how many since the packet before.
    pub fn packet(&mut self, node: usize, packet: &PacketRecord, frame: &[u8], lost: u64) -> io::Result<()> {
        let number = self.interface(node, packet);
        let of = &mut self.nodes[node];
        let mut comment = comment(packet);
        if lost > of.said {
            let _ = write!(comment, " lost={}", lost - of.said);
            of.said = lost;
        }
        if let Some(name) = &of.name {
            let _ = write!(comment, " node={name}");
        }
        of.packets += 1;
        self.packets += 1;
        self.last = Time(packet.time);
        let interface = &mut self.interfaces[number];
        interface.packets += 1;
        let record = Record {
            time: self.last,
            interface: InterfaceId(number as u32),
            captured: frame.len() as u32,
            original: packet.length,
        };
        self.writer.write(&record, &interface.described, frame, &comment)
    }

    fn interface(&mut self, node: usize, packet: &PacketRecord) -> usize {
        let next = self.interfaces.len();
        let number = *self.numbers.entry((node, packet.port, packet.interface.clone())).or_insert(next);
        if number == next {
            let name = match &self.nodes[node].name {
                Some(node) => format!("{} on {node}", packet.interface),
                None => packet.interface.clone(),
            };
            self.describe(node, name);
        }
        number
    }

    fn describe(&mut self, node: usize, name: String) {
        let described = CaptureInterface { file: 0, name: Some(name), link: LinkType::Ethernet };
        self.interfaces.push(Interface { node, described, packets: 0 });
    }

    /// Passes on what is written so far.
    pub fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }

    /// Ends the file with each interface's packets. By node: what it has counted, and why it ended. What a node lost is not known
    /// by interface, and stands with its first.
    pub fn end(&mut self, ended: &[(CaptureCounts, String)]) -> io::Result<()> {
        for (node, (counts, _)) in ended.iter().enumerate() {
            if counts.lost > 0 && self.interfaces.iter().all(|interface| interface.node != node) {
                self.describe(node, "lost".to_owned());
            }
        }
        let mut is_said = vec![false; self.nodes.len()];
        for (number, Interface { node, described, packets }) in self.interfaces.iter().enumerate() {
            let (CaptureCounts { lost, .. }, reason) = &ended[*node];
            let of = self.nodes[*node].name.as_ref().map_or_else(String::new, |name| format!(" of node {name}"));
            let (lost, comment) = match std::mem::replace(&mut is_said[*node], true) {
                false => (*lost, format!("ended: {reason}; {lost} packets of all interfaces{of} lost to the capture")),
                true => (0, String::new()),
            };
            let id = InterfaceId(number as u32);
            self.writer.statistics((self.last, id), described, (packets + lost, lost), &comment)?;
        }
        self.flush()
    }
}

/// The daemon's record of a packet, as `key=value` pairs.
fn comment(packet: &PacketRecord) -> String {
    let mut text = format!("verdict={}", packet.verdict.name());
    let staged = packet.staged.as_deref();
    let parts = [
        ("reason", packet.reason.as_deref()),
        ("egress", packet.egress.as_deref()),
        ("ingress", packet.ingress.as_deref()),
        ("staged", staged.map(|staged| staged.verdict.name())),
        ("staged_egress", staged.map(|staged| staged.egress.as_str())),
        ("staged_ingress", staged.map(|staged| staged.ingress.as_str())),
        ("connection", packet.connection.as_deref()),
    ];
    for (key, value) in parts.into_iter().filter_map(|(key, value)| Some((key, value?))) {
        let _ = if value.contains(' ') { write!(text, " {key}={value:?}") } else { write!(text, " {key}={value}") };
    }
    let _ = write!(text, " epoch={} worker={}", packet.epoch, packet.worker);
    if packet.opens {
        text.push_str(" opens");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::CaptureFile;
    use super::*;
    use penstock_admin::capture::{StagedVerdict, Verdict};

    fn record(time: u64, port: u16, interface: &str) -> PacketRecord {
        PacketRecord {
            time,
            port,
            interface: interface.to_owned(),
            length: 60,
            verdict: Verdict::Allow,
            reason: None,
            egress: Some("open".to_owned()),
            ingress: Some("shop-db ingress rule 0".to_owned()),
            connection: Some("00c0ffee00c0ffee".to_owned()),
            opens: false,
            staged: None,
            epoch: 7,
            worker: 1,
        }
    }

    #[test]
    fn a_comment_says_what_was_decided_and_why() {
        let allowed = record(0, 1, "shop/web");
        assert_eq!(
            comment(&allowed),
            "verdict=allow egress=open ingress=\"shop-db ingress rule 0\" connection=00c0ffee00c0ffee epoch=7 worker=1"
        );
        let denied = PacketRecord {
            verdict: Verdict::Deny,
            reason: Some("malformed".to_owned()),
            egress: None,
            ingress: None,
            connection: None,
            ..allowed.clone()
        };
        assert_eq!(comment(&denied), "verdict=deny reason=malformed epoch=7 worker=1");
        let opening = PacketRecord { opens: true, ..allowed.clone() };
        assert!(comment(&opening).ends_with(" epoch=7 worker=1 opens"));
        let staged = |verdict| {
            let (egress, ingress) = ("open".to_owned(), "denied by shop/next".to_owned());
            Some(Box::new(StagedVerdict { verdict, egress, ingress }))
        };
        let would_be_denied = PacketRecord { staged: staged(Verdict::Deny), ..opening.clone() };
        let part = " staged=deny staged_egress=open staged_ingress=\"denied by shop/next\" connection=";
        assert!(comment(&would_be_denied).contains(part), "{}", comment(&would_be_denied));
        let would_pass = PacketRecord { staged: staged(Verdict::Allow), ..denied };
        assert!(comment(&would_pass).starts_with("verdict=deny reason=malformed staged=allow "));
    }

    /// Time, interface's name, bytes captured and on the wire, and comment of each packet.
    fn read(bytes: Vec<u8>) -> Vec<(u64, String, u32, u32, String)> {
        let (mut interfaces, mut frames, mut found) = (Vec::new(), Vec::new(), Vec::new());
        let file = CaptureFile::read("test".as_ref(), io::Cursor::new(bytes), 0, &mut interfaces).unwrap();
        let mut file = file.with_comments();
        while let Some(record) = file.next(&mut frames, &mut interfaces).unwrap() {
            let name = interfaces[record.interface.index()].name.clone().unwrap();
            found.push((record.time.0, name, record.captured, record.original, file.comment().to_owned()));
        }
        assert_eq!(file.truncated_at(), None);
        found
    }

    fn ended(lost: u64, reason: &str) -> (CaptureCounts, String) {
        (CaptureCounts { lost, ..CaptureCounts::default() }, reason.to_owned())
    }

    #[test]
    fn a_capture_is_read_back_with_one_interface_for_each_pod() {
        let mut bytes = Vec::new();
        let mut file = VerdictFile::new(&mut bytes).unwrap();
        let packets = [(1_000, 3, "shop/web"), (2_000, 4, "shop/db"), (3_000, 3, "shop/web"), (4_000, 3, "shop/new")];
        let losses = [0, 5, 5, 5];
        for ((time, port, interface), lost) in packets.into_iter().zip(losses) {
            file.packet(0, &record(time, port, interface), &[7; 20], lost).unwrap();
        }
        file.end(&[ended(6, "4 packets")]).unwrap();
        assert_eq!((file.packets(), file.packets_of(0)), (4, 4));
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert_eq!(text.matches(" lost=5").count(), 1, "said once");
        assert!(text.contains("ended: 4 packets; 6 packets of all interfaces lost to the capture"));
        let found = read(bytes);
        let expected = packets.map(|(time, _, name)| (time, name.to_owned(), 20, 60));
        assert!(
            found
                .iter()
                .map(|(time, name, captured, original, _)| (*time, name.clone(), *captured, *original))
                .eq(expected)
        );
    }

    #[test]
    fn packets_of_several_nodes_have_their_nodes_names() {
        let mut bytes = Vec::new();
        let mut file = VerdictFile::of_nodes(&mut bytes, ["a".to_owned(), "b".to_owned(), "c".to_owned()]).unwrap();
        file.packet(0, &record(1, 3, "shop/web"), &[7; 20], 0).unwrap();
        file.packet(1, &record(2, 3, "shop/web"), &[7; 20], 2).unwrap();
        file.packet(0, &record(3, 3, "shop/web"), &[7; 20], 0).unwrap();
        file.end(&[ended(0, "interrupted"), ended(3, "9 s"), ended(8, "9 s")]).unwrap();
        assert_eq!([0, 1, 2].map(|node| file.packets_of(node)), [2, 1, 0]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        for said in [
            "ended: interrupted; 0 packets of all interfaces of node a lost",
            "ended: 9 s; 3 packets of all interfaces of node b lost",
            "ended: 9 s; 8 packets of all interfaces of node c lost",
        ] {
            assert_eq!(text.matches(said).count(), 1, "{said}");
        }
        let found = read(bytes);
        let found: Vec<_> =
            found.iter().map(|(time, name, .., comment)| (*time, name.as_str(), comment.as_str())).collect();
        assert_eq!(
            found.iter().map(|(time, name, _)| (*time, *name)).collect::<Vec<_>>(),
            [(1, "shop/web on a"), (2, "shop/web on b"), (3, "shop/web on a")]
        );
        assert!(
            found[0].2.ends_with(" worker=1 node=a") && found[1].2.ends_with(" worker=1 lost=2 node=b"),
            "{found:?}"
        );
    }
}
