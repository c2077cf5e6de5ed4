//! Native and generic XDP.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use penstock_bench::load::transfer;
use penstock_bench::testbed::{Attach, Offload};

use crate::fixture::{Fixture, pods, policy};

const POLICY: &str =
    "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}], ports: [{port: 8080}, {port: 5201}]}]\n";

/// Pods in this XDP mode; the last one has a policy.
fn fixture(mode: &str) -> Fixture {
    Fixture::of(&(pods(3) + &policy("some", "pod-2", POLICY)), |_, config| {
        config.attach = Attach::Xdp;
        config.sections += &format!("[xdp]\nmode = \"{mode}\"\n");
    })
}

#[test]
fn policy_is_enforced_in_native_and_generic_mode() {
    for mode in ["native", "generic"] {
        let fixture = fixture(mode);
        fixture.assert_as_expected(&fixture.matrix());
        for port in fixture.status().ports {
            let expected = if port.kind == "host" { "native" } else { mode };
            assert_eq!(port.mode, expected, "{}", port.interface);
        }
    }
}

#[test]
fn a_restart_in_another_mode_keeps_the_links_and_says_so() {
    let mut fixture = fixture("native");
    fixture.kill();
    fixture.change_config(|config| config.sections = config.sections.replace("native", "generic"));
    fixture.restart();
    fixture.assert_as_expected(&fixture.matrix());
    assert_eq!(fixture.port("test/pod-0").mode, "native");
    let log = fixture.daemon.log().lines().join("\n");
    assert!(log.contains("stays in native mode") && log.contains("run penstock cleanup"), "{log}");
}

#[test]
fn in_generic_mode_packets_longer_than_a_frame_are_counted() {
    let fixture = fixture("generic");
    let (from, to) = (fixture.site("test/pod-0"), fixture.site("test/pod-2"));
    let lost = || fixture.port("test/pod-0").kernel_drops["rx_dropped"];
    let address = SocketAddr::new(to.address(false).unwrap(), 8080);
    let mut stream = from.namespace.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(5))).unwrap();
    stream.write_all(&[7; 60_000]).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while lost() == 0 {
        assert!(Instant::now() < deadline, "segments of 60,000 bytes were not lost: {:?}", fixture.port("test/pod-0"));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(fixture.port("test/pod-0").xdp.get("too_long").copied().unwrap_or(0), 0, "none goes by the kernel");
    for site in [from, to] {
        for offload in [Offload::Tso, Offload::Gso] {
            site.namespace.set_offload("eth0", offload, false).unwrap();
        }
    }
    let report = transfer(&from.namespace, &to.namespace, to.address(false).unwrap(), 20_000_000).unwrap();
    assert!(report.bytes >= 20_000_000 && report.retransmitted_share() < 0.01, "{report:?}");
}
