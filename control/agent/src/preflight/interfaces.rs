//! Checks interface settings: offloads, and for `attach = "xdp"` filters, MTUs and other XDP programs.

use penstock_dataplane::io::{Offloads, takes_long_packets};
use penstock_xdp_redirect::{ForeignProgram, LARGEST_NATIVE_MTU};

use super::PreflightFinding;
use crate::config::XdpMode;
use crate::discovery::{ArpAnswers, Link, PodPort, Shaping, SourceFilter};
use crate::settings::{Attach, Settings, try_tcx};

pub(super) fn pod(port: &PodPort, settings: &Settings<'_>) -> Vec<PreflightFinding> {
    let own = format!("pod {}: {}, MTU {}", port.pod, port.name, port.mtu);
    let interface = match Offloads::read(&port.name) {
        Ok(offloads) => format!("{own}; {}", describe(&offloads)),
        Err(_) => format!("{own}; cannot read its offloads"),
    };
    let mut findings = vec![PreflightFinding::ok(interface)];
    findings.extend(shaping(port, settings.attach, || filters_that_hold_by_xdp(settings, port.shaping)));
    findings.extend(for_xdp(port, settings, SourceFilter::of(&port.name)));
    findings
}

/// Whether the kernel answers the pod's ARP, where an XDP program is to be on the pod's interface.
pub(super) fn answers_arp(port: &PodPort, settings: &Settings<'_>) -> Option<PreflightFinding> {
    (settings.attach == Attach::Xdp).then(|| filter(port, SourceFilter::of(&port.name))).flatten()
}

/// Names what others have set on the interface: limits of bandwidth, filters. `by_xdp`: which of them hold with XDP.
fn shaping(port: &PodPort, attach: Attach, by_xdp: impl FnOnce() -> Shaping) -> Option<PreflightFinding> {
    let PodPort { name, pod, shaping, .. } = port;
    let which = shaping.directions()?;
    let found = format!("pod {pod}: {name} has a queueing discipline or filters of somebody else, for {which}");
    let held = if attach == Attach::Xdp { by_xdp() } else { *shaping };
    let beside = Shaping { to_pod: shaping.to_pod && !held.to_pod, from_pod: shaping.from_pod && !held.from_pod };
    Some(match beside.directions() {
        Some(beside) => PreflightFinding::warning(format!(
            "{found}: by XDP {beside} passes beside them, so that limits of bandwidth do not hold; set attach = \"tcx\", which needs Linux 6.6"
        )),
        None => PreflightFinding::ok(format!("{found}: all its packets take the way by them, which is slower")),
    })
}

/// Those by which packets can go with XDP: the tcx programs beside it send them there, and a generic XDP program takes what the pod sends again.
fn filters_that_hold_by_xdp(settings: &Settings<'_>, found: Shaping) -> Shaping {
    match (try_tcx(false), settings.config.xdp.mode) {
        (Err(_), _) => Shaping::default(),
        (Ok(()), XdpMode::Generic) => Shaping { from_pod: false, ..found },
        (Ok(()), XdpMode::Native) => found,
    }
}

/// Checks what matters to an XDP program on the pod's interface, and to none at its tcx hooks.
fn for_xdp(port: &PodPort, settings: &Settings<'_>, source_filter: SourceFilter) -> Vec<PreflightFinding> {
    if settings.attach != Attach::Xdp {
        return Vec::new();
    }
    let is_native = settings.config.xdp.mode == XdpMode::Native;
    let too_large = is_native.then(|| mtu_too_large_for_native(port, takes_long_packets())).flatten();
    // A warning only: other pods are served, and this one is tried again.
    let program = program(&port.name, port.link).map(PreflightFinding::warning);
    too_large.into_iter().chain(filter(port, source_filter)).chain(program).collect()
}

