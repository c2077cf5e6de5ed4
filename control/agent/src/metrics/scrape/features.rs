//! Metrics of what a daemon may be set to do: domain names, limits of annotations, staged policies, flow records.

use std::fmt;

use penstock_dataplane::names::NameCounts;
use penstock_policy::model::ObjectKey;
use prometheus_client::metrics::MetricType;

use super::{RefusedConnections, Scrape};
use crate::flow_records::RecordTotals;
use crate::metrics::exposition::Exposition;
use crate::trial::{ChangeKind, ChangeTotals};

impl Scrape {
    pub(super) fn encode_names(&self, to: &mut Exposition<'_>) -> fmt::Result {
        let Some(NameCounts { kept, learnt, evicted, not_understood, unasked }) = self.names else { return Ok(()) };
        to.gauge("penstock_domain_names", "Domain names that pods have learnt, one for each address", kept as f64)?;
        for (name, help, count) in [
            ("penstock_domain_names_learnt", "Domain names that DNS answers gave pods, one for each address", learnt),
            ("penstock_domain_names_evicted", "Domain names that were evicted because a limit was reached", evicted),
            (
                "penstock_dns_answers_not_understood",
                "Messages from DNS servers to pods with domain names in their rules that were no answer, or malformed",
                not_understood,
            ),
            (
                "penstock_dns_answers_unasked",
                "Answers from DNS servers to pods with domain names in their rules to something that the pod had not asked",
                unasked,
            ),
        ] {
            to.counter(name, help, count)?;
        }
        Ok(())
    }

    pub(super) fn encode_limits(&self, to: &mut Exposition<'_>) -> fmt::Result {
        to.family(
            MetricType::Counter,
            "penstock_limited_connections_refused",
            "Packets that would have opened a connection beyond a limit of a pod's annotations",
            |add| {
                self.limits.iter().try_for_each(|RefusedConnections { pod, direction, refused }| {
                    let counts = [("connection_rate", refused.each_second), ("too_many_connections", refused.open)];
                    counts.iter().try_for_each(|(limit, count)| {
                        let ObjectKey { namespace, name } = pod;
                        let labels = [
                            ("namespace", namespace.as_str()),
                            ("pod", name),
                            ("direction", direction),
                            ("limit", limit),
                        ];
                        add.count(&labels, *count)
                    })
                })
            },
        )
    }

    pub(super) fn encode_staged(&self, to: &mut Exposition<'_>) -> fmt::Result {
        to.gauges(
            "penstock_rules",
            "Rules in effect that decided a connection within this time, and that never did",
            "used",
            self.rules.iter().map(|(used, count)| (*used, *count as f64)),
        )?;
        let (policies, unrecorded, ChangeTotals { live, opened }) = self.staged;
        let kinds = || ChangeKind::ALL.into_iter().map(ChangeKind::name);
        to.gauge("penstock_staged_policies", "Policies that are staged", policies as f64)?;
        to.gauges(
            "penstock_staged_connections",
            "Open connections that promotion of what is staged would change, by what would happen to them",
            "change",
            kinds().zip(live.map(|count| count as f64)),
        )?;
        to.gauges(
            "penstock_staged_opened_connections",
            "Connections opened, or denied, since the present policies are staged, that promotion would change",
            "change",
            kinds().zip(opened.map(|count| count as f64)),
        )?;
        let help = "Packets whose verdict promotion would change, beyond what is recorded";
        to.counter("penstock_staged_unrecorded", help, unrecorded)
    }
}

pub(super) fn encode_flow_records(totals: &RecordTotals, to: &mut Exposition<'_>) -> fmt::Result {
    let (made, lost) = (totals.made.iter().copied(), totals.lost.iter().copied());
    to.counters("penstock_flow_records", "Records of flows that were made, by event", "event", made)?;
    to.counters(
        "penstock_flow_records_lost",
        "Ended connections and denied packets without a record, and records that were not written or sent",
        "at",
        lost,
    )?;
    let help = "Forwarded packets that are in no connection's counts";
    to.counter("penstock_flow_uncounted_packets", help, totals.uncounted)
}
