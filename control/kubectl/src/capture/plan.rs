//! Decides what to capture on which node.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::super::cluster::{PodName, PodPlace};

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Plan {
    /// By node, the options that only it gets; `None`: all nodes.
    pub(super) nodes: Option<BTreeMap<String, Vec<String>>>,
    /// Addresses of both ends, where a node cannot choose by them.
    pub(super) between: Option<(Vec<IpAddr>, Vec<IpAddr>)>,
}

/// The packets of one pod, on its node.
pub(super) fn of_pod(pod: &PodName, place: PodPlace) -> Plan {
    let nodes = BTreeMap::from([(place.node, vec![format!("--pod={pod}")])]);
    Plan { nodes: Some(nodes), between: None }
}

/// The packets between two pods: each node chooses by its own pod and the other's address, if there is but one.
pub(super) fn between((from, one): (&PodName, &PodPlace), (to, other): (&PodName, &PodPlace)) -> Plan {
    let options = |pod: &PodName, peer: &PodPlace| match peer.addresses[..] {
        [address] => vec![format!("--pod={pod}"), format!("--host={address}")],
        _ => vec![format!("--pod={pod}")],
    };
    let nodes = BTreeMap::from([(other.node.clone(), options(to, one)), (one.node.clone(), options(from, other))]);
    let is_plain = one.addresses.len() == 1 && other.addresses.len() == 1;
    let between = (!is_plain).then(|| (one.addresses.clone(), other.addresses.clone()));
    Plan { nodes: Some(nodes), between }
}

/// Whether a frame is from one of these addresses to one of those, or back.
pub(super) fn is_between(frame: &[u8], (one, other): &(Vec<IpAddr>, Vec<IpAddr>)) -> bool {
    let address = |at: std::ops::Range<usize>| -> Option<IpAddr> {
        let bytes = frame.get(at)?;
        match bytes.len() {
            4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
            _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        }
    };
    let ends = match frame.get(12..14) {
        Some([0x08, 0x00]) => address(26..30).zip(address(30..34)),
        Some([0x86, 0xdd]) => address(22..38).zip(address(38..54)),
        _ => None,
    };
    ends.is_some_and(|(from, to)| {
        one.contains(&from) && other.contains(&to) || one.contains(&to) && other.contains(&from)
    })
}
