//! When to log a pod's problem, and how loudly.
//!
//! Pods come and go all the time, and most have a problem for a moment meanwhile: a veth is gone before its pod's object, an
//! address is another pod's before the last one's object is deleted. So a problem that can pass by itself is a warning only if
//! it lasts, and not while its pod is being deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use penstock_policy::model::ObjectKey;
use tracing::Level;

use crate::discovery::PodProblem;

/// How long a problem that can pass by itself lasts before it is a warning.
const LASTING: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct ProblemLog {
    known: BTreeMap<PodProblem, KnownProblem>,
}

#[derive(Clone, Copy, Debug)]
struct KnownProblem {
    since: Instant,
    level: Level,
}

impl ProblemLog {
    /// The lines to log now that these problems exist; `leaving` are the pods that are being deleted.
    pub(super) fn update(
        &mut self,
        problems: &BTreeSet<PodProblem>,
        leaving: &BTreeSet<ObjectKey>,
        now: Instant,
    ) -> Vec<(Level, String)> {
        let mut lines = Vec::new();
        let before = std::mem::take(&mut self.known);
        for problem in problems {
            let known = before.get(problem);
            let since = known.map_or(now, |known| known.since);
            let level = level(problem, leaving, now - since);
            // In the order of levels, more verbose is greater.
            if known.is_none_or(|known| level < known.level) {
                lines.push((level, problem.to_string()));
            }
            let level = known.map_or(level, |known| known.level.min(level));
            self.known.insert(problem.clone(), KnownProblem { since, level });
        }
        for (problem, known) in before.iter().filter(|(problem, _)| !problems.contains(problem)) {
            lines.push((known.level.max(Level::INFO), format!("resolved: {problem}")));
        }
        lines
    }

    /// Problems that last, or cannot pass by themselves.
    pub(super) fn lasting(&self) -> impl Iterator<Item = &PodProblem> {
        self.known.iter().filter(|(_, known)| known.level <= Level::WARN).map(|(problem, _)| problem)
    }
}

fn level(problem: &PodProblem, leaving: &BTreeSet<ObjectKey>, age: Duration) -> Level {
    match problem.can_pass() {
        true if problem.pods().any(|pod| leaving.contains(pod)) => match problem {
            // Says which of two pods is served.
            PodProblem::AddressTaken { .. } => Level::INFO,
            _ => Level::DEBUG,
        },
        true if age < LASTING => Level::INFO,
        _ => Level::WARN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> ObjectKey {
        ObjectKey { namespace: "shop".into(), name: name.into() }
    }

    fn no_route(name: &str) -> PodProblem {
        PodProblem::NoRoute { pod: key(name), addresses: "10.1.1.5".into() }
    }

    fn taken(first: &str, second: &str) -> PodProblem {
        PodProblem::AddressTaken { first: key(first), second: key(second), address: [10, 1, 1, 5].into() }
    }

    /// Seconds, problems, pods that are being deleted, and the levels that are logged at that time.
    type Step = (u64, Vec<PodProblem>, &'static [&'static str], &'static [Level]);

    fn run(steps: Vec<Step>) {
        let (mut log, start) = (ProblemLog::default(), Instant::now());
        for (second, problems, leaving, expected) in steps {
            let (problems, leaving) = (problems.into_iter().collect(), leaving.iter().map(|name| key(name)).collect());
            let lines = log.update(&problems, &leaving, start + Duration::from_secs(second));
            let levels: Vec<Level> = lines.iter().map(|(level, _)| *level).collect();
            assert_eq!(levels, expected, "after {second} s: {lines:?}");
        }
    }

    #[test]
    fn pods_that_come_and_go_give_no_warning() {
        // A new pod's route comes a moment after its object.
        run(vec![(0, vec![no_route("a")], &[], &[Level::INFO]), (3, vec![], &[], &[Level::INFO])]);
        // A deleted pod's veth is gone long before its object.
        run(vec![
            (0, vec![no_route("a")], &["a"], &[Level::DEBUG]),
            (60, vec![no_route("a")], &["a"], &[]),
            (61, vec![], &[], &[Level::DEBUG]),
        ]);
        // Its address is the next pod's meanwhile.
        run(vec![(0, vec![taken("b", "a")], &["a"], &[Level::INFO]), (60, vec![taken("b", "a")], &["a"], &[])]);
    }

    #[test]
    fn what_lasts_is_a_warning_once() {
        run(vec![
            (0, vec![no_route("a")], &[], &[Level::INFO]),
            (9, vec![no_route("a")], &[], &[]),
            (10, vec![no_route("a")], &[], &[Level::WARN]),
            (90, vec![no_route("a")], &[], &[]),
            (91, vec![], &[], &[Level::INFO]),
            (92, vec![no_route("a")], &[], &[Level::INFO]),
        ]);
    }

    #[test]
    fn what_does_not_pass_by_itself_is_a_warning_at_once() {
        let long = PodProblem::TooLong { pod: key("a"), link: "veth1".into(), mtu: 9000, largest: 1778 };
        run(vec![(0, vec![long.clone()], &[], &[Level::WARN]), (1, vec![long], &[], &[])]);
    }
}
