//! Numbers of pods and nodes.

/// A pod whose policies are enforced on this node. Numbered from 0; small numbers are reused first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(transparent)]
pub struct EndpointId(pub u32);

/// A node of the cluster; any number except `u32::MAX`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(transparent)]
pub struct NodeId(pub u32);
