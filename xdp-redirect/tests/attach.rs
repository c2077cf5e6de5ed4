//! Tests on real interfaces. They need root; each has its own temporary network namespace.

use std::collections::BTreeSet;
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::resume_unwind;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use penstock_xdp_redirect::{
    AttachError, AttachOptions, Attached, Bridge, ConnectionMapSizes, ConnectionMaps, Interface, LARGEST_NATIVE_MTU,
    ModeChoice, OnMiss, Pinned, Pins, ProgramOutcome, ProgramTag, Redirect, Role, SocketError, TranslatedSources,
    XdpMode,
};

/// Runs a test in a temporary network namespace.
fn in_namespace(test: impl FnOnce() + Send) {
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        // So that only the test sends packets on its interfaces.
        std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        test();
    };
    if let Err(panic) = thread::scope(|scope| scope.spawn(run).join()) {
        resume_unwind(panic);
    }
}

/// Runs the `ip` command in the calling thread's namespace.
fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("iproute2 is installed");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn veth() -> Interface {
    ip("link add name v type veth peer name vp");
    ip("link set dev v up");
    ip("link set dev vp up");
    Interface::by_name("v").unwrap()
}

/// Sends a frame out of an interface.
fn send(interface: &str, frame: &[u8]) {
    // SAFETY: a plain system call; nothing else owns the descriptor that it returns.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: as above.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all zeros is valid for this plain structure.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_ifindex = nix::net::if_::if_nametoindex(interface).unwrap() as i32;
    // SAFETY: frame and address live across the call, and their sizes are given.
    let sent = unsafe {
        let length = size_of::<libc::sockaddr_ll>() as u32;
        libc::sendto(socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0, (&raw const to).cast(), length)
    };
    assert_eq!(sent, frame.len() as isize, "{}", io::Error::last_os_error());
}

/// Waits until this many packets had this outcome.
fn expect(attached: &Attached, outcome: ProgramOutcome, count: u64) {
    let deadline = Instant::now() + Duration::from_secs(2);
    while attached.outcomes().unwrap().get(outcome) < count && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(attached.outcomes().unwrap().get(outcome), count, "{outcome}: {:?}", attached.outcomes());
}

fn options(mode: ModeChoice) -> AttachOptions {
    AttachOptions { mode, ..AttachOptions::new(Role::Pod) }
}

#[test]
fn a_veth_is_native_and_dropping_detaches() {
    in_namespace(|| {
        let interface = veth();
        let redirect = Redirect::new().unwrap();
        for choice in [ModeChoice::NativeElseGeneric, ModeChoice::Native] {
            let attached = redirect.attach(&interface, options(choice)).unwrap();
            assert_eq!((attached.mode(), attached.interface()), (&XdpMode::Native, &interface));
            assert!(ip("-d link show dev v").contains(" prog/xdp "));
            drop(attached);
            assert!(!ip("-d link show dev v").contains("prog/xdp"));
        }
        let attached = redirect.attach(&interface, options(ModeChoice::Generic)).unwrap();
        assert_eq!(attached.mode(), &XdpMode::Generic { because: None });
        assert!(ip("-d link show dev v").contains("xdpgeneric"));
    });
}

#[test]
fn without_driver_support_it_is_generic_and_says_why() {
    in_namespace(|| {
        let interface = Interface::by_name("lo").unwrap();
        let redirect = Redirect::new().unwrap();
        let attached = redirect.attach(&interface, options(ModeChoice::NativeElseGeneric)).unwrap();
        match attached.mode() {
            XdpMode::Generic { because: Some(reason) } => assert!(reason.contains("not supported"), "{reason}"),
            mode => panic!("{mode:?}"),
        }
        drop(attached);
        let error = redirect.attach(&interface, options(ModeChoice::Native)).unwrap_err();
        assert!(error.to_string().contains("interface lo in native mode"), "{error}");
    });
}

#[test]
fn a_veth_is_native_whatever_its_mtu() {
    in_namespace(|| {
        let interface = veth();
        let redirect = Redirect::new().unwrap();
        for mtu in [1500, LARGEST_NATIVE_MTU, LARGEST_NATIVE_MTU + 1, 9001, 65_535] {
            ip(&format!("link set dev vp mtu {mtu}"));
            let attached = redirect.attach(&interface, options(ModeChoice::NativeElseGeneric)).unwrap();
            assert_eq!(attached.mode().to_string(), "native", "MTU {mtu}: {:?}", attached.mode());
        }
    });
}

