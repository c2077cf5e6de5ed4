//! Checks the settings of pods' interfaces: offloads, and what others have set on them.

use penstock_dataplane::io::Offloads;

use super::PreflightFinding;
use crate::discovery::PodPort;

pub(super) fn pod(port: &PodPort) -> Vec<PreflightFinding> {
    let own = format!("pod {}: {}, MTU {}", port.pod, port.name, port.mtu);
    let interface = match Offloads::read(&port.name) {
        Ok(offloads) => format!("{own}; {}", describe(&offloads)),
        Err(_) => format!("{own}; cannot read its offloads"),
    };
    std::iter::once(PreflightFinding::ok(interface)).chain(shaping(port)).collect()
}

/// Names what others have set on the interface: limits of bandwidth, filters.
fn shaping(port: &PodPort) -> Option<PreflightFinding> {
    let PodPort { name, pod, shaping, .. } = port;
    let which = shaping.directions()?;
    Some(PreflightFinding::ok(format!(
        "pod {pod}: {name} has a queueing discipline or filters of somebody else, for {which}: all its packets take the way by them, which is slower"
    )))
}

fn describe(offloads: &Offloads) -> String {
    let on = |on: Option<bool>| match on {
        Some(true) => "on",
        Some(false) => "off",
        None => "unknown",
    };
    format!(
        "tso {}, gso {}, gro {}, rx checksum {}, tx checksum {}",
        on(offloads.tso),
        on(offloads.gso),
        on(offloads.gro),
        on(offloads.rx_checksum),
        on(offloads.tx_checksum)
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use penstock_dataplane::forward::Mac;
    use penstock_policy::model::ObjectKey;

    use super::*;
    use crate::discovery::Shaping;

    fn port(shaping: Shaping) -> PodPort {
        // There is no such interface.
        let link = i32::MAX as u32;
        PodPort {
            link,
            name: "veth1".to_owned(),
            own_mac: Mac::default(),
            peer_mac: Mac::default(),
            mtu: 1500,
            shaping,
            bridge: None,
            enters_by: link,
            pod: ObjectKey { namespace: "shop".to_owned(), name: "web".to_owned() },
            addresses: BTreeSet::new(),
        }
    }

    #[test]
    fn limits_that_others_set_on_a_pods_interface_are_named() {
        for (to_pod, from_pod, which) in [
            (false, false, None),
            (true, false, Some("for what it receives:")),
            (false, true, Some("for what it sends:")),
            (true, true, Some("for what it sends and receives:")),
        ] {
            let found = shaping(&port(Shaping { to_pod, from_pod }));
            assert_eq!(found.is_some(), which.is_some());
            assert!(which.is_none_or(|which| found.is_some_and(|found| found.line.contains(which))), "{which:?}");
        }
    }

    #[test]
    fn offloads_that_a_driver_does_not_report_are_unknown() {
        let text = describe(&Offloads { tso: Some(true), gso: Some(false), ..Offloads::default() });
        assert_eq!(text, "tso on, gso off, gro unknown, rx checksum unknown, tx checksum unknown");
    }
}
