//! How policies want their decisions reported, beside the verdict: nothing here changes one.

use std::sync::Arc;

use super::EndpointId;
use super::addresses::NONE;
use super::{Direction, DirectionVerdict, FlowEnds, PolicySet, PolicyVerdict, RuleRef};
use crate::names::NameTime;
use crate::packet::Flow;

/// The notes of a rule table. Rules are given by their numbers, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TableNotes {
    /// The rules that allow, and whose policies want each connection recorded that they allow.
    pub record_allowed: Vec<u32>,
    /// The rules that deny, and whose policies want recorded what they deny.
    pub record_denied: Vec<u32>,
    /// The policies that isolate the endpoint, and want recorded what no rule allows: `<namespace>/<name>`.
    pub record_isolated: Vec<Arc<str>>,
    /// The rules that deny, and whose policies say whether the sender is told.
    pub answers: Vec<(u32, bool)>,
    /// Whether the sender of what no rule allows is told, if a policy that isolates the endpoint says so.
    pub isolated_answer: Option<bool>,
}

impl TableNotes {
    fn records(&self, rule: u32) -> bool {
        [&self.record_allowed, &self.record_denied].into_iter().any(|rules| rules.binary_search(&rule).is_ok())
    }

    fn answer(&self, rule: u32) -> Option<bool> {
        let found = self.answers.binary_search_by_key(&rule, |(rule, _)| *rule).ok()?;
        Some(self.answers[found].1)
    }
}

impl PolicySet {
    /// Whether a policy wants a connection recorded that this verdict allows.
    pub(crate) fn records_allowed(&self, verdict: &PolicyVerdict) -> bool {
        let rules = [verdict.egress, verdict.ingress].into_iter().filter_map(|side| side.rule());
        rules.into_iter().any(|rule| self.notes_of(rule).is_some_and(|notes| notes.records(rule.rule)))
    }

    /// Whether a policy wants connections recorded that it allows between these ends: each must meet a worker.
    pub(crate) fn may_record_allowed(&self, ends: FlowEnds<'_>) -> bool {
        let both = [(ends.src.endpoint, Direction::Egress), (ends.dst.endpoint, Direction::Ingress)];
        let mut notes = both.into_iter().filter_map(|(endpoint, direction)| self.notes_at(endpoint, direction));
        notes.any(|notes| !notes.record_allowed.is_empty())
    }

    /// The policies that want a connection with this verdict recorded: `<namespace>/<name>` or `<tier>/<name>`. Each once.
    pub fn recorded_for(&self, flow: &Flow, verdict: &PolicyVerdict) -> Vec<Arc<str>> {
        let mut all = Vec::new();
        for (direction, side) in [(Direction::Egress, verdict.egress), (Direction::Ingress, verdict.ingress)] {
            match side {
                DirectionVerdict::Denied => {
                    all.extend(self.notes(flow, direction).iter().flat_map(|notes| notes.record_isolated.clone()));
                }
                side => all.extend(side.rule().and_then(|rule| self.recorded_rule(rule))),
            }
        }
        all.dedup();
        all
    }

    fn recorded_rule(&self, rule: RuleRef) -> Option<Arc<str>> {
        self.notes_of(rule).filter(|notes| notes.records(rule.rule))?;
        Some(self.rule_name(rule)?.shared_policy())
    }

    /// Whether the sender of a flow is told that policy denies it, if the policy that does so says that.
    #[cold]
    pub(crate) fn answer_to_denied(&self, flow: &Flow) -> Option<bool> {
        let sides = [Direction::Egress, Direction::Ingress];
        sides.into_iter().find_map(|direction| self.notes(flow, direction))?;
        let verdict = self.evaluate_named(flow, NameTime::Ever);
        let sides = sides.into_iter().zip([verdict.egress, verdict.ingress]);
        // The first that denies is why it was dropped.
        let (direction, side) = sides.into_iter().find(|(_, side)| !side.is_allowed())?;
        match side.rule() {
            Some(rule) => self.notes_of(rule)?.answer(rule.rule),
            None => self.notes(flow, direction)?.isolated_answer,
        }
    }

    /// The notes of the rules of one direction that a flow is subject to.
    fn notes(&self, flow: &Flow, direction: Direction) -> Option<&TableNotes> {
        let FlowEnds { src, dst } = self.ends(flow);
        self.notes_at(if direction == Direction::Egress { src } else { dst }.endpoint, direction)
    }

    fn notes_of(&self, rule: RuleRef) -> Option<&TableNotes> {
        self.notes_at(rule.endpoint.0, rule.direction)
    }

    fn notes_at(&self, endpoint: u32, direction: Direction) -> Option<&TableNotes> {
        (endpoint != NONE).then(|| self.direction(EndpointId(endpoint), direction))??.table()?.notes()
    }
}
