//! Policy tables for the packet path: identities, rule bits and one lookup per direction.
//!
//! A [`PolicySet`] is the workers' policy at one time. It contains neither labels nor selectors:
//!
//! ```text
//! address ─▶ identity, endpoint, node, port   one hash map for the cluster, in shards
//! endpoint, direction ─▶ open | rule table    equal rules share one table
//! in a rule table, a row being one bit a rule:
//!   identity ─▶ row      two-level array: the pods that selectors name
//!   address  ─▶ row      trie: address blocks, excepts and shadowing resolved when it is built
//!   (protocol, port) ─▶ row   two-level array: ranges resolved when it is built
//! first rule = lowest bit of ((identity's row | address's row) & port's row); without one an isolated endpoint denies
//! ```
//!
//! The rules of ClusterNetworkPolicies are bits of the same rows, in the order of their tiers ([`TieredTable`]), so the
//! lowest bit is the rule that decides, and a Pass masks the bits of its tier.
//!
//! So the cost of a new connection does not depend on the number of policies and pods. Rules of
//! one endpoint cost a little only in wide rows: one step for each 4,096 rules in which both rows have bits (`rows`). A bit is a *rule*, not a policy: peers and ports of different rules never combine. Rules for every peer
//! are in every address row, and rules without ports in every port row.
//!
//! All parts are immutable and reference-counted. [`PolicySet::update`] copies what a change affects (a shard, a chunk
//! of endpoints, a page of identities) and shares the rest with the previous set, which readers keep unchanged.

mod addresses;
mod blocks;
mod endpoints;
mod hits;
mod ids;
mod notes;
mod peers;
mod ports;
mod rows;
mod table;
mod tiers;
mod update;
mod verdict;

#[cfg(test)]
mod tests;

pub use addresses::AddressOwner;
pub use blocks::AddressBlock;
pub use endpoints::{Endpoint, EndpointPolicy};
pub use hits::RuleHits;
pub use ids::{EndpointId, NodeId};
pub use notes::TableNotes;
pub use peers::Identity;
pub use ports::{PortProtocol, PortRange};
pub use rows::RuleSet;
pub use table::{PeerSpec, PortSpec, RuleName, RuleSpec, RuleTable};
pub use tiers::{RuleAction, TieredTable};
pub use update::PolicySetUpdate;
pub use verdict::{Direction, DirectionVerdict, EvaluationForm, PolicyVerdict, RuleRef, RuleScope};

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::names::{LearntNames, NameTime};
use crate::packet::{Address, Flow};

pub(crate) use addresses::AddressEntry;
use addresses::{AddressMap, NONE};
use endpoints::Endpoints;
use tiers::{Given, TierOutcome};

pub type AddressSet = FxHashSet<Address>;

/// Source and destination of a flow, as far as they are known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowEnds<'a> {
    pub(crate) src: &'a AddressEntry,
    pub(crate) dst: &'a AddressEntry,
}

/// Addresses, tables and endpoints at one time. Immutable, cheap to clone; the default has no endpoint.
#[derive(Clone, Debug, Default)]
pub struct PolicySet {
    addresses: AddressMap,
    endpoints: Endpoints,
    rule_scope: RuleScope,
    /// By endpoint, what those have learnt whose egress rules have domain names.
    names: Arc<FxHashMap<u32, Arc<LearntNames>>>,
}

impl PolicySet {
    /// Evaluates policy for a flow in the direction in which it is opened. The destination port counts for TCP, UDP and
    /// SCTP; other protocols only match rules without ports. Domain names match nothing. Allocates nothing.
    #[inline]
    pub fn evaluate(&self, flow: &Flow) -> PolicyVerdict {
        self.evaluate_between(flow, self.ends(flow), NameTime::Never)
    }

    /// Evaluates policy for a flow that leaves the node as it is: also at an address of a Service, for that address.
    pub(crate) fn evaluate_as_it_is(&self, flow: &Flow, time: NameTime) -> PolicyVerdict {
        let FlowEnds { src, dst } = self.ends(flow);
        self.evaluate_between(flow, FlowEnds { src, dst: &dst.without_service() }, time)
    }

