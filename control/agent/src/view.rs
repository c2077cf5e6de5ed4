//! Read access to the daemon's state, for the admin API and metrics.

use std::time::Instant;

use penstock_admin::capture::CaptureCounts;
use penstock_dataplane::Epoch;
use penstock_dataplane::worker::{Dataplane, RingDepths};
use penstock_sources::SourceHealth;

use crate::capture::RunningCapture;
use crate::config::Config;
use crate::flow_records::RecordTotals;
use crate::last_good::RejectedConfig;
use crate::objects::NodeObjects;
use crate::ports::{OpenPorts, PortOutcomes};
use crate::progress::EnforcementProgress;
use crate::recorded_objects::StaleObjects;
use crate::rule_usage::RuleUsage;
use crate::samples::{CounterSample, CounterSamples};
use crate::trial::StagedCounters;

pub(crate) struct DaemonView<'a> {
    pub(crate) config: &'a Config,
    pub(crate) objects: &'a NodeObjects,
    pub(crate) ports: &'a OpenPorts,
    pub(crate) dataplane: &'a Dataplane,
    pub(crate) epoch: Epoch,
    pub(crate) progress: &'a EnforcementProgress,
    pub(crate) source: &'a SourceHealth,
    /// A configuration that was refused, while the last good one is in effect.
    pub(crate) rejected: Option<&'a RejectedConfig>,
    /// Set while the objects of an earlier run are in effect.
    pub(crate) stale: Option<StaleObjects>,
    /// Whether some server's answers count.
    pub(crate) has_resolver: bool,
    pub(crate) samples: &'a CounterSamples,
    pub(crate) capture: Option<&'a RunningCapture>,
    /// Packets of captures that have ended.
    pub(crate) captured: CaptureCounts,
    pub(crate) unwritten: u64,
    /// Records of flows made and lost, if there are any.
    pub(crate) flow_records: Option<RecordTotals>,
    /// The changes that promotion of all that is staged would make.
    pub(crate) staged: &'a StagedCounters,
    pub(crate) usage: &'a RuleUsage,
    pub(crate) started: Instant,
}

/// Counters of the kernel and the workers. Reading them may take a moment.
pub(crate) struct LiveCounters {
    pub(crate) sample: CounterSample,
    pub(crate) depths: RingDepths,
    pub(crate) ports: Vec<PortOutcomes>,
}

impl LiveCounters {
    pub(crate) fn read(dataplane: &Dataplane, ports: &OpenPorts) -> Self {
        // A dead worker does not answer; the health probe reports it.
        let depths = dataplane.depths().unwrap_or_default();
        Self { sample: CounterSample::take(dataplane, ports), depths, ports: ports.outcomes() }
    }
}

impl DaemonView<'_> {
    /// Packets of all captures since the start.
    pub(crate) fn captured(&self) -> CaptureCounts {
        let now = self.capture.map(RunningCapture::counts).unwrap_or_default();
        CaptureCounts {
            packets: self.captured.packets + now.packets,
            bytes: self.captured.bytes + now.bytes,
            lost: self.captured.lost + now.lost,
        }
    }
}
