//! All metrics of one scrape.

mod features;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_admin::capture::CaptureCounts;
use penstock_dataplane::conntrack::ConnTable;
use penstock_dataplane::limits::{Limit, PodLimits, Refused};
use penstock_dataplane::names::NameCounts;
use penstock_dataplane::policy::{self, Direction};
use penstock_dataplane::worker::{DataplaneStatistics, Histogram, LoggedOutcome, PortStatistics, QueueDepths};
use penstock_policy::model::ObjectKey;
use penstock_sources::{KindHealth, ObjectKind};
use penstock_xdp_redirect::{KeptBy, TrafficCount};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::exposition::{Exposition, FamilyType};
use super::services::ServiceMetrics;
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
    depths: QueueDepths,
    /// By port number: role, namespace and name of its pod, outcomes of its programs.
    ports: BTreeMap<u16, PortLabels>,
    published: u32,
    in_force: Vec<u32>,
    offload_in_force: Option<u32>,
    /// From pod to pod, from a pod to the node's stack, and from there to a pod.
    offloaded: Option<[TrafficCount; 5]>,
    /// Of each uplink and family, by what packets are kept to the node's stack.
    kept_by: Vec<(String, &'static str, Option<KeptBy>)>,
    refused_tunnels: Option<u64>,
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
    services: Option<ServiceMetrics>,
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
    /// How many rules have decided lately, and never.
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

/// What keeps packets between pods and other machines to the node's stack, by interface and family.
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
            services: view.config.services.enabled.then(|| ServiceMetrics::new(view)),
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
            source: view.source.followed().iter().map(|kind| (kind, view.source.of(kind))).collect(),
            config_rejected: view.rejected.is_some(),
            stale: view.stale,
            uptime: Instant::now().saturating_duration_since(view.started),
            times: view.progress.times.clone(),
        }
    }

    fn encode_ports(&self, to: &mut Exposition<'_>) -> fmt::Result {
        to.family(
            FamilyType::Counter,
            "penstock_port_packets",
            "Packets by direction, as the pod sees it, and verdict",
            |add| {
                self.each_port(|labels, port| {
                    let (traffic, dropped) = (&port.traffic, port.traffic.dropped_packets());
                    let sent = [("direction", "egress"), ("verdict", "forwarded")];
                    add.count(&[labels, &sent].concat(), traffic.rx_packets.saturating_sub(dropped))?;
                    add.count(&[labels, &[("direction", "egress"), ("verdict", "dropped")]].concat(), dropped)?;
                    let received = [("direction", "ingress"), ("verdict", "forwarded")];
                    add.count(&[labels, &received].concat(), traffic.tx_packets)
                })
            },
        )?;
        to.family(FamilyType::Counter, "penstock_port_bytes", "Bytes of those, Ethernet headers included", |add| {
            self.each_port(|labels, port| {
                let (traffic, dropped) = (&port.traffic, port.traffic.dropped_bytes);
                let sent = [("direction", "egress"), ("verdict", "forwarded")];
                add.count(&[labels, &sent].concat(), traffic.rx_bytes.saturating_sub(dropped))?;
                add.count(&[labels, &[("direction", "egress"), ("verdict", "dropped")]].concat(), dropped)?;
                let received = [("direction", "ingress"), ("verdict", "forwarded")];
                add.count(&[labels, &received].concat(), traffic.tx_bytes)
            })
        })?;
        to.family(
            FamilyType::Counter,
            "penstock_port_drops",
            "Packets that came in by a port and were dropped, by drop reason",
            |add| {
                self.each_port(|labels, port| {
                    port.traffic.drops().try_for_each(|(reason, count)| {
                        add.count(&[labels, &[("reason", reason.name())]].concat(), count)
                    })
                })
            },
        )?;
        to.family(
            FamilyType::Counter,
            "penstock_port_kernel_drops",
            "Packets that the kernel lost at a port's AF_XDP sockets (struct xdp_statistics), by reason",
            |add| {
                self.each_port(|labels, port| {
                    port.kernel
                        .iter()
                        .try_for_each(|(reason, count)| add.count(&[labels, &[("reason", reason)]].concat(), count))
                })
            },
        )?;
        to.family(
            FamilyType::Counter,
            "penstock_port_program",
            "Packets by what the program at the port did with them",
            |add| {
                self.each_port(|labels, port| {
                    let named = self.ports.get(&port.port.0);
                    let outcomes = named.iter().flat_map(|named| &named.outcomes);
                    let mut outcomes = outcomes.map(|(outcome, count)| (outcome.as_str(), *count));
                    outcomes
                        .try_for_each(|(outcome, count)| add.count(&[labels, &[("outcome", outcome)]].concat(), count))
                })
            },
        )?;
        to.family(FamilyType::Gauge, "penstock_port_queue_frames", "Frames in a port's rings", |add| {
            self.each_port(|labels, port| {
                let of = || self.depths.queues.iter().filter(|queue| queue.port == port.port);
                let receiving: u32 = of().map(|queue| queue.receiving).sum();
                let sending: u32 = of().map(|queue| queue.sending).sum();
                add.value(&[labels, &[("ring", "receiving")]].concat(), receiving.into())?;
                add.value(&[labels, &[("ring", "sending")]].concat(), sending.into())
            })
        })
    }

    fn each_port(&self, mut write: impl FnMut(&[(&str, &str)], &PortStatistics) -> fmt::Result) -> fmt::Result {
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
            write(&labels, port)
        })
    }

    fn encode_totals(&self, to: &mut Exposition<'_>) -> fmt::Result {
        let total = self.statistics.total();
        let dropped = total.dropped_packets();
        to.family(
            FamilyType::Counter,
            "penstock_packets",
            "Packets that workers received, by verdict; closed ports included",
            |add| {
                add.count(&[("verdict", "forwarded")], total.rx_packets.saturating_sub(dropped))?;
                add.count(&[("verdict", "dropped")], dropped)
            },
        )?;
        to.family(FamilyType::Counter, "penstock_bytes", "Bytes of those, Ethernet headers included", |add| {
            add.count(&[("verdict", "forwarded")], total.rx_bytes.saturating_sub(total.dropped_bytes))?;
            add.count(&[("verdict", "dropped")], total.dropped_bytes)
        })?;
        to.family(
            FamilyType::Counter,
            "penstock_drops",
            "Packets dropped by workers, by drop reason; closed ports included",
            |add| {
                let mut reasons = penstock_dataplane::DropReason::of_workers();
                reasons.try_for_each(|reason| add.count(&[("reason", reason.name())], total.dropped(reason)))
            },
        )?;
        to.family(
            FamilyType::Counter,
            "penstock_kernel_drops",
            "Packets that the kernel lost at AF_XDP sockets, by reason; closed ports included",
            |add| {
                let all = self.statistics.total_kernel();
                all.iter().try_for_each(|(reason, count)| add.count(&[("reason", reason)], count))
            },
        )
    }

    fn encode_workers(&self, to: &mut Exposition<'_>) -> fmt::Result {
        let workers = || self.statistics.workers.iter().enumerate();
        let label = |worker: usize| worker.to_string();
        to.family(
            FamilyType::Counter,
            "penstock_worker_busy_seconds",
            "Time in which a worker moved packets; its rate is the busy share",
            |add| {
                workers().try_for_each(|(n, worker)| {
                    add.count_seconds(&[("worker", &label(n))], worker.busy_iterations.sum().as_secs_f64())
                })
            },
        )?;
        to.family(FamilyType::Counter, "penstock_worker_asleep_seconds", "Time in which a worker slept", |add| {
            workers()
                .try_for_each(|(n, worker)| add.count_seconds(&[("worker", &label(n))], worker.asleep.as_secs_f64()))
        })?;
        to.family(FamilyType::Counter, "penstock_worker_batches", "Batches of packets received", |add| {
            workers().try_for_each(|(n, worker)| add.count(&[("worker", &label(n))], worker.batches))
        })?;
        to.family(
            FamilyType::Counter,
            "penstock_worker_handed_over_packets",
            "Packets handed to the worker that owns their port",
            |add| workers().try_for_each(|(n, worker)| add.count(&[("worker", &label(n))], worker.handed_over)),
        )?;
        to.family(
            FamilyType::Counter,
            "penstock_worker_joined_segments",
            "TCP segments sent merged with others as one GSO packet",
            |add| workers().try_for_each(|(n, worker)| add.count(&[("worker", &label(n))], worker.joined)),
        )?;
        to.family(
            FamilyType::Counter,
            "penstock_worker_answers",
            "ICMP errors and TCP resets that the node sent for dropped packets",
            |add| workers().try_for_each(|(n, worker)| add.count(&[("worker", &label(n))], worker.replies)),
        )?;
        to.family(
            FamilyType::Counter,
            "penstock_worker_answers_withheld",
            "ICMP errors and TCP resets not sent because of the rate limit",
            |add| workers().try_for_each(|(n, worker)| add.count(&[("worker", &label(n))], worker.replies_suppressed)),
        )?;
        to.family(
            FamilyType::Gauge,
            "penstock_worker_waiting_packets",
            "Packets from other workers that wait for this one",
            |add| {
                self.depths
                    .handed_over
                    .iter()
                    .enumerate()
                    .try_for_each(|(n, waiting)| add.value(&[("worker", &label(n))], *waiting as f64))
            },
        )?;
        to.family(FamilyType::Gauge, "penstock_worker_core", "The core that a worker is pinned to", |add| {
            self.cores.iter().enumerate().try_for_each(|(n, core)| add.value(&[("worker", &label(n))], *core as f64))
        })?;
        to.family(FamilyType::Gauge, "penstock_worker_epoch", "The snapshot in effect on a worker", |add| {
            self.in_force
                .iter()
                .enumerate()
                .try_for_each(|(n, epoch)| add.value(&[("worker", &label(n))], (*epoch).into()))
        })?;
        to.family(
            FamilyType::Gauge,
            "penstock_offload_epoch",
            "The snapshot in effect in the tcx programs, if they forward packets of established connections",
            |add| self.offload_in_force.iter().try_for_each(|epoch| add.value(&[], (*epoch).into())),
        )?;
        to.family(
            FamilyType::Counter,
            "penstock_offloaded_packets",
            "Packets that the tcx programs forwarded without a worker; port counters include them",
            |add| {
                let paths = ["pod_to_pod", "pod_to_stack", "stack_to_pod", "pod_to_uplink", "uplink_to_pod"];
                let counts = self.offloaded.iter().flatten();
                paths.iter().zip(counts).try_for_each(|(path, count)| add.count(&[("path", path)], count.packets))
            },
        )?;
        to.family(
            FamilyType::Gauge,
            "penstock_host_routing",
            "Whether packets between pods and other machines may pass the node's stack by, and what keeps them to it",
            |add| {
                self.kept_by.iter().try_for_each(|(interface, family, kept_by)| {
                    let labels = [
                        ("interface", interface.as_str()),
                        ("family", family),
                        ("kept_by", kept_by.map_or("", KeptBy::name)),
                    ];
                    add.value(&labels, f64::from(u8::from(kept_by.is_none())))
                })
            },
        )?;
        to.family(
            FamilyType::Counter,
            "penstock_tunnel_packets_refused",
            "Tunnel packets of other nodes' pods to this node, which it would have unwrapped",
            |add| self.refused_tunnels.iter().try_for_each(|count| add.count(&[], *count)),
        )?;
        to.family(
            FamilyType::Histogram,
            "penstock_worker_poll_iteration_seconds",
            "Duration of a worker's poll iterations with packets",
            |add| {
                workers().try_for_each(|(n, worker)| {
                    add.histogram(&[("worker", &label(n))], &poll_times(&worker.busy_iterations))
                })
            },
        )?;
        to.family(FamilyType::Histogram, "penstock_worker_batch_packets", "Packets per batch", |add| {
            workers().try_for_each(|(n, worker)| {
                let packets: u64 = self
                    .statistics
                    .ports
                    .iter()
                    .filter_map(|port| port.by_worker.get(n))
                    .map(|traffic| traffic.rx_packets)
                    .sum();
                let sizes = worker.batch_sizes.iter().enumerate();
                let buckets = sizes.map(|(power, count)| (f64::from(1 << power), *count)).collect();
                add.histogram(&[("worker", &label(n))], &super::exposition::Buckets { sum: packets as f64, buckets })
            })
        })
    }

    fn encode_source(&self, to: &mut Exposition<'_>) -> fmt::Result {
        to.gauge(
            "penstock_source_refused_files",
            "Manifests that are not applied; their last valid objects are in effect",
            self.refused_files as f64,
        )?;
        let gauge = |get: fn(&KindHealth) -> f64| -> Vec<(&str, f64)> {
            self.source.iter().map(|(kind, health)| (kind.resource(), get(health))).collect()
        };
        to.gauges(
            "penstock_source_synced",
            "Whether all objects of a kind have been read",
            "resource",
            &gauge(|health| f64::from(u8::from(health.synced))),
        )?;
        to.gauges(
            "penstock_source_connected",
            "Whether changes of a kind arrive as they happen",
            "resource",
            &gauge(|health| f64::from(u8::from(health.connected))),
        )?;
        to.gauges(
            "penstock_source_objects",
            "NodeObjects of a kind",
            "resource",
            &gauge(|health| health.objects as f64),
        )?;
        to.gauges(
            "penstock_source_invalid_objects",
            "NodeObjects among them that are not understood",
            "resource",
            &gauge(|health| health.invalid as f64),
        )?;
        to.family(
            FamilyType::Gauge,
            "penstock_source_last_sign_seconds",
            "Seconds since the last message from the source for a kind",
            |add| {
                self.source.iter().try_for_each(|(kind, health)| match health.last_sign {
                    Some(age) => add.value(&[("resource", kind.resource())], age.as_secs_f64()),
                    None => Ok(()),
                })
            },
        )?;
        type Count = fn(&KindHealth) -> u64;
        let counts: [(&str, &str, Count); 3] = [
            ("penstock_source_events", "Events of a kind", |health| health.events),
            ("penstock_source_outages", "How often the connection to the source was lost", |health| health.outages),
            ("penstock_source_lists", "How often all objects of a kind were read", |health| health.lists),
        ];
        counts.into_iter().try_for_each(|(name, help, get)| {
            to.family(FamilyType::Counter, name, help, |add| {
                self.source
                    .iter()
                    .try_for_each(|(kind, health)| add.count(&[("resource", kind.resource())], get(health)))
            })
        })
    }

    fn encode_captures(&self, to: &mut Exposition<'_>) -> fmt::Result {
        to.gauge("penstock_capture_running", "Whether a capture runs", f64::from(u8::from(self.is_capturing)))?;
        let CaptureCounts { packets, lost, .. } = self.captured;
        to.family(FamilyType::Counter, "penstock_capture_packets", "Packets of captures", |add| {
            add.count(&[], packets)
        })?;
        let help = "Packets that captures lost because their reader was too slow";
        to.family(FamilyType::Counter, "penstock_capture_lost_packets", help, |add| add.count(&[], lost))
    }

    fn encode_rest(&self, to: &mut Exposition<'_>) -> fmt::Result {
        let frames = &self.depths.frames;
        to.gauges(
            "penstock_umem_frames",
            "Frames of the UMEM, by where they are",
            "state",
            &[("free", frames.free.into()), ("fill", frames.fill.into()), ("in_flight", frames.in_flight.into())],
        )?;
        to.gauge("penstock_umem_capacity_frames", "All frames of the UMEM", frames.total.into())?;
        let states: Vec<(&str, f64)> =
            self.counts.by_state.iter().map(|(state, count)| (*state, *count as f64)).collect();
        to.gauges("penstock_connections", "Connections in the table, by state", "state", &states)?;
        to.gauge(
            "penstock_connections_capacity",
            "Connections that the table has room for",
            self.connections.capacity as f64,
        )?;
        to.gauge("penstock_connections_memory_bytes", "Memory of the connection table", self.connections.bytes as f64)?;
        to.family(FamilyType::Counter, "penstock_connection_events", "Events of connections, by kind", |add| {
            self.connections.events.iter().try_for_each(|(event, count)| add.count(&[("event", event)], *count))
        })?;
        to.gauge("penstock_policies", "NetworkPolicies in the cluster", self.policies as f64)?;
        to.gauges(
            "penstock_pods",
            "Pods of this node: known, attached to the workers, and those whose new tables are being built",
            "state",
            &[("known", self.pods as f64), ("attached", self.attached as f64), ("building", self.building as f64)],
        )?;
        let [pods, node] = self.not_enforced.map(|count| count as f64);
        to.gauges(
            "penstock_not_enforced",
            "Where policy is not enforced: pods under policy that are neither served nor closed, and things of the node",
            "of",
            &[("pods", pods), ("node", node)],
        )?;
        to.gauge("penstock_policy_addresses", "Addresses that the policy tables know", self.tables.addresses as f64)?;
        to.gauge("penstock_policy_tables", "Different rule tables", self.tables.tables as f64)?;
        to.gauge("penstock_policy_rules", "Rules in them", self.tables.rules as f64)?;
        to.gauge("penstock_policy_memory_bytes", "Memory of the policy tables", self.tables.bytes as f64)?;
        to.gauge(
            "penstock_config_rejected",
            "1 if the configuration was refused and the last good one is in effect",
            u8::from(self.config_rejected).into(),
        )?;
        to.gauge(
            "penstock_objects_stale",
            "1 while the objects of an earlier run are in effect, because the source has not been read yet",
            u8::from(self.stale.is_some()).into(),
        )?;
        to.family(
            FamilyType::Gauge,
            "penstock_objects_recorded_timestamp_seconds",
            "When stale objects were recorded; absent if none are in effect",
            |add| self.stale.map_or(Ok(()), |stale| add.value(&[], stale.recorded.as_second() as f64)),
        )?;
        to.gauge("penstock_epoch", "The snapshot that was published last", self.published.into())?;
        to.gauge("penstock_uptime_seconds", "How long the daemon has been running", self.uptime.as_secs_f64())?;
        to.family(
            FamilyType::Counter,
            "penstock_verdict_log_suppressed",
            "Packets that the verdict log left out to stay in its budget, by outcome",
            |add| {
                self.verdicts
                    .suppressed
                    .iter()
                    .try_for_each(|(outcome, count)| add.count(&[("outcome", outcome)], *count))
            },
        )?;
        to.family(
            FamilyType::Counter,
            "penstock_verdict_log_lost",
            "Records of the verdict log that were lost because it was not read fast enough",
            |add| add.count(&[], self.verdicts.lost),
        )
    }
}

