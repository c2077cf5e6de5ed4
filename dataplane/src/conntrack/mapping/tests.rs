use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::*;
use crate::conntrack::entry::{ControlWord, EntryContents, EpochTag};
use crate::conntrack::tests::{NOW, POD, flow, insert, syn, tcp};
use crate::conntrack::{Config, ConnTable, Insertion, OwnerId, State, TcpState, Update};
use crate::epoch::Epoch;
use crate::packet::{TcpFlags, TcpSegment, Transport};

const ENTRIES: usize = 1000;

fn open(path: &Path) -> Result<ConnTable, OpenError> {
    ConnTable::new(&Config { entries: ENTRIES, memory: TableMemory::File(path.to_owned()), ..Config::default() })
}

fn contents() -> EntryContents {
    EntryContents { owner: POD, tracking: [0; 2] }
}

fn directory() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("conntrack");
    (directory, path)
}

#[test]
fn connections_outlast_the_table_that_created_them() {
    let (_directory, path) = directory();
    {
        let table = open(&path).unwrap();
        assert_eq!(table.origin(), &TableOrigin::New);
        for n in 0..200 {
            insert(&table, &flow(n), &Transport::Udp, NOW).unwrap();
        }
    }
    let table = open(&path).unwrap();
    assert_eq!((table.origin(), table.len()), (&TableOrigin::Found, 200));
    for n in 0..200 {
        let conn = table.find(&table.prepare(&flow(n).reversed()), NOW).unwrap();
        assert_eq!((conn.original_flow(), conn.owner(), conn.state()), (flow(n), POD, State::Unreplied));
        assert!(!conn.is_evaluated_under(Epoch(1)), "evaluated by another process");
    }
    // Even ports belong to a pod that still exists, with another number.
    let removed = table.assign_owners(|flow| (flow.src_port % 2 == 0).then_some(OwnerId(3)));
    assert_eq!((removed, table.len(), table.len_of(POD), table.len_of(OwnerId(3))), (100, 100, 0, 100));
    assert_eq!(table.iter(NOW).filter(|connection| connection.owner == OwnerId(3)).count(), 100);
}

/// The connection id in the log stays the same across restarts.
#[test]
fn connection_ids_persist_with_the_file() {
    let (_directory, path) = directory();
    let numbers = |table: &ConnTable| -> Vec<u64> { (0..50).map(|n| table.connection_id(&flow(n))).collect() };
    let before = numbers(&open(&path).unwrap());
    assert_eq!(numbers(&open(&path).unwrap()), before);
    let back: Vec<u64> = (0..50).map(|n| open(&path).unwrap().connection_id(&flow(n).reversed())).collect();
    assert_eq!(back, before, "in the other direction");
    std::fs::remove_file(&path).unwrap();
    assert!(numbers(&open(&path).unwrap()).iter().zip(&before).all(|(new, old)| new != old), "another table's");
}

#[test]
fn a_tcp_connection_continues_after_missed_segments() {
    let segment =
        |flags, seq, ack| Transport::Tcp(TcpSegment { seq, ack, window: 1000, flags, ..TcpSegment::default() });
    let fin = |seq, ack| segment(TcpFlags::ACK.with(TcpFlags::FIN), seq, ack);
    let established = Update::Accepted(State::Tcp(TcpState::Established));
    let (_directory, path) = directory();
    let (out, back) = (tcp(1).key().1, tcp(1).key().1.opposite());
    let step = |table: &ConnTable, way, transport: &Transport| {
        table.find(&table.prepare(&tcp(1)), NOW).unwrap().update(way, transport, NOW)
    };
    {
        let table = open(&path).unwrap();
        insert(&table, &tcp(1), &syn(), NOW).unwrap();
        step(&table, back, &segment(TcpFlags::SYN.with(TcpFlags::ACK), 5000, 1001));
        step(&table, out, &segment(TcpFlags::ACK, 1001, 5001));
        assert_eq!(step(&table, out, &fin(9_000_000, 5001)), established, "it does not fit, and ends nothing");
    }
    let table = open(&path).unwrap();
    assert_eq!(step(&table, out, &segment(TcpFlags::ACK, 9_000_000, 7_000_000)), established);
    assert_eq!(step(&table, back, &segment(TcpFlags::ACK, 7_000_000, 9_000_000)), established);
    assert_eq!(step(&table, out, &fin(20_000_000, 7_000_000)), established, "windows hold again");
    assert_eq!(step(&table, out, &fin(9_000_000, 7_000_000)), Update::Accepted(State::Tcp(TcpState::FinWait)));
}

