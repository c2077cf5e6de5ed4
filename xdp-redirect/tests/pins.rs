//! Pinned links, and the programs of the workers' pairs. These tests need root; each has its own temporary network namespace.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::panic::resume_unwind;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use penstock_xdp_redirect::{
    AttachError, ConnectionMapSizes, ConnectionMaps, Interface, LARGEST_NATIVE_MTU, Pins, ProgramTag, SocketRedirect,
    TcxOptions, TcxPrograms, TranslatedSources,
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

/// An AF_XDP socket with the smallest RX ring, not bound.
fn socket() -> OwnedFd {
    let entries: libc::c_int = 1;
    let socket = socket2::Socket::new(libc::AF_XDP.into(), socket2::Type::RAW, None).unwrap();
    // SAFETY: the value lives across the call, and its length is given.
    let set = unsafe {
        let (value, length) = ((&raw const entries).cast(), size_of_val(&entries) as libc::socklen_t);
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_XDP, libc::XDP_RX_RING, value, length)
    };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
    socket.into()
}

#[test]
fn a_pairs_end_has_a_native_program_whatever_its_mtu() {
    in_namespace(|| {
        let (interface, socket) = (veth(), socket());
        for mtu in [1500, LARGEST_NATIVE_MTU, LARGEST_NATIVE_MTU + 1, 9001, 65_535] {
            ip(&format!("link set dev vp mtu {mtu}"));
            let attached = SocketRedirect::attach(&interface, socket.as_fd()).unwrap();
            assert!(ip("-d link show dev v").contains(" prog/xdp "), "MTU {mtu}");
            drop(attached);
            // A child that another test has forked holds the link until it executes its program.
            let deadline = Instant::now() + Duration::from_secs(10);
            while ip("-d link show dev v").contains("prog/xdp") {
                assert!(Instant::now() < deadline, "MTU {mtu}: the program stays");
            }
        }
    });
}

#[test]
fn an_interface_that_takes_no_program_is_named() {
    in_namespace(|| {
        let error = Interface::by_name("none").unwrap_err();
        assert!(error.to_string().contains("interface none does not exist"), "{error}");
        let gone = Interface { name: "gone".to_owned(), index: 12_345 };
        let error = SocketRedirect::attach(&gone, socket().as_fd()).unwrap_err();
        assert!(matches!(error, AttachError::Xdp { .. }) && error.to_string().contains("interface gone"), "{error}");
        let no_socket = std::fs::File::open("/dev/null").unwrap();
        let error = SocketRedirect::attach(&veth(), no_socket.as_fd()).unwrap_err();
        assert!(error.to_string().contains("interface v"), "{error}");
    });
}

fn programs(pins: Pins) -> TcxPrograms {
    let programs = TcxPrograms::load(&TcxOptions::default(), None).unwrap().with_pins(Some(pins));
    programs.set_pairs(&[1], &[]).unwrap();
    programs.take_over([], []).unwrap();
    programs
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

/// Replaces the program of a pinned link by one that passes everything, without using this crate.
fn replace_by_another(pin: &std::path::Path) {
    use libbpf_rs::libbpf_sys::{
        BPF_PROG_TYPE_SCHED_CLS, BPF_TCX_INGRESS, bpf_insn, bpf_link_update, bpf_obj_get, bpf_prog_load,
        bpf_prog_load_opts,
    };

    // r0 = TC_ACT_OK
    let pass = bpf_insn { code: 0xb7, imm: 0, ..Default::default() };
    let exit = bpf_insn { code: 0x95, ..Default::default() };
    let (program, path) = ([pass, exit], std::ffi::CString::new(pin.to_str().unwrap()).unwrap());
    let mut options = bpf_prog_load_opts { sz: size_of::<bpf_prog_load_opts>() as _, ..Default::default() };
    // The attach type of the replaced program; otherwise the kernel rejects it.
    options.expected_attach_type = BPF_TCX_INGRESS;
    // SAFETY: instructions, strings and options live across the calls, and the number of instructions is given; nothing
    // else owns the two new descriptors.
    unsafe {
        let license = c"GPL".as_ptr();
        let loaded =
            bpf_prog_load(BPF_PROG_TYPE_SCHED_CLS, c"other".as_ptr(), license, program.as_ptr(), 2, &mut options);
        assert!(loaded >= 0, "{}", io::Error::from_raw_os_error(-loaded));
        let (loaded, link) = (OwnedFd::from_raw_fd(loaded), OwnedFd::from_raw_fd(bpf_obj_get(path.as_ptr())));
        assert_eq!(bpf_link_update(link.as_raw_fd(), loaded.as_raw_fd(), std::ptr::null()), 0);
    }
}

#[test]
fn a_foreign_program_is_detected_by_its_tag_and_replaced() {
    in_namespace(|| {
        let root = PinRoot::new("tag");
        let (interface, programs) = (veth(), programs(root.open()));
        let [from_pod, to_pod, ..] = ProgramTag::own().unwrap();
        let tags = || {
            let all = programs.pins().unwrap().tags();
            all.into_iter().map(|(_, tag)| tag.unwrap().to_string()).collect::<BTreeSet<_>>()
        };
        let own = BTreeSet::from([from_pod.to_string(), to_pod.to_string()]);
        let attached = programs.attach_pod(&interface).unwrap();
        assert_eq!(tags(), own);
        let directory = std::fs::read_dir(&root.0).unwrap().next().unwrap().unwrap().path();
        replace_by_another(&directory.join(format!("from_pod-{}", interface.index)));
        assert_ne!(tags(), own);
        attached.keep();
        let taken_over = programs.attach_pod(&interface).unwrap();
        assert_eq!(tags(), own);
        drop(taken_over);
    });
}

#[test]
fn pins_of_removed_interfaces_and_namespaces_are_swept() {
    let root = PinRoot::new("sweep");
    in_namespace(|| {
        let programs = programs(root.open());
        programs.attach_pod(&veth()).unwrap().keep();
        ip("link del dev v");
        assert_eq!(programs.pins().unwrap().links(), [], "its interface is gone");
        programs.attach_pod(&veth()).unwrap().keep();
        assert_eq!(programs.pins().unwrap().links().len(), 2);
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
