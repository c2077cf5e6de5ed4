//! Results of `bench/trex/run.py`; docs/trex.md describes the document's format.

use std::net::IpAddr;

use serde_json::Value;

use super::tables::ReportPart;

/// The supported format version.
const FORMAT: u64 = 1;

/// Content of the document, or why there is none.
pub(crate) fn parts(json: Option<&str>) -> Vec<ReportPart> {
    let Some(json) = json else {
        return vec![ReportPart::Text(
            "Not measured: there is no trex.json beside this report; `bench/trex/run.py` writes one against a TRex server \
             (docs/trex.md)."
                .to_owned(),
        )];
    };
    let document: Value = match serde_json::from_str(json) {
        Ok(document) => document,
        Err(error) => return vec![ReportPart::Text(format!("Not measured: trex.json cannot be read ({error})."))],
    };
    if document["format"] != FORMAT {
        return vec![ReportPart::Text(format!("Not measured: trex.json has another form ({}).", document["format"]))];
    }
    let runs = document["runs"].as_array().into_iter().flatten();
    runs.flat_map(|run| [ReportPart::Text(origin(run)), ReportPart::Table(profiles(run))]).collect()
}

fn origin(run: &Value) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let drivers: Vec<String> =
        run["ports"].as_array().into_iter().flatten().map(|port| text(&port["driver"])).collect();
    format!(
        "TRex {}, {} mode, on {} at {}, {} cores, ports of {}; not in the same run as the figures above, and {}.",
        text(&run["server"]["version"]["version"]),
        text(&run["mode"]),
        text(&run["server"]["host"]),
        text(&run["time"]),
        run["server"]["cores"],
        drivers.join(" and "),
        server(run["server"]["address"].as_str()),
    )
}

/// Where the server was, as far as its address tells: a run from the node may have had it on the node itself.
fn server(address: Option<&str>) -> String {
    match address {
        None => "it is not known on which machine".to_owned(),
        Some(address) if address == "localhost" || address.parse().is_ok_and(|ip: IpAddr| ip.is_loopback()) => {
            "on the machine that the runner ran on".to_owned()
        }
        Some(address) => format!("with the server at {address}"),
    }
}

