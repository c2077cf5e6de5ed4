//! All metrics of one scrape.

mod features;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_admin::capture::CaptureCounts;
use penstock_dataplane::DropReason;
use penstock_dataplane::conntrack::ConnTable;
use penstock_dataplane::limits::{PodLimits, Refused};
use penstock_dataplane::names::NameCounts;
use penstock_dataplane::policy;
use penstock_dataplane::worker::{
    DataplaneStatistics, Histogram, LoggedOutcome, PortStatistics, RingDepth, RingDepths, Traffic, WorkerStatistics,
};
use penstock_policy::model::ObjectKey;
use penstock_sources::{KindHealth, ObjectKind};
use penstock_xdp_redirect::{KeptBy, TrafficCount};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::exposition::{Buckets, Exposition, FamilyWriter, LabelPairs};
use crate::connection_limits::limited;
use crate::flow_records::RecordTotals;
use crate::ports::PortRole;
use crate::progress::StepTimes;
use crate::recorded_objects::StaleObjects;
use crate::scans::TableCounts;
use crate::trial::ChangeTotals;
use crate::view::{DaemonView, LiveCounters};

/// The values of one scrape, except those of [`StepTimes`].
#[derive(Debug)]
pub(crate) struct Scrape {
    statistics: DataplaneStatistics,
    depths: RingDepths,
    /// By port number: role, namespace and name of its pod, outcomes of its programs.
    ports: BTreeMap<u16, PortLabels>,
    published: u32,
    in_force: Vec<u32>,
    offload_in_force: Option<u32>,
    /// From pod to pod, from a pod to the node's stack, and from there to a pod.
    offloaded: Option<[TrafficCount; 5]>,
    /// The reason, by uplink and family, why packets go by the node's stack.
    kept_by: Vec<(String, &'static str, Option<KeptBy>)>,
    refused_tunnels: Option<u64>,
    restored_filters: Option<u64>,
    cores: Vec<usize>,
    policies: usize,
    pods: usize,
    attached: usize,
    building: usize,
    /// Pods under policy that are neither served nor closed, and things of the node.
    not_enforced: [usize; 2],
    tables: policy::PolicySetStatistics,
    connections: TableMetrics,
    pub(super) table: Arc<ConnTable>,
    /// Filled in after the scan of the table.
    pub(super) counts: Arc<TableCounts>,
    /// Only if workers translate.
    verdicts: VerdictLogCounts,
    /// All zero if there are none.
    flow_records: RecordTotals,
    captured: CaptureCounts,
    is_capturing: bool,
    /// Staged policies, packets without a record, and what would change.
    staged: (u64, u64, ChangeTotals),
    /// Only if domain names are followed.
    names: Option<NameCounts>,
    /// The refused connections of pods whose connections are limited.
    limits: Vec<RefusedConnections>,
    rules: Vec<(&'static str, u64)>,
    source: Vec<(ObjectKind, KindHealth)>,
    refused_files: u64,
    config_rejected: bool,
    stale: Option<StaleObjects>,
    uptime: Duration,
    pub(super) times: StepTimes,
}

#[derive(Debug)]
struct PortLabels {
    role: PortRole,
    namespace: String,
    pod: String,
    outcomes: Vec<(String, u64)>,
}

/// Connections that a pod's limits have refused, by the name of the direction.
#[derive(Debug)]
struct RefusedConnections {
    pod: ObjectKey,
    direction: &'static str,
    refused: Refused,
}

#[derive(Debug)]
struct TableMetrics {
    capacity: usize,
    bytes: usize,
    events: Vec<(&'static str, u64)>,
}

#[derive(Debug)]
struct VerdictLogCounts {
    suppressed: Vec<(&'static str, u64)>,
    lost: u64,
}

/// Bucket bounds of the poll histogram, in nanoseconds: powers of two, where the workers' own buckets end.
const POLL_BUCKETS: [u64; 8] = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24];

/// The reasons why packets between pods and other machines go by the node's stack, by interface and family.
fn kept_by(view: &DaemonView<'_>) -> Vec<(String, &'static str, Option<KeptBy>)> {
    let by_interface = view.ports.kept_by().into_iter();
    let families = |(interface, kept_by): (&str, [Option<KeptBy>; 2])| {
        let interface = interface.to_owned();
        ["ipv4", "ipv6"].into_iter().zip(kept_by).map(move |(family, by)| (interface.clone(), family, by))
    };
    by_interface.flat_map(families).collect()
}

impl Scrape {
    /// Reads all values except the connections' states, which need a scan of the table.
    pub(crate) fn new(view: &DaemonView<'_>, counters: LiveCounters) -> Self {
        let table = view.dataplane.connections();
        let LiveCounters { sample, depths, ports } = counters;
        let named = ports.into_iter().map(|port| {
            let (namespace, pod) = port.pod.map(|pod| (pod.namespace, pod.name)).unwrap_or_default();
            let outcomes = port.outcomes.iter().flat_map(|outcomes| outcomes.iter());
            let outcomes = outcomes.map(|(name, count)| (name.to_string(), count)).collect();
            (
                port.id.0,
                PortLabels { role: port.role, namespace: namespace.to_string(), pod: pod.to_string(), outcomes },
            )
        });
        let log = view.dataplane.verdicts();
        Self {
            statistics: sample.statistics,
            depths,
            ports: named.collect(),
            published: view.epoch.0,
            in_force: view.dataplane.in_force().into_iter().map(|epoch| epoch.0).collect(),
            offload_in_force: view.dataplane.offload_in_force().map(|epoch| epoch.0),
            offloaded: view.ports.offloaded(),
            kept_by: kept_by(view),
            refused_tunnels: view.ports.refused_tunnels(),
            restored_filters: view.ports.restored_filters(),
            cores: view.dataplane.cores().iter().map(|core| core.0).collect(),
            policies: view.objects.policies(),
            pods: view.objects.pods().filter(|pod| !pod.host_network && !pod.finished).count(),
            attached: view.ports.pods(),
            building: view.objects.engine().waiting_pods(),
            not_enforced: [true, false]
                .map(|pods| view.progress.not_enforced().iter().filter(|one| one.pod.is_some() == pods).count()),
            tables: view.objects.engine().policy_set().statistics(),
            connections: TableMetrics {
                capacity: table.capacity(),
                bytes: table.memory(),
                events: table.statistics().iter().collect(),
            },
            table: Arc::clone(table),
            counts: Arc::default(),
            verdicts: VerdictLogCounts {
                suppressed: LoggedOutcome::all().map(|outcome| (outcome.name(), log.suppressed(outcome))).collect(),
                lost: log.lost() + view.unwritten,
            },
            flow_records: view.flow_records.clone().unwrap_or_default(),
            captured: view.captured(),
            is_capturing: view.capture.is_some(),
            staged: view.staged.read(),
            names: view.objects.names().map(|names| names.counts()),
            limits: refused(view),
            rules: view.usage.ages(jiff::Timestamp::now()),
            refused_files: view.source.refused_files(),
            source: ObjectKind::ALL.into_iter().map(|kind| (kind, view.source.of(kind))).collect(),
            config_rejected: view.rejected.is_some(),
            stale: view.stale,
            uptime: Instant::now().saturating_duration_since(view.started),
            times: view.progress.times.clone(),
        }
    }

    fn encode_ports(&self, to: &mut Exposition<'_>) -> fmt::Result {
        // Received from the pod, dropped of it, and sent to it.
        type Counts = fn(&Traffic) -> [u64; 3];
        let traffic: [(&str, &str, Counts); 2] = [
            ("penstock_port_packets", "Packets by direction, as the pod sees it, and verdict", |traffic| {
                [traffic.rx_packets, traffic.dropped_packets(), traffic.tx_packets]
            }),
            ("penstock_port_bytes", "Bytes of those, Ethernet headers included", |traffic| {
                [traffic.rx_bytes, traffic.dropped_bytes, traffic.tx_bytes]
            }),
        ];
        for (name, help, counts) in traffic {
            self.each_port(to, MetricType::Counter, name, help, |add, labels, port| {
                let [received, dropped, sent] = counts(&port.traffic);
                let egress = [labels, &[("direction", "egress")]].concat();
                add.counts(&egress, "verdict", by_verdict(received, dropped))?;
                add.count(&[labels, &[("direction", "ingress"), ("verdict", "forwarded")]].concat(), sent)
            })?;
        }
        self.each_port(
            to,
            MetricType::Counter,
            "penstock_port_drops",
            "Packets that came in by a port and were dropped, by drop reason",
            |add, labels, port| {
                add.counts(labels, "reason", port.traffic.drops().map(|(reason, count)| (reason.name(), count)))
            },
        )?;
        self.each_port(
            to,
            MetricType::Counter,
            "penstock_port_kernel_drops",
            "Packets that the kernel lost at a port's AF_XDP sockets (struct xdp_statistics), by reason",
            |add, labels, port| add.counts(labels, "reason", port.kernel.iter()),
        )?;
        self.each_port(
            to,
            MetricType::Counter,
            "penstock_port_program",
            "Packets by what the program at the port did with them",
            |add, labels, port| {
                let named = self.ports.get(&port.port.0);
                let outcomes = named.iter().flat_map(|named| &named.outcomes);
                add.counts(labels, "outcome", outcomes.map(|(outcome, count)| (outcome, *count)))
            },
        )
    }

    /// Writes a family; `write` adds the members of one port, whose labels it gets.
    fn each_port(
        &self,
        to: &mut Exposition<'_>,
        kind: MetricType,
        name: &str,
        help: &str,
        write: impl Fn(&mut FamilyWriter<'_>, &LabelPairs<'_>, &PortStatistics) -> fmt::Result,
    ) -> fmt::Result {
        to.family(kind, name, help, |add| {
            self.statistics.ports.iter().try_for_each(|port| {
                let named = self.ports.get(&port.port.0);
                let text = |get: fn(&PortLabels) -> &str| named.map_or("", get);
                let kind = named.map_or(PortRole::Pod, |named| named.role).name();
                let labels = [
                    ("interface", port.interface.as_str()),
                    ("kind", kind),
                    ("namespace", text(|named| &named.namespace)),
                    ("pod", text(|named| &named.pod)),
                ];
                write(add, &labels, port)
            })
        })
    }

    fn encode_totals(&self, to: &mut Exposition<'_>) -> fmt::Result {
        let total = self.statistics.total();
        to.counters(
            "penstock_packets",
            "Packets that workers received, by verdict; closed ports included",
            "verdict",
            by_verdict(total.rx_packets, total.dropped_packets()),
        )?;
        to.counters(
            "penstock_bytes",
            "Bytes of those, Ethernet headers included",
            "verdict",
            by_verdict(total.rx_bytes, total.dropped_bytes),
        )?;
        to.counters(
            "penstock_drops",
            "Packets dropped by workers, by drop reason; closed ports included",
            "reason",
            DropReason::of_workers().map(|reason| (reason.name(), total.dropped(reason))),
        )?;
        to.counters(
            "penstock_kernel_drops",
            "Packets that the kernel lost at AF_XDP sockets, by reason; closed ports included",
            "reason",
            self.statistics.total_kernel().iter(),
        )
    }

    fn encode_workers(&self, to: &mut Exposition<'_>) -> fmt::Result {
        let workers = &self.statistics.workers;
        type Time = fn(&WorkerStatistics) -> Duration;
        let times: [(&str, &str, Time); 2] = [
            (
                "penstock_worker_busy_seconds",
                "Time in which a worker moved packets; its rate is the busy share",
                |worker| worker.busy_iterations.sum(),
            ),
            ("penstock_worker_asleep_seconds", "Time in which a worker slept", |worker| worker.asleep),
        ];
        for (name, help, time) in times {
            to.counters(name, help, "worker", numbered(workers.iter().map(|worker| time(worker).as_secs_f64())))?;
        }
        type Count = fn(&WorkerStatistics) -> u64;
        let counts: [(&str, &str, Count); 4] = [
            ("penstock_worker_batches", "Batches of packets received", |worker| worker.batches),
            ("penstock_worker_joined_segments", "TCP segments sent merged with others as one GSO packet", |worker| {
                worker.joined
            }),
            (
                "penstock_worker_answers",
                "ICMP errors and TCP resets that the node sent for dropped packets",
                |worker| worker.replies,
            ),
            (
                "penstock_worker_answers_withheld",
                "ICMP errors and TCP resets not sent because of the rate limit",
                |worker| worker.replies_suppressed,
            ),
        ];
        for (name, help, count) in counts {
            to.counters(name, help, "worker", numbered(workers.iter().map(count)))?;
        }
        type Frames = fn(&RingDepth) -> u32;
        let rings: [(&str, &str, Frames); 2] = [
            (
                "penstock_worker_receiving_frames",
                "Frames that the kernel has for receiving, or that wait for the worker",
                |rings| rings.receiving,
            ),
            ("penstock_worker_sending_frames", "Frames that the kernel has for sending", |rings| rings.sending),
        ];
        for (name, help, frames) in rings {
            to.gauges(name, help, "worker", numbered(self.depths.workers.iter().map(|rings| frames(rings).into())))?;
        }
        to.gauges(
            "penstock_worker_core",
            "The core that a worker is pinned to",
            "worker",
            numbered(self.cores.iter().map(|core| *core as f64)),
        )?;
        to.gauges(
            "penstock_worker_epoch",
            "The snapshot in effect on a worker",
            "worker",
            numbered(self.in_force.iter().copied().map(f64::from)),
        )?;
        self.encode_batches(to)
    }

    fn encode_batches(&self, to: &mut Exposition<'_>) -> fmt::Result {
        let workers = || self.statistics.workers.iter().enumerate();
        to.family(
            MetricType::Histogram,
            "penstock_worker_poll_iteration_seconds",
            "Duration of a worker's poll iterations with packets",
            |add| {
                workers().try_for_each(|(n, worker)| {
                    add.histogram(&[("worker", &n.to_string())], &poll_times(&worker.busy_iterations))
                })
            },
        )?;
        to.family(MetricType::Histogram, "penstock_worker_batch_packets", "Packets per batch", |add| {
            workers().try_for_each(|(n, worker)| {
                let of_ports = self.statistics.ports.iter().filter_map(|port| port.by_worker.get(n));
                let packets: u64 = of_ports.map(|traffic| traffic.rx_packets).sum();
                let sizes = worker.batch_sizes.iter().enumerate();
                let buckets = sizes.map(|(power, count)| (f64::from(1 << power), *count)).collect();
                add.histogram(&[("worker", &n.to_string())], &Buckets { sum: packets as f64, buckets })
            })
        })
    }

    /// Packets that need no worker, or not the node's stack.
    fn encode_programs(&self, to: &mut Exposition<'_>) -> fmt::Result {
        to.family(
            MetricType::Gauge,
            "penstock_offload_epoch",
            "The snapshot in effect in the tcx programs, if they forward packets of established connections",
            |add| self.offload_in_force.iter().try_for_each(|epoch| add.value(&[], (*epoch).into())),
        )?;
        let paths = ["pod_to_pod", "pod_to_stack", "stack_to_pod", "pod_to_uplink", "uplink_to_pod"];
        to.counters(
            "penstock_offloaded_packets",
            "Packets that the tcx programs forwarded without a worker; port counters include them",
            "path",
            paths.iter().zip(self.offloaded.iter().flatten().map(|count| count.packets)),
        )?;
        to.family(
            MetricType::Gauge,
            "penstock_host_routing",
            "Whether packets between pods and other machines may pass the node's stack by, and what keeps them to it",
            |add| {
                self.kept_by.iter().try_for_each(|(interface, family, kept_by)| {
                    let kept = ("kept_by", kept_by.map_or("", KeptBy::name));
                    add.value(&[("interface", interface), ("family", family), kept], flag(kept_by.is_none()))
                })
            },
        )?;
        to.family(
            MetricType::Counter,
            "penstock_tunnel_packets_refused",
            "Tunnel packets of other nodes' pods to this node, which it would have unwrapped",
            |add| self.refused_tunnels.iter().try_for_each(|count| add.count(&[], *count)),
        )?;
        to.family(
            MetricType::Counter,
            "penstock_filters_restored",
            "Filters before Linux 6.6 that somebody deleted, with their qdisc or alone, and that were put back",
            |add| self.restored_filters.iter().try_for_each(|count| add.count(&[], *count)),
        )
    }

    fn encode_source(&self, to: &mut Exposition<'_>) -> fmt::Result {
        to.gauge(
            "penstock_source_refused_files",
            "Manifests that are not applied; their last valid objects are in effect",
            self.refused_files as f64,
        )?;
        type Value = fn(&KindHealth) -> Option<f64>;
        let values: [(&str, &str, Value); 5] = [
            ("penstock_source_synced", "Whether all objects of a kind have been read", |health| {
                Some(flag(health.synced))
            }),
            ("penstock_source_connected", "Whether changes of a kind arrive as they happen", |health| {
                Some(flag(health.connected))
            }),
            ("penstock_source_objects", "Objects of a kind", |health| Some(health.objects as f64)),
            ("penstock_source_invalid_objects", "Objects among them that are not understood", |health| {
                Some(health.invalid as f64)
            }),
            (
                "penstock_source_last_sign_seconds",
                "Seconds since the last message from the source for a kind",
                |health| health.last_sign.map(|age| age.as_secs_f64()),
            ),
        ];
        let kinds = || self.source.iter().map(|(kind, health)| (kind.resource(), health));
        for (name, help, value) in values {
            to.gauges(name, help, "resource", kinds().filter_map(|(kind, health)| Some((kind, value(health)?))))?;
        }
        type Count = fn(&KindHealth) -> u64;
        let counts: [(&str, &str, Count); 3] = [
            ("penstock_source_events", "Events of a kind", |health| health.events),
            ("penstock_source_outages", "How often the connection to the source was lost", |health| health.outages),
            ("penstock_source_lists", "How often all objects of a kind were read", |health| health.lists),
        ];
        for (name, help, count) in counts {
            to.counters(name, help, "resource", kinds().map(|(kind, health)| (kind, count(health))))?;
        }
        Ok(())
    }

    fn encode_captures(&self, to: &mut Exposition<'_>) -> fmt::Result {
        to.gauge("penstock_capture_running", "Whether a capture runs", flag(self.is_capturing))?;
        let CaptureCounts { packets, lost, .. } = self.captured;
        to.counter("penstock_capture_packets", "Packets of captures", packets)?;
        let help = "Packets that captures lost because their reader was too slow";
        to.counter("penstock_capture_lost_packets", help, lost)
    }

    fn encode_table(&self, to: &mut Exposition<'_>) -> fmt::Result {
        let frames = &self.depths.frames;
        to.gauges(
            "penstock_umem_frames",
            "Frames of the UMEM, by where they are",
            "state",
            [("free", frames.free.into()), ("fill", frames.fill.into()), ("in_flight", frames.in_flight.into())],
        )?;
        to.gauge("penstock_umem_capacity_frames", "All frames of the UMEM", frames.total.into())?;
        let states = self.counts.by_state.iter().map(|(state, count)| (*state, *count as f64));
        to.gauges("penstock_connections", "Connections in the table, by state", "state", states)?;
        let TableMetrics { capacity, bytes, events } = &self.connections;
        let help = "Connections that the table has room for";
        to.gauge("penstock_connections_capacity", help, *capacity as f64)?;
        to.gauge("penstock_connections_memory_bytes", "Memory of the connection table", *bytes as f64)?;
        let events = events.iter().copied();
        to.counters("penstock_connection_events", "Events of connections, by kind", "event", events)
    }

    fn encode_rest(&self, to: &mut Exposition<'_>) -> fmt::Result {
        to.gauge("penstock_policies", "NetworkPolicies in the cluster", self.policies as f64)?;
        to.gauges(
            "penstock_pods",
            "Pods of this node: known, attached to the workers, and those whose new tables are being built",
            "state",
            [("known", self.pods as f64), ("attached", self.attached as f64), ("building", self.building as f64)],
        )?;
        let [pods, node] = self.not_enforced.map(|count| count as f64);
        to.gauges(
            "penstock_not_enforced",
            "Where policy is not enforced: pods under policy that are neither served nor closed, and things of the node",
            "of",
            [("pods", pods), ("node", node)],
        )?;
        to.gauge("penstock_policy_addresses", "Addresses that the policy tables know", self.tables.addresses as f64)?;
        to.gauge("penstock_policy_tables", "Different rule tables", self.tables.tables as f64)?;
        to.gauge("penstock_policy_rules", "Rules in them", self.tables.rules as f64)?;
        to.gauge("penstock_policy_memory_bytes", "Memory of the policy tables", self.tables.bytes as f64)?;
        to.gauge(
            "penstock_config_rejected",
            "1 if the configuration was refused and the last good one is in effect",
            flag(self.config_rejected),
        )?;
        to.gauge(
            "penstock_objects_stale",
            "1 while the objects of an earlier run are in effect, because the source has not been read yet",
            flag(self.stale.is_some()),
        )?;
        to.family(
            MetricType::Gauge,
            "penstock_objects_recorded_timestamp_seconds",
            "When stale objects were recorded; absent if none are in effect",
            |add| self.stale.map_or(Ok(()), |stale| add.value(&[], stale.recorded.as_second() as f64)),
        )?;
        to.gauge("penstock_epoch", "The snapshot that was published last", self.published.into())?;
        to.gauge("penstock_uptime_seconds", "How long the daemon has been running", self.uptime.as_secs_f64())?;
        to.counters(
            "penstock_verdict_log_suppressed",
            "Packets that the verdict log left out to stay in its budget, by outcome",
            "outcome",
            self.verdicts.suppressed.iter().copied(),
        )?;
        let help = "Records of the verdict log that were lost because it was not read fast enough";
        to.counter("penstock_verdict_log_lost", help, self.verdicts.lost)
    }
}

fn by_verdict(all: u64, dropped: u64) -> [(&'static str, u64); 2] {
    [("forwarded", all.saturating_sub(dropped)), ("dropped", dropped)]
}

/// Values with their numbers, as text.
fn numbered<T>(values: impl IntoIterator<Item = T>) -> impl Iterator<Item = (String, T)> {
    values.into_iter().enumerate().map(|(number, value)| (number.to_string(), value))
}

fn flag(is_set: bool) -> f64 {
    f64::from(u8::from(is_set))
}

fn refused(view: &DaemonView<'_>) -> Vec<RefusedConnections> {
    let of_pod = |(pod, limits): (&ObjectKey, &PodLimits)| {
        let refused = limited(limits).map(|(name, direction)| RefusedConnections {
            pod: pod.clone(),
            direction: name,
            refused: limits.refused(direction),
        });
        refused.collect::<Vec<_>>()
    };
    view.objects.limits().iter().flat_map(of_pod).collect()
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut to = Exposition::new(encoder);
        self.encode_totals(&mut to)?;
        self.encode_ports(&mut to)?;
        self.encode_workers(&mut to)?;
        self.encode_programs(&mut to)?;
        self.encode_source(&mut to)?;
        self.encode_captures(&mut to)?;
        features::encode_flow_records(&self.flow_records, &mut to)?;
        self.encode_staged(&mut to)?;
        self.encode_names(&mut to)?;
        self.encode_limits(&mut to)?;
        self.encode_table(&mut to)?;
        self.encode_rest(&mut to)
    }
}

fn poll_times(histogram: &Histogram) -> Buckets {
    let limits = POLL_BUCKETS.map(Duration::from_nanos);
    let mut below = 0;
    let cumulative = histogram.shorter_than(&limits);
    let mut buckets: Vec<(f64, u64)> = limits
        .iter()
        .zip(cumulative)
        .map(|(limit, upto)| (limit.as_secs_f64(), upto - std::mem::replace(&mut below, upto)))
        .collect();
    buckets.push((f64::INFINITY, histogram.count() - below));
    Buckets { sum: histogram.sum().as_secs_f64(), buckets }
}
