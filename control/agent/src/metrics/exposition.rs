//! Writes metric families in the OpenMetrics text format.

use std::borrow::Cow;
use std::fmt;

use penstock_admin::printable::printable;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FamilyType {
    /// Only grows; the format adds `_total` to its name.
    Counter,
    Gauge,
    /// How often values fell into each bucket.
    Histogram,
}

pub(super) type LabelPairs<'a> = [(&'a str, &'a str)];

/// Labels with values that are [printable]: interfaces may be called by anything but a slash and white space.
fn written<'a>(labels: &LabelPairs<'a>) -> Vec<(&'a str, Cow<'a, str>)> {
    labels.iter().map(|&(name, value)| (name, printable(value))).collect()
}

/// How often values fell into each bucket.
pub(super) struct Buckets {
    pub(super) sum: f64,
    /// Ascending upper bounds, each with the count of values up to it and above the previous one.
    pub(super) buckets: Vec<(f64, u64)>,
}

pub(super) struct Exposition<'a>(DescriptorEncoder<'a>);

pub(super) struct FamilyWriter<'a>(MetricEncoder<'a>);

impl<'a> Exposition<'a> {
    pub(super) fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    /// Writes a family; `write` adds its members.
    pub(super) fn family(
        &mut self,
        kind: FamilyType,
        name: &str,
        help: &str,
        write: impl FnOnce(&mut FamilyWriter<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let kind = match kind {
            FamilyType::Counter => MetricType::Counter,
            FamilyType::Gauge => MetricType::Gauge,
            FamilyType::Histogram => MetricType::Histogram,
        };
        write(&mut FamilyWriter(self.0.encode_descriptor(name, help, None, kind)?))
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.family(FamilyType::Gauge, name, help, |add| add.value(&[], value))
    }

    /// Writes gauges that differ in one label.
    pub(super) fn gauges(&mut self, name: &str, help: &str, label: &str, values: &[(&str, f64)]) -> fmt::Result {
        self.family(FamilyType::Gauge, name, help, |add| {
            values.iter().try_for_each(|(of, value)| add.value(&[(label, of)], *value))
        })
    }
}

impl FamilyWriter<'_> {
    pub(super) fn count(&mut self, labels: &LabelPairs<'_>, count: u64) -> fmt::Result {
        match labels {
            [] => self.0.encode_counter::<NoLabelSet, _, f64>(&count, None),
            _ => self.0.encode_family(&written(labels))?.encode_counter::<NoLabelSet, _, f64>(&count, None),
        }
    }

    pub(super) fn count_seconds(&mut self, labels: &LabelPairs<'_>, seconds: f64) -> fmt::Result {
        self.0.encode_family(&written(labels))?.encode_counter::<NoLabelSet, _, f64>(&seconds, None)
    }

    pub(super) fn value(&mut self, labels: &LabelPairs<'_>, value: f64) -> fmt::Result {
        match labels {
            [] => self.0.encode_gauge(&value),
            _ => self.0.encode_family(&written(labels))?.encode_gauge(&value),
        }
    }

    /// A histogram. Adds an infinite bucket if the last bound is finite.
    pub(super) fn histogram(&mut self, labels: &LabelPairs<'_>, values: &Buckets) -> fmt::Result {
        let count = values.buckets.iter().map(|(_, count)| count).sum();
        let mut buckets = values.buckets.clone();
        if buckets.last().is_none_or(|(limit, _)| limit.is_finite()) {
            buckets.push((f64::INFINITY, 0));
        }
        self.0.encode_family(&written(labels))?.encode_histogram::<NoLabelSet>(values.sum, count, &buckets, None)
    }
}
