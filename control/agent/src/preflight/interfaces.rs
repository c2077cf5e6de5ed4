//! Checks interface settings: offloads, and for `attach = "xdp"` filters, MTUs and other XDP programs.

use penstock_dataplane::io::Offloads;
use penstock_xdp_redirect::{ForeignProgram, LARGEST_NATIVE_MTU};

use super::PreflightFinding;
use crate::config::{Attach, Config, XdpMode};
use crate::discovery::{Link, PodPort, Sysctl};

/// A pod's interface that can be served.
pub(super) fn pod(port: &PodPort, config: &Config) -> Vec<PreflightFinding> {
    let own = format!("pod {}: {}, MTU {}", port.pod, port.name, port.mtu);
    let settings = match Offloads::read(&port.name) {
        Ok(offloads) => format!("{own}; {}", describe(&offloads)),
        Err(_) => format!("{own}; cannot read its offloads"),
    };
    let mut findings = vec![PreflightFinding::ok(settings)];
    findings.extend(for_xdp(port, config, [strict("all"), strict(&port.name)]));
    findings
}

/// What matters to an XDP program on the pod's interface, and to none at its tcx hooks; with whether `rp_filter` is strict for
/// all interfaces, and for this one.
fn for_xdp(port: &PodPort, config: &Config, strict: [bool; 2]) -> Vec<PreflightFinding> {
    if config.attach_by != Attach::Xdp {
        return Vec::new();
    }
    let is_native = config.xdp.mode == XdpMode::Native;
    let too_large = is_native.then(|| mtu_too_large_for_native(port)).flatten();
    // A warning only: other pods are served, and this one is tried again.
    let program = program(&port.name, port.link).map(PreflightFinding::warning);
    too_large.into_iter().chain(filter(&port.name, strict)).chain(program).collect()
}

/// An uplink that exists, is up and fits.
pub(super) fn uplink(link: &Link) -> Vec<PreflightFinding> {
    let mut findings: Vec<PreflightFinding> =
        Offloads::read(&link.name).ok().and_then(|set| merging(&link.name, &set)).into_iter().collect();
    findings.extend(program(&link.name, link.index).map(PreflightFinding::error));
    findings
}

