//! Address blocks without their excepts.

use ipnet::IpNet;

use crate::model::IpBlock;

/// The prefixes of a block minus its excepts, ascending and disjoint.
pub(crate) fn without_excepts(block: &IpBlock) -> Vec<IpNet> {
    let mut rest = Vec::new();
    subtract(block.cidr, &block.except.iter().collect::<Vec<_>>(), &mut rest);
    rest
}

fn subtract(net: IpNet, excepts: &[&IpNet], rest: &mut Vec<IpNet>) {
    if excepts.iter().any(|except| except.contains(&net)) {
        return;
    }
    let inside: Vec<&IpNet> = excepts.iter().copied().filter(|except| net.contains(*except)).collect();
    if inside.is_empty() {
        return rest.push(net);
    }
    // The except lies strictly inside, so the net can be halved.
    if let Ok(halves) = net.subnets(net.prefix_len() + 1) {
        halves.for_each(|half| subtract(half, &inside, rest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subtracting_excepts_leaves_the_rest_of_the_block() {
        for (cidr, except, expected) in [
            ("10.0.0.0/8", vec![], vec!["10.0.0.0/8"]),
            ("10.0.0.0/30", vec!["10.0.0.1/32"], vec!["10.0.0.0/32", "10.0.0.2/31"]),
            ("10.0.0.0/30", vec!["10.0.0.0/31", "10.0.0.1/32"], vec!["10.0.0.2/31"]),
            ("0.0.0.0/0", vec!["0.0.0.0/1", "128.0.0.0/1"], vec![]),
            ("fd00::/126", vec!["fd00::3/128"], vec!["fd00::/127", "fd00::2/128"]),
            ("10.0.0.0/8", vec!["fd00::/8"], vec!["10.0.0.0/8"]),
        ] {
            let parse = |text: &str| text.parse::<IpNet>().unwrap();
            let block = IpBlock { cidr: parse(cidr), except: except.into_iter().map(parse).collect() };
            let expected: Vec<IpNet> = expected.into_iter().map(parse).collect();
            assert_eq!(without_excepts(&block), expected, "{block:?}");
        }
    }
}
