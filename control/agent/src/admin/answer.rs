//! Answers of the admin API, from the daemon's state.

use std::collections::BTreeMap;
use std::net::IpAddr;

use penstock_admin::types;
use penstock_dataplane::Epoch;
use penstock_dataplane::conntrack::{ConnectionInfo, OwnerId, Timestamp};
use penstock_dataplane::forward::PortId;
use penstock_dataplane::limits::PodLimits;
use penstock_dataplane::names::{Moment, NameCounts};
use penstock_dataplane::worker::{KernelDrops, PortStatistics, RingDepth, RingDepths};
use penstock_policy::engine::Engine;
use penstock_policy::explain::{self, PlainText};
use penstock_policy::flow;
use penstock_sources::ObjectKind;
use penstock_xdp_redirect::KeptBy;

use crate::connection_limits::limited;
use crate::naming::{end, identifier, sides, traffic};
use crate::ports::PortRole;
use crate::query::FlowScan;
use crate::samples::CounterSample;
use crate::view::{DaemonView, LiveCounters};

impl DaemonView<'_> {
    fn engine(&self) -> &Engine {
        self.objects.engine()
    }

    pub(crate) fn status(&self, counters: &LiveCounters) -> types::Status {
        let LiveCounters { sample: now, depths, .. } = counters;
        let before = self.samples.before(now);
        let in_force = self.dataplane.in_force();
        let total = now.statistics.total();
        types::Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node: self.config.node.to_string(),
            process: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            policies: self.objects.policies(),
            published: self.epoch.0,
            in_force: self.dataplane.is_in_force(self.epoch),
            workers: self.workers(now, before, depths, &in_force),
            ports: self.port_list(counters, before),
            pods: self.pods(),
            drops: total.drops().map(|(cause, count)| (cause.name().to_owned(), count)).collect(),
            kernel_drops: kernel_drops(&now.statistics.total_kernel()),
            frames: types::FrameCounts {
                total: depths.frames.total,
                free: depths.frames.free,
                fill: depths.frames.fill,
                in_flight: depths.frames.in_flight,
            },
            connections: self.connections(),
            host_routing: self.host_routing(),
            domain_names: self.objects.names().filter(|_| self.engine().policy_set().has_names()).map(|names| {
                let NameCounts { kept, learnt, evicted, not_understood, unasked } = names.counts();
                types::NamesStatus { kept, learnt, evicted, not_understood, unasked, has_resolver: self.has_resolver }
            }),
            configuration_refused: self.rejected.map(|rejected| rejected.reasons.clone()).unwrap_or_default(),
            refused_files: self.source.refused_files(),
            stale: self
                .stale
                .map(|stale| types::StaleObjects { recorded: stale.recorded.to_string(), objects: stale.objects }),
            capture: self.capture.map(|running| types::CaptureStatus {
                seconds: running.age().as_secs(),
                pod: running.pod().map(ToString::to_string),
                packets: running.counts().packets,
                lost: running.counts().lost,
            }),
            flow_records: self.flow_records.as_ref().map(|totals| types::FlowRecordsStatus {
                made: totals.made.iter().map(|(event, count)| ((*event).to_owned(), *count)).collect(),
                lost: totals.lost.iter().map(|(at, count)| ((*at).to_owned(), *count)).collect(),
                uncounted: totals.uncounted,
            }),
            not_enforced: (self.progress.not_enforced().iter())
                .map(|one| types::NotEnforced {
                    pod: one.pod.as_ref().map(ToString::to_string),
                    reason: one.reason.clone(),
                })
                .collect(),
            object_problems: self.objects.unmet_claims().iter().cloned().collect(),
            source: ObjectKind::ALL.into_iter().map(|kind| (kind.resource().to_owned(), self.kind(kind))).collect(),
        }
    }

    fn kind(&self, kind: ObjectKind) -> types::SourceStatus {
        let health = self.source.of(kind);
        types::SourceStatus {
            synced: health.synced,
            connected: health.connected,
            last_sign_seconds: health.last_sign.map(|age| age.as_secs_f64()),
            objects: health.objects,
            invalid: health.invalid,
            outages: health.outages,
            version: health.version,
        }
    }

    fn host_routing(&self) -> Vec<types::HostRoutingStatus> {
        let interfaces = self.ports.kept_by().into_iter();
        let status = |(interface, kept_by): (&str, [Option<KeptBy>; 2])| {
            let [ipv4_kept_by, ipv6_kept_by] = kept_by.map(|by| by.map(|by| by.name().to_owned()));
            types::HostRoutingStatus { interface: interface.to_owned(), ipv4_kept_by, ipv6_kept_by }
        };
        interfaces.map(status).collect()
    }

    fn connections(&self) -> types::TableStatus {
        let table = self.dataplane.connections();
        types::TableStatus {
            entries: table.len(),
            capacity: table.capacity(),
            events: table.statistics().iter().map(|(name, count)| (name.to_owned(), count)).collect(),
        }
    }

    fn workers(
        &self,
        now: &CounterSample,
        before: &CounterSample,
        depths: &RingDepths,
        in_force: &[Epoch],
    ) -> Vec<types::WorkerStatus> {
        let seconds = now.seconds_since(before);
        let received = |sample: &CounterSample, worker: usize| -> u64 {
            let ports = sample.statistics.ports.iter();
            ports.filter_map(|port| port.by_worker.get(worker)).map(|traffic| traffic.rx_packets).sum()
        };
        let workers = now.statistics.workers.iter().zip(self.dataplane.cores()).enumerate();
        workers
            .map(|(worker, (counters, core))| {
                let earlier = before.statistics.workers.get(worker).cloned().unwrap_or_default();
                let share = |now: std::time::Duration, before: std::time::Duration| {
                    (now.saturating_sub(before).as_secs_f64() / seconds).clamp(0.0, 1.0)
                };
                let packets = received(now, worker).saturating_sub(received(before, worker));
                let batches = counters.batches.saturating_sub(earlier.batches);
                types::WorkerStatus {
                    worker,
                    core: core.0,
                    epoch: in_force.get(worker).map_or(0, |epoch| epoch.0),
                    busy: share(counters.busy_iterations.sum(), earlier.busy_iterations.sum()),
                    awake: 1.0 - share(counters.asleep, earlier.asleep),
                    packets_per_second: packets as f64 / seconds,
                    packets_per_batch: if batches == 0 { 0.0 } else { packets as f64 / batches as f64 },
                    poll_iteration_median_seconds: counters
                        .busy_iterations
                        .quantile(0.5)
                        .map(|time| time.as_secs_f64()),
                    poll_iteration_p99_seconds: counters.busy_iterations.quantile(0.99).map(|time| time.as_secs_f64()),
                    rings: {
                        let RingDepth { receiving, sending, size } =
                            depths.workers.get(worker).copied().unwrap_or_default();
                        types::RingDepth { receiving, sending, size }
                    },
                }
            })
            .collect()
    }

    fn port_list(&self, counters: &LiveCounters, before: &CounterSample) -> Vec<types::PortStatus> {
        let LiveCounters { sample: now, ports: by_port, .. } = counters;
        let seconds = now.seconds_since(before);
        let ports = now.statistics.ports.iter();
        ports
            .map(|counters| {
                let known = by_port.iter().find(|port| port.id == counters.port);
                let total = counts(counters);
                let earlier = before.statistics.port(counters.port).filter(|port| port.interface == counters.interface);
                let drops = counters.traffic.drops().map(|(cause, count)| (cause.name().to_owned(), count));
                let outcomes = known.and_then(|port| port.outcomes);
                types::PortStatus {
                    port: counters.port.0,
                    interface: counters.interface.clone(),
                    kind: known.map_or(PortRole::Pod, |port| port.role).name().to_owned(),
                    pod: known.and_then(|port| port.pod.as_ref()).map(ToString::to_string),
                    program: known.map_or_else(String::new, |port| port.program.to_owned()),
                    rate: rates(&total, &earlier.map(counts).unwrap_or_default(), seconds),
                    total,
                    drops: drops.collect(),
                    kernel_drops: kernel_drops(&counters.kernel),
                    outcomes: outcomes
                        .iter()
                        .flat_map(|outcomes| outcomes.iter())
                        .map(|(name, count)| (name.to_string(), count))
                        .collect(),
                }
            })
            .collect()
    }

    fn pods(&self) -> Vec<types::PodStatus> {
        let everywhere = self.dataplane.is_in_force(self.epoch);
        let pods = self.objects.pods().filter(|pod| !pod.host_network && !pod.finished);
        pods.map(|pod| {
            let port = self.ports.port_of(&pod.key);
            let changed = port.and_then(|_| self.progress.changed(&pod.key));
            let waiting = match port {
                None => Some(self.progress.waiting(&pod.key, pod.addresses.is_empty())),
                Some(_) => None,
            };
            let building = self.objects.engine().is_waiting(&pod.key);
            types::PodStatus {
                pod: pod.key.to_string(),
                addresses: pod.addresses.clone(),
                interface: port.map(|(_, interface)| interface.to_owned()),
                port: port.map(|(id, _)| id.0),
                changed: changed.map(|epoch| epoch.0),
                published: changed.map(|_| self.epoch.0),
                enforced: changed.is_some() && everywhere && !building,
                building,
                waiting,
                filtered: self.ports.filters_of(&pod.key),
                connections: port.map_or(0, |(id, _)| self.connections_of(id)),
                limits: self.objects.limits().of(&pod.key).map_or_else(Vec::new, |limits| self.limits(limits)),
            }
        })
        .collect()
    }

    fn limits(&self, limits: &PodLimits) -> Vec<types::ConnectionLimitStatus> {
        limited(limits)
            .map(|(name, direction)| {
                let (limit, refused) = (limits.limit(direction), limits.refused(direction));
                types::ConnectionLimitStatus {
                    direction: name.to_owned(),
                    each_second: limit.each_second,
                    most_open: limit.open,
                    open: limits.open(direction, self.dataplane.connections(), Timestamp::now()),
                    refused_each_second: refused.each_second,
                    refused_open: refused.open,
                }
            })
            .collect()
    }

    fn connections_of(&self, port: PortId) -> u32 {
        let owners = [OwnerId::opens(port.0), OwnerId::opened_to(port.0)];
        owners.map(|owner| self.dataplane.connections().len_of(owner)).iter().sum()
    }

    pub(crate) fn listing(&self, end: Option<&str>) -> Result<FlowScan, String> {
        let addresses = end.map(|end| self.addresses(end)).transpose()?;
        Ok(FlowScan { table: self.dataplane.connections().clone(), addresses })
    }

    fn addresses(&self, end: &str) -> Result<Vec<IpAddr>, String> {
        let end: flow::FlowEndpoint = end.parse().map_err(|error: flow::FlowError| error.to_string())?;
        flow::addresses(self.engine().state(), &end).map_err(|error| error.to_string())
    }

    /// Connections with the names of their ends, and what allows them under the current policy.
    pub(crate) fn describe(&self, connections: &[ConnectionInfo]) -> Vec<types::ConnectionFlow> {
        let table = self.dataplane.connections();
        connections
            .iter()
            .map(|connection| {
                let original = &connection.original;
                let (egress, ingress) = sides(self.engine(), original);
                let (src_port, dst_port) = original.shown_ports();
                let [sent, received] = traffic(connection);
                types::ConnectionFlow {
                    connection: identifier(table.connection_id(original)),
                    protocol: original.protocol.to_string(),
                    from: end(self.engine(), original.src, src_port),
                    to: end(self.engine(), original.dst, dst_port),
                    state: connection.state.name().to_owned(),
                    sent,
                    received,
                    egress,
                    ingress,
                    idle_seconds: connection.idle.as_secs(),
                    expires_seconds: connection.expires_in.as_secs(),
                }
            })
            .collect()
    }

    pub(crate) fn explain(&self, query: &types::ExplainQuery) -> Result<types::Explanation, String> {
        let (from, to) = (query.from.parse(), query.to.parse());
        let text = |error: flow::FlowError| error.to_string();
        let port = query.port.parse().map_err(text)?;
        let now = Moment(Timestamp::now().as_millis());
        let (allowed, text) =
            explain::text_at(self.engine(), &PlainText, &from.map_err(text)?, &to.map_err(text)?, &port, Some(now))
                .map_err(text)?;
        let mut text = text;
        let ends = [&query.from, &query.to];
        let is_end = |pod: &str| ends.iter().any(|end| end.strip_prefix("pod/").unwrap_or(end) == pod);
        for one in self.progress.not_enforced() {
            if let Some(pod) = one.pod.as_ref().map(ToString::to_string).filter(|pod| is_end(pod)) {
                text.push_str(&format!("\nPOLICY IS NOT ENFORCED on {pod}: {}\n", one.reason));
            }
        }
        Ok(types::Explanation { allowed, text, epoch: self.epoch.0 })
    }
}

fn counts(counters: &PortStatistics) -> types::PortCounts {
    let traffic = &counters.traffic;
    types::PortCounts {
        rx_packets: traffic.rx_packets,
        rx_bytes: traffic.rx_bytes,
        tx_packets: traffic.tx_packets,
        tx_bytes: traffic.tx_bytes,
        dropped_packets: traffic.dropped_packets() + counters.kernel.packets(),
    }
}

fn rates(now: &types::PortCounts, before: &types::PortCounts, seconds: f64) -> types::PortRates {
    let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
    types::PortRates {
        rx_packets: rate(now.rx_packets, before.rx_packets),
        rx_bytes: rate(now.rx_bytes, before.rx_bytes),
        tx_packets: rate(now.tx_packets, before.tx_packets),
        tx_bytes: rate(now.tx_bytes, before.tx_bytes),
        dropped_packets: rate(now.dropped_packets, before.dropped_packets),
    }
}

fn kernel_drops(kernel: &KernelDrops) -> BTreeMap<String, u64> {
    kernel.iter().filter(|(_, count)| *count > 0).map(|(name, count)| (name.to_owned(), count)).collect()
}
