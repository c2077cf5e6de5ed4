//! The log of a record: its body, and its fields by the names of OpenTelemetry's semantic conventions.

use opentelemetry::logs::{AnyValue, LogRecord as _, Severity};
use opentelemetry_sdk::logs::SdkLogRecord;

use crate::flow_records::record::{FlowEvent, FlowRecord, RecordedEnd};

pub(super) fn fill_in(log: &mut SdkLogRecord, record: &FlowRecord) {
    log.set_event_name(match record.event {
        FlowEvent::End => "penstock.flow.end",
        FlowEvent::Interval => "penstock.flow.interval",
        FlowEvent::Denied => "penstock.flow.denied",
    });
    let (severity, text) = match record.event {
        FlowEvent::Denied => (Severity::Warn, "WARN"),
        FlowEvent::End | FlowEvent::Interval => (Severity::Info, "INFO"),
    };
    log.set_severity_number(severity);
    log.set_severity_text(text);
    log.set_timestamp(record.last.into());
    log.set_observed_timestamp(record.time.into());
    log.set_body(AnyValue::from(body(record)));
    log.add_attributes(attributes(record));
}

fn body(record: &FlowRecord) -> String {
    let name = |end: &RecordedEnd| match &end.identity {
        Some(identity) => identity.name.clone(),
        None => end.address.to_string(),
    };
    let FlowRecord { protocol, from, to, .. } = record;
    let what = record.ended.or(record.reason).or(record.state).unwrap_or_default();
    format!("{protocol} {} to {} port {}: {what}", name(from), name(to), to.port)
}

/// The record's fields, by the names of the semantic conventions where there are such
/// (<https://opentelemetry.io/docs/specs/semconv/registry/attributes/>).
pub(super) fn attributes(record: &FlowRecord) -> Vec<(String, AnyValue)> {
    let mut all: Vec<(String, AnyValue)> = Vec::with_capacity(48);
    let mut add = |name: &str, value: Option<AnyValue>| {
        all.extend(value.map(|value| (name.to_owned(), value)));
    };
    let text = |text: &str| Some(AnyValue::from(text.to_owned()));
    let some_text = |text: Option<&str>| text.map(|text| AnyValue::from(text.to_owned()));
    let number = |number: u64| Some(AnyValue::from(i64::try_from(number).unwrap_or(i64::MAX)));
    add("network.transport", text(&record.protocol.to_lowercase()));
    add("network.type", text(if record.from.address.is_ipv4() { "ipv4" } else { "ipv6" }));
    for (side, end) in [("source", &record.from), ("destination", &record.to)] {
        add(&format!("{side}.address"), text(&end.address.to_string()));
        add(&format!("{side}.port"), number(end.port.into()));
        let Some(identity) = &end.identity else { continue };
        let k8s = |name: &str| format!("{side}.k8s.{name}.name");
        add(&k8s("namespace"), some_text(identity.namespace.as_deref()));
        add(&k8s("pod"), some_text(identity.pod.as_deref()));
        add(&k8s("node"), some_text(identity.node.as_deref()));
        if let Some(workload) = &identity.workload {
            add(&k8s(&workload.kind.to_lowercase()), text(&workload.name));
        }
    }
    add("penstock.verdict", text(record.verdict.name()));
    add("penstock.reason", some_text(record.reason));
    add("penstock.egress.rule", some_text(record.rules.egress.as_deref()));
    add("penstock.egress.tier", some_text(record.rules.egress_tier));
    add("penstock.ingress.rule", some_text(record.rules.ingress.as_deref()));
    add("penstock.ingress.tier", some_text(record.rules.ingress_tier));
    add("penstock.connection.id", some_text(record.connection.as_deref()));
    add("penstock.connection.state", some_text(record.state));
    add("penstock.connection.ended", some_text(record.ended));
    if let Some(counts) = &record.counts {
        for (name, traffic) in [
            ("sent", counts.sent),
            ("received", counts.received),
            ("sent_since", counts.sent_since),
            ("received_since", counts.received_since),
        ] {
            add(&format!("penstock.{name}.packets"), number(traffic.packets));
            add(&format!("penstock.{name}.bytes"), number(traffic.bytes));
        }
    }
    add("penstock.denied.packets", record.packets.and_then(number));
    add("penstock.first", some_text(record.first.map(|first| format!("{first:.3}")).as_deref()));
    if !record.tcp_flags.is_empty() {
        add("penstock.tcp.flags", text(&record.tcp_flags.join(",")));
    }
    all
}
