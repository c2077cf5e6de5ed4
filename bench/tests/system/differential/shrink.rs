//! The shortest history that still fails, as far as a bounded search finds it.

use std::collections::BTreeMap;

use super::steps::Step;
use super::{Difference, Pair, Setting};

/// Histories that are tried, each on two new nodes.
const TRIES: usize = 24;

struct Search {
    setting: Setting,
    tries: usize,
}

impl Search {
    /// The first difference of a history on new nodes.
    fn fails(&mut self, history: &[Step]) -> Option<Difference> {
        if self.tries == 0 || history.is_empty() {
            return None;
        }
        self.tries -= 1;
        let (differences, _) = Pair::new(self.setting).run(history, &mut BTreeMap::new());
        differences.into_iter().next()
    }
}

/// Describes the differences, and a short history that has the first one.
pub(super) fn shrink(setting: Setting, all: &[Step], differences: &[Difference]) -> String {
    let mut search = Search { setting, tries: TRIES };
    let first = differences[0].number;
    let at = all.iter().rposition(|step| step.number == first).expect("a difference is about a step");
    let what = |number: u16| all.iter().rfind(|step| step.number == number).map_or("", |step| &step.what);
    let mut text = String::new();
    for difference in differences.iter().take(10) {
        text += &format!("  {}: {}\n{}\n", difference.number, what(difference.number), difference.text);
    }
    text += &format!("  {} differences\n", differences.len());
    let of_script: Vec<Step> = all.iter().filter(|step| step.script == all[at].script).cloned().collect();
    let candidates = [vec![all[at].clone()], of_script, all[at.saturating_sub(400)..=at].to_vec(), all.to_vec()];
    let Some(mut shortest) = candidates.into_iter().find(|history| search.fails(history).is_some()) else {
        return text + "  it did not fail again on new nodes";
    };
    // Takes away halves, quarters and so on (delta debugging), while it still fails.
    let mut size = shortest.len().div_ceil(2);
    while size > 0 && search.tries > 0 && shortest.len() > 1 {
        let mut from = 0;
        while from < shortest.len() && search.tries > 0 {
            let to = (from + size).min(shortest.len());
            let without = [&shortest[..from], &shortest[to..]].concat();
            if search.fails(&without).is_some() {
                shortest = without;
            } else {
                from = to;
            }
        }
        size = if size == 1 { 0 } else { size.div_ceil(2) };
    }
    text += "  it fails again on new nodes with these steps alone:\n";
    for step in &shortest {
        text += &format!("    {}: {}\n", step.number, step.what);
    }
    text
}
