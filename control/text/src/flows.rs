//! Connections.

use std::collections::HashMap;
use std::time::Instant;

use indicatif::HumanBytes;
use penstock_admin::table::align_columns;
use penstock_admin::types::{ConnectionFlow, FlowEnd, Flows, Traffic};

#[derive(Debug, Default)]
pub struct Rates {
    last: Option<Instant>,
    /// Bytes in both directions, by the connection's number.
    bytes: HashMap<String, u64>,
}

impl Rates {
    /// For each connection of a listing `now`: bits per second since the last one, if it was there and its counters have not
    /// started anew.
    pub fn since_last(&mut self, flows: &Flows, now: Instant) -> Vec<Option<f64>> {
        let seconds = self.last.replace(now).map(|last| (now - last).as_secs_f64());
        let both = |flow: &ConnectionFlow| Some(flow.sent?.bytes + flow.received?.bytes);
        let listed = flows.flows.iter().map(|flow| (&flow.connection, both(flow)));
        let rates = listed.clone().map(|(connection, bytes)| {
            let grown = bytes?.checked_sub(*self.bytes.get(connection)?)?;
            Some(grown as f64 * 8.0 / seconds.filter(|seconds| *seconds > 0.0)?)
        });
        let rates = rates.collect();
        self.bytes = listed.filter_map(|(connection, bytes)| Some((connection.clone(), bytes?))).collect();
        rates
    }
}

/// The listing; with rates, if there are some, in the order of the flows.
pub fn text(flows: &Flows, rates: Option<&[Option<f64>]>) -> String {
    align_columns(&table(&flows.flows, rates)) + &listed(flows.flows.len(), flows.matching)
}

