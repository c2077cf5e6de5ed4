//! Writes metric families in the OpenMetrics text format.

use std::borrow::Cow;
use std::fmt;

use penstock_admin::printable::printable;
use prometheus_client::encoding::{DescriptorEncoder, EncodeCounterValue, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

pub(super) type LabelPairs<'a> = [(&'a str, &'a str)];

/// Labels with values that are [printable]: interfaces may be called by anything but a slash and white space.
fn written<'a>(labels: &LabelPairs<'a>) -> Vec<(&'a str, Cow<'a, str>)> {
    labels.iter().map(|&(name, value)| (name, printable(value))).collect()
}

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

    /// Writes a family; `write` adds its members. The format adds `_total` to a counter's name.
    pub(super) fn family(
        &mut self,
        kind: MetricType,
        name: &str,
        help: &str,
        write: impl FnOnce(&mut FamilyWriter<'_>) -> fmt::Result,
    ) -> fmt::Result {
        write(&mut FamilyWriter(self.0.encode_descriptor(name, help, None, kind)?))
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.family(MetricType::Gauge, name, help, |add| add.value(&[], value))
    }

    /// Writes gauges that differ in one label.
    pub(super) fn gauges(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (impl AsRef<str>, f64)>,
    ) -> fmt::Result {
        let mut values = values.into_iter();
        self.family(MetricType::Gauge, name, help, |add| {
            values.try_for_each(|(of, value)| add.value(&[(label, of.as_ref())], value))
        })
    }

    pub(super) fn counter(&mut self, name: &str, help: &str, count: u64) -> fmt::Result {
        self.family(MetricType::Counter, name, help, |add| add.count(&[], count))
    }

    /// Writes counters that differ in one label.
    pub(super) fn counters(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        counts: impl IntoIterator<Item = (impl AsRef<str>, impl EncodeCounterValue)>,
    ) -> fmt::Result {
        self.family(MetricType::Counter, name, help, |add| add.counts(&[], label, counts))
    }
}

impl FamilyWriter<'_> {
    pub(super) fn count(&mut self, labels: &LabelPairs<'_>, count: impl EncodeCounterValue) -> fmt::Result {
        match labels {
            [] => self.0.encode_counter::<NoLabelSet, _, f64>(&count, None),
            _ => self.0.encode_family(&written(labels))?.encode_counter::<NoLabelSet, _, f64>(&count, None),
        }
    }

    /// Counters that differ in one more label.
    pub(super) fn counts(
        &mut self,
        labels: &LabelPairs<'_>,
        label: &str,
        counts: impl IntoIterator<Item = (impl AsRef<str>, impl EncodeCounterValue)>,
    ) -> fmt::Result {
        counts.into_iter().try_for_each(|(of, count)| self.count(&[labels, &[(label, of.as_ref())]].concat(), count))
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