    /// Whether policy does not let the receiver ask the sender, whose address is a Service's, which no rule has given it: until something
    /// translates what a pod sends to a Service, its egress policy is postponed.
    #[cold]
    pub(crate) fn is_unasked(&self, flow: &Flow) -> bool {
        !self.evaluate_as_it_is(&flow.reversed(), NameTime::Ever).egress.is_allowed()
    }

    /// Evaluates policy for a flow of which the node's stack has translated the source, and nobody knows what it was: no rule for some
    /// sources allows it.
    pub(crate) fn evaluate_without_source(&self, flow: &Flow, ends: FlowEnds<'_>) -> PolicyVerdict {
        PolicyVerdict { egress: ends.src.without_endpoint(), ingress: self.evaluate_unknown(ends.dst, flow) }
    }

    /// [`PolicySet::evaluate`] with what the source has learnt of domain names.
    pub fn evaluate_named(&self, flow: &Flow, time: NameTime) -> PolicyVerdict {
        self.evaluate_between(flow, self.ends(flow), time)
    }

    /// Evaluates policy for a flow as an earlier evaluation did.
    pub fn evaluate_as(&self, flow: &Flow, form: EvaluationForm, time: NameTime) -> PolicyVerdict {
        match form {
            EvaluationForm::Plain => self.evaluate_named(flow, time),
            EvaluationForm::Forwarded => self.evaluate_forwarded(flow, self.ends(flow), time),
            EvaluationForm::Unknown => self.evaluate_without_source(flow, self.ends(flow)),
            EvaluationForm::Hairpin => self.evaluate_hairpin(flow, time),
        }
    }

    /// Whether the egress rules of any endpoint have domain names that are followed.
    #[inline]
    pub fn has_names(&self) -> bool {
        !self.names.is_empty()
    }

    /// The names that the pod of this node with this address has learnt, if its egress rules have domain names that are followed.
    pub(crate) fn names_of(&self, address: Address) -> Option<&LearntNames> {
        let entry = self.find(address);
        if entry.endpoint == NONE { None } else { self.names.get(&entry.endpoint).map(|names| &**names) }
    }

    /// The same, for who looks in.
    pub fn learnt_by(&self, pod: Address) -> Option<&LearntNames> {
        self.names_of(pod)
    }

