//! The daemon's state as those see it who look in: what answers, metrics and the verdict log are made of.

use std::time::Instant;

use penstock_admin::types;
use penstock_dataplane::Epoch;
use penstock_dataplane::forward::PortKind;
use penstock_dataplane::packet::Address;
use penstock_dataplane::worker::{Dataplane, QueueDepths};
use penstock_policy::flow;
use penstock_sources::SourceHealth;

use crate::config::Config;
use crate::objects::Objects;
use crate::ports::{Counted, Ports};
use crate::progress::Progress;
use crate::samples::{Sample, Samples};

/// The daemon's state, to be read.
pub(crate) struct View<'a> {
    pub(crate) config: &'a Config,
    pub(crate) objects: &'a Objects,
    pub(crate) ports: &'a Ports,
    pub(crate) dataplane: &'a Dataplane,
    pub(crate) epoch: Epoch,
    pub(crate) progress: &'a Progress,
    pub(crate) source: &'a SourceHealth,
    pub(crate) samples: &'a Samples,
    /// Lines of the verdict log that could not be written.
    pub(crate) unwritten: u64,
    pub(crate) started: Instant,
}

/// What is read of the kernel and asked of the workers, which may take a moment.
pub(crate) struct Figures {
    pub(crate) sample: Sample,
    pub(crate) depths: QueueDepths,
    pub(crate) ports: Vec<Counted>,
}

impl Figures {
    pub(crate) fn read(dataplane: &Dataplane, ports: &Ports) -> Self {
        // A worker that has died does not answer; that is told otherwise.
        let depths = dataplane.depths().unwrap_or_default();
        Self { sample: Sample::take(dataplane), depths, ports: ports.counted() }
    }
}

impl View<'_> {
    /// An address with its owner's name.
    pub(crate) fn end(&self, address: Address, port: u16) -> types::End {
        let address = address.into();
        types::End { address, port, name: flow::name(self.objects.engine().state(), address) }
    }
}

/// A connection's number as it is written.
pub(crate) fn identifier(connection: u64) -> String {
    format!("{connection:016x}")
}

/// A port's kind as it is written.
pub(crate) fn kind(kind: PortKind) -> &'static str {
    match kind {
        PortKind::Pod => "pod",
        PortKind::Host => "host",
        PortKind::Uplink => "uplink",
    }
}
