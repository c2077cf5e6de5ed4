//! Figures by number of policies and engine, one of each round.

use std::collections::BTreeMap;

use penstock_bench::figures::{Samples, number};
use serde_json::{Value, json};

/// The parts of a report, in their order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Section {
    Rates,
    Costs,
    Changes,
    Disturbances,
    Daemons,
}

impl Section {
    pub(crate) const ALL: [Self; 5] = [Self::Rates, Self::Costs, Self::Changes, Self::Disturbances, Self::Daemons];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Rates => "Rates; in brackets against no enforcement in the same round, above 1 is faster",
            Self::Costs => {
                "Processor time of both ends and the engine; in brackets against no enforcement in the same round, below 1 is cheaper"
            }
            Self::Changes => "A policy denies what connections use, and is taken back; from the save",
            Self::Disturbances => {
                "The engine is away, and comes back: connections that went otherwise than policy says, of all tried"
            }
            Self::Daemons => "The engine on one node",
        }
    }

    /// Whether figures stand beside those of no enforcement.
    fn is_relative(self) -> bool {
        matches!(self, Self::Rates | Self::Costs)
    }
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Figure {
    pub(crate) section: Section,
    pub(crate) order: usize,
    pub(crate) name: String,
    pub(crate) digits: usize,
    /// The word for a number that is missing because it did not happen.
    pub(crate) absent: &'static str,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Reading {
    Number(f64),
    Absent,
    Of(usize, usize),
}

type Rounds = BTreeMap<u32, Reading>;

#[derive(Default)]
pub(crate) struct Results {
    /// By number of policies, figure and engine.
    readings: BTreeMap<(usize, Figure), BTreeMap<&'static str, Rounds>>,
    /// Engines that were not measured, or not with so many policies: name, number of policies, reason.
    pub(crate) failures: Vec<(&'static str, Option<usize>, String)>,
}

/// The engine that others are compared with.
pub(crate) const ZERO: &str = "none";

impl Results {
    pub(crate) fn add(&mut self, policies: usize, figure: Figure, engine: &'static str, round: u32, reading: Reading) {
        self.readings.entry((policies, figure)).or_default().entry(engine).or_default().insert(round, reading);
    }

    pub(crate) fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> = self.readings.keys().map(|(policies, _)| *policies).collect();
        sizes.dedup();
        sizes
    }

