//! Metrics of Services that workers translate.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use penstock_dataplane::pipeline::DropReason;
use penstock_dataplane::services::{FrontendKey, ServiceSet};
use penstock_dataplane::worker::DataplaneStatistics;

use super::exposition::Exposition;
use crate::view::DaemonView;

/// Drops of packets to Services. The first two are refused, by a RST or an ICMP error.
const REASONS: [DropReason; 4] =
    [DropReason::NoBackend, DropReason::NoServicePort, DropReason::NoLocalBackend, DropReason::NoService];
/// The Services that have no series of their own. No Service has this name: theirs have a namespace.
const OTHERS: &str = "other";

/// Services as a scrape finds them, without the table's connections.
#[derive(Debug)]
pub(super) struct ServiceMetrics {
    services: ServiceSet,
    /// Services with a series of their own.
    most: usize,
    affinity: (usize, usize),
    translated: u64,
    affinity_kept: u64,
}

impl ServiceMetrics {
    pub(super) fn new(view: &DaemonView<'_>) -> Self {
        let table = view.dataplane.connections();
        let counters = table.statistics();
        Self {
            services: view.objects.engine().service_set().clone(),
            most: view.config.metrics.services.into(),
            affinity: table.affinity_entries(),
            translated: counters.translated,
            affinity_kept: counters.affinity_kept,
        }
    }

    pub(super) fn encode(
        &self,
        statistics: &DataplaneStatistics,
        connections: &HashMap<FrontendKey, u64>,
        to: &mut Exposition<'_>,
    ) -> fmt::Result {
        let backends: usize = self.services.iter().map(|(_, frontend)| frontend.backends.len()).sum();
        to.gauge(
            "penstock_service_frontends",
            "Cluster addresses of Services, each with a port and protocol",
            self.services.len() as f64,
        )?;
        to.gauge("penstock_service_backends", "Backends for new connections, of all of these", backends as f64)?;
        let (used, all) = self.affinity;
        to.gauge("penstock_service_affinity_entries", "Clients with an entry in the table of affinity", used as f64)?;
        to.gauge("penstock_service_affinity_capacity", "Clients that the table of affinity has room for", all as f64)?;
        let kept = [("true", self.affinity_kept), ("false", self.translated.saturating_sub(self.affinity_kept))];
        let help = "Connections to Services that got a backend, by whether affinity chose it";
        to.counters("penstock_service_connections_opened", help, "affinity", kept)?;
        let total = statistics.total();
        to.counters(
            "penstock_service_packets_refused",
            "Packets to Services that got no backend, by reason; they are in penstock_drops too",
            "reason",
            REASONS.map(|reason| (reason.name(), total.dropped(reason))),
        )?;
        let named = self.named(connections);
        to.gauges(
            "penstock_service_connections",
            "Connections in the table, by the Service's port: those with the most, and all others together",
            "service",
            largest(&named, self.most).into_iter().map(|(service, count)| (service, count as f64)),
        )
    }

    /// Connections by the name of the Service's port, at whatever address; those of a Service that is gone by an empty one.
    fn named(&self, connections: &HashMap<FrontendKey, u64>) -> BTreeMap<Arc<str>, u64> {
        let mut named = BTreeMap::new();
        for (key, count) in connections {
            let name = self.services.frontend(key).map(|frontend| Arc::clone(&frontend.name)).unwrap_or_default();
            *named.entry(name).or_default() += count;
        }
        named
    }
}

/// The `most` names with the largest counts, and [`OTHERS`] with the sum of the rest, which an empty name is part of. Equal
/// counts are in the order of their names, so that series do not come and go without a reason.
fn largest(counts: &BTreeMap<Arc<str>, u64>, most: usize) -> Vec<(&str, u64)> {
    let (mut named, gone): (Vec<_>, Vec<_>) =
        counts.iter().map(|(name, count)| (&**name, *count)).partition(|(name, _)| !name.is_empty());
    named.sort_by_key(|&(name, count)| (std::cmp::Reverse(count), name));
    let rest = named.split_off(most.min(named.len()));
    let others = rest.iter().chain(&gone).map(|(_, count)| count).sum();
    named.push((OTHERS, others));
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_bounded_and_their_sum_is_all_connections() {
        let counts: BTreeMap<Arc<str>, u64> =
            [("", 2), ("shop/api", 7), ("shop/db", 9), ("shop/web", 7), ("shop/x", 1)]
                .map(|(name, count)| (name.into(), count))
                .into();
        for (most, expected) in [
            (0, vec![("other", 26)]),
            (1, vec![("shop/db", 9), ("other", 17)]),
            (2, vec![("shop/db", 9), ("shop/api", 7), ("other", 10)]),
            (9, vec![("shop/db", 9), ("shop/api", 7), ("shop/web", 7), ("shop/x", 1), ("other", 2)]),
        ] {
            let found = largest(&counts, most);
            assert_eq!(found, expected, "{most}");
            assert_eq!(found.iter().map(|(_, count)| count).sum::<u64>(), counts.values().sum::<u64>());
        }
    }
}