#[test]
fn another_program_is_not_replaced_but_named() {
    in_namespace(|| {
        let interface = veth();
        let redirect = Redirect::new().unwrap();
        for first in [ModeChoice::Native, ModeChoice::Generic] {
            let attached = redirect.attach(&interface, options(first)).unwrap();
            for second in [ModeChoice::NativeElseGeneric, ModeChoice::Native, ModeChoice::Generic] {
                let error = redirect.attach(&interface, options(second)).unwrap_err();
                assert!(matches!(error, AttachError::Occupied { .. }), "{error:?}");
                let mode = if first == ModeChoice::Native { "native" } else { "generic" };
                let text = error.to_string();
                assert!(
                    text.contains("interface v ") && text.contains("(penstock id ") && text.contains(mode),
                    "{text}"
                );
            }
            drop(attached);
        }
    });
}

#[test]
fn a_missing_interface_or_queue_is_named() {
    in_namespace(|| {
        let error = Interface::by_name("none").unwrap_err();
        assert!(error.to_string().contains("interface none does not exist"), "{error}");
        let redirect = Redirect::new().unwrap();
        let gone = Interface { name: "gone".to_owned(), index: 12_345 };
        let error = redirect.attach(&gone, AttachOptions::new(Role::Pod)).unwrap_err();
        assert!(matches!(error, AttachError::NoInterface { .. }), "{error:?}");

        let attached = redirect.attach(&veth(), AttachOptions::new(Role::Pod)).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let fd = std::os::fd::AsFd::as_fd(&file);
        assert!(matches!(attached.set_socket(64, fd), Err(SocketError::QueueOutOfRange { queue: 64, .. })));
        let error = attached.set_socket(0, fd).unwrap_err();
        assert!(error.to_string().contains("interface v: the kernel rejects"), "{error}");
    });
}

