//! Rules of several tiers in one table, evaluated in order.

use std::sync::Arc;

use crate::names::{LearntNames, NameRules, NameTime};
use crate::packet::{Address, Protocol};

use super::peers::Identity;
use super::rows::{Row, RuleSet};
use super::table::RuleTable;

/// The action of a rule on a flow that it matches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum RuleAction {
    Accept,
    Deny,
    /// Leaves it to the next tier.
    Pass,
}

/// The rules of one direction of an endpoint to which a ClusterNetworkPolicy applies.
///
/// The Admin tier's rules come first, in order. Behind them come the NetworkPolicies' rules if these isolate the
/// endpoint, and the Baseline tier's otherwise: NetworkPolicy decides finally for an endpoint that it isolates, so the
/// Baseline tier is never reached there. The lowest matching rule decides; a Pass of the Admin tier masks the tier, so
/// there are at most two lookups of rows that were found once.
#[derive(Clone, Debug)]
pub struct TieredTable {
    table: RuleTable,
    actions: Arc<[RuleAction]>,
    admin: u32,
    is_isolated: bool,
    /// Domain names of rules, which match besides the rows.
    names: Option<Arc<NameRules>>,
}

/// The domain names that the pod whose egress is evaluated has learnt, and which of them count.
pub(super) type Given<'a> = Option<(&'a LearntNames, NameTime)>;

/// The outcome of all tiers, with the number of the rule that decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TierOutcome {
    Accepted(u32),
    Denied(u32),
    /// NetworkPolicies isolate the endpoint, and none of their rules allows the flow.
    Isolated,
    /// NetworkPolicies isolate the endpoint, and the flow is between it and its own node.
    OwnNode,
    Default,
}

impl TieredTable {
    /// Combines a table of all rules with their actions, in the same order. `admin` is the number of rules of the Admin
    /// tier; `is_isolated` says whether the other rules are NetworkPolicies', which isolate the endpoint.
    ///
    /// # Panics
    ///
    /// If there is not one action for each rule, or there are fewer rules than in the Admin tier.
    pub fn new(table: RuleTable, actions: impl IntoIterator<Item = RuleAction>, admin: u32, is_isolated: bool) -> Self {
        let actions: Arc<[RuleAction]> = actions.into_iter().collect();
        assert!(actions.len() == table.rules() && admin as usize <= actions.len(), "an action for each rule");
        Self { table, actions, admin, is_isolated, names: None }
    }

    /// This table, with the domain names of its rules, all of which accept.
    #[must_use]
    pub fn with_names(self, names: NameRules) -> Self {
        Self { names: (!names.is_empty()).then(|| Arc::new(names)), ..self }
    }

    #[inline]
    pub fn has_names(&self) -> bool {
        self.names.is_some()
    }

    /// This table with other rules for some identities, as in [`RuleTable::with_identities`].
    pub fn with_identities(&self, changes: impl IntoIterator<Item = (Identity, Option<RuleSet>)>) -> Self {
        Self { table: self.table.with_identities(changes), ..self.clone() }
    }

    pub fn table(&self) -> &RuleTable {
        &self.table
    }

    pub(super) fn is_of_network_policy(&self, rule: u32) -> bool {
        self.is_isolated && rule >= self.admin
    }

    /// Evaluates the tiers in order. `own_node` says whether the peer is the endpoint's own node, which NetworkPolicies
    /// never cut off.
    #[inline]
    pub(super) fn evaluate(
        &self,
        identity: u32,
        peer: Address,
        protocol: Protocol,
        port: u16,
        own_node: bool,
        given: Given<'_>,
    ) -> TierOutcome {
        let rows = self.table.rows(identity, peer, protocol, port);
        let mut first = self.first_from(rows, peer, 0, given);
        if let Some(rule) = first.filter(|rule| *rule < self.admin) {
            match self.actions[rule as usize] {
                RuleAction::Accept => return TierOutcome::Accepted(rule),
                RuleAction::Deny => return TierOutcome::Denied(rule),
                RuleAction::Pass => first = self.first_from(rows, peer, self.admin, given),
            }
        }
        if self.is_isolated && own_node {
            return TierOutcome::OwnNode;
        }
        match first.map(|rule| (rule, self.actions[rule as usize])) {
            Some((rule, RuleAction::Accept)) => TierOutcome::Accepted(rule),
            Some((rule, RuleAction::Deny)) => TierOutcome::Denied(rule),
            None if self.is_isolated => TierOutcome::Isolated,
            Some((_, RuleAction::Pass)) | None => TierOutcome::Default,
        }
    }

    /// The same for a peer of which nothing is known: it has the rights that every peer has. What a rule says of some peers
    /// alone counts where it denies, and not where it accepts.
    pub(super) fn evaluate_unknown(&self, protocol: Protocol, port: u16) -> TierOutcome {
        let by_port = self.table.by_port(protocol, port);
        let (mut start, mut may_pass) = (0, false);
        while let Some((rule, is_for_every_peer)) = by_port(start) {
            start = rule + 1;
            let is_admin = rule < self.admin;
            match (self.actions[rule as usize], is_for_every_peer) {
                (RuleAction::Deny, _) => return TierOutcome::Denied(rule),
                // For a peer that an earlier rule has passed on the next tier decides.
                (RuleAction::Accept, true) if is_admin && may_pass => start = self.admin,
                (RuleAction::Accept, true) => return TierOutcome::Accepted(rule),
                (RuleAction::Pass, true) if is_admin => start = self.admin,
                (RuleAction::Pass, true) => return TierOutcome::Default,
                (RuleAction::Pass, false) => may_pass = true,
                (RuleAction::Accept, false) => {}
            }
        }
        if self.is_isolated { TierOutcome::Isolated } else { TierOutcome::Default }
    }

    /// The lowest rule from `start` on that matches, by its rows or by a name.
    #[inline]
    fn first_from(&self, rows: [Row; 3], peer: Address, start: u32, given: Given<'_>) -> Option<u32> {
        let by_rows = if start == 0 { self.table.first(rows) } else { self.table.first_from(rows, start) };
        match (&self.names, given) {
            (Some(names), Some(given)) => self.or_by_name(names, by_rows, rows, peer, start, given),
            _ => by_rows,
        }
    }

    /// The lower of a rule that was found and the lowest from `start` on that matches by a name.
    #[cold]
    fn or_by_name(
        &self,
        names: &NameRules,
        by_rows: Option<u32>,
        rows: [Row; 3],
        peer: Address,
        start: u32,
        (learnt, time): (&LearntNames, NameTime),
    ) -> Option<u32> {
        let counts = |rule| rule >= start && self.table.matches_port(rows, rule);
        let by_name = learnt.first_rule(names, peer, time, counts);
        by_rows.into_iter().chain(by_name).min()
    }

    /// The rules that pass a flow on, in the order of their tiers, as if domain names matched nothing.
    pub(super) fn passes(&self, identity: u32, peer: Address, protocol: Protocol, port: u16) -> Vec<u32> {
        let rows = self.table.rows(identity, peer, protocol, port);
        let passes = |rule: &u32| self.actions[*rule as usize] == RuleAction::Pass;
        let first = self.table.first(rows);
        let in_admin = first.filter(|rule| *rule < self.admin);
        let next = match in_admin {
            Some(rule) if !passes(&rule) => None,
            Some(_) => self.table.first_from(rows, self.admin),
            None => first,
        };
        in_admin.into_iter().chain(next).filter(passes).collect()
    }
}
