//! The endpoints whose policies are enforced, by number.

use std::sync::Arc;

use super::addresses::EndpointId;
use super::table::RuleTable;

/// Policy of one direction of an endpoint.
#[derive(Clone, Debug)]
pub enum EndpointPolicy {
    /// No policy selects it for this direction: everything is allowed.
    Open,
    /// Isolated: only what a rule of this table allows.
    Isolated(Arc<RuleTable>),
}

/// Policy of both directions of an endpoint.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// What it may send.
    pub egress: EndpointPolicy,
    /// What it may receive.
    pub ingress: EndpointPolicy,
}

/// Endpoints per chunk.
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
    /// The endpoint of this number.
    #[inline]
    pub(super) fn find(&self, endpoint: u32) -> Option<&Endpoint> {
        self.chunks.get(endpoint as usize / CHUNK)?[endpoint as usize % CHUNK].as_ref()
    }

    /// Sets or removes an endpoint.
    pub(super) fn set(&mut self, id: EndpointId, endpoint: Option<Endpoint>) {
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

    /// Number of endpoints.
    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }

    /// Every endpoint.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.chunks.iter().flat_map(|chunk| chunk.iter().flatten())
    }
}