fn refused(view: &DaemonView<'_>) -> Vec<RefusedConnections> {
    let directions = [("egress", Direction::Egress), ("ingress", Direction::Ingress)];
    let of_pod = |(pod, limits): (&ObjectKey, &PodLimits)| {
        let limited = directions.into_iter().filter(|(_, direction)| limits.limit(*direction) != Limit::default());
        let refused = limited.map(|(name, direction)| RefusedConnections {
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
        self.encode_source(&mut to)?;
        if let Some(services) = &self.services {
            services.encode(&self.statistics, &self.counts.by_frontend, &mut to)?;
        }
        self.encode_captures(&mut to)?;
        features::encode_flow_records(&self.flow_records, &mut to)?;
        self.encode_staged(&mut to)?;
        self.encode_names(&mut to)?;
        self.encode_limits(&mut to)?;
        self.encode_rest(&mut to)
    }
}

fn poll_times(histogram: &Histogram) -> super::exposition::Buckets {
    let limits = POLL_BUCKETS.map(Duration::from_nanos);
    let mut below = 0;
    let cumulative = histogram.shorter_than(&limits);
    let mut buckets: Vec<(f64, u64)> = limits
        .iter()
        .zip(cumulative)
        .map(|(limit, upto)| (limit.as_secs_f64(), upto - std::mem::replace(&mut below, upto)))
        .collect();
    buckets.push((f64::INFINITY, histogram.count() - below));
    super::exposition::Buckets { sum: histogram.sum().as_secs_f64(), buckets }
}