/// The connections as rows below a heading; with rates, if there are some, in the order of the connections.
pub fn table(flows: &[ConnectionFlow], rates: Option<&[Option<f64>]>) -> Vec<Vec<String>> {
    let heading =
        ["CONNECTION", "PROTOCOL", "FROM", "TO", "STATE", "SENT", "RECEIVED", "EGRESS", "INGRESS", "IDLE", "EXPIRES"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(flows.iter().map(row));
    if let Some(rates) = rates {
        insert(&mut rows, 7, "RATE", rates.iter().map(|rate| rate.map_or_else(|| "-".to_owned(), bits_per_second)));
    }
    rows
}

/// How many connections are listed, of those that match.
pub fn listed(shown: usize, matching: usize) -> String {
    match matching {
        1 if shown == 1 => "1 connection\n".to_owned(),
        matching if matching == shown => format!("{shown} connections\n"),
        matching => format!("{shown} of {matching} connections; list more with --limit\n"),
    }
}

/// Adds a column to rows of which the first is the heading.
pub fn insert(rows: &mut [Vec<String>], at: usize, heading: &str, cells: impl Iterator<Item = String>) {
    let cells = std::iter::once(heading.to_owned()).chain(cells);
    rows.iter_mut().zip(cells).for_each(|(row, cell)| row.insert(at, cell));
}

/// `9 packets, 600 B`.
pub fn amount(Traffic { packets, bytes }: &Traffic) -> String {
    let unit = if *packets == 1 { "packet" } else { "packets" };
    format!("{packets} {unit}, {}", HumanBytes(*bytes))
}

/// `3.5 Mbit/s`.
pub fn bits_per_second(rate: f64) -> String {
    let (divisor, unit) = match rate {
        rate if rate >= 1e9 => (1e9, "Gbit/s"),
        rate if rate >= 1e6 => (1e6, "Mbit/s"),
        rate if rate >= 1e3 => (1e3, "kbit/s"),
        _ => return format!("{rate:.0} bit/s"),
    };
    format!("{:.1} {unit}", rate / divisor)
}

fn row(flow: &ConnectionFlow) -> Vec<String> {
    let counted = |traffic: &Option<Traffic>| traffic.as_ref().map_or_else(|| "-".to_owned(), amount);
    vec![
        flow.connection.clone(),
        flow.protocol.clone(),
        end(&flow.from),
        end(&flow.to),
        flow.state.clone(),
        counted(&flow.sent),
        counted(&flow.received),
        flow.egress.clone(),
        flow.ingress.clone(),
        format!("{} s", flow.idle_seconds),
        format!("{} s", flow.expires_seconds),
    ]
}

/// `shop/web-1 10.1.0.5:8080`, `[fd00::1]:53`, `10.1.0.5`.
fn end(end: &FlowEnd) -> String {
    let address = match end.port {
        0 => end.address.to_string(),
        port => std::net::SocketAddr::new(end.address, port).to_string(),
    };
    match &end.name {
        Some(name) => format!("{name} {address}"),
        None => address,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_flow_line_has_names_addresses_and_the_rule() {
        let end = |address: &str, port, name: Option<&str>| FlowEnd {
            address: address.parse().unwrap(),
            port,
            name: name.map(str::to_owned),
        };
        let flow = ConnectionFlow {
            connection: "00c0ffee00c0ffee".to_owned(),
            protocol: "TCP".to_owned(),
            from: end("10.1.0.5", 40_000, Some("shop/web")),
            to: end("fd00::7", 80, None),
            state: "ESTABLISHED".to_owned(),
            sent: Some(Traffic { packets: 1, bytes: 60 }),
            received: Some(Traffic { packets: 12, bytes: 5_000_000 }),
            egress: "open".to_owned(),
            ingress: "shop-ingress-db-0-all-0-0".to_owned(),
            idle_seconds: 3,
            expires_seconds: 40,
        };
        let listed = text(&Flows { matching: 2, flows: vec![flow.clone()] }, None);
        let lines: Vec<&str> = listed.lines().collect();
        assert_eq!(
            lines[1],
            "00c0ffee00c0ffee  TCP       shop/web 10.1.0.5:40000  [fd00::7]:80  ESTABLISHED  1 packet, 60 B  12 packets, 4.77 MiB  open    shop-ingress-db-0-all-0-0  3 s   40 s"
        );
        assert_eq!(lines[2], "1 of 2 connections; list more with --limit");
        let uncounted = ConnectionFlow { sent: None, received: None, ..flow };
        assert!(
            text(&Flows { matching: 1, flows: vec![uncounted] }, None).contains("ESTABLISHED  -     -         open")
        );
    }

    #[test]
    fn a_rate_is_what_was_counted_since_the_last_listing() {
        let listing = |counts: &[(&str, Option<u64>)]| {
            let counted = |bytes| Some(Traffic { packets: 1, bytes });
            let flow = |&(connection, bytes): &(&str, Option<u64>)| {
                let end = FlowEnd { address: [10, 1, 0, 5].into(), port: 80, name: None };
                let (from, to) = (end.clone(), end);
                ConnectionFlow {
                    connection: connection.to_owned(),
                    protocol: "TCP".to_owned(),
                    from,
                    to,
                    state: "ESTABLISHED".to_owned(),
                    sent: bytes.and_then(counted),
                    received: bytes.and(counted(1000)),
                    egress: "open".to_owned(),
                    ingress: "open".to_owned(),
                    idle_seconds: 0,
                    expires_seconds: 40,
                }
            };
            Flows { matching: counts.len(), flows: counts.iter().map(flow).collect() }
        };
        let (mut rates, start) = (Rates::default(), Instant::now());
        let first = listing(&[("a", Some(1000)), ("b", Some(5000)), ("c", None)]);
        assert_eq!(rates.since_last(&first, start), [None, None, None], "nothing to compare with");
        // In another order; b's number was given to another connection; d is new.
        let second = listing(&[("d", Some(9)), ("b", Some(10)), ("a", Some(501_000)), ("c", None)]);
        let seen = rates.since_last(&second, start + Duration::from_secs(2));
        assert_eq!(seen, [None, None, Some(2_000_000.0), None]);
        let listed = text(&second, Some(&seen));
        assert!(listed.lines().nth(3).unwrap().contains("1000 B  2.0 Mbit/s  open"), "{listed}");
        for (rate, shown) in [(0.0, "0 bit/s"), (999.0, "999 bit/s"), (12_340.0, "12.3 kbit/s"), (9.87e9, "9.9 Gbit/s")]
        {
            assert_eq!(bits_per_second(rate), shown);
        }
    }
}
