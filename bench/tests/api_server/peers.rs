//! The benchmark beside other engines, in a quick run with Penstock alone.

use std::process::Command;

use penstock_bench::testbed::ScratchDir;
use serde_json::Value;

#[test]
fn penstock_is_measured_beside_no_enforcement() {
    let scratch = ScratchDir::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_peers"));
    command.args(["--quick", "--engine", "penstock", "--patience", "120", "--output"]).arg(scratch.path());
    // No other project's program takes part, wherever they are.
    let output = command.env_remove("PENSTOCK_PEERS").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    let report: Value = serde_json::from_slice(&std::fs::read(scratch.path().join("peers.json")).unwrap()).unwrap();
    assert_eq!(report["not_measured"].as_array().map(Vec::len), Some(0), "{printed}");
    let figures = report["figures"].as_array().unwrap();
    let of = |section: &str| figures.iter().filter(move |figure| figure["section"] == section).collect::<Vec<_>>();
    for section in ["rates", "costs"] {
        assert_eq!(of(section).len(), 10, "{section}: {printed}");
        for engine in ["none", "penstock"] {
            // On a busy machine a tenth of a second may pass in which nothing is sent.
            let is_measured = |figure: &&Value| figure["engines"][engine][0]["value"].as_f64() > Some(0.0);
            assert!(of(section).iter().any(is_measured), "{section} of {engine}: {printed}");
        }
    }
    for figure in of("disturbances").iter().filter(|figure| figure["figure"].as_str().unwrap().contains("denied")) {
        let value = &figure["engines"]["penstock"][0]["value"];
        assert!(value["count"] == 0 && value["of"].as_u64() > Some(0), "{}: {value}\n{printed}", figure["figure"]);
    }
    let denied = of("changes")
        .iter()
        .find(|figure| figure["figure"] == "no new connection passes from, ms")
        .map(|it| it["engines"]["penstock"][0]["value"].as_f64());
    assert!(denied.flatten().is_some(), "{printed}");
    let page = std::fs::read_to_string(scratch.path().join("peers.md")).unwrap();
    assert!(page.contains("## 10 policies") && !page.contains("Not measured"), "{page}");
}