/// An uplink that exists, is up and fits.
pub(super) fn uplink(link: &Link) -> Vec<PreflightFinding> {
    let mut findings: Vec<PreflightFinding> =
        Offloads::read(&link.name).ok().and_then(|set| merging(&link.name, &set)).into_iter().collect();
    findings.extend(program(&link.name, link.index).map(PreflightFinding::error));
    findings
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
fn mtu_too_large_for_native(port: &PodPort, takes_long_packets: bool) -> Option<PreflightFinding> {
    (port.mtu > LARGEST_NATIVE_MTU && !takes_long_packets).then(|| {
        PreflightFinding::warning(format!(
            "pod {}: MTU {} of {} is more than the {LARGEST_NATIVE_MTU} up to which a veth takes native XDP: its program and the host veth's will be in generic mode, where segments longer than a frame are lost and bulk TCP does not flow; lower the MTU to {LARGEST_NATIVE_MTU} on both ends, or switch segmentation off in the pod (ethtool -K eth0 tso off gso off)",
            port.pod, port.mtu, port.name
        ))
    })
}

/// Under `rp_filter` the kernel may not answer the pod's ARP, since the route to the pod is the workers'.
fn filter(port: &PodPort, source_filter: SourceFilter) -> Option<PreflightFinding> {
    let PodPort { name, pod, .. } = port;
    let SourceFilter { all, own, .. } = source_filter;
    let (place, value) = if all > 0 { ("all", all) } else { (name.as_str(), own) };
    match source_filter.arp_answers() {
        ArpAnswers::AsIs => None,
        ArpAnswers::With(loose) => Some(PreflightFinding::ok(format!(
            "net/ipv4/conf/{place}/rp_filter = {value}: set to {loose} on {name} while its pod is served, and restored at the end"
        ))),
        ArpAnswers::Never if port.addresses.iter().all(|address| address.is_ipv6()) => None,
        ArpAnswers::Never => Some(PreflightFinding::error(format!(
            "pod {pod}: net/ipv4/conf/all/rp_filter = {all} and {name} has no IPv4 address: with attach = \"xdp\" the kernel would answer none of the pod's ARP; set net.ipv4.conf.all.rp_filter to 0 (sysctl -w), or attach = \"tcx\""
        ))),
    }
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
    use crate::config::Config;
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
            shaping: Shaping::default(),
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
        let mut found = |attach, mode, mtu, all| {
            let strict = SourceFilter { all, own: 0, has_address: true };
            config.xdp.mode = mode;
            let settings = Settings::of(&config, (attach, None), vec![0], Some(1));
            let findings = for_xdp(&port(mtu), &settings, strict);
            findings.into_iter().map(|it| (it.level, it.line.contains("rp_filter"))).collect::<Vec<_>>()
        };
        let (mtu, filter) = ((Level::Warning, false), (Level::Ok, true));
        let native = if takes_long_packets() { vec![filter] } else { vec![mtu, filter] };
        for (attach, mode, expected) in [
            (Attach::Xdp, XdpMode::Native, native),
            (Attach::Xdp, XdpMode::Generic, vec![filter]),
            (Attach::Tcx, XdpMode::Native, vec![]),
            (Attach::Tcx, XdpMode::Generic, vec![]),
        ] {
            assert_eq!(found(attach, mode, 9000, 1), expected, "{attach:?} {mode:?}");
            assert_eq!(found(attach, mode, 1500, 0), [], "{attach:?} {mode:?}, with nothing to say");
        }
    }

    #[test]
    fn an_mtu_too_large_for_native_xdp_on_a_veth_is_a_warning() {
        for mtu in [1500, 3506] {
            assert_eq!(mtu_too_large_for_native(&port(mtu), false), None, "{mtu}");
        }
        assert_eq!(mtu_too_large_for_native(&port(9001), true), None, "where the kernel takes longer ones");
        for mtu in [3507, 3826] {
            let found = mtu_too_large_for_native(&port(mtu), false).unwrap();
            assert_eq!(found.level, Level::Warning);
            let start =
                format!("pod shop/web: MTU {mtu} of veth1 is more than the 3506 up to which a veth takes native XDP");
            assert!(found.line.starts_with(&start) && found.line.contains("lower the MTU to 3506"), "{found:?}");
        }
    }

    #[test]
    fn limits_that_others_set_on_a_pods_interface_are_named() {
        let with = |to_pod, from_pod| PodPort { shaping: Shaping { to_pod, from_pod }, ..port(1500) };
        let (none, all) = (Shaping::default(), Shaping { to_pod: true, from_pod: true });
        let to_pod = Shaping { from_pod: false, ..all };
        assert_eq!(shaping(&with(false, false), Attach::Xdp, Shaping::default), None);
        for (of_pod, attach, held, level, texts) in [
            ((true, false), Attach::Tcx, none, Level::Ok, ["for what it receives:", "slower"]),
            ((false, true), Attach::Tcx, none, Level::Ok, ["for what it sends:", "slower"]),
            ((true, true), Attach::Tcx, none, Level::Ok, ["for what it sends and receives:", "slower"]),
            ((true, true), Attach::Xdp, all, Level::Ok, ["for what it sends and receives:", "slower"]),
            ((true, false), Attach::Xdp, none, Level::Warning, ["by XDP what it receives passes", "set attach"]),
            ((true, true), Attach::Xdp, none, Level::Warning, ["by XDP what it sends and receives", "set attach"]),
            ((true, true), Attach::Xdp, to_pod, Level::Warning, ["by XDP what it sends passes", "set attach"]),
            ((true, false), Attach::Xdp, to_pod, Level::Ok, ["for what it receives:", "slower"]),
        ] {
            let found = shaping(&with(of_pod.0, of_pod.1), attach, || held).unwrap();
            assert!(found.level == level && texts.iter().all(|text| found.line.contains(text)), "{found:?}");
        }
    }

    #[test]
    fn rp_filters_effect_on_arp_is_said_or_refuses_the_start() {
        let v4 = PodPort { addresses: [[10, 0, 0, 1].into()].into(), ..port(1500) };
        for (all, own, has_address, level, text) in [
            (0, 0, false, None, ""),
            (0, 2, true, None, ""),
            (2, 0, true, None, ""),
            (1, 2, true, None, ""),
            (1, 0, true, Some(Level::Ok), "net/ipv4/conf/all/rp_filter = 1: set to 2 on veth1"),
            (0, 1, true, Some(Level::Ok), "net/ipv4/conf/veth1/rp_filter = 1: set to 2 on veth1"),
            (0, 1, false, Some(Level::Ok), "net/ipv4/conf/veth1/rp_filter = 1: set to 0 on veth1"),
            (0, 2, false, Some(Level::Ok), "net/ipv4/conf/veth1/rp_filter = 2: set to 0 on veth1"),
            (1, 1, false, Some(Level::Error), "pod shop/web: net/ipv4/conf/all/rp_filter = 1 and veth1 has no IPv4"),
            (2, 0, false, Some(Level::Error), "pod shop/web: net/ipv4/conf/all/rp_filter = 2 and veth1 has no IPv4"),
        ] {
            let found = filter(&v4, SourceFilter { all, own, has_address });
            assert_eq!(found.as_ref().map(|found| found.level), level, "{all} {own} {has_address}");
            assert!(found.is_none_or(|found| found.line.starts_with(text)), "{all} {own} {has_address}");
        }
        assert!(filter(&port(1500), SourceFilter { all: 1, own: 1, has_address: false }).is_none(), "no IPv4 address");
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
