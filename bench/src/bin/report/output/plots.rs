//! One bar for each case of a scenario, with its spread; and one for each ratio of the first table.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::number::number;
use super::tables::plotted;
use crate::results::{Samples, ScenarioResult};

const WIDTH: u32 = 900;
const LINE: u32 = 24;
const BARS: (i32, i32) = (330, 800);

/// The plot of a scenario's first metric as SVG; `None` if nothing was measured.
pub(crate) fn plot(scenario: &ScenarioResult) -> Result<Option<String>> {
    let Some((metric, higher)) = plotted(scenario) else { return Ok(None) };
    let measured: Vec<(&str, &Samples)> = scenario
        .cases
        .iter()
        .filter_map(|case| Some((case.name.as_str(), case.samples.first().filter(|samples| samples.count() > 0)?)))
        .collect();
    let highest = measured.iter().filter_map(|(_, samples)| samples.highest()).fold(0.0, f64::max);
    if measured.is_empty() || highest <= 0.0 {
        return Ok(None);
    }
    let mut svg = String::new();
    {
        let height = LINE * (measured.len() as u32 + 2);
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let direction = if higher { "more is better" } else { "less is better" };
        let title = format!("{}, {}: {direction}", metric.name, metric.unit);
        write_text(&area, &title, (8, 14), HPos::Left)?;
        for (index, (name, samples)) in measured.iter().enumerate() {
            let line = LINE as i32 * (index as i32 + 1) + 8;
            draw_bar(&area, name, samples, line, highest, metric.digits)?;
        }
        area.present().map_err(|error| anyhow!("cannot draw a plot: {error}"))?;
    }
    Ok(Some(svg))
}

/// The plot of ratios as SVG, with a line at 1; `None` if there are none.
pub(crate) fn ratios(ratios: &[(&str, f64)]) -> Result<Option<String>> {
    let Some(highest) = ratios.iter().map(|(_, ratio)| *ratio).reduce(f64::max) else { return Ok(None) };
    let highest = highest.max(1.0);
    let at = |value: f64| BARS.0 + ((BARS.1 - BARS.0) as f64 * value / highest) as i32;
    let mut svg = String::new();
    {
        let height = LINE * (ratios.len() as u32 + 2);
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let title = "Penstock against kernel + nftables + conntrack: right of the line Penstock is better";
        write_text(&area, title, (8, 14), HPos::Left)?;
        for (index, (name, ratio)) in ratios.iter().enumerate() {
            let line = LINE as i32 * (index as i32 + 1) + 8;
            let color = if *ratio >= 1.0 { RGBColor(0x1f, 0x6f, 0xb5) } else { RGBColor(0xc7, 0x6b, 0x2b) };
            let bar = Rectangle::new([(BARS.0, line + 4), (at(*ratio), line + LINE as i32 - 4)], color.filled());
            area.draw(&bar).map_err(|error| anyhow!("cannot draw a bar: {error}"))?;
            write_text(&area, name, (BARS.0 - 8, line + LINE as i32 / 2), HPos::Right)?;
            write_text(&area, &number(*ratio, 2), (at(*ratio) + 6, line + LINE as i32 / 2), HPos::Left)?;
        }
        let even = Rectangle::new([(at(1.0), LINE as i32 + 4), (at(1.0) + 1, height as i32 - 12)], BLACK.filled());
        area.draw(&even).map_err(|error| anyhow!("cannot draw a line: {error}"))?;
        area.present().map_err(|error| anyhow!("cannot draw a plot: {error}"))?;
    }
    Ok(Some(svg))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw_bar(area: &Area<'_>, name: &str, samples: &Samples, line: i32, highest: f64, digits: usize) -> Result<()> {
    let at = |value: f64| BARS.0 + ((BARS.1 - BARS.0) as f64 * value / highest) as i32;
    let (Some(median), Some(lowest), Some(most)) = (samples.median(), samples.lowest(), samples.highest()) else {
        return Ok(());
    };
    let color = if name.contains("Penstock") { RGBColor(0x1f, 0x6f, 0xb5) } else { RGBColor(0x9a, 0xa7, 0xb4) };
    let middle = line + LINE as i32 / 2;
    let shapes = [
        Rectangle::new([(BARS.0, line + 4), (at(median), line + LINE as i32 - 4)], color.filled()),
        Rectangle::new([(at(lowest), middle), (at(most), middle + 1)], BLACK.filled()),
    ];
    for shape in shapes {
        area.draw(&shape).map_err(|error| anyhow!("cannot draw a bar: {error}"))?;
    }
    write_text(area, name, (BARS.0 - 8, middle), HPos::Right)?;
    write_text(area, &number(median, digits), (at(most).max(at(median)) + 6, middle), HPos::Left)
}

fn write_text(area: &Area<'_>, text: &str, at: (i32, i32), anchor: HPos) -> Result<()> {
    let style = ("sans-serif", 13).into_font().color(&BLACK).pos(Pos::new(anchor, VPos::Center));
    area.draw(&Text::new(text.to_owned(), at, style)).map_err(|error| anyhow!("cannot write into a plot: {error}"))
}
