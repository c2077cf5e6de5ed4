use std::fs;

use penstock_replay::capture::{CaptureFile, CaptureInterface, CaptureWriter, InterfaceId, LinkType, Record, Time};

use super::*;
use crate::fake::{ASKING, FakeCluster, Reply};

/// A node's stream: packets with these times, of one interface.
fn stream(interface: &str, times: &[u64]) -> Vec<u8> {
    let mut writer = CaptureWriter::new(Vec::new()).unwrap();
    let interface = CaptureInterface { file: 0, name: Some(interface.to_owned()), link: LinkType::Ethernet };
    for &time in times {
        let record = Record { time: Time(time), interface: InterfaceId(0), captured: 20, original: 60 };
        writer.write(&record, &interface, &[time as u8; 20], "verdict=allow").unwrap();
    }
    writer.into_inner()
}

fn capturing(stdout: Vec<u8>, packets: u64, lost: u64) -> Vec<Reply> {
    let said = format!(
        "penstock: capturing on x\npenstock: {packets} packets captured, {lost} lost to the capture (interrupted)\n"
    );
    vec![Reply::EndsAfterInput(0, stdout, said)]
}

fn args(output: &Path) -> Args {
    Args {
        output: output.to_owned(),
        from: None,
        to: None,
        pod: None,
        verdict: None,
        reason: None,
        host: None,
        port: None,
        protocol: None,
        program: None,
        snaplen: None,
        packets: None,
        seconds: None,
        bytes: None,
    }
}

/// Time, interface's name and comment of each packet.
fn read(path: &Path) -> Vec<(u64, String, String)> {
    let (mut interfaces, mut frame, mut found) = (Vec::new(), Vec::new(), Vec::new());
    let mut file = CaptureFile::open(path, 0, &mut interfaces).unwrap().with_comments();
    while let Some(record) = file.next(&mut frame, &mut interfaces).unwrap() {
        let name = interfaces[record.interface.index()].name.clone().unwrap();
        assert_eq!((record.captured, record.original), (20, 60));
        found.push((record.time.0, name, file.comment().to_owned()));
    }
    assert_eq!(file.truncated_at(), None);
    found
}

#[tokio::test]
async fn packets_of_two_nodes_are_in_one_file_by_time_until_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("both.pcapng");
    let cluster = FakeCluster::new([
        ("a", capturing(stream("shop/web", &[10, 30, 50]), 3, 0)),
        ("b", capturing(stream("shop/db", &[20, 40, 60]), 3, 7)),
    ]);
    run(&cluster, ASKING, Args { packets: Some(5), ..args(&output) }).await.unwrap();
    let found = read(&output);
    let times: Vec<u64> = found.iter().map(|(time, ..)| *time).collect();
    assert_eq!(times, [10, 20, 30, 40, 50]);
    assert_eq!(found[0].1, "shop/web on a");
    assert_eq!(found[1].1, "shop/db on b");
    assert_eq!(found[1].2, "verdict=allow node=b");
    let bytes = fs::read(&output).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("7 packets of node b lost to the capture"), "what is missing is said in the file");
    assert_eq!(*cluster.inputs.lock().unwrap(), [b"\n", b"\n"], "both were asked to end");
    let asked = cluster.asked.lock().unwrap();
    assert_eq!(asked[0].1, ["penstock", "capture", "--output=-", "--end-with-input", "--packets=5"]);
}

#[tokio::test]
async fn a_node_that_does_not_capture_is_named_and_the_others_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("some.pcapng");
    let mut whole = stream("shop/web", &[10, 30]);
    let refused = "penstock: /run/penstock/capture.sock: no daemon offers captures there (gone); set capture.socket\n";
    let broken = whole[..whole.len() - 3].to_vec();
    let cluster = FakeCluster::new([
        ("a", capturing(std::mem::take(&mut whole), 2, 0)),
        ("b", vec![Reply::error(2, refused)]),
        ("c", vec![Reply::Ends(0, b"no capture at all".to_vec(), String::new())]),
        ("d", vec![Reply::Ends(0, broken, String::new())]),
        (
            "e",
            vec![Reply::error(
                2,
                "error: unexpected argument '--end-with-input' found\n\nFor more information, try '--help'.\n",
            )],
        ),
    ]);
    let ended = run(&cluster, ASKING, Args { packets: Some(3), ..args(&output) }).await;
    let Err(Failure::Partial(lines)) = ended else { panic!("{ended:?}") };
    for (line, (node, part)) in lines.iter().zip([
        ("b", "no daemon offers captures there"),
        ("c", "sent no valid answer"),
        ("d", "break off"),
        ("e", "an older version"),
    ]) {
        assert!(line.starts_with(&format!("node {node}: ")) && line.contains(part), "{line}");
    }
    assert_eq!(lines.len(), 4);
    let times: Vec<u64> = read(&output).iter().map(|(time, ..)| *time).collect();
    assert_eq!(times, [10, 10, 30]);
}