fn profiles(run: &Value) -> Vec<Vec<String>> {
    let heading = ["profile", "no loss", "with some loss", "limited by", "latency at half of it", "sustained"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for profile in run["profiles"].as_array().into_iter().flatten() {
        let mut row = vec![profile["asked"].as_str().unwrap_or("?").to_owned()];
        let found = if profile["no_loss"].is_object() { &profile["no_loss"] } else { &profile["ndr"] };
        match profile["error"].as_str() {
            Some(error) if !found.is_object() => {
                row.push(format!("not measured: {error}"));
                row.resize(heading.len(), String::new());
            }
            unfinished => {
                let unit = profile["rate_unit"].as_str().unwrap_or_default();
                let limits = found["limited_by"].as_array().into_iter().flatten().filter_map(Value::as_str);
                let limits: Vec<&str> = limits.chain(unfinished).collect();
                row.extend([rate(found, unit), rate(&profile["pdr"], unit), limits.join(", ")]);
                row.extend([latency(&profile["latency"]), sustained(&profile["sustained"])]);
            }
        }
        rows.push(row);
    }
    rows
}

fn rate(found: &Value, unit: &str) -> String {
    let number = |key: &str| found[key].as_f64();
    match (number("median"), number("lowest"), number("highest")) {
        (Some(0.0), ..) => "none found".to_owned(),
        (Some(median), Some(lowest), Some(highest)) => format!("{median:.0} {unit} ({lowest:.0} to {highest:.0})"),
        _ => String::new(),
    }
}

fn latency(points: &Value) -> String {
    let Some(half) = points.as_array().into_iter().flatten().find(|point| point["share_of_ndr"] == 0.5) else {
        return String::new();
    };
    if let Some(error) = half["error"].as_str() {
        return error.to_owned();
    }
    let streams = half["streams"].as_array().into_iter().flatten();
    let figures = streams.map(|stream| match (stream["average_us"].as_f64(), stream["most_us"].as_f64()) {
        (Some(average), Some(most)) => format!("{average} µs, at most {most} µs"),
        _ => "nothing arrived".to_owned(),
    });
    figures.collect::<Vec<_>>().join("; ")
}

/// The median run of a profile without a rate search.
fn sustained(runs: &Value) -> String {
    let of = |key: &str| {
        let mut values: Vec<f64> = runs.as_array().into_iter().flatten().filter_map(|run| run[key].as_f64()).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    match (of("established_at_most"), of("received_by_clients_bit_s")) {
        (Some(held), Some(bits)) => {
            let lost: u64 =
                runs.as_array().into_iter().flatten().filter_map(|run| run["generator_lost"].as_u64()).sum();
            let lost = if lost > 0 { format!(", {lost} packets lost by TRex itself") } else { String::new() };
            format!("{held:.0} connections, {:.2} Gbit/s to clients{lost}", bits / 1e9)
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = r#"{"format": 1, "runs": [{
        "mode": "stl", "time": "2026-01-01T00:00:00+00:00",
        "server": {"address": "192.0.2.7", "version": {"version": "v3.08"}, "host": "generator", "cores": 4},
        "ports": [{"driver": "net_i40e"}, {"driver": "net_i40e"}],
        "profiles": [
            {"profile": "udp", "asked": "udp --size 64", "rate_unit": "packets/s",
             "ndr": {"median": 1000000.4, "lowest": 990000, "highest": 1010000, "limited_by": ["loss"]},
             "pdr": {"median": 1100000, "lowest": 1090000, "highest": 1110000, "limited_by": ["loss"]},
             "latency": [{"share_of_ndr": 0.5, "streams": [{"average_us": 12.5, "most_us": 80}]}]},
            {"profile": "mix", "asked": "mix", "error": "3 packets arrived that policy should deny"},
            {"profile": "imix", "asked": "imix", "error": "not finished: the run ended here", "rate_unit": "packets/s",
             "ndr": {"median": 0, "lowest": 0, "highest": 0, "limited_by": ["generator"]},
             "latency": [{"share_of_ndr": 0.5, "streams": [{"average_us": null, "most_us": null}]}]},
            {"profile": "bulk", "asked": "bulk", "sustained": [
                {"established_at_most": 8, "received_by_clients_bit_s": 2500000000.0, "generator_lost": 0}]},
            {"profile": "held", "asked": "held", "sustained": [
                {"established_at_most": 9, "received_by_clients_bit_s": 1000000000.0, "generator_lost": 70}]},
            {"profile": "pods", "asked": "pods", "rate_unit": "packets/s",
             "ndr": {"median": 1, "lowest": 1, "highest": 1, "limited_by": ["loss"]},
             "latency": [{"share_of_ndr": 0.5, "error": "no room for a latency stream at this rate", "streams": []}]}
        ]}]}"#;

    #[test]
    fn each_profile_is_a_row_and_unmeasured_ones_state_the_reason() {
        let parts = parts(Some(DOCUMENT));
        let [ReportPart::Text(origin), ReportPart::Table(rows)] = &parts[..] else { panic!("{parts:?}") };
        assert!(origin.starts_with("TRex v3.08, stl mode, on generator at 2026-01-01"), "{origin}");
        assert_eq!(
            rows[1],
            [
                "udp --size 64",
                "1000000 packets/s (990000 to 1010000)",
                "1100000 packets/s (1090000 to 1110000)",
                "loss",
                "12.5 µs, at most 80 µs",
                "",
            ]
        );
        assert_eq!(rows[2][1], "not measured: 3 packets arrived that policy should deny");
        assert_eq!(rows[3][1..5], ["none found", "", "generator, not finished: the run ended here", "nothing arrived"]);
        assert_eq!(rows[4][5], "8 connections, 2.50 Gbit/s to clients");
        assert_eq!(rows[5][5], "9 connections, 1.00 Gbit/s to clients, 70 packets lost by TRex itself");
        assert_eq!(rows[6][4], "no room for a latency stream at this rate");
        assert!(rows.iter().all(|row| row.len() == rows[0].len()));
    }

    #[test]
    fn only_what_the_servers_address_tells_is_said_of_its_machine() {
        for (address, end) in [
            (Some("192.0.2.7"), "and with the server at 192.0.2.7."),
            (Some("127.0.0.1"), "and on the machine that the runner ran on."),
            (Some("::1"), "and on the machine that the runner ran on."),
            (Some("localhost"), "and on the machine that the runner ran on."),
            (None, "and it is not known on which machine."),
        ] {
            let said = origin(&serde_json::json!({"mode": "stl", "server": {"address": address}}));
            assert!(said.ends_with(end), "{said}");
        }
    }

    #[test]
    fn a_missing_or_unknown_document_is_reported() {
        for (json, reason) in [
            (None, "there is no trex.json"),
            (Some("nothing"), "cannot be read"),
            (Some(r#"{"format": 2}"#), "another form"),
        ] {
            let parts = parts(json);
            let [ReportPart::Text(text)] = &parts[..] else { panic!("{parts:?}") };
            assert!(text.starts_with("Not measured: ") && text.contains(reason), "{text}");
        }
    }
}
