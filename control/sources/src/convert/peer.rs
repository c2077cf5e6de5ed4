//! Peers of policies: selectors and address blocks.

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::networking::v1::{IPBlock, NetworkPolicyPeer};
use penstock_policy::model::{Block, Peer};

use super::selector::selector;
use super::{At, Invalid, Problem};

/// A peer of a policy's rule.
pub(super) fn peer(peer: &NetworkPolicyPeer, at: &At<'_>) -> Result<Peer, Invalid> {
    let pods_at = at.field("podSelector");
    let namespaces_at = at.field("namespaceSelector");
    match (&peer.ip_block, &peer.namespace_selector, &peer.pod_selector) {
        (None, None, None) => Err(at.invalid(Problem::EmptyPeer)),
        (Some(ip_block), None, None) => Ok(Peer::Block(block(ip_block, &at.field("ipBlock"))?)),
        (Some(_), Some(_), _) => Err(at.invalid(Problem::BlockBesideSelector("namespaceSelector"))),
        (Some(_), None, Some(_)) => Err(at.invalid(Problem::BlockBesideSelector("podSelector"))),
        (None, None, Some(pods)) => Ok(Peer::Pods(selector(pods, &pods_at)?)),
        (None, Some(namespaces), None) => Ok(Peer::Namespaces(selector(namespaces, &namespaces_at)?)),
        (None, Some(namespaces), Some(pods)) => Ok(Peer::PodsInNamespaces {
            namespaces: selector(namespaces, &namespaces_at)?,
            pods: selector(pods, &pods_at)?,
        }),
    }
}

fn block(block: &IPBlock, at: &At<'_>) -> Result<Block, Invalid> {
    let cidr = cidr(&block.cidr, &at.field("cidr"))?;
    let excepts_at = at.field("except");
    let except = block.except.iter().flatten().enumerate().map(|(i, text)| {
        let except_at = excepts_at.index(i);
        let except = self::cidr(text, &except_at)?;
        match cidr.contains(&except) && except.prefix_len() > cidr.prefix_len() {
            true => Ok(except),
            false => Err(except_at.invalid(Problem::ExceptOutside { except, cidr })),
        }
    });
    Ok(Block { cidr, except: except.collect::<Result<_, _>>()? })
}

/// A block, its host bits cleared: the API takes `10.0.0.1/8` for `10.0.0.0/8`.
fn cidr(text: &str, at: &At<'_>) -> Result<IpNet, Invalid> {
    let net: IpNet = text.parse().map_err(|_| at.invalid(Problem::Cidr(text.to_owned())))?;
    match net.addr() {
        // A prefix shorter than the mapping's own covers more than IPv4, and means what it says.
        IpAddr::V6(address) if address.to_ipv4_mapped().is_some() && net.prefix_len() >= 96 => {
            Err(at.invalid(Problem::Mapped(text.to_owned())))
        }
        _ => Ok(net.trunc()),
    }
}