    /// The names that an endpoint has learnt, if the rules of this direction may ask for it.
    #[inline]
    fn given(&self, tiers: &TieredTable, own: &AddressEntry, time: NameTime) -> Given<'_> {
        if !tiers.has_names() || time == NameTime::Never {
            return None;
        }
        self.names.get(&own.endpoint).map(|names| (&**names, time))
    }

    /// Whether no policy selects either end in any direction. A node without us would forward such packets whatever their
    /// connection, and so do we. Not if neither end is enforced here, or what is known of one is not all.
    pub(crate) fn is_free(&self, FlowEnds { src, dst }: FlowEnds<'_>) -> bool {
        let is_open = |end: &AddressEntry| match end.endpoint {
            NONE => !end.is_local_pod(),
            number => matches!(
                self.endpoints.find(number),
                Some(Endpoint { egress: EndpointPolicy::Open, ingress: EndpointPolicy::Open })
            ),
        };
        (src.endpoint != NONE || dst.endpoint != NONE) && is_open(src) && is_open(dst)
    }

    /// Counts the rules that decided a connection that is opened, or denied. Only this worker may call it with its number.
    pub fn count(&self, worker: usize, verdict: &PolicyVerdict) {
        for rule in [verdict.egress.rule(), verdict.ingress.rule()].into_iter().flatten() {
            let table = self.direction(rule.endpoint, rule.direction).and_then(EndpointPolicy::table);
            if let Some(table) = table {
                table.hits().add(worker, rule.rule);
            }
        }
    }

    #[inline(always)]
    pub(crate) fn find(&self, address: Address) -> &AddressEntry {
        self.addresses.find(address)
    }

    #[inline]
    pub(crate) fn ends(&self, flow: &Flow) -> FlowEnds<'_> {
        FlowEnds { src: self.find(flow.src), dst: self.find(flow.dst) }
    }

    /// Like [`PolicySet::evaluate`], for a flow whose ends were looked up.
    #[inline]
    pub(crate) fn evaluate_between(
        &self,
        flow: &Flow,
        FlowEnds { src, dst }: FlowEnds<'_>,
        time: NameTime,
    ) -> PolicyVerdict {
        if is_exempt(src, dst) {
            return self.evaluate_exempt(flow, src, dst, time);
        }
        self.evaluate_rules(flow, FlowEnds { src, dst }, time)
    }

    /// The same for a flow that the node's stack forwards: its source has no exemption as the node's. If it is an address of the
    /// receiving pod's node, the node gave it to the packet and nobody knows what it was: no rule for some sources allows it.
    pub(crate) fn evaluate_forwarded(&self, flow: &Flow, ends: FlowEnds<'_>, time: NameTime) -> PolicyVerdict {
        if ends.src.is_node() && ends.src.node == ends.dst.node {
            return self.evaluate_without_source(flow, ends);
        }
        self.evaluate_between(flow, ends, time)
    }

    fn evaluate_unknown(&self, own: &AddressEntry, flow: &Flow) -> DirectionVerdict {
        if own.endpoint == NONE {
            return own.without_endpoint();
        }
        let Some(endpoint) = self.endpoints.find(own.endpoint) else { return DirectionVerdict::Denied };
        match &endpoint.ingress {
            EndpointPolicy::Open => DirectionVerdict::Open,
            EndpointPolicy::Isolated(table) => match table.find_for_every_peer(flow.protocol, flow.dst_port) {
                Some(rule) => DirectionVerdict::Allowed(RuleRef {
                    endpoint: EndpointId(own.endpoint),
                    direction: Direction::Ingress,
                    rule,
                }),
                None => DirectionVerdict::Denied,
            },
            EndpointPolicy::Tiered(tiers) => {
                tiered(tiers.evaluate_unknown(flow.protocol, flow.dst_port), own.endpoint, Direction::Ingress)
            }
        }
    }

    #[inline]
    fn evaluate_rules(&self, flow: &Flow, FlowEnds { src, dst }: FlowEnds<'_>, time: NameTime) -> PolicyVerdict {
        let egress = match dst.is_service() && src.endpoint != NONE {
            true => DirectionVerdict::Postponed,
            false => self.evaluate_direction(src, Direction::Egress, dst, flow.dst, flow, time),
        };
        let ingress = self.evaluate_direction(dst, Direction::Ingress, src, flow.src, flow, NameTime::Never);
        match self.rule_scope {
            RuleScope::BothSides => PolicyVerdict { egress, ingress },
            RuleScope::ClusterWide => self.cluster_wide(egress, ingress),
        }
    }

    /// Between a pod and itself, or a pod and its node. Only ClusterNetworkPolicies can deny, and only egress to the
    /// node: no peer of an ingress rule can be a node.
    #[cold]
    fn evaluate_exempt(&self, flow: &Flow, src: &AddressEntry, dst: &AddressEntry, time: NameTime) -> PolicyVerdict {
        let mut egress = exempt(src);
        if dst.is_node()
            && let Some(Endpoint { egress: EndpointPolicy::Tiered(tiers), .. }) = self.endpoints.find(src.endpoint)
        {
            let given = self.given(tiers, src, time);
            let outcome = tiers.evaluate(dst.identity, flow.dst, flow.protocol, flow.dst_port, true, given);
            egress = tiered(outcome, src.endpoint, Direction::Egress);
        }
        PolicyVerdict { egress, ingress: exempt(dst) }
    }

    /// Evaluates policy for a flow of a pod to itself through a Service. NetworkPolicies do not apply, as between a pod and
    /// its node; ClusterNetworkPolicies do.
    #[cold]
    pub(crate) fn evaluate_hairpin(&self, flow: &Flow, time: NameTime) -> PolicyVerdict {
        let own = self.find(flow.src);
        let Some(endpoint) = self.endpoints.find(own.endpoint).filter(|_| own.endpoint != NONE) else {
            return PolicyVerdict { egress: own.without_endpoint(), ingress: own.without_endpoint() };
        };
        let evaluate = |policy: &EndpointPolicy, direction| match policy {
            EndpointPolicy::Tiered(tiers) => {
                let given = self.given(tiers, own, time);
                let outcome = tiers.evaluate(own.identity, flow.src, flow.protocol, flow.dst_port, true, given);
                tiered(outcome, own.endpoint, direction)
            }
            EndpointPolicy::Open | EndpointPolicy::Isolated(_) => DirectionVerdict::Exempt,
        };
        PolicyVerdict {
            egress: evaluate(&endpoint.egress, Direction::Egress),
            ingress: evaluate(&endpoint.ingress, Direction::Ingress),
        }
    }

    /// A NetworkPolicy's rule of one direction overrules the isolation of the other.
    fn cluster_wide(&self, egress: DirectionVerdict, ingress: DirectionVerdict) -> PolicyVerdict {
        use DirectionVerdict::{Allowed, AllowedByPeer, Denied};
        match (egress, ingress) {
            (Allowed(rule), Denied) if self.is_of_network_policy(rule) => {
                PolicyVerdict { egress, ingress: AllowedByPeer(rule) }
            }
            (Denied, Allowed(rule)) if self.is_of_network_policy(rule) => {
                PolicyVerdict { egress: AllowedByPeer(rule), ingress }
            }
            _ => PolicyVerdict { egress, ingress },
        }
    }

    fn is_of_network_policy(&self, rule: RuleRef) -> bool {
        match self.direction(rule.endpoint, rule.direction) {
            None | Some(EndpointPolicy::Open) => false,
            Some(EndpointPolicy::Isolated(_)) => true,
            Some(EndpointPolicy::Tiered(tiers)) => tiers.is_of_network_policy(rule.rule),
        }
    }

    fn direction(&self, endpoint: EndpointId, direction: Direction) -> Option<&EndpointPolicy> {
        let endpoint = self.endpoint(endpoint)?;
        Some(match direction {
            Direction::Egress => &endpoint.egress,
            Direction::Ingress => &endpoint.ingress,
        })
    }

    #[inline]
    fn evaluate_direction(
        &self,
        own: &AddressEntry,
        direction: Direction,
        peer: &AddressEntry,
        address: Address,
        flow: &Flow,
        time: NameTime,
    ) -> DirectionVerdict {
        if own.endpoint == NONE {
            return own.without_endpoint();
        }
        let Some(endpoint) = self.endpoints.find(own.endpoint) else { return DirectionVerdict::Denied };
        let isolation = match direction {
            Direction::Egress => &endpoint.egress,
            Direction::Ingress => &endpoint.ingress,
        };
        match isolation {
            EndpointPolicy::Open => DirectionVerdict::Open,
            EndpointPolicy::Isolated(table) => match table.find(peer.identity, address, flow.protocol, flow.dst_port) {
                Some(rule) => {
                    DirectionVerdict::Allowed(RuleRef { endpoint: EndpointId(own.endpoint), direction, rule })
                }
                None => DirectionVerdict::Denied,
            },
            EndpointPolicy::Tiered(tiers) => {
                let given = self.given(tiers, own, time);
                let outcome = tiers.evaluate(peer.identity, address, flow.protocol, flow.dst_port, false, given);
                tiered(outcome, own.endpoint, direction)
            }
        }
    }

    /// The rules of one direction of a flow that passed it on to the next tier, in order, before this verdict. For display.
    pub fn passes(&self, flow: &Flow, direction: Direction, verdict: DirectionVerdict) -> Vec<RuleRef> {
        let FlowEnds { src, dst } = self.ends(flow);
        let (own, peer, address) = match direction {
            Direction::Egress => (src, dst, flow.dst),
            Direction::Ingress => (dst, src, flow.src),
        };
        // Neither a pod itself nor ingress from its node is subject to a rule.
        let exempt = is_exempt(src, dst) && (direction == Direction::Ingress || !dst.is_node());
        let endpoint = EndpointId(own.endpoint);
        match self.direction(endpoint, direction) {
            Some(EndpointPolicy::Tiered(tiers)) if own.endpoint != NONE && !exempt => {
                let decided = verdict.rule().filter(|rule| rule.direction == direction);
                let rules = tiers.passes(peer.identity, address, flow.protocol, flow.dst_port);
                // A rule that accepts by a name may stand before one that would pass the flow on.
                let before = rules.into_iter().filter(|rule| decided.is_none_or(|decided| *rule < decided.rule));
                before.map(|rule| RuleRef { endpoint, direction, rule }).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The addresses at which egress is postponed ([`PolicySetUpdate::set_services`]).
    pub fn services(&self) -> &Arc<AddressSet> {
        self.addresses.services()
    }

    /// Owner of an address, if known to this set.
    pub fn owner(&self, address: Address) -> Option<AddressOwner> {
        self.addresses.find(address).owner()
    }

    pub fn endpoint(&self, id: EndpointId) -> Option<&Endpoint> {
        self.endpoints.find(id.0)
    }

    /// The name of a rule returned by this set.
    pub fn rule_name(&self, rule: RuleRef) -> Option<&RuleName> {
        self.direction(rule.endpoint, rule.direction)?.table()?.name(rule.rule)
    }

    /// Whether every evaluation gives the same, by the same tables, as in the other set, of which this is a copy with changes that
    /// have changed nothing. Two sets that became equal in different ways are not the same.
    pub fn is_same(&self, other: &Self) -> bool {
        let Self { addresses, endpoints, rule_scope, names } = self;
        addresses.is_same(&other.addresses)
            && endpoints.is_same(&other.endpoints)
            && *rule_scope == other.rule_scope
            && Arc::ptr_eq(names, &other.names)
    }

    /// Starts the next set from this one, which stays unchanged.
    pub fn update(&self) -> PolicySetUpdate {
        PolicySetUpdate { set: self.clone() }
    }

    pub fn statistics(&self) -> PolicySetStatistics {
        let directions = self.endpoints.iter().flat_map(|endpoint| [&endpoint.egress, &endpoint.ingress]);
        let mut tables: Vec<&RuleTable> = directions.filter_map(EndpointPolicy::table).collect();
        tables.sort_unstable_by_key(|table| std::ptr::from_ref(*table));
        tables.dedup_by_key(|table| std::ptr::from_ref(*table));
        PolicySetStatistics {
            addresses: self.addresses.owned(),
            endpoints: self.endpoints.len(),
            tables: tables.len(),
            rules: tables.iter().map(|table| table.rules()).sum(),
            bytes: self.addresses.size() + tables.iter().map(|table| table.size()).sum::<usize>(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PolicySetStatistics {
    pub addresses: usize,
    pub endpoints: usize,
    pub tables: usize,
    pub rules: usize,
    /// Approximate memory of the lookup structures, in bytes.
    pub bytes: usize,
}

#[inline]
fn is_exempt(src: &AddressEntry, dst: &AddressEntry) -> bool {
    (src.endpoint != NONE && (src.endpoint == dst.endpoint || (dst.is_node() && dst.node == src.node)))
        || (dst.endpoint != NONE && src.is_node() && src.node == dst.node)
}

fn exempt(end: &AddressEntry) -> DirectionVerdict {
    if end.endpoint == NONE { end.without_endpoint() } else { DirectionVerdict::Exempt }
}

#[inline]
fn tiered(outcome: TierOutcome, endpoint: u32, direction: Direction) -> DirectionVerdict {
    let rule = |rule| RuleRef { endpoint: EndpointId(endpoint), direction, rule };
    match outcome {
        TierOutcome::Accepted(number) => DirectionVerdict::Allowed(rule(number)),
        TierOutcome::Denied(number) => DirectionVerdict::DeniedBy(rule(number)),
        TierOutcome::Isolated => DirectionVerdict::Denied,
        TierOutcome::OwnNode => DirectionVerdict::Exempt,
        TierOutcome::Default => DirectionVerdict::Default,
    }
}
