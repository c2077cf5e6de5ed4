//! Plots the samples over time.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::fixture::Outage;
use crate::sample::{Sample, Sampler};

const SIZE: (u32, u32) = (1000, 900);
const SHADE: RGBColor = RGBColor(0xe0, 0xc8, 0xc8);

/// A line in a panel: its name and its value at a sample.
type Line = (&'static str, fn(&Sample) -> Option<f64>);

const PANELS: [(&str, &[Line]); 4] = [
    ("memory, MiB", &[("resident", |sample| Some(sample.memory_mebibytes))]),
    ("descriptors", &[("open", |sample| Some(sample.descriptors))]),
    ("frames under way", &[("frames", |sample| Some(sample.frames_under_way))]),
    (
        "latency, ms",
        &[
            ("median", |sample| sample.latency_milliseconds.map(|(p50, _)| p50)),
            ("99 %", |sample| sample.latency_milliseconds.map(|(_, p99)| p99)),
        ],
    ),
];

/// Draws the panels below each other; times without a daemon are shaded.
pub(crate) fn draw(path: &Path, sampler: &Sampler, outages: &[Outage]) -> Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let failed = |error: &dyn std::fmt::Display| anyhow!("{}: {error}", path.display());
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE).map_err(|error| failed(&error))?;
    for (panel, (title, lines)) in area.split_evenly((PANELS.len(), 1)).iter().zip(PANELS) {
        draw_panel(panel, title, lines, &sampler.samples, outages)?;
    }
    area.present().map_err(|error| failed(&error))
}

fn draw_panel(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    title: &str,
    lines: &[Line],
    samples: &[Sample],
    outages: &[Outage],
) -> Result<()> {
    let seconds = |sample: &Sample| sample.at.as_secs_f64();
    let values = samples.iter().flat_map(|sample| lines.iter().filter_map(|(_, value)| value(sample)));
    let highest = values.fold(1.0, f64::max) * 1.1;
    let end = samples.last().map_or(1.0, seconds);
    let failed = |error: &dyn std::fmt::Display| anyhow!("{title}: {error}");
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16))
        .margin(8)
        .x_label_area_size(24)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..end, 0.0..highest)
        .map_err(|error| failed(&error))?;
    chart.configure_mesh().x_desc("seconds").max_light_lines(1).draw().map_err(|error| failed(&error))?;
    let shades = outages.iter().map(|outage| {
        let corners = [(outage.from.as_secs_f64(), 0.0), (outage.to.as_secs_f64(), highest)];
        Rectangle::new(corners, SHADE.filled())
    });
    chart.draw_series(shades).map_err(|error| failed(&error))?;
    for (index, (name, value)) in lines.iter().enumerate() {
        let points = samples.iter().filter_map(|sample| Some((seconds(sample), value(sample)?)));
        let color = Palette99::pick(index).to_rgba();
        let series = chart.draw_series(LineSeries::new(points, color)).map_err(|error| failed(&error))?;
        series.label(*name).legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color));
    }
    if lines.len() > 1 {
        chart.configure_series_labels().border_style(BLACK).draw().map_err(|error| failed(&error))?;
    }
    Ok(())
}
