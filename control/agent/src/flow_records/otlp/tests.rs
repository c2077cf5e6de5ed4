//! Against a stand-in collector that speaks the protocol.

use std::io::Write;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry_http::Bytes;
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use prost::Message;

use super::*;
use crate::config::Config;
use crate::flow_records::record::{DecidingRules, FlowEvent, Identity, RecordedCounts, RecordedEnd, RecordedVerdict};

/// A collector's content: the resource's attributes, and each log record's event and attributes.
#[derive(Default)]
struct Got {
    requests: Vec<(HeaderMap, ExportLogsServiceRequest)>,
    /// Answers instead of success, the next one last.
    answers: Vec<u16>,
}

type Shared = Arc<Mutex<Got>>;

/// A collector at this address, 0 for any port, until the returned runtime is dropped.
fn collector(at: SocketAddr, got: &Shared) -> (tokio::runtime::Runtime, SocketAddr) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let socket = std::net::TcpListener::bind(at).unwrap();
    socket.set_nonblocking(true).unwrap();
    let address = socket.local_addr().unwrap();
    let got = got.clone();
    runtime.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(socket).unwrap();
        let app = Router::new().route("/v1/logs", post(take)).with_state(got);
        axum::serve(listener, app).await.unwrap();
    });
    (runtime, address)
}

async fn take(State(got): State<Shared>, headers: HeaderMap, body: Bytes) -> (StatusCode, Vec<u8>) {
    let mut got = got.lock().unwrap();
    if let Some(answer) = got.answers.pop() {
        return (StatusCode::from_u16(answer).unwrap(), Vec::new());
    }
    got.requests.push((headers, ExportLogsServiceRequest::decode(body).expect("valid protobuf")));
    (StatusCode::OK, ExportLogsServiceResponse::default().encode_to_vec())
}

fn settings(section: &str) -> config::FlowRecords {
    let text = format!("node = \"n\"\n[source]\nmanifests = \"m\"\n[flow_records]\n{section}\n");
    Config::parse(&text, Path::new("/etc/penstock.toml")).unwrap().flow_records
}

fn record(number: u64) -> FlowRecord {
    let end = |last: u8, port, pod: &str| RecordedEnd {
        address: [10, 0, 0, last].into(),
        port,
        identity: Some(Arc::new(Identity {
            name: format!("shop/{pod}"),
            namespace: Some("shop".into()),
            pod: Some(pod.into()),
            workload: Some(penstock_policy::model::Controller { kind: "Deployment".into(), name: "web".into() }),
            node: Some("n".into()),
        })),
    };
    let traffic = |packets| penstock_admin::types::Traffic { packets, bytes: 100 * packets };
    FlowRecord {
        time: "2026-01-01T00:00:10Z".parse().unwrap(),
        event: FlowEvent::End,
        node: "n".into(),
        connection: Some(format!("{number:016x}")),
        protocol: "TCP".into(),
        from: end(1, 40000, "web-1"),
        to: end(2, 5432, "db-0"),
        verdict: RecordedVerdict::Allowed,
        reason: None,
        rules: DecidingRules::new(("open".into(), "shop-ingress-db-0-podSelector-0-0".into())),
        state: Some("TIME_WAIT"),
        ended: Some("closed"),
        counts: Some(RecordedCounts {
            sent: traffic(number),
            received: traffic(2),
            sent_since: traffic(1),
            received_since: traffic(0),
        }),
        packets: None,
        tcp_flags: vec!["SYN", "ACK"],
        first: None,
        last: "2026-01-01T00:00:09.5Z".parse().unwrap(),
    }
}

/// Runs the collector until it has got as many requests.
fn wait_for(runtime: &tokio::runtime::Runtime, got: &Shared, requests: usize) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while got.lock().unwrap().requests.len() < requests {
        assert!(Instant::now() < deadline, "the collector has got {} requests", got.lock().unwrap().requests.len());
        // Made inside of the runtime, which also serves the collector meanwhile.
        runtime.block_on(async { tokio::time::sleep(Duration::from_millis(5)).await });
    }
}

