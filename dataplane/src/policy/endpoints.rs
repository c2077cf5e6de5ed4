//! The endpoints whose policies are enforced, by number.

use std::sync::Arc;

use super::EndpointId;
use super::table::RuleTable;
use super::tiers::TieredTable;

#[derive(Clone, Debug)]
pub enum EndpointPolicy {
    /// No policy applies to it in this direction: everything is allowed.
    Open,
    /// Isolated by NetworkPolicies alone: only what a rule of this table allows.
    Isolated(Arc<RuleTable>),
    /// ClusterNetworkPolicies apply, with or without NetworkPolicies.
    Tiered(Arc<TieredTable>),
}

impl EndpointPolicy {
    pub fn table(&self) -> Option<&RuleTable> {
        match self {
            Self::Open => None,
            Self::Isolated(table) => Some(table),
            Self::Tiered(tiers) => Some(tiers.table()),
        }
    }

    /// Whether both are the same table, or both open.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Open, Self::Open) => true,
            (Self::Isolated(table), Self::Isolated(other)) => Arc::ptr_eq(table, other),
            (Self::Tiered(tiers), Self::Tiered(other)) => Arc::ptr_eq(tiers, other),
            _ => false,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Endpoint {
    pub egress: EndpointPolicy,
    pub ingress: EndpointPolicy,
}

impl Endpoint {
    /// Whether both have the same tables, or neither is there.
    pub fn is_same(one: Option<&Self>, other: Option<&Self>) -> bool {
        match (one, other) {
            (Some(one), Some(other)) => one.egress.is_same(&other.egress) && one.ingress.is_same(&other.ingress),
            (None, None) => true,
            _ => false,
        }
    }
}

const CHUNK: usize = 32;

type Chunk = [Option<Endpoint>; CHUNK];

/// Chunks of endpoints; a modified copy shares all chunks but one.
#[derive(Clone, Debug)]
pub(super) struct Endpoints {
    chunks: Arc<[Arc<Chunk>]>,
}

impl Default for Endpoints {
    fn default() -> Self {
        Self { chunks: Arc::new([]) }
    }
}

impl Endpoints {
    #[inline]
    pub(super) fn find(&self, endpoint: u32) -> Option<&Endpoint> {
        self.chunks.get(endpoint as usize / CHUNK)?[endpoint as usize % CHUNK].as_ref()
    }

    /// Whether this is an unchanged copy of the other.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.chunks, &other.chunks)
    }

    /// Sets an endpoint. If nothing differs, everything stays shared.
    pub(super) fn set(&mut self, id: EndpointId, endpoint: Option<Endpoint>) {
        if Endpoint::is_same(self.find(id.0), endpoint.as_ref()) {
            return;
        }
        let (chunk, slot) = (id.0 as usize / CHUNK, id.0 as usize % CHUNK);
        if self.chunks.len() <= chunk {
            // Doubled, so that adding endpoints one by one copies each pointer only a few times.
            let length = (chunk + 1).next_power_of_two();
            let empty = Arc::new([const { None }; CHUNK]);
            let fresh = std::iter::repeat_n(empty, length - self.chunks.len());
            self.chunks = self.chunks.iter().cloned().chain(fresh).collect();
        }
        Arc::make_mut(&mut Arc::make_mut(&mut self.chunks)[chunk])[slot] = endpoint;
    }

    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.chunks.iter().flat_map(|chunk| chunk.iter().flatten())
    }
}
