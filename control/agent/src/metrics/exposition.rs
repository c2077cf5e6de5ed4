//! Families of metrics, written one after the other in the OpenMetrics text format.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// What a family counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Something that only grows; the format adds `_total` to its name.
    Counter,
    /// Something that is as it is.
    Gauge,
    /// How often which values were met.
    Histogram,
}

/// Labels with their values.
pub(super) type Labels<'a> = [(&'a str, &'a str)];

/// How often which values were met.
pub(super) struct Buckets {
    /// All values together.
    pub(super) sum: f64,
    /// Limits that ascend, and how many values there were up to each and beyond the one before.
    pub(super) buckets: Vec<(f64, u64)>,
}

/// Where families are written to.
pub(super) struct Exposition<'a>(DescriptorEncoder<'a>);

/// Where the members of one family are written to.
pub(super) struct Members<'a>(MetricEncoder<'a>);

impl<'a> Exposition<'a> {
    pub(super) fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    /// Writes a family, whose members `write` adds.
    pub(super) fn family(
        &mut self,
        kind: Kind,
        name: &str,
        help: &str,
        write: impl FnOnce(&mut Members<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let kind = match kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
        };
        write(&mut Members(self.0.encode_descriptor(name, help, None, kind)?))
    }

    /// Writes a gauge without labels.
    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.family(Kind::Gauge, name, help, |add| add.value(&[], value))
    }

    /// Writes gauges that one label tells apart.
    pub(super) fn gauges(&mut self, name: &str, help: &str, label: &str, values: &[(&str, f64)]) -> fmt::Result {
        self.family(Kind::Gauge, name, help, |add| {
            values.iter().try_for_each(|(of, value)| add.value(&[(label, of)], *value))
        })
    }
}

impl Members<'_> {
    /// A counter.
    pub(super) fn count(&mut self, labels: &Labels<'_>, count: u64) -> fmt::Result {
        match labels {
            [] => self.0.encode_counter::<NoLabelSet, _, f64>(&count, None),
            _ => self.0.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&count, None),
        }
    }

    /// A counter of seconds.
    pub(super) fn count_seconds(&mut self, labels: &Labels<'_>, seconds: f64) -> fmt::Result {
        self.0.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&seconds, None)
    }

    /// A gauge.
    pub(super) fn value(&mut self, labels: &Labels<'_>, value: f64) -> fmt::Result {
        match labels {
            [] => self.0.encode_gauge(&value),
            _ => self.0.encode_family(&labels)?.encode_gauge(&value),
        }
    }

    /// A histogram; what is beyond the last limit is added where that is not infinite.
    pub(super) fn histogram(&mut self, labels: &Labels<'_>, values: &Buckets) -> fmt::Result {
        let count = values.buckets.iter().map(|(_, count)| count).sum();
        let mut buckets = values.buckets.clone();
        if buckets.last().is_none_or(|(limit, _)| limit.is_finite()) {
            buckets.push((f64::INFINITY, 0));
        }
        self.0.encode_family(&labels)?.encode_histogram::<NoLabelSet>(values.sum, count, &buckets, None)
    }
}
