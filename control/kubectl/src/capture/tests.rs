use std::collections::BTreeMap;
use std::fs;

use penstock_admin::capture::{ObjectsInForce, PacketRecord, PickupInForce, Verdict, decode, encode};
use penstock_replay::capture::CaptureFile;

use super::super::cluster::PodPlace;
use super::plan::{between, is_between};
use super::*;
use crate::fake::{ASKING, FakeCluster, Reply};

fn packet(interface: &str, time: u64) -> CaptureMessage {
    CaptureMessage::Packet(PacketRecord {
        time,
        port: 3,
        interface: interface.to_owned(),
        length: 60,
        verdict: Verdict::Allow,
        reason: None,
        egress: None,
        ingress: None,
        connection: None,
        opens: false,
        staged: None,
        epoch: 7,
        worker: 0,
    })
}

/// A node's messages: packets with these times, of one interface. With `objects`: one object, and one change after the packets.
fn messages(interface: &str, times: &[u64], lost: u64, objects: bool) -> Vec<u8> {
    let mut stream = Vec::new();
    let in_force = || ObjectsInForce {
        version: "0.0.0".to_owned(),
        epoch: 7,
        time: 1,
        count: 1,
        service_cidrs: vec!["10.96.0.0/12".to_owned()],
        midstream_pickup: PickupInForce::default(),
    };
    encode(&CaptureMessage::Begin { node: "x".to_owned(), objects: objects.then(in_force) }, &[], &mut stream);
    if objects {
        encode(&CaptureMessage::Objects { count: 1 }, b"{\"object\":1}\n", &mut stream);
    }
    for &time in times {
        encode(&packet(interface, time), &[time as u8; 20], &mut stream);
    }
    if objects {
        encode(&CaptureMessage::Changes { epoch: 8, time: 99 }, b"[]", &mut stream);
    }
    let counts = CaptureCounts { packets: times.len() as u64, bytes: 0, lost };
    encode(&CaptureMessage::Progress(counts), &[], &mut stream);
    encode(&CaptureMessage::End { reason: "interrupted".to_owned(), counts }, &[], &mut stream);
    stream
}

fn capturing(interface: &str, times: &[u64], lost: u64) -> Vec<Reply> {
    vec![Reply::EndsAfterInput(0, messages(interface, times, lost, false), String::new())]
}

fn args(output: &Path) -> Args {
    Args {
        output: Some(output.to_owned()),
        bundle: None,
        from: None,
        to: None,
        pod: None,
        packets: CaptureArgs::default(),
    }
}

fn first(packets: u64) -> CaptureArgs {
    CaptureArgs { packets: Some(packets), ..CaptureArgs::default() }
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
        ("a", capturing("shop/web", &[10, 30, 50], 0)),
        ("b", capturing("shop/db", &[20, 40, 60], 7)),
    ]);
    run(&cluster, ASKING, Args { packets: first(5), ..args(&output) }).await.unwrap();
    let found = read(&output);
    let times: Vec<u64> = found.iter().map(|(time, ..)| *time).collect();
    assert_eq!(times, [10, 20, 30, 40, 50]);
    assert_eq!(found[0].1, "shop/web on a");
    assert_eq!(found[1].1, "shop/db on b");
    assert_eq!(found[1].2, "verdict=allow epoch=7 worker=0 node=b");
    let bytes = fs::read(&output).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    assert!(
        text.contains("ended: interrupted; 7 packets of all interfaces of node b lost"),
        "what is missing is said in the file"
    );
    assert_eq!(*cluster.inputs.lock().unwrap(), [b"\n", b"\n"], "both were asked to end");
    let asked = cluster.asked.lock().unwrap();
    assert_eq!(asked[0].1, ["penstock", "capture", "--messages", "--end-with-input", "--packets=5"]);
}