/// The first request, with the resource's attributes in order: the SDK has them in a hash map.
fn connections(got: &Shared) -> Vec<Vec<String>> {
    let got = got.lock().unwrap();
    let of_request = |request: &ExportLogsServiceRequest| -> Vec<String> {
        let logs = request.resource_logs.iter().flat_map(|logs| &logs.scope_logs).flat_map(|logs| &logs.log_records);
        logs.map(|log| match value(&log.attributes, "penstock.connection.id") {
            Some(Value::StringValue(text)) => text,
            other => panic!("{other:?}"),
        })
        .collect()
    };
    got.requests.iter().map(|(_, request)| of_request(request)).collect()
}

fn value(attributes: &[opentelemetry_proto::tonic::common::v1::KeyValue], name: &str) -> Option<Value> {
    attributes.iter().find(|attribute| attribute.key == name)?.value.clone()?.value
}

const ANY: ([u8; 4], u16) = ([127, 0, 0, 1], 0);

#[test]
fn records_arrive_by_semantic_conventions_with_the_headers() {
    let got = Shared::default();
    let (runtime, address) = collector(ANY.into(), &got);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"# for the collector\n\nAuthorization: Bearer secret\n").unwrap();
    let section = format!("otlp = \"http://{address}\"\notlp_headers_file = \"{}\"", file.path().display());
    let lost = Arc::default();
    let sender = OtlpSender::start(&settings(&section), "node-1", &lost).unwrap().unwrap();
    assert!(sender.try_send(vec![record(7)]));
    wait_for(&runtime, &got, 1);
    drop(sender);
    let got = got.lock().unwrap();
    let (headers, request) = &got.requests[0];
    assert_eq!(
        (&headers["authorization"], &headers["content-type"]),
        (&HeaderValue::from_static("Bearer secret"), &HeaderValue::from_static("application/x-protobuf"))
    );
    let logs = &request.resource_logs[0];
    let text = |text: &str| Some(Value::StringValue(text.into()));
    let resource = &logs.resource.as_ref().unwrap().attributes;
    assert_eq!(value(resource, "service.name"), text("penstock"));
    assert_eq!(value(resource, "k8s.node.name"), text("node-1"));
    let log = &logs.scope_logs[0].log_records[0];
    assert_eq!((log.event_name.as_str(), log.time_unix_nano), ("penstock.flow.end", 1_767_225_609_500_000_000));
    for (name, expected) in [
        ("source.address", text("10.0.0.1")),
        ("source.port", Some(Value::IntValue(40000))),
        ("source.k8s.pod.name", text("web-1")),
        ("destination.address", text("10.0.0.2")),
        ("destination.port", Some(Value::IntValue(5432))),
        ("destination.k8s.namespace.name", text("shop")),
        ("destination.k8s.deployment.name", text("web")),
        ("network.transport", text("tcp")),
        ("network.type", text("ipv4")),
        ("penstock.verdict", text("allowed")),
        ("penstock.ingress.tier", text("NetworkPolicy")),
        ("penstock.connection.ended", text("closed")),
        ("penstock.sent.bytes", Some(Value::IntValue(700))),
        ("penstock.reason", None),
    ] {
        assert_eq!(value(&log.attributes, name), expected, "{name}");
    }
    assert_eq!(lost.load(Ordering::Relaxed), 0);
}

#[test]
fn records_made_without_the_collector_arrive_later() {
    let got = Shared::default();
    // A port that nobody listens on.
    let address = std::net::TcpListener::bind(SocketAddr::from(ANY)).unwrap().local_addr().unwrap();
    let lost = Arc::default();
    let sender = OtlpSender::start(&settings(&format!("otlp = \"http://{address}\"")), "n", &lost).unwrap().unwrap();
    let all = 10 * WAITING as u64;
    let refused = (0..all).filter(|&number| !sender.try_send(vec![record(number)])).count();
    // The queue, and the batch that is tried.
    assert!((all as usize - WAITING - 1..=all as usize - WAITING).contains(&refused), "{refused}");
    let (runtime, _) = collector(address, &got);
    let taken = all as usize - refused;
    wait_for(&runtime, &got, taken);
    let expected: Vec<_> = (0..taken as u64).map(|number| vec![format!("{number:016x}")]).collect();
    let mut found = connections(&got);
    found.truncate(WAITING);
    assert_eq!(found, expected[..WAITING], "in order");
    assert_eq!(lost.load(Ordering::Relaxed), 0, "what was not taken is its caller's to count");
}