#[tokio::test]
async fn where_no_node_captures_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("none.pcapng");
    let cluster =
        FakeCluster::new([("a", vec![Reply::Fails(Problem::Forbidden("needs create on pods/exec".to_owned()))])]);
    let ended = run(&cluster, ASKING, args(&output)).await;
    assert!(matches!(ended, Err(Failure::BadInput(_))), "{ended:?}");
    assert!(!output.exists());
    let refused = "penstock: /run/penstock/capture.sock: no daemon offers captures there (gone); set capture.socket\n";
    let cluster = FakeCluster::new([("a", vec![Reply::error(2, refused)])]);
    assert!(matches!(run(&cluster, ASKING, args(&output)).await, Err(Failure::BadInput(_))));
    assert!(!output.exists(), "no packet was captured");
    fs::write(&output, "mine").unwrap();
    let ended = run(&cluster, ASKING, args(&output)).await;
    assert!(matches!(&ended, Err(Failure::BadInput(lines)) if lines[0].contains("exists already")), "{ended:?}");
}

fn place(node: &str, addresses: &[&str]) -> PodPlace {
    let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
    PodPlace { node: node.to_owned(), addresses, host_network: false }
}

#[test]
fn each_end_is_captured_on_its_node_by_its_pod_and_the_others_address() {
    let (web, db): (PodName, PodName) = ("shop/web".parse().unwrap(), "shop/db".parse().unwrap());
    let plan = between((&web, &place("a", &["10.0.0.1"])), (&db, &place("b", &["10.0.0.2"])));
    let nodes = plan.nodes.unwrap();
    assert_eq!(nodes["a"], ["--pod=shop/web", "--host=10.0.0.2"]);
    assert_eq!(nodes["b"], ["--pod=shop/db", "--host=10.0.0.1"]);
    assert_eq!(plan.between, None);
    let plan = between((&web, &place("a", &["10.0.0.1"])), (&db, &place("a", &["10.0.0.2"])));
    assert_eq!(
        plan.nodes.unwrap(),
        BTreeMap::from([("a".to_owned(), vec!["--pod=shop/web".to_owned(), "--host=10.0.0.2".to_owned()])])
    );
    let plan = between((&web, &place("a", &["10.0.0.1", "fd00::1"])), (&db, &place("b", &["10.0.0.2", "fd00::2"])));
    assert_eq!(plan.nodes.as_ref().unwrap()["a"], ["--pod=shop/web"], "two addresses are no filter of a daemon");
    let ends = plan.between.unwrap();
    let v4 = |from: u8, to: u8| [&[0; 12][..], &[8, 0], &[0; 12], &[10, 0, 0, from], &[10, 0, 0, to]].concat();
    let v6 = |from: u8, to: u8| {
        let address = |last| [&[0xfd][..], &[0; 14], &[last]].concat();
        [&[0; 12][..], &[0x86, 0xdd], &[0; 8], &address(from), &address(to)].concat()
    };
    for (frame, expected) in [
        (v4(1, 2), true),
        (v4(2, 1), true),
        (v4(1, 3), false),
        (v4(1, 1), false),
        (v6(1, 2), true),
        (v6(2, 1), true),
        (v6(3, 2), false),
        (v4(1, 2)[..33].to_vec(), false),
        (Vec::new(), false),
    ] {
        assert_eq!(is_between(&frame, &ends), expected, "{frame:?}");
    }
}
