//! Decides which packets of a capture no worker evaluates: the rules of `xdp-redirect/src/bpf/tcx.bpf.c` in Rust.
//!
//! Differences: the programs drop ARP and neighbour discovery with which a pod claims other addresses; here they go to the
//! kernel like the rest, since policy applies to neither. A packet from an uplink enters the node's stack and is evaluated when
//! the stack sends it to a pod; here it is evaluated at once. The programs look up in the kernel's routing table whether neighbour discovery of a global address is for the node; here the node's
//! addresses decide.

use penstock_dataplane::ProgramOutcome;
use penstock_dataplane::forward::{Forwarding, PortKind};
use penstock_dataplane::packet::{Address, ETHERNET_LEN};

const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
const ARP: [u8; 2] = [0x08, 0x06];
const VLAN: [u8; 2] = [0x81, 0x00];
const SERVICE_VLAN: [u8; 2] = [0x88, 0xa8];

/// Why a frame from a port of this kind goes to the kernel without a verdict; `None` if it goes to a worker. The programs
/// drop a frame with a VLAN tag on a pod's port; a worker would drop it too, so it goes there.
pub fn passed_to_kernel(forwarding: &Forwarding, kind: PortKind, frame: &[u8]) -> Option<ProgramOutcome> {
    let Some(ethertype) = frame.get(12..ETHERNET_LEN) else { return Some(ProgramOutcome::NotIp) };
    let is_uplink = kind == PortKind::Uplink;
    match [ethertype[0], ethertype[1]] {
        ARP => return Some(ProgramOutcome::Arp),
        VLAN | SERVICE_VLAN => return is_uplink.then_some(ProgramOutcome::NotIp),
        IPV6 if is_neighbour_discovery(forwarding, frame) => return Some(ProgramOutcome::NeighbourDiscovery),
        IPV4 | IPV6 => {}
        _ => return Some(ProgramOutcome::NotIp),
    }
    let is_for_pod = || addresses(frame).is_some_and(|(_, to)| forwarding.pod_port(to).is_some());
    (is_uplink && !is_for_pod()).then_some(ProgramOutcome::NotLocal)
}

/// Whether a frame carries a packet behind a header that nobody here takes off.
pub(super) fn is_encapsulated(frame: &[u8]) -> bool {
    const MPLS: [u8; 2] = [0x88, 0x47];
    const PPPOE_SESSION: [u8; 2] = [0x88, 0x64];
    frame
        .get(12..ETHERNET_LEN)
        .is_some_and(|ethertype| [VLAN, SERVICE_VLAN, MPLS, PPPOE_SESSION].iter().any(|known| known == ethertype))
}

/// Source and destination of a frame with a complete IP header, whatever else may be wrong with it.
#[inline]
pub fn addresses(frame: &[u8]) -> Option<(Address, Address)> {
    addresses_behind(frame, 12)
}

/// The same of a frame that may have VLAN tags.
pub fn addresses_behind_tags(frame: &[u8]) -> Option<(Address, Address)> {
    let is_tag = |at: &usize| {
        frame.get(*at..at + 2).is_some_and(|ethertype| [VLAN, SERVICE_VLAN].iter().any(|tag| tag == ethertype))
    };
    let ethertype = (12..).step_by(4).find(|at| !is_tag(at))?;
    addresses_behind(frame, ethertype)
}

fn addresses_behind(frame: &[u8], ethertype: usize) -> Option<(Address, Address)> {
    let (ethertype, ip) = frame.get(ethertype..)?.split_first_chunk::<2>()?;
    match *ethertype {
        IPV4 => {
            let ip = ip.first_chunk::<20>()?;
            let address = |at: usize| Address::from_v4_bytes([ip[at], ip[at + 1], ip[at + 2], ip[at + 3]]);
            Some((address(12), address(16)))
        }
        IPV6 => {
            let ip = ip.first_chunk::<40>()?;
            let (from, to) = (ip[8..].first_chunk::<16>()?, ip[24..].first_chunk::<16>()?);
            Some((Address::from_v6_bytes(*from), Address::from_v6_bytes(*to)))
        }
        _ => None,
    }
}

