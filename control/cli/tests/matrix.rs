//! `penstock matrix`: as a table, as JSON, and as a page.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::commands::{SHOP, assert_expected, error_line, output, penstock_with};

#[test]
fn matrix_is_a_table() {
    let mut text = output(&["matrix", "--manifests", SHOP]);
    text += "\n";
    text += &output(&["matrix", "--manifests", SHOP, "--port", "5432/TCP"]);
    text += "\n";
    text += &output(&["matrix", "--manifests", SHOP, "--port", "http/TCP", "--port", "ICMP"]);
    text += "\n";
    text +=
        &output(&["matrix", "--manifests", SHOP, "--namespace", "web", "--namespace", "shop", "--port", "8000/TCP"]);
    text += "\n";
    text += &output(&[
        "matrix",
        "--manifests",
        SHOP,
        "--pod",
        "web/frontend-2",
        "--pod",
        "shop/db-0",
        "--port",
        "8000/TCP",
    ]);
    assert_expected("matrix.txt", &text);
}

#[test]
fn a_matrix_of_programs_has_the_groups_of_equal_pods() {
    let answer = |more: &[&str]| -> Value {
        let arguments = [&["matrix", "--json", "--manifests", SHOP, "--port", "8000/TCP"][..], more].concat();
        serde_json::from_str(&output(&arguments)).unwrap()
    };
    let all = answer(&[]);
    let groups = all["groups"].as_array().unwrap();
    let of = |name: &str| groups.iter().find(|group| group["pods"][0] == name).unwrap();
    assert_eq!(of("frontend-1")["pods"], serde_json::json!(["frontend-1", "frontend-2"]));
    assert_eq!(of("frontend-1")["all"], serde_json::json!([of("api-1")["number"]]));
    assert_eq!(of("frontend-1")["none"].as_array().unwrap().len(), groups.len() - 1, "its other pod, too");
    assert_eq!(all["unseen"][1]["reason"], "has finished");
    let one = answer(&["--pod", "shop/api-1"]);
    let listed = |group: &Value| ["all", "some", "none"].iter().map(|kind| group[kind].as_array().unwrap().len()).sum();
    let lengths: Vec<usize> = one["groups"].as_array().unwrap().iter().map(listed).collect();
    assert_eq!(lengths.iter().sum::<usize>(), 2 * (groups.len() - 1), "what it reaches, and what reaches it: {one}");
}

#[test]
fn a_matrix_of_what_is_not_there_is_refused_with_the_remedy() {
    let with = |more: &[&str]| error_line(&[&["matrix", "--manifests", SHOP][..], more].concat(), "");
    for (more, line) in [
        (&["--namespace", "shpo"][..], "--namespace shpo: no pod is in it: correct its name"),
        (&["--pod", "shop/apy"], "--pod: pod shop/apy is unknown: correct its name, or use an address"),
        (&["--pod", "10.1.1.21"], "--pod 10.1.1.21: not a pod: write NAMESPACE/POD"),
        (&["--pod", "shop/migrate-x7k"], "--pod shop/migrate-x7k has finished: name another pod"),
        (
            &["--pod", "shop/api-1", "--namespace", "web"],
            "--pod shop/api-1 is in no namespace that --namespace names: name its own, too",
        ),
    ] {
        assert_eq!(with(more), line);
    }
}

#[test]
#[ignore = "needs Chromium: make test-long"]
fn matrix_html_is_self_contained() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("matrix.html");
    let path = file.to_str().unwrap();
    assert_eq!(output(&["matrix", "--manifests", SHOP, "--html", path]), "");
    let page = fs::read_to_string(&file).unwrap();
    assert!(!page.contains("://") && !page.contains("MATRIX DATA"), "nothing is loaded from elsewhere");
    let data = page.lines().find_map(|line| line.strip_prefix("const data = ")?.strip_suffix(';')).unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    let rows = data["rows"].as_array().unwrap();
    let name = |row: &Value, pod: usize| Some(format!("{}/{}", row["namespace"].as_str()?, row["pods"][pod].as_str()?));
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let pairs = rows.iter().flat_map(|from| rows.iter().map(move |to| (from, to)));
    // From one pod of a row to another.
    let pairs = pairs.filter_map(|(from, to)| Some((from, to, name(from, 0)?, name(to, usize::from(from == to))?)));
    let pairs: Vec<_> = pairs.collect();
    // Every cell says what evaluate says.
    let (mut queries, mut cells) = (String::new(), Vec::new());
    for (port, cells_of_port) in data["ports"].as_array().unwrap().iter().zip(data["cells"].as_array().unwrap()) {
        let (port, protocol) = port.as_str().unwrap().split_once('/').unwrap();
        for (of, at, from, to) in &pairs {
            let place = number(&of["class"]) * number(&data["classes"]) + number(&at["class"]);
            queries +=
                &format!("{{\"from\":\"{from}\",\"to\":\"{to}\",\"port\":{port},\"protocol\":\"{protocol}\"}}\n");
            cells.push(data["outcomes"][number(&cells_of_port[place])][0].as_bool().unwrap());
        }
    }
    let answers = penstock_with(&["evaluate", "--manifests", SHOP, "--queries", "-"], &queries, &[]).out;
    let verdicts: Vec<bool> = answers.lines().map(|line| line.contains("\"verdict\":\"allow\",\"egress\"")).collect();
    assert_eq!(verdicts, cells);
    assert!(cells.contains(&true) && cells.contains(&false));
    shown_by_a_browser(&file);
}

/// The page as a browser shows it, where there is one.
fn shown_by_a_browser(file: &Path) {
    let profile = tempfile::tempdir().unwrap();
    let arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"];
    let mut command = Command::new("chromium");
    command.args(arguments).arg(format!("--user-data-dir={}", profile.path().display())).arg(file);
    let shown = command.stderr(Stdio::null()).output().expect("chromium is there");
    let shown = String::from_utf8_lossy(&shown.stdout);
    let count = |class: &str| shown.matches(&format!("<td class=\"{class}\"")).count();
    assert_eq!((count("every"), count("some"), count("none")), (0, 6, 15));
    assert!(shown.contains("6 on some ports, 15 denied"));
}