/// While no worker ran, data arrived whose acknowledgements were lost: the sender retransmits from the first byte, and
/// the reply acknowledges all of it.
#[test]
fn a_tcp_connection_continues_with_a_retransmission() {
    let data = |seq, ack, payload_len| {
        let flags = TcpFlags::ACK;
        Transport::Tcp(TcpSegment { seq, ack, window: 1000, flags, payload_len, ..TcpSegment::default() })
    };
    let established = Update::Accepted(State::Tcp(TcpState::Established));
    for answer_first in [false, true] {
        let (_directory, path) = directory();
        let (out, back) = (tcp(1).key().1, tcp(1).key().1.opposite());
        let step = |table: &ConnTable, way, transport: &Transport| {
            table.find(&table.prepare(&tcp(1)), NOW).unwrap().update(way, transport, NOW)
        };
        {
            let table = open(&path).unwrap();
            insert(&table, &tcp(1), &syn(), NOW).unwrap();
            let flags = TcpFlags::SYN.with(TcpFlags::ACK);
            let answer = TcpSegment { seq: 5000, ack: 1001, window: 1000, flags, ..TcpSegment::default() };
            step(&table, back, &Transport::Tcp(answer));
            for seq in [1001, 1101, 1201] {
                assert_eq!(step(&table, out, &data(seq, 5001, 100)), established);
            }
        }
        let table = open(&path).unwrap();
        if answer_first {
            assert_eq!(step(&table, back, &data(5001, 1101, 0)), established, "of what came before a gap");
        }
        assert_eq!(step(&table, out, &data(1101, 5001, 100)), established, "sent again");
        assert_eq!(step(&table, back, &data(5001, 1301, 0)), established, "all of it, answer first: {answer_first}");
        let fin = TcpSegment {
            seq: 5001,
            ack: 1400,
            window: 1000,
            flags: TcpFlags::ACK.with(TcpFlags::FIN),
            ..TcpSegment::default()
        };
        assert_eq!(step(&table, back, &Transport::Tcp(fin)), established, "windows hold again");
    }
}

#[test]
fn an_unusable_file_is_replaced_with_a_reason() {
    type Damage = (&'static str, fn(&Path), fn(&UnusableFile) -> bool);
    let damages: [Damage; 6] = [
        ("foreign", |path| std::fs::write(path, vec![b'x'; 10_000]).unwrap(), |why| *why == UnusableFile::Foreign),
        ("empty", |path| std::fs::write(path, b"").unwrap(), |why| *why == UnusableFile::Torn),
        ("cut", |path| truncate(path, 50_000), |why| *why == UnusableFile::Torn),
        ("another version", |path| patch(path, 1, 77), |why| matches!(why, UnusableFile::Version { found: 77, .. })),
        ("damaged header", |path| patch(path, 7, 1), |why| *why == UnusableFile::Torn),
        (
            "another size",
            |path| {
                std::fs::remove_file(path).unwrap();
                let config =
                    Config { entries: 2 * ENTRIES, memory: TableMemory::File(path.to_owned()), ..Config::default() };
                drop(ConnTable::new(&config).unwrap());
            },
            |why| *why == UnusableFile::Size,
        ),
    ];
    for (what, damage, is_expected) in damages {
        let (_directory, path) = directory();
        insert(&open(&path).unwrap(), &flow(1), &Transport::Udp, NOW).unwrap();
        damage(&path);
        let table = open(&path).unwrap();
        let TableOrigin::Remade(why) = table.origin() else { panic!("{what}: {:?}", table.origin()) };
        assert!(is_expected(why), "{what}: {why}");
        assert!(table.is_empty(), "{what}");
        insert(&table, &flow(2), &Transport::Udp, NOW).unwrap();
        drop(table);
        assert_eq!(open(&path).unwrap().len(), 1, "{what}: and from then on it is kept");
    }
}

fn truncate(path: &Path, len: u64) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

/// Overwrites one word of the header.
fn patch(path: &Path, word: usize, value: u64) {
    use std::os::unix::fs::FileExt;
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&value.to_ne_bytes(), word as u64 * 8).unwrap();
}