#[tokio::test]
async fn a_node_without_a_capture_is_named_and_others_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("some.pcapng");
    let whole = messages("shop/web", &[10, 30], 0, false);
    let refused = "penstock: /run/penstock/capture.sock: no daemon offers captures there (gone); set capture.socket\n";
    let broken = whole[..whole.len() - 3].to_vec();
    let unfinished = {
        let mut stream = Vec::new();
        encode(&CaptureMessage::Begin { node: "f".to_owned(), objects: None }, &[], &mut stream);
        stream
    };
    let cluster = FakeCluster::new([
        ("a", vec![Reply::EndsAfterInput(0, whole, String::new())]),
        ("b", vec![Reply::error(2, refused)]),
        ("c", vec![Reply::Ends(0, b"no capture at all".to_vec(), String::new())]),
        ("d", vec![Reply::Ends(0, broken, String::new())]),
        (
            "e",
            vec![Reply::error(
                2,
                "error: unexpected argument '--messages' found\n\nFor more information, try '--help'.\n",
            )],
        ),
        ("f", vec![Reply::Ends(0, unfinished, String::new())]),
    ]);
    let ended = run(&cluster, ASKING, Args { packets: first(3), ..args(&output) }).await;
    let Err(Failure::Partial(lines)) = ended else { panic!("{ended:?}") };
    for (line, (node, part)) in lines.iter().zip([
        ("b", "no daemon offers captures there"),
        ("c", "sent no valid answer"),
        ("d", "break off"),
        ("e", "an older version"),
        ("f", "break off, 0 bytes into a message"),
    ]) {
        assert!(line.starts_with(&format!("node {node}: ")) && line.contains(part), "{line}");
    }
    assert_eq!(lines.len(), 5);
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
fn each_end_is_captured_on_its_own_node() {
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

#[tokio::test]
async fn a_bundle_has_a_folder_for_each_node() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("incident");
    let whole =
        |interface, times, lost| vec![Reply::EndsAfterInput(0, messages(interface, times, lost, true), String::new())];
    // c ends before its objects have come.
    let all = messages("shop/x", &[], 0, true);
    let begun = all[..decode(&all).unwrap().unwrap().length].to_vec();
    let refused = "penstock: connection broke\n";
    let cluster = FakeCluster::new([
        ("a", whole("shop/web", &[10, 30], 0)),
        ("b", whole("shop/db", &[20, 40], 7)),
        ("c", vec![Reply::Ends(1, begun, refused.to_owned())]),
    ]);
    let args = Args { output: None, bundle: Some(directory.clone()), packets: first(4), ..args(&directory) };
    let ended = run(&cluster, ASKING, args).await;
    let Err(Failure::Partial(lines)) = ended else { panic!("{ended:?}") };
    assert_eq!(lines, ["node c: connection broke"]);
    let asked = cluster.asked.lock().unwrap();
    assert_eq!(asked[0].1, ["penstock", "capture", "--messages", "--end-with-input", "--objects", "--packets=4"]);
    for (node, times, lost) in [("a", [10, 30], 0), ("b", [20, 40], 7)] {
        let folder = directory.join(node);
        let found = read(&folder.join("packets.pcapng"));
        assert_eq!(found.iter().map(|(time, ..)| *time).collect::<Vec<_>>(), times);
        assert_eq!(found[0].2, "verdict=allow epoch=7 worker=0", "as a daemon's own bundle has it");
        assert_eq!(fs::read_to_string(folder.join("objects.jsonl")).unwrap(), "{\"object\":1}\n");
        let timeline = fs::read_to_string(folder.join("timeline.jsonl")).unwrap();
        assert_eq!(timeline, "{\"epoch\":8,\"time\":99,\"changes\":[]}\n");
        let manifest: serde_json::Value =
            serde_json::from_slice(&fs::read(folder.join("bundle.json")).unwrap()).unwrap();
        assert_eq!((&manifest["packets"], &manifest["lost"]), (&2.into(), &lost.into()), "{manifest}");
    }
    assert!(!directory.join("c").exists(), "half a bundle is none");
}

#[tokio::test]
async fn a_filter_is_compiled_here_and_a_wrong_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("web.pcapng");
    let cluster = FakeCluster::new([("a", capturing("shop/web", &[10], 0))]);
    let filtered = |expression: &str| Args {
        packets: CaptureArgs { filter: Some(expression.to_owned()), ..first(1) },
        ..args(&output)
    };
    let ended = run(&cluster, ASKING, filtered("tcp prot 80")).await;
    assert!(matches!(&ended, Err(Failure::BadInput(lines)) if lines[0].contains("tcp prot 80")), "{ended:?}");
    assert!(cluster.asked.lock().unwrap().is_empty() && !output.exists());
    run(&cluster, ASKING, filtered("ip6")).await.unwrap();
    let asked = cluster.asked.lock().unwrap();
    assert!(asked[0].1.contains(&"--program=4,40 0 0 12,21 0 1 34525,6 0 0 262144,6 0 0 0".to_owned()), "{asked:?}");
}