    /// A section's table for a number of policies and these engines; `None` if nothing of it was measured.
    pub(crate) fn table(
        &self,
        policies: usize,
        section: Section,
        engines: &[&'static str],
    ) -> Option<Vec<Vec<String>>> {
        let of = |(key, _): &(&(usize, Figure), _)| key.0 == policies && key.1.section == section;
        let rows: Vec<_> = self.readings.iter().filter(of).collect();
        let has = |engine: &&&str| rows.iter().any(|(_, by_engine)| by_engine.contains_key(**engine));
        let engines: Vec<&str> = engines.iter().filter(has).copied().collect();
        if rows.is_empty() {
            return None;
        }
        let header = std::iter::once(String::new()).chain(engines.iter().map(|&engine| engine.to_owned())).collect();
        let row = |((_, figure), by_engine): (&(usize, Figure), &BTreeMap<&'static str, Rounds>)| {
            let cell = |engine: &&str| {
                let zero = by_engine.get(ZERO).filter(|_| section.is_relative() && *engine != ZERO);
                by_engine.get(*engine).map_or_else(|| "–".to_owned(), |rounds| cell(figure, rounds, zero))
            };
            std::iter::once(figure.name.clone()).chain(engines.iter().map(cell)).collect()
        };
        Some(std::iter::once(header).chain(rows.into_iter().map(row)).collect())
    }

    pub(crate) fn json(&self) -> Vec<Value> {
        let one = |((policies, figure), by_engine): (&(usize, Figure), &BTreeMap<&'static str, Rounds>)| {
            let engines: serde_json::Map<String, Value> = by_engine
                .iter()
                .map(|(engine, rounds)| {
                    let rounds =
                        rounds.iter().map(|(round, reading)| json!({ "round": round, "value": value(*reading) }));
                    ((*engine).to_owned(), rounds.collect())
                })
                .collect();
            let section = format!("{:?}", figure.section).to_lowercase();
            json!({ "policies": policies, "section": section, "figure": figure.name, "engines": engines })
        };
        self.readings.iter().map(one).collect()
    }
}

fn value(reading: Reading) -> Value {
    match reading {
        Reading::Number(value) => json!(value),
        Reading::Absent => Value::Null,
        Reading::Of(some, all) => json!({ "count": some, "of": all }),
    }
}

/// The median, what did not happen counting as more than any number; and the median of the ratios to the zero line.
fn cell(figure: &Figure, rounds: &Rounds, zero: Option<&Rounds>) -> String {
    let counts = rounds.values().filter_map(|reading| match reading {
        Reading::Of(some, all) => Some((*some, *all)),
        _ => None,
    });
    if let Some((some, all)) = counts.reduce(|sum, it| (sum.0 + it.0, sum.1 + it.1)) {
        return format!("{some} of {all}");
    }
    let number_of = |reading: &Reading| match reading {
        Reading::Number(value) => *value,
        _ => f64::INFINITY,
    };
    let median = rounds.values().map(number_of).collect::<Samples>().median().unwrap_or(f64::INFINITY);
    if median.is_infinite() {
        return figure.absent.to_owned();
    }
    let ratio = |(round, reading): (&u32, &Reading)| Some(number_of(reading) / number_of(zero?.get(round)?));
    let ratio = rounds.iter().filter_map(ratio).collect::<Samples>().median();
    let ratio = ratio.map_or_else(String::new, |ratio| format!(" ({})", number(ratio, 2)));
    format!("{}{ratio}", number(median, figure.digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(section: Section) -> Figure {
        Figure { section, order: 0, name: "TCP_RR".to_owned(), digits: 1, absent: "goes on" }
    }

    fn filled(section: Section, readings: &[(&'static str, u32, Reading)]) -> Vec<Vec<String>> {
        let mut results = Results::default();
        for &(engine, round, reading) in readings {
            results.add(10, figure(section), engine, round, reading);
        }
        results.table(10, section, &["none", "penstock", "kube-router"]).unwrap()
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        let number = Reading::Number;
        let readings = [
            ("none", 0, number(10.0)),
            ("none", 1, number(100.0)),
            ("none", 2, number(20.0)),
            ("penstock", 0, number(9.0)),
            ("penstock", 1, number(90.0)),
            ("penstock", 2, number(18.0)),
        ];
        let table = filled(Section::Rates, &readings);
        assert_eq!(table[0], ["", "none", "penstock"]);
        assert_eq!(table[1], ["TCP_RR", "20.0", "18.0 (0.90)"]);
    }

    #[test]
    fn what_does_not_happen_counts_as_more_than_any_number() {
        let rows = [
            (vec![Reading::Absent, Reading::Absent, Reading::Number(3.0)], "goes on"),
            (vec![Reading::Absent, Reading::Number(4.0), Reading::Number(3.0)], "4.0"),
            (vec![Reading::Of(1, 20), Reading::Of(2, 30)], "3 of 50"),
        ];
        for (readings, expected) in rows {
            let readings: Vec<_> = (0..).zip(readings).map(|(round, it)| ("penstock", round, it)).collect();
            assert_eq!(filled(Section::Changes, &readings)[1][1], expected);
        }
    }

    #[test]
    fn an_engine_without_a_reading_has_a_dash_or_no_column() {
        let mut results = Results::default();
        let other = Figure { name: "TCP_CRR".to_owned(), order: 1, ..figure(Section::Rates) };
        results.add(10, figure(Section::Rates), "none", 0, Reading::Number(1.0));
        results.add(10, other, "penstock", 0, Reading::Number(1.0));
        let table = results.table(10, Section::Rates, &["none", "penstock", "kube-router"]).unwrap();
        assert_eq!(table, [["", "none", "penstock"], ["TCP_RR", "1.0", "–"], ["TCP_CRR", "–", "1.0"]]);
        assert_eq!(results.table(1000, Section::Rates, &["none"]), None);
    }
}
