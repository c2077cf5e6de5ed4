//! The pods in scope and the tables that they use.

use std::sync::Arc;

use penstock_dataplane::names::{LearntNames, NamedPod};
use penstock_dataplane::policy::{Direction, EndpointPolicy};
use rustc_hash::FxHashSet;

use crate::compile::TableKey;
use crate::model::{ObjectKey, Pod, PortProtocol};
use crate::state::PodId;

use super::identities::{Identities, identity};
use super::linked::LinkedRules;

/// Whose an endpoint is: numbers of pods are used again, and so are their names.
pub(super) type EndpointOwner = (ObjectKey, Option<i64>);

/// The owner that a pod is.
pub(super) fn owner_of(pod: &Pod) -> EndpointOwner {
    (pod.key.clone(), pod.lifetime.created)
}

/// The tables of both directions; `None` where no policy applies.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Sides {
    pub(super) egress: Option<u32>,
    pub(super) ingress: Option<u32>,
}

impl Sides {
    pub(super) fn tables(self) -> impl Iterator<Item = u32> {
        self.egress.into_iter().chain(self.ingress)
    }

    pub(super) fn get(self, direction: Direction) -> Option<u32> {
        match direction {
            Direction::Egress => self.egress,
            Direction::Ingress => self.ingress,
        }
    }
}

/// A pod in scope.
#[derive(Debug)]
pub(super) struct EndpointRecord {
    pub(super) pod: PodId,
    pub(super) owner: EndpointOwner,
    /// The tables of its policies.
    pub(super) wanted: Sides,
    /// The tables that are in effect, which differ while those of its policies are built; `None` until a new pod's first are.
    pub(super) served: Option<Sides>,
    /// Its place among those that wait for tables.
    pub(super) waits_since: Option<u64>,
    /// The domain names that this pod has learnt since its egress rules had some.
    pub(super) names: Option<(NamedPod, Arc<LearntNames>)>,
}

impl EndpointRecord {
    pub(super) fn new(pod: PodId, owner: EndpointOwner) -> Self {
        Self { pod, owner, wanted: Sides::default(), served: None, waits_since: None, names: None }
    }

    /// The sides that workers see. A table that is not built yet denies.
    pub(super) fn in_effect(&self) -> Sides {
        self.served.unwrap_or(self.wanted)
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.served != Some(self.wanted)
    }

    /// The tables that it has or waits for; may repeat.
    pub(super) fn tables(&self) -> impl Iterator<Item = u32> {
        self.wanted.tables().chain(self.served.unwrap_or_default().tables())
    }
}

/// How far a table is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// None of its rules is compiled.
    Waiting,
    /// Some are. Endpoints that want it keep to it from here on.
    Linking,
    /// Another thread builds it from identities among which these have changed since.
    Building(FxHashSet<u32>),
    Built,
}

#[derive(Debug)]
pub(super) struct TableRecord {
    pub(super) key: Arc<TableKey>,
    /// The endpoints that have it or wait for it.
    pub(super) endpoints: FxHashSet<u32>,
    /// The port names whose numbers on peers its rules depend on.
    pub(super) names: Vec<(String, PortProtocol)>,
    pub(super) stage: Stage,
    pub(super) linked: LinkedRules,
    /// One that denies everything until it is built.
    pub(super) table: EndpointPolicy,
}

impl TableRecord {
    /// Whether its turn to be built aside has begun.
    pub(super) fn has_turn(&self) -> bool {
        matches!(self.stage, Stage::Linking | Stage::Building(_))
    }

    /// Takes note of identities that were added or removed.
    pub(super) fn patch(&mut self, changed: FxHashSet<u32>, identities: &Identities) {
        if changed.is_empty() {
            return;
        }
        let rows = changed.into_iter().map(|number| {
            let peer_sets = identities.peer_sets(number);
            (identity(number), if peer_sets.is_empty() { None } else { self.linked.row(peer_sets) })
        });
        self.table = match &self.table {
            EndpointPolicy::Open => unreachable!("a table is never open"),
            EndpointPolicy::Isolated(table) => EndpointPolicy::Isolated(Arc::new(table.with_identities(rows))),
            EndpointPolicy::Tiered(tiers) => EndpointPolicy::Tiered(Arc::new(tiers.with_identities(rows))),
        };
    }
}