#[test]
fn without_a_socket_packets_pass_only_by_setting() {
    in_namespace(|| {
        let interface = veth();
        let redirect = Redirect::new().unwrap();
        let mut frame = vec![0xff; 6];
        frame.extend([2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.resize(60, 0);
        for on_miss in [OnMiss::Drop, OnMiss::Pass] {
            let attached =
                redirect.attach(&interface, AttachOptions { on_miss, ..options(ModeChoice::Native) }).unwrap();
            for _ in 0..10 {
                send("vp", &frame);
            }
            expect(&attached, ProgramOutcome::NoSocket, 10);
            assert_eq!(attached.outcomes().unwrap().get(ProgramOutcome::Redirected), 0);
        }
    });
}

/// Destination MAC of [`solicitation`].
const SOLICITED: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// A neighbour solicitation (RFC 4861 section 4.3) for this address.
fn solicitation(to: &str) -> Vec<u8> {
    let mut frame = SOLICITED.to_vec();
    frame.extend([2, 0, 0, 0, 0, 2, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 24, 58, 255]);
    frame.extend("fd00::9".parse::<Ipv6Addr>().unwrap().octets());
    frame.extend(to.parse::<Ipv6Addr>().unwrap().octets());
    frame.extend([135, 0, 0, 0, 0, 0, 0, 0]);
    frame.extend(to.parse::<Ipv6Addr>().unwrap().octets());
    frame
}

#[test]
fn routable_neighbour_discovery_does_not_pass_to_the_kernel() {
    in_namespace(|| {
        let interface = veth();
        std::fs::write("/proc/sys/net/ipv6/conf/v/disable_ipv6", "0").unwrap();
        ip("-6 address add fd00::1/64 dev v nodad");
        std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        ip("link add name u type veth peer name up");
        ip("link set dev u up");
        std::fs::write("/proc/sys/net/ipv6/conf/u/disable_ipv6", "0").unwrap();
        ip("-6 route add default dev u");
        let attached = Redirect::new().unwrap().attach(&interface, AttachOptions::new(Role::Pod)).unwrap();
        let before = attached.outcomes().unwrap();
        for (to, outcome) in [
            ("fd00::1", ProgramOutcome::NeighbourDiscovery),
            ("ff02::1:ff00:1", ProgramOutcome::NeighbourDiscovery),
            ("2001:db8::1", ProgramOutcome::NoSocket),
            ("fd00::2", ProgramOutcome::NoSocket),
        ] {
            let count = attached.outcomes().unwrap().get(outcome) + 1;
            send("vp", &solicitation(to));
            expect(&attached, outcome, count);
        }
        assert!(attached.outcomes().unwrap().total() >= before.total() + 4);
        drop(attached);
    });
}

#[test]
fn neighbour_discovery_of_a_bridges_port_stays_on_the_bridge() {
    in_namespace(|| {
        let interface = veth();
        std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        ip("link add name b type bridge");
        std::fs::write("/proc/sys/net/ipv6/conf/b/disable_ipv6", "0").unwrap();
        ip("link set dev b up");
        ip("link set dev v master b");
        ip("-6 address add fd00::1/64 dev b nodad");
        ip("link add name u type veth peer name up");
        ip("link set dev u up");
        std::fs::write("/proc/sys/net/ipv6/conf/u/disable_ipv6", "0").unwrap();
        ip("-6 address add fd00:9::1/64 dev u nodad");
        ip("-6 route add default via fd00:9::2 dev u");
        ip("-6 route add 2001:db8:2::/64 via fd00::9 dev b");
        let bridge = Some(Bridge { index: nix::net::if_::if_nametoindex("b").unwrap(), mac: SOLICITED });
        let redirect = Redirect::new().unwrap();
        redirect.local_pods().insert("2001:db8::5".parse().unwrap(), 0).unwrap();
        let attached = redirect.attach(&interface, AttachOptions { bridge, ..AttachOptions::new(Role::Pod) }).unwrap();
        for (to, outcome) in [
            ("fd00::1", ProgramOutcome::NeighbourDiscovery),
            ("fd00::2", ProgramOutcome::NeighbourDiscovery),
            ("2001:db8::5", ProgramOutcome::NeighbourDiscovery),
            // By the uplink, and by a router on the bridge.
            ("2001:db8::1", ProgramOutcome::NoSocket),
            ("2001:db8:2::1", ProgramOutcome::NoSocket),
        ] {
            let count = attached.outcomes().unwrap().get(outcome) + 1;
            send("vp", &solicitation(to));
            expect(&attached, outcome, count);
        }
    });
}

/// A directory in bpffs for one test; removed with everything pinned in it.
struct PinRoot(std::path::PathBuf);

impl PinRoot {
    fn new(test: &str) -> Self {
        Self(format!("/sys/fs/bpf/penstock-test-{test}-{}", std::process::id()).into())
    }

    fn open(&self) -> Pins {
        Pins::open(&self.0).unwrap()
    }
}

impl Drop for PinRoot {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An IPv4 packet that the program would redirect.
fn ipv4_frame() -> Vec<u8> {
    let mut frame = vec![0xff; 12];
    frame.extend([8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 9, 10, 0, 0, 5, 0, 1, 0, 2, 0, 8, 0, 0]);
    frame
}

#[test]
fn a_pinned_link_is_taken_over_without_a_gap() {
    in_namespace(|| {
        let root = PinRoot::new("takeover");
        let interface = veth();
        let before = Redirect::pinned(root.open()).unwrap().attach(&interface, AttachOptions::new(Role::Pod)).unwrap();
        let program = |shown: String| shown.split(" prog/xdp id ").nth(1)?.split(' ').next().map(str::to_owned);
        let first = program(ip("-d link show dev v")).expect("a program is attached");
        before.keep();
        assert_eq!(program(ip("-d link show dev v")), Some(first.clone()), "it outlasts its owner");

        let redirect = Redirect::pinned(root.open()).unwrap();
        let there = redirect.pins().unwrap().links();
        assert_eq!(
            there,
            [Pinned { program: penstock_xdp_redirect::PinnedProgram::Xdp(Role::Pod), interface: interface.index }]
        );
        let after = redirect.attach(&interface, AttachOptions::new(Role::Pod)).unwrap();
        assert_eq!(after.mode(), &XdpMode::Native);
        assert_ne!(program(ip("-d link show dev v")), Some(first), "another program has its place");
        send("vp", &ipv4_frame());
        expect(&after, ProgramOutcome::NoSocket, 1);
        drop(after);
        assert_eq!(program(ip("-d link show dev v")), None);
        assert_eq!(redirect.pins().unwrap().links(), []);
    });
}

/// Replaces the program of a pinned link by one that passes everything, without using this crate.
fn replace_by_another(pin: &std::path::Path) {
    use libbpf_rs::libbpf_sys::{
        BPF_PROG_TYPE_XDP, BPF_XDP, bpf_insn, bpf_link_update, bpf_obj_get, bpf_prog_load, bpf_prog_load_opts,
    };

    // r0 = XDP_PASS
    let pass = bpf_insn { code: 0xb7, imm: 2, ..Default::default() };
    let exit = bpf_insn { code: 0x95, ..Default::default() };
    let (program, path) = ([pass, exit], std::ffi::CString::new(pin.to_str().unwrap()).unwrap());
    let mut options = bpf_prog_load_opts { sz: size_of::<bpf_prog_load_opts>() as _, ..Default::default() };
    // The attach type of the replaced program; otherwise the kernel rejects it.
    options.expected_attach_type = BPF_XDP;
    // SAFETY: instructions, strings and options live across the calls, and the number of instructions is given; nothing
    // else owns the two new descriptors.
    unsafe {
        let license = c"GPL".as_ptr();
        let loaded = bpf_prog_load(BPF_PROG_TYPE_XDP, c"other".as_ptr(), license, program.as_ptr(), 2, &mut options);
        assert!(loaded >= 0, "{}", io::Error::from_raw_os_error(-loaded));
        let (loaded, link) = (OwnedFd::from_raw_fd(loaded), OwnedFd::from_raw_fd(bpf_obj_get(path.as_ptr())));
        assert_eq!(bpf_link_update(link.as_raw_fd(), loaded.as_raw_fd(), std::ptr::null()), 0);
    }
}

#[test]
fn a_foreign_program_is_detected_by_its_tag_and_replaced() {
    in_namespace(|| {
        let root = PinRoot::new("tag");
        let interface = veth();
        let redirect = Redirect::pinned(root.open()).unwrap();
        let own = ProgramTag::own(Role::Pod).unwrap();
        let tags = || redirect.pins().unwrap().tags().into_iter().map(|(_, tag)| tag.unwrap()).collect::<Vec<_>>();
        // Whatever its constants are.
        for (role, on_miss) in [(Role::Pod, OnMiss::Drop), (Role::Uplink, OnMiss::Pass), (Role::Host, OnMiss::Drop)] {
            let attached = redirect.attach(&interface, AttachOptions { on_miss, ..AttachOptions::new(role) }).unwrap();
            assert_eq!(tags(), [ProgramTag::own(role).unwrap()], "{role:?}");
            drop(attached);
        }
        let attached = redirect.attach(&interface, AttachOptions::new(Role::Pod)).unwrap();
        let directory = std::fs::read_dir(&root.0).unwrap().next().unwrap().unwrap().path();
        replace_by_another(&directory.join(format!("pod-{}", interface.index)));
        assert_ne!(tags(), [own]);
        attached.keep();
        let taken_over = redirect.attach(&interface, AttachOptions::new(Role::Pod)).unwrap();
        assert_eq!(tags(), [own]);
        drop(taken_over);
    });
}

#[test]
fn pins_of_removed_interfaces_and_namespaces_are_swept() {
    let root = PinRoot::new("sweep");
    in_namespace(|| {
        let redirect = Redirect::pinned(root.open()).unwrap();
        redirect.attach(&veth(), AttachOptions::new(Role::Pod)).unwrap().keep();
        ip("link del dev v");
        assert_eq!(redirect.pins().unwrap().links(), [], "its interface is gone");
        redirect.attach(&veth(), AttachOptions::new(Role::Uplink)).unwrap().keep();
        assert_eq!(redirect.pins().unwrap().links().len(), 1);
    });
    in_namespace(|| {
        // The kernel removes a namespace's interfaces a little after its last user.
        let deadline = Instant::now() + Duration::from_secs(5);
        let directories = || {
            let own = root.open();
            let count = std::fs::read_dir(&root.0).unwrap().count();
            own.close();
            count
        };
        while directories() > 1 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(directories(), 1, "only this namespace's own");
    });
}

#[test]
fn a_start_elsewhere_keeps_a_waiting_connection_table() {
    let root = PinRoot::new("table");
    let sizes = ConnectionMapSizes { version: 1, table: 64, tags: (1, 64), entries: (1, 64), usage: (1, 64) };
    in_namespace(|| {
        let pins = root.open();
        ConnectionMaps::open(Some(&pins), &sizes).unwrap();
        TranslatedSources::open(Some(&pins)).unwrap();
        let names = || {
            let directory = std::fs::read_dir(&root.0).unwrap().next().unwrap().unwrap().path();
            std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect::<BTreeSet<_>>()
        };
        let pinned = names();
        assert_eq!(pinned.len(), 5, "four arrays and the sources: {pinned:?}");
        drop(pins);
        in_namespace(|| root.open().close());
        assert_eq!(names(), pinned);
    });
}

#[test]
fn pins_outside_bpffs_are_rejected_with_the_remedy() {
    let directory = std::env::temp_dir().join(format!("penstock-no-bpffs-{}", std::process::id()));
    let error = Pins::open(&directory).unwrap_err().to_string();
    std::fs::remove_dir_all(&directory).unwrap();
    assert!(error.contains("give a directory below /sys/fs/bpf"), "{error}");
}
