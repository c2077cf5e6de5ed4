//! Address blocks that excepts, or other blocks, make pointless.

use ipnet::IpNet;
use penstock_policy::model::{IpBlock, Peer};

use super::FindingKind;

/// Whether the excepts of a block leave nothing of it.
pub(super) fn is_covered(block: &IpBlock) -> bool {
    // Neighbours merge, so that together they are the block itself if they cover it.
    IpNet::aggregate(&block.except).contains(&block.cidr)
}

/// Findings about the block at an index of a rule's peers: the index of the except concerned, if any, and the message.
pub(super) fn pointless(block: &IpBlock, place: usize, peers: &[Peer]) -> Vec<(Option<usize>, FindingKind, String)> {
    if is_covered(block) {
        return vec![(
            None,
            FindingKind::NeverMatches,
            format!("its excepts cover all of {}: no address can match", block.cidr),
        )];
    }
    let mut found = Vec::new();
    let others = peers.iter().enumerate().filter_map(|(other, peer)| match peer {
        Peer::IpBlock(block) if other != place => Some((other, block)),
        _ => None,
    });
    let others: Vec<(usize, &IpBlock)> = others.collect();
    if let Some((other, _)) =
        others.iter().find(|(other, outer)| is_within(block, outer) && (*other < place || !is_within(outer, block)))
    {
        found.push((None, FindingKind::Shadowed, format!("{} is in the block of peer {other} already", block.cidr)));
    }
    for (i, except) in block.except.iter().enumerate() {
        let wider = block
            .except
            .iter()
            .enumerate()
            .find(|(j, wider)| *j != i && wider.contains(except) && (*wider != except || *j < i));
        if let Some((_, wider)) = wider {
            found.push((Some(i), FindingKind::Shadowed, format!("{except} is in except {wider} already")));
        } else if let Some((other, _)) = others.iter().find(|(_, outer)| allows_all_of(outer, except)) {
            let message = format!("{except} has no effect: the block of peer {other} of the same rule has it");
            found.push((Some(i), FindingKind::Shadowed, message));
        }
    }
    found
}

/// Whether all that a block matches is matched by another.
fn is_within(block: &IpBlock, outer: &IpBlock) -> bool {
    let excepted =
        |except: &IpNet| !overlap(except, &block.cidr) || block.except.iter().any(|own| own.contains(except));
    outer.cidr.contains(&block.cidr) && outer.except.iter().all(excepted)
}

fn allows_all_of(block: &IpBlock, net: &IpNet) -> bool {
    block.cidr.contains(net) && !block.except.iter().any(|except| overlap(except, net))
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(cidr: &str, except: &[&str]) -> IpBlock {
        IpBlock { cidr: cidr.parse().unwrap(), except: except.iter().map(|net| net.parse().unwrap()).collect() }
    }

    #[test]
    fn excepts_that_leave_nothing_are_reported() {
        assert!(is_covered(&block("10.0.0.0/8", &["10.0.0.0/9", "10.128.0.0/9"])));
        assert!(is_covered(&block("10.0.0.0/8", &["10.64.0.0/10", "10.0.0.0/10", "10.128.0.0/10", "10.192.0.0/10"])));
        assert!(!is_covered(&block("10.0.0.0/8", &["10.0.0.0/9", "10.128.0.0/10"])));
        assert!(!is_covered(&block("10.0.0.0/8", &[])));
    }

    #[test]
    fn blocks_and_excepts_without_effect_are_reported() {
        let said = |blocks: &[IpBlock]| -> Vec<(usize, Option<usize>)> {
            let peers: Vec<Peer> = blocks.iter().cloned().map(Peer::IpBlock).collect();
            let of =
                |(place, block)| pointless(block, place, &peers).into_iter().map(move |(except, ..)| (place, except));
            blocks.iter().enumerate().flat_map(of).collect()
        };
        assert_eq!(said(&[block("10.0.0.0/8", &[]), block("10.1.0.0/16", &[])]), [(1, None)]);
        assert_eq!(said(&[block("10.0.0.0/8", &[]), block("10.0.0.0/8", &[])]), [(1, None)], "of two equal ones, one");
        assert_eq!(said(&[block("10.0.0.0/8", &["10.1.0.0/16"]), block("10.1.2.0/24", &[])]), [], "a part comes back");
        assert_eq!(said(&[block("10.0.0.0/8", &["10.1.0.0/16"]), block("10.1.0.0/16", &[])]), [(0, Some(0))]);
        assert_eq!(said(&[block("10.0.0.0/8", &["10.1.0.0/16", "10.1.2.0/24"])]), [(0, Some(1))]);
        assert_eq!(said(&[block("10.0.0.0/8", &["10.1.0.0/16", "10.1.0.0/16"])]), [(0, Some(1))]);
        assert_eq!(said(&[block("10.0.0.0/8", &["10.1.0.0/16"]), block("10.0.0.0/8", &["10.1.0.0/16"])]), [(1, None)]);
    }
}