#[test]
fn a_file_belongs_to_one_process_at_a_time() {
    let (_directory, path) = directory();
    let table = open(&path).unwrap();
    assert!(matches!(open(&path), Err(OpenError::InUse { .. })));
    drop(table);
    assert_eq!(open(&path).unwrap().origin(), &TableOrigin::Found);
    let missing = path.join("nowhere");
    assert!(open(&missing).unwrap_err().to_string().contains("nowhere"));
}

#[test]
fn unfinished_and_damaged_entries_are_cleared() {
    let (_directory, path) = directory();
    let capacity = {
        let table = open(&path).unwrap();
        insert(&table, &flow(1), &Transport::Udp, NOW).unwrap();
        insert(&table, &flow(2), &Transport::Udp, NOW).unwrap();
        // Claimed and not written; tentative; with an invalid state; in a wrong group.
        let free: Vec<u32> =
            (0..table.capacity() as u32).filter(|slot| table.entry(*slot).control().is_free()).take(3).collect();
        table.entry(free[0]).claim().unwrap();
        let words = |n| table.prepare(&flow(n)).words;
        let claimed = table.entry(free[1]).claim().unwrap();
        let tentative = ControlWord::tentative(claimed, 2, flow(3).key().1, EpochTag::NONE, NOW.tick());
        table.entry(free[1]).publish(tentative, &words(3), contents());
        let claimed = table.entry(free[2]).claim().unwrap();
        let stray = ControlWord::tentative(claimed, 14, flow(4).key().1, EpochTag::NONE, NOW.tick()).confirmed();
        table.entry(free[2]).publish(stray, &words(4), contents());
        let (slot, control) = table.lookup(&table.prepare(&flow(2))).unwrap();
        let wrong = (0..u32::MAX)
            .map(|n| table.prepare(&flow(100 + n)))
            .find(|other| {
                let groups = [0, 1].map(|n| {
                    let of = if n == 0 { crate::conntrack::hash::home } else { crate::conntrack::hash::alternate };
                    of(other.hash, table.groups)
                });
                !groups.contains(&(slot / LANES))
            })
            .unwrap();
        table.entry(slot).publish(control, &wrong.words, contents());
        table.capacity()
    };
    let table = open(&path).unwrap();
    let left: Vec<_> = table.iter(NOW).map(|connection| connection.original).collect();
    assert_eq!((left, table.len()), (vec![flow(1)], 1));
    let free = (0..capacity as u32).filter(|slot| table.entry(*slot).control().is_free()).count();
    assert_eq!(free, capacity - 1);
}

/// Passes the file to a test that runs as another process.
const CHILD: &str = "PENSTOCK_TEST_CONNTRACK";

/// Does nothing unless started by the test below: then inserts and removes connections until it is killed.
#[test]
fn works_until_killed() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let table = open(Path::new(&path)).unwrap();
    let begun = Instant::now();
    for n in (0..).map(|n: u32| n.wrapping_mul(0x9e37_79b1) % 1500) {
        match insert(&table, &flow(n), &Transport::Udp, NOW) {
            Ok(Insertion::Found(conn)) => _ = conn.remove(),
            Ok(Insertion::Created(mut conn)) => _ = conn.update(flow(n).key().1, &Transport::Udp, NOW),
            Err(_) => {}
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "somebody should have killed this");
    }
}

#[test]
fn a_killed_process_leaves_a_consistent_table() {
    let (_directory, path) = directory();
    for round in 0..3 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "conntrack::mapping::tests::works_until_killed", "--test-threads=1"])
            .env(CHILD, &path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !path.exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(150));
        child.kill().unwrap();
        child.wait().unwrap();
        let table = open(&path).unwrap();
        assert_eq!(table.origin(), &TableOrigin::Found, "round {round}");
        let listed: Vec<_> = table.iter(NOW).map(|connection| connection.original.key().0).collect();
        assert!(!listed.is_empty() && listed.len() == table.len(), "round {round}: {} listed", listed.len());
        let distinct: std::collections::HashSet<_> = listed.iter().collect();
        assert_eq!(distinct.len(), listed.len(), "round {round}: one entry a connection");
        for key in &listed {
            assert!(table.find(&table.prepare(&key.flow(crate::packet::Orientation::LowToHigh)), NOW).is_some());
        }
        insert(&table, &flow(9999), &Transport::Udp, NOW).unwrap();
    }
}