fn strict(interface: &str) -> bool {
    Sysctl::v4(interface, "rp_filter").read() == Some(1)
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

/// In generic mode the pod's stack hands over GSO packets before segmentation.
fn mtu_too_large_for_native(port: &PodPort) -> Option<PreflightFinding> {
    (port.mtu > LARGEST_NATIVE_MTU).then(|| {
        PreflightFinding::warning(format!(
            "pod {}: MTU {} of {} is more than the {LARGEST_NATIVE_MTU} up to which a veth takes native XDP: its program and the host veth's will be in generic mode, where segments longer than a frame are lost and bulk TCP does not flow; lower the MTU to {LARGEST_NATIVE_MTU} on both ends, or switch segmentation off in the pod (ethtool -K eth0 tso off gso off)",
            port.pod, port.mtu, port.name
        ))
    })
}

/// Under strict rp_filter the kernel would not answer the pod's ARP, since the route to the pod is the workers'.
fn filter(name: &str, strict: [bool; 2]) -> Option<PreflightFinding> {
    let which = match strict {
        [true, _] => "all",
        [false, true] => name,
        [false, false] => return None,
    };
    Some(PreflightFinding::ok(format!(
        "net/ipv4/conf/{which}/rp_filter = 1: set to 2 on {name} while its pod is served, and restored at the end"
    )))
}

/// Packets that GRO or LRO merged before the generic path may be longer than a frame.
fn merging(name: &str, offloads: &Offloads) -> Option<PreflightFinding> {
    let merges = [("lro", offloads.lro), ("gro", offloads.gro)].into_iter().find(|(_, on)| *on == Some(true));
    merges.map(|(feature, _)| {
        PreflightFinding::warning(format!(
            "uplinks: {feature} of {name} is on: if its driver has no XDP of its own, merged packets longer than a frame take the slower kernel path; switch it off (ethtool -K {name} {feature} off)"
        ))
    })
}

/// A line about another XDP program on the interface, if there is one.
fn program(name: &str, index: u32) -> Option<String> {
    // Without permission to read it other errors are reported already.
    let found = ForeignProgram::on(index).ok()??;
    let called = found.name.map_or_else(String::new, |called| format!(" ({called})"));
    Some(format!(
        "interface {name}: another XDP program is attached, number {}{called}; detach it (ip link set dev {name} xdp off)",
        found.id
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use penstock_dataplane::forward::Mac;

    use super::*;
    use crate::preflight::Level;
    use penstock_policy::model::ObjectKey;

    fn port(mtu: u32) -> PodPort {
        // There is no such interface.
        let link = i32::MAX as u32;
        PodPort {
            link,
            name: "veth1".to_owned(),
            own_mac: Mac::default(),
            peer_mac: Mac::default(),
            mtu,
            bridge: None,
            enters_by: link,
            pod: ObjectKey { namespace: "shop".to_owned(), name: "web".to_owned() },
            addresses: BTreeSet::new(),
        }
    }

    #[test]
    fn what_only_xdp_needs_of_a_pods_interface_is_left_out_with_tcx() {
        let parsed = Config::parse("node = \"a\"\n[source]\nmanifests = \"/m\"\n", "/etc/penstock.toml".as_ref());
        let mut config = parsed.unwrap();
        let mut found = |attach_by, mode, mtu, strict| {
            (config.attach_by, config.xdp.mode) = (attach_by, mode);
            let findings = for_xdp(&port(mtu), &config, strict);
            findings.into_iter().map(|it| (it.level, it.line.contains("rp_filter"))).collect::<Vec<_>>()
        };
        let (mtu, filter) = ((Level::Warning, false), (Level::Ok, true));
        for (attach, mode, expected) in [
            (Attach::Xdp, XdpMode::Native, vec![mtu, filter]),
            (Attach::Xdp, XdpMode::Generic, vec![filter]),
            (Attach::Tcx, XdpMode::Native, vec![]),
            (Attach::Tcx, XdpMode::Generic, vec![]),
        ] {
            assert_eq!(found(attach, mode, 9000, [true, false]), expected, "{attach:?} {mode:?}");
            assert_eq!(found(attach, mode, 1500, [false, false]), [], "{attach:?} {mode:?}, with nothing to say");
        }
    }

    #[test]
    fn an_mtu_too_large_for_native_xdp_on_a_veth_is_a_warning() {
        for mtu in [1500, 3506] {
            assert_eq!(mtu_too_large_for_native(&port(mtu)), None, "{mtu}");
        }
        for mtu in [3507, 3826] {
            let found = mtu_too_large_for_native(&port(mtu)).unwrap();
            assert_eq!(found.level, Level::Warning);
            let start =
                format!("pod shop/web: MTU {mtu} of veth1 is more than the 3506 up to which a veth takes native XDP");
            assert!(found.line.starts_with(&start) && found.line.contains("lower the MTU to 3506"), "{found:?}");
        }
    }

    #[test]
    fn a_strict_rp_filter_is_reported_with_the_setting_that_causes_it() {
        assert_eq!(filter("veth1", [false, false]), None);
        assert!(
            filter("veth1", [true, true])
                .unwrap()
                .line
                .starts_with("net/ipv4/conf/all/rp_filter = 1: set to 2 on veth1")
        );
        assert!(filter("veth1", [false, true]).unwrap().line.starts_with("net/ipv4/conf/veth1/rp_filter = 1: "));
    }

    #[test]
    fn an_uplink_with_lro_or_gro_is_a_warning() {
        let off = Offloads::default();
        assert_eq!(merging("eth0", &off), None);
        let found = merging("eth0", &Offloads { gro: Some(true), lro: Some(false), ..off }).unwrap();
        assert_eq!(found.level, Level::Warning);
        assert!(
            found.line.contains("gro of eth0 is on") && found.line.contains("ethtool -K eth0 gro off"),
            "{found:?}"
        );
    }

    #[test]
    fn offloads_that_a_driver_does_not_report_are_unknown() {
        let text = describe(&Offloads { tso: Some(true), gso: Some(false), ..Offloads::default() });
        assert_eq!(text, "tso on, gso off, gro unknown, rx checksum unknown, tx checksum unknown");
    }
}
