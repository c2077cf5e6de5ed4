//! A case as captures of its clients' interfaces: replay and the oracle say the same of each packet.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use penstock_pcap_tests::CorpusCase;
use penstock_pcap_tests::script::CaseScript;

use super::made::{Conversation, Part, changes, time_of};
use crate::differential::{Comparison, compare};

/// The packets of a conversation, each with its time. What is sent to a Service is answered from there.
fn packets(conversation: &Conversation) -> Vec<(u64, String)> {
    let end = |(address, port): &(String, u16)| match conversation.v6 {
        true => format!("[{address}]:{port}"),
        false => format!("{address}:{port}"),
    };
    let ends = [(conversation.source(), conversation.client_port), conversation.destination()];
    let [client, server] = [&ends[0], &ends[1]].map(end);
    let plan = ["S", "S A", "A", "A P len=10", "A P len=10", "A len=3"];
    let mut next = [100, 900];
    let mut packets = Vec::new();
    for ((time, is_sent), what) in conversation.packets.iter().zip(plan) {
        let side = usize::from(!is_sent);
        let ends = if *is_sent { format!("{client} > {server}") } else { format!("{server} > {client}") };
        let text = match conversation.is_tcp {
            false => "udp len=20".to_owned(),
            true if what == "S" => format!("tcp S seq={}", next[side]),
            true => format!("tcp {what} seq={} ack={}", next[side], next[1 - side]),
        };
        let length = what.split_once("len=").map_or(0, |(_, length)| length.parse().unwrap());
        next[side] += length + u32::from(what.contains('S'));
        packets.push((*time, format!("{ends} {text}")));
    }
    packets
}

/// Compares the verdicts on a case; `directory` is for its files.
fn verdicts(directory: &Path, (name, base): (&str, &str), parts: &[Part]) -> Comparison {
    let state = |wanted: u64| {
        let objects = parts.iter().filter_map(|part| match part {
            Part::Objects(change, yaml) if *change == wanted => Some(yaml.as_str()),
            _ => None,
        });
        let place = directory.join(format!("change-{wanted}"));
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("all.yaml"), [base].into_iter().chain(objects).collect::<Vec<_>>().join("---\n")).unwrap();
        place
    };
    let states: Vec<_> = changes().map(state).collect();
    let mut timeline = String::new();
    for (change, state) in changes().zip(&states).skip(1) {
        let at = time_of(change) / 1_000_000_000;
        let _ = write!(timeline, "[[step]]\nat = \"+{at}s\"\nreplace = [\"{}\"]\n", state.display());
    }
    // The clock of the changes begins with the first packet.
    let mut sent = vec![(0, "10.0.1.1:1 > 10.0.1.2:1 udp len=1".to_owned())];
    sent.extend(parts.iter().flat_map(|part| match part {
        // A table may still hold datagrams that have expired, which is no matter of policy.
        Part::Conversation(conversation) if conversation.is_tcp || !conversation.expires() => packets(conversation),
        Part::Conversation(_) | Part::Objects(..) => Vec::new(),
    }));
    sent.sort();
    let mut text = format!("purpose: {name}.\ncluster: {}\nnode: n1\n", states[0].display());
    for (time, line) in sent {
        let _ = writeln!(text, "{}.{:09} {line}", time / 1_000_000_000, time % 1_000_000_000);
    }
    let mut script = CaseScript::parse(name, &text).unwrap();
    script.timeline = timeline;
    script.service_cidrs = vec!["10.96.0.0/16".to_owned()];
    let case = CorpusCase { file: directory.join("random.case"), name: name.to_owned(), script };
    fs::write(case.capture_file(), case.capture()).unwrap();
    compare(&case)
}

/// Where replay and the oracle agree on a case, and where not.
pub(super) fn differences(seed: u64, base: &str, parts: &[Part]) -> Comparison {
    let directory = tempfile::tempdir().unwrap();
    verdicts(directory.path(), (&format!("seed {seed}"), base), parts)
}