#[test]
fn a_batch_that_is_refused_is_lost_and_the_next_one_is_sent() {
    let got = Shared::default();
    got.lock().unwrap().answers = vec![503, 400];
    let (runtime, address) = collector(ANY.into(), &got);
    let lost = Arc::default();
    let sender = OtlpSender::start(&settings(&format!("otlp = \"http://{address}\"")), "n", &lost).unwrap().unwrap();
    // The first is bad, says the collector; before it takes the second, it is busy for a moment.
    assert!(sender.try_send(vec![record(1), record(2)]) && sender.try_send(vec![record(3)]));
    wait_for(&runtime, &got, 1);
    assert_eq!(connections(&got), [[format!("{:016x}", 3)]]);
    assert_eq!(lost.load(Ordering::Relaxed), 2);
}

#[test]
fn the_end_does_not_wait_for_a_collector_that_is_away() {
    let address = std::net::TcpListener::bind(SocketAddr::from(ANY)).unwrap().local_addr().unwrap();
    let sender =
        OtlpSender::start(&settings(&format!("otlp = \"http://{address}\"")), "n", &Arc::default()).unwrap().unwrap();
    (0..5).for_each(|number| _ = sender.try_send(vec![record(number)]));
    let (done, dropped) = std::sync::mpsc::channel();
    thread::spawn(move || {
        drop(sender);
        let _ = done.send(());
    });
    dropped.recv_timeout(30 * FLUSH).expect("it ends");
}

#[test]
fn unusable_files_are_named_with_a_remedy_without_secrets() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(directory.path().join(name), text).unwrap();
        directory.path().join(name).display().to_string()
    };
    for (section, parts) in [
        (
            format!("otlp_headers_file = \"{}\"", file("h", "a: b\nsecret token\n")),
            ["line 2 is no header", "Authorization"],
        ),
        (format!("otlp_headers_file = \"{}\"", file("n", "na me: secret\n")), ["line 1 is no header", "Authorization"]),
        ("otlp_headers_file = \"/nowhere\"".to_owned(), ["otlp_headers_file = /nowhere", "cannot be read"]),
        ("otlp_ca_file = \"/nowhere\"".to_owned(), ["otlp_ca_file = /nowhere", "PEM certificates"]),
        (format!("otlp_ca_file = \"{}\"", file("c", "secret")), ["has no certificate", "PEM certificates"]),
    ] {
        let settings = settings(&format!("otlp = \"https://127.0.0.1:1\"\n{section}"));
        let error = OtlpSender::start(&settings, "n", &Arc::default()).map(drop).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)) && !error.contains("secret"), "{error}");
    }
}

/// Words of an expression, without what is in quotes.
fn words(expression: &str) -> Vec<&str> {
    let outside = expression.split('"').step_by(2);
    outside.flat_map(|text| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')).collect()
}

#[test]
fn the_dashboard_asks_only_for_fields_that_records_have() {
    // As Loki names attributes, those of the resource too.
    let stored = |name: &str| name.replace('.', "_");
    let all = FlowRecord {
        reason: Some("ingress_denied"),
        packets: Some(1),
        first: Some("2026-01-01T00:00:09Z".parse().unwrap()),
        ..record(1)
    };
    let mut known: Vec<String> = log::attributes(&all).iter().map(|(name, _)| stored(name)).collect();
    known.extend(resource("n").iter().map(|(name, _)| stored(name.as_str())));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/grafana/flows.json");
    let dashboard: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let mut asked = 0;
    for target in targets.filter(|target| target["datasource"]["type"] == "loki") {
        let expression = target["expr"].as_str().unwrap();
        assert_eq!(expression.matches('(').count(), expression.matches(')').count(), "{expression}");
        let legend = target["legendFormat"].as_str().unwrap();
        for word in words(expression).into_iter().chain(words(legend)) {
            let is_field = ["penstock_", "source_", "destination_", "network_", "service_", "k8s_"];
            if is_field.iter().any(|prefix| word.starts_with(prefix)) {
                assert!(known.iter().any(|name| name == word), "{word} of {expression} is none of {known:?}");
                asked += 1;
            }
        }
    }
    assert!(asked > 20, "{asked}");
}
