//! The pcapng file of a capture.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, Write};

use penstock_admin::capture::PacketRecord;
use penstock_replay::capture::{CaptureInterface, CaptureWriter, InterfaceId, LinkType, Record, Time};

/// A capture that is being written.
pub(super) struct PacketFile<W: Write> {
    writer: CaptureWriter<W>,
    interfaces: Vec<Interface>,
    /// By port and what is behind it: a port's number may be another's later.
    numbers: HashMap<(u16, String), usize>,
    packets: u64,
    last: Time,
    /// Packets that the daemon lost so far, and how many of them the comments have said.
    lost: (u64, u64),
}

struct Interface {
    described: CaptureInterface,
    packets: u64,
}

impl<W: Write> PacketFile<W> {
    /// Starts a file.
    pub(super) fn new(output: W) -> io::Result<Self> {
        Ok(Self {
            writer: CaptureWriter::new(output)?,
            interfaces: Vec::new(),
            numbers: HashMap::new(),
            packets: 0,
            last: Time::default(),
            lost: (0, 0),
        })
    }

    /// Packets in the file.
    pub(super) fn packets(&self) -> u64 {
        self.packets
    }

    /// So many packets were lost until now; the next packet's comment says how many before it.
    pub(super) fn lost(&mut self, lost: u64) {
        self.lost.0 = lost;
    }

    /// Writes a packet.
    pub(super) fn packet(&mut self, packet: &PacketRecord, frame: &[u8]) -> io::Result<()> {
        let number = self.interface(packet);
        let (lost, said) = self.lost;
        let mut comment = comment(packet);
        if lost > said {
            let _ = write!(comment, " lost={}", lost - said);
            self.lost.1 = lost;
        }
        self.last = Time(packet.time);
        self.packets += 1;
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

    fn interface(&mut self, packet: &PacketRecord) -> usize {
        let next = self.interfaces.len();
        let number = *self.numbers.entry((packet.port, packet.interface.clone())).or_insert(next);
        if number == next {
            let described =
                CaptureInterface { file: 0, name: Some(packet.interface.clone()), link: LinkType::Ethernet };
            self.interfaces.push(Interface { described, packets: 0 });
        }
        number
    }

    /// Passes on what is written so far.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }

    /// Ends the file with each interface's packets. What was lost is not known by interface, and stands with the first.
    pub(super) fn end(&mut self, lost: u64, reason: &str) -> io::Result<()> {
        if self.interfaces.is_empty() && lost > 0 {
            let described = CaptureInterface { file: 0, name: Some("lost".to_owned()), link: LinkType::Ethernet };
            self.interfaces.push(Interface { described, packets: 0 });
        }
        for (number, Interface { described, packets }) in self.interfaces.iter().enumerate() {
            let id = InterfaceId(number as u32);
            let (lost, comment) = match number {
                0 => (lost, format!("ended: {reason}; {lost} packets of all interfaces lost to the capture")),
                _ => (0, String::new()),
            };
            self.writer.statistics((self.last, id), described, (packets + lost, lost), &comment)?;
        }
        self.flush()
    }
}

/// What the daemon says of a packet, as `key=value` pairs.
fn comment(packet: &PacketRecord) -> String {
    let mut text = format!("verdict={}", packet.verdict.name());
    let parts = [
        ("reason", &packet.reason),
        ("egress", &packet.egress),
        ("ingress", &packet.ingress),
        ("service", &packet.service),
        ("connection", &packet.connection),
    ];
    for (key, value) in parts.into_iter().filter_map(|(key, value)| Some((key, value.as_ref()?))) {
        let _ = if value.contains(' ') { write!(text, " {key}={value:?}") } else { write!(text, " {key}={value}") };
    }
    let _ = write!(text, " epoch={} worker={}", packet.epoch, packet.worker);
    if packet.opens {
        text.push_str(" opens");
    }
    if packet.translated {
        text.push_str(" translated");
    }
    text
}

#[cfg(test)]
mod tests {
    use penstock_admin::capture::Verdict;
    use penstock_replay::capture::CaptureFile;

    use super::*;

    fn record(time: u64, port: u16, interface: &str) -> PacketRecord {
        PacketRecord {
            time,
            port,
            interface: interface.to_owned(),
            length: 60,
            translated: false,
            verdict: Verdict::Allow,
            reason: None,
            egress: Some("open".to_owned()),
            ingress: Some("shop-db ingress rule 0".to_owned()),
            connection: Some("00c0ffee00c0ffee".to_owned()),
            service: None,
            opens: false,
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
        let translated = PacketRecord { translated: true, service: Some("shop/db:sql".to_owned()), ..allowed };
        assert!(
            comment(&translated)
                .ends_with(" service=shop/db:sql connection=00c0ffee00c0ffee epoch=7 worker=1 translated")
        );
    }

    #[test]
    fn a_capture_is_read_back_with_one_interface_for_each_pod() {
        let mut bytes = Vec::new();
        let mut file = PacketFile::new(&mut bytes).unwrap();
        let packets = [(1_000, 3, "shop/web"), (2_000, 4, "shop/db"), (3_000, 3, "shop/web"), (4_000, 3, "shop/new")];
        for (time, port, interface) in packets {
            file.packet(&record(time, port, interface), &[7; 20]).unwrap();
            file.lost(5);
        }
        file.end(6, "4 packets").unwrap();
        assert_eq!(file.packets(), 4);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert_eq!(text.matches(" lost=5").count(), 1, "said once");
        assert!(text.contains("ended: 4 packets; 6 packets of all interfaces lost to the capture"));
        let (mut interfaces, mut frames, mut found) = (Vec::new(), Vec::new(), Vec::new());
        let mut read = CaptureFile::read("test".as_ref(), std::io::Cursor::new(bytes), 0, &mut interfaces).unwrap();
        while let Some(record) = read.next(&mut frames, &mut interfaces).unwrap() {
            let name = interfaces[record.interface.index()].name.clone().unwrap();
            found.push((record.time.0, name, record.captured, record.original));
        }
        let expected = packets.map(|(time, _, name)| (time, name.to_owned(), 20, 60));
        assert_eq!(found, expected);
        assert_eq!((read.truncated_at(), interfaces.len()), (None, 3));
    }
}