/// RFC 4861 sections 6.1 and 7.1: types 133 to 137 with hop limit 255, without extension headers, to link scope or to the
/// node.
fn is_neighbour_discovery(forwarding: &Forwarding, frame: &[u8]) -> bool {
    const ICMPV6: u8 = 58;
    let Some(bytes) = frame.get(ETHERNET_LEN..ETHERNET_LEN + 48) else { return false };
    let (next_header, hop_limit, kind) = (bytes[6], bytes[7], bytes[40]);
    if next_header != ICMPV6 || hop_limit != 255 || !(133..=137).contains(&kind) {
        return false;
    }
    let to = &bytes[24..40];
    let is_link_scope = (to[0] == 0xff && to[1] & 0x0f == 2) || (to[0] == 0xfe && to[1] & 0xc0 == 0x80);
    is_link_scope || addresses(frame).is_some_and(|(_, to)| forwarding.is_node(to))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use penstock_dataplane::forward::{Mac, Port, PortId};

    use super::*;

    const POD: &str = "fd00::1";
    const NODE: &str = "fd00::ff";

    fn forwarding() -> Forwarding {
        let address = |text: &str| Address::from(text.parse::<std::net::IpAddr>().unwrap());
        let mut forwarding = Forwarding::new([address(NODE)]);
        let addresses = vec![address(POD), address("10.0.0.1")];
        let mac = Mac::default();
        let pod = Port::new(PortKind::Pod, mac, mac, 1500, addresses);
        forwarding.insert(PortId(0), pod).unwrap();
        forwarding
    }

    fn frame(ethertype: [u8; 2], rest: &[u8]) -> Vec<u8> {
        [&[0; 12][..], &ethertype, rest].concat()
    }

    fn v6(to: &str, next_header: u8, hop_limit: u8, kind: u8) -> Vec<u8> {
        let to: Ipv6Addr = to.parse().unwrap();
        let mut ip = [&[0x60, 0, 0, 0, 0, 8, next_header, hop_limit][..], &[0; 16], &to.octets()].concat();
        ip.extend([kind, 0, 0, 0, 0, 0, 0, 0]);
        frame(IPV6, &ip)
    }

    fn v4(to: [u8; 4]) -> Vec<u8> {
        frame(IPV4, &[&[0x45, 0, 0, 20, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1][..], &to].concat())
    }

    #[test]
    fn exactly_the_frames_that_programs_pass_go_to_the_kernel() {
        use ProgramOutcome::{Arp, NeighbourDiscovery, NotIp, NotLocal};
        let (pod, host, uplink) = (PortKind::Pod, PortKind::Host, PortKind::Uplink);
        for (name, kind, frame, expected) in [
            ("ARP", pod, frame(ARP, &[0; 28]), Some(Arp)),
            ("ARP on an uplink", uplink, frame(ARP, &[0; 28]), Some(Arp)),
            ("LLDP", pod, frame([0x88, 0xcc], &[0; 46]), Some(NotIp)),
            ("shorter than Ethernet", pod, vec![0; 13], Some(NotIp)),
            ("tagged, from a pod", pod, frame(VLAN, &[0; 46]), None),
            ("tagged, from outside", uplink, frame(VLAN, &[0; 46]), Some(NotIp)),
            ("IPv4 from a pod", pod, v4([192, 0, 2, 9]), None),
            ("IPv4 from the host port", host, v4([192, 0, 2, 9]), None),
            ("IPv4 from outside to a pod", uplink, v4([10, 0, 0, 1]), None),
            ("IPv4 from outside to another", uplink, v4([10, 0, 0, 9]), Some(NotLocal)),
            ("IPv4 cut, from a pod", pod, v4([10, 0, 0, 1])[..33].to_vec(), None),
            ("IPv4 cut, from outside", uplink, v4([10, 0, 0, 1])[..33].to_vec(), Some(NotLocal)),
            ("solicitation", pod, v6("ff02::1:ff00:1", 58, 255, 135), Some(NeighbourDiscovery)),
            ("advertisement", uplink, v6("fe80::1", 58, 255, 136), Some(NeighbourDiscovery)),
            ("redirect", pod, v6("fe80::1", 58, 255, 137), Some(NeighbourDiscovery)),
            ("solicitation of the node", pod, v6(NODE, 58, 255, 135), Some(NeighbourDiscovery)),
            ("solicitation that would be routed", pod, v6(POD, 58, 255, 135), None),
            ("solicitation from afar", pod, v6("fe80::1", 58, 254, 135), None),
            ("echo request", pod, v6("fe80::1", 58, 255, 128), None),
            ("behind an extension header", pod, v6("fe80::1", 0, 255, 135), None),
            ("IPv6 from outside to a pod", uplink, v6(POD, 17, 64, 0), None),
            ("IPv6 from outside to the node", uplink, v6(NODE, 17, 64, 0), Some(NotLocal)),
        ] {
            assert_eq!(passed_to_kernel(&forwarding(), kind, &frame), expected, "{name}");
        }
    }
}
