//! The tcx programs on real veths. These tests need root; each has its own temporary network namespaces.
//!
//! A packet socket on the worker's end of a pair stands for the worker.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::panic::resume_unwind;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use nix::sched::{CloneFlags, CpuSet, sched_getaffinity, sched_setaffinity, unshare};
use nix::unistd::Pid;
use penstock_xdp_redirect::{
    ConnectionMapSizes, ConnectionMaps, Entrances, Filtered, Interface, PinnedProgram, Pins, PodVeth, ProgramOutcome,
    ServedPort, TcxOptions, TcxPrograms, WaitingArray, WorkerPair,
};
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};

const TO_WORKER: [u8; 2] = [2, 0xfa];
const FROM_WORKER: [u8; 2] = [2, 0xfb];
const CHECKSUM_OPEN: u8 = 1;
const FROM_NODE: u8 = 2;
const LOCAL_PROCESS: u8 = 4;
const TO_NODE: u8 = 1;
const NO_PORT: u16 = 0xffff;

fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("iproute2 is installed");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn in_namespace(test: impl FnOnce() + Send) {
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        ip("link set dev lo up");
        test();
    };
    if let Err(panic) = thread::scope(|scope| scope.spawn(run).join()) {
        resume_unwind(panic);
    }
}

/// A pod: a thread in a network namespace of its own, which runs what it is sent.
struct Pod {
    number: u8,
    jobs: Sender<Box<dyn FnOnce() + Send>>,
}

impl Pod {
    /// The pod 10.0.0.`number` behind the interface `v{number}`.
    fn new(number: u8) -> Self {
        let (jobs, todo) = channel::<Box<dyn FnOnce() + Send>>();
        let (tid, began) = channel();
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
            tid.send(nix::unistd::gettid()).unwrap();
            todo.into_iter().for_each(|job| job());
        });
        let pod = Self { number, jobs };
        ip(&format!("link add name v{number} type veth peer name eth0 netns {}", began.recv().unwrap()));
        ip(&format!("link set dev v{number} up"));
        ip(&format!("route add 10.0.0.{number}/32 dev v{number}"));
        pod.run(move || {
            ip("link set dev lo up");
            ip("link set dev eth0 up");
            ip(&format!("addr add 10.0.0.{number}/24 dev eth0"));
            // As the node's address and the other pods': all by the node.
            let node = node_mac(number);
            for other in (1..=9).chain([254]).filter(|&other| other != number) {
                let mac = node.map(|byte| format!("{byte:02x}")).join(":");
                ip(&format!("neigh add 10.0.0.{other} lladdr {mac} dev eth0"));
            }
        });
        let mac = pod.mac().map(|byte| format!("{byte:02x}")).join(":");
        ip(&format!("neigh add 10.0.0.{number} lladdr {mac} dev v{number}"));
        pod
    }

    fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (answer, result) = channel();
        self.jobs.send(Box::new(move || answer.send(job()).unwrap())).unwrap();
        result.recv().unwrap()
    }

    fn mac(&self) -> [u8; 6] {
        self.run(|| parse_mac(&ip("link show dev eth0")))
    }

    fn address(&self) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, self.number).into()
    }

    fn interface(&self) -> Interface {
        Interface::by_name(&format!("v{}", self.number)).unwrap()
    }

    fn served(&self, port: u16) -> ServedPort {
        ServedPort {
            port,
            node_mac: parse_mac(&ip(&format!("link show dev v{}", self.number))),
            pod_mac: self.mac(),
            bridge: 0,
            mtu: 1500,
            filtered: Filtered::default(),
        }
    }
}

/// The MAC of the node's end of a pod's veth, before the pod's thread can ask for it: set by the test.
fn node_mac(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0xee, number]
}

fn parse_mac(shown: &str) -> [u8; 6] {
    let text = shown.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).expect("it has a MAC");
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// A packet socket on an interface: frames as they are on the wire.
struct Raw(Socket, SockAddr);

impl Raw {
    fn open(interface: &str) -> Self {
        let all = i32::from((libc::ETH_P_ALL as u16).to_be());
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(all))).unwrap();
        let mut storage = SockAddrStorage::zeroed();
        // SAFETY: the storage is larger than this plain structure, and zeroed.
        let address = unsafe { storage.view_as::<libc::sockaddr_ll>() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = all as u16;
        address.sll_ifindex = nix::net::if_::if_nametoindex(interface).unwrap() as i32;
        // SAFETY: the length is that of the structure that was written.
        let address = unsafe { SockAddr::new(storage, size_of::<libc::sockaddr_ll>() as u32) };
        socket.bind(&address).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        Self(socket, address)
    }

    fn send(&self, frame: &[u8]) {
        assert_eq!(self.0.send_to(frame, &self.1).unwrap(), frame.len());
    }

    /// The next IP frame that came in; `None` if there is none for 200 ms.
    fn next(&self) -> Option<Vec<u8>> {
        loop {
            let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
            let (length, from) = self.0.recv_from(&mut buffer).ok()?;
            // SAFETY: the kernel has written the address of a packet socket, and so many bytes of the buffer.
            let (kind, frame) = unsafe {
                let at = from.as_ptr().cast::<libc::sockaddr_ll>();
                ((*at).sll_pkttype, buffer[..length].iter().map(|byte| byte.assume_init()).collect::<Vec<u8>>())
            };
            if kind != libc::PACKET_OUTGOING && matches!(frame[12..14], [8, 0] | [0x86, 0xdd]) {
                return Some(frame);
            }
        }
    }
}

/// The programs, a worker's pair, and two pods on ports 5 and 6.
struct Node {
    programs: TcxPrograms,
    worker: Raw,
    _pair: WorkerPair,
    pods: [Pod; 2],
    veths: [PodVeth; 2],
}

impl Node {
    fn new() -> Self {
        Self::with(TcxOptions::default())
    }

    fn with(options: TcxOptions) -> Self {
        Self::with_workers(options, &[], &[])
    }

    /// With the pairs of further workers, and the CPUs of all.
    fn with_workers(options: TcxOptions, pairs: &[u32], cpus: &[usize]) -> Self {
        ip("link add name pn0 type veth peer name px0");
        ip("link set dev pn0 up");
        ip("link set dev px0 up");
        ip("addr add 10.0.0.254/32 dev lo");
        let pair = Interface::by_name("pn0").unwrap();
        // Its pair is the first worker's.
        let pairs = [&[pair.index], pairs].concat();
        let programs = TcxPrograms::load(&TcxOptions { workers: pairs.len(), ..options }, None).unwrap();
        programs.set_pairs(&pairs, cpus).unwrap();
        let attached = programs.attach_worker(&pair).unwrap();
        let pods = [1, 2].map(|number| {
            let pod = Pod::new(number);
            let mac = node_mac(number).map(|byte| format!("{byte:02x}")).join(":");
            ip(&format!("link set dev v{number} address {mac}"));
            pod
        });
        let mut veths = [0, 1].map(|index| programs.attach_pod(&pods[index].interface()).unwrap());
        for (index, veth) in veths.iter_mut().enumerate() {
            veth.serve(&pods[index].served(5 + index as u16)).unwrap();
            let index_of = pods[index].interface().index;
            let by = Entrances { veth: index_of, stack: index_of };
            programs.set_pod_address(pods[index].address(), Some(by)).unwrap();
        }
        Self { programs, worker: Raw::open("px0"), _pair: attached, pods, veths }
    }
}

/// A UDP socket in the calling thread's namespace.
fn udp(address: IpAddr) -> UdpSocket {
    let socket = Socket::new(Domain::for_address(SocketAddr::new(address, 4000)), Type::DGRAM, None).unwrap();
    // A closed one stays bound while a program that another test has just started still holds it, until its exec.
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::new(address, 4000).into()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    socket.into()
}

/// Tags a frame as a worker does.
fn tagged(mut frame: Vec<u8>, port: u16, flags: u8) -> Vec<u8> {
    frame[..2].copy_from_slice(&FROM_WORKER);
    frame[2] = flags;
    frame[4..6].copy_from_slice(&port.to_be_bytes());
    frame
}

/// Makes an IPv4 frame that a worker received one that it sends: to this port.
fn to(frame: Vec<u8>, port: u16, flags: u8) -> Vec<u8> {
    let mut frame = tagged(frame, port, flags);
    // The receiver does not know that the checksum is open; UDP over IPv4 may have none (RFC 768).
    frame[40..42].fill(0);
    frame
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn expect(veth: &PodVeth, outcome: ProgramOutcome, count: u64) {
    wait_until(outcome.name(), || veth.outcomes().unwrap().get(outcome) >= count);
    assert_eq!(veth.outcomes().unwrap().get(outcome), count, "{outcome}: {:?}", veth.outcomes());
}

#[test]
fn a_pods_packets_reach_the_worker_with_their_port_and_go_on() {
    in_namespace(|| {
        let node = Node::new();
        let [a, b] = &node.pods;
        let (from, other, host) = (a.address(), b.address(), IpAddr::from([10, 0, 0, 254]));
        let send = move |to| udp(from).send_to(b"hello", SocketAddr::new(to, 4000)).unwrap();
        a.run(move || send(other));
        let frame = node.worker.next().expect("it reaches the worker");
        let interface = node.pods[0].interface().index.to_be_bytes();
        let tag = [&TO_WORKER[..], &[CHECKSUM_OPEN, 0, 0, 5], &TO_WORKER, &interface].concat();
        assert_eq!(frame[..12], tag[..]);
        assert!(frame.ends_with(b"hello"));
        expect(&node.veths[0], ProgramOutcome::Redirected, 1);

        let (ready, bound) = channel();
        let (received, result) = channel();
        let _ = b.jobs.send(Box::new(move || {
            let (socket, mut buffer) = (udp(other), [0; 16]);
            ready.send(()).unwrap();
            received
                .send(socket.recv_from(&mut buffer).map(|(length, from)| (buffer[..length].to_vec(), from)))
                .unwrap();
        }));
        bound.recv().unwrap();
        node.worker.send(&to(frame, 6, 0));
        assert_eq!(
            result.recv().unwrap().unwrap(),
            (b"hello".to_vec(), SocketAddr::new(from, 4000)),
            "to the other pod"
        );

        let (socket, mut buffer) = (udp(host), [0; 16]);
        a.run(move || send(host));
        let frame = node.worker.next().expect("what is for the node reaches the worker first");
        node.worker.send(&to(frame, 5, TO_NODE));
        let (length, sender) = socket.recv_from(&mut buffer).expect("to the node's stack, as the pod's own");
        assert_eq!((&buffer[..length], sender), (&b"hello"[..], SocketAddr::new(from, 4000)));
        assert!(node.worker.next().is_none(), "what a worker has handed to the stack does not come back");
    });
}

#[test]
fn what_the_nodes_stack_sends_to_a_pod_reaches_the_worker_first() {
    in_namespace(|| {
        let node = Node::new();
        let to = SocketAddr::new(node.pods[1].address(), 4000);
        udp(IpAddr::from([10, 0, 0, 254])).send_to(b"hello", to).unwrap();
        let frame = node.worker.next().expect("it reaches the worker");
        assert_eq!(frame[..3], [TO_WORKER[0], TO_WORKER[1], CHECKSUM_OPEN | FROM_NODE | LOCAL_PROCESS]);
        assert_eq!(frame[4..6], [0, 6]);
        // A process of the node that takes a pod's address is not that pod.
        ip("addr add 10.0.0.1/32 dev lo");
        udp(node.pods[0].address()).send_to(b"forged", to).unwrap();
        expect(&node.veths[1], ProgramOutcome::SpoofedSource, 1);
        node.programs.set_pod_address(IpAddr::from([10, 0, 0, 254]), None).unwrap();
        udp(IpAddr::from([10, 0, 0, 254])).send_to(b"of a pod without worker", to).unwrap();
        expect(&node.veths[1], ProgramOutcome::SpoofedSource, 2);
        node.programs.remove_pod_address(IpAddr::from([10, 0, 0, 254])).unwrap();
        udp(IpAddr::from([10, 0, 0, 254])).send_to(b"again", to).unwrap();
        assert!(node.worker.next().expect("only this one").ends_with(b"again"));
    });
}

/// A worker has received so many packets of this port, of `sent` ones.
fn set_received(array: &WaitingArray, port: u32, [sent, received]: [u64; 2]) {
    let mut element = [0_u64; 16];
    (element[0], element[8]) = (sent, received);
    let array = array.descriptor().unwrap();
    // SAFETY: key and value live across the call and have the array's sizes.
    let result = unsafe {
        let (key, value) = ((&raw const port).cast(), element.as_ptr().cast());
        libbpf_rs::libbpf_sys::bpf_map_update_elem(array.as_raw_fd(), key, value, 0)
    };
    assert_eq!(result, 0);
}

#[test]
fn a_pods_share_of_waiting_packets_affects_no_other_pod() {
    in_namespace(|| {
        let array = WaitingArray::create(128).unwrap();
        let node = Node::with(TcxOptions { waiting: Some((array.clone(), 3)), ..TcxOptions::default() });
        let [one, other] = [0, 1].map(|index| node.pods[index].address());
        let send = |pod: usize, count: usize| {
            let (from, to) = if pod == 0 { (one, other) } else { (other, one) };
            node.pods[pod].run(move || {
                let socket = udp(from);
                for _ in 0..count {
                    socket.send_to(b"hello", SocketAddr::new(to, 4000)).unwrap();
                }
            });
        };
        send(0, 5);
        expect(&node.veths[0], ProgramOutcome::Redirected, 3);
        expect(&node.veths[0], ProgramOutcome::ShareUsed, 2);
        send(1, 2);
        expect(&node.veths[1], ProgramOutcome::Redirected, 2);
        set_received(&array, 5, [3, 2]);
        send(0, 3);
        expect(&node.veths[0], ProgramOutcome::Redirected, 5);
        expect(&node.veths[0], ProgramOutcome::ShareUsed, 3);
        // More received than sent: the difference is negative, not huge.
        set_received(&array, 5, [5, 6]);
        send(0, 5);
        expect(&node.veths[0], ProgramOutcome::Redirected, 9);
        expect(&node.veths[0], ProgramOutcome::ShareUsed, 4);
    });
}

/// A TCP segment with a virtio header (include/uapi/linux/virtio_net.h) that asks for segments of this many bytes.
fn long_segment(node_mac: [u8; 6], from: u8, to: u8, payload: usize, size: u16) -> Vec<u8> {
    const NEEDS_CSUM: u8 = 1;
    const TCPV4: u8 = 1;
    let mut frame = vec![NEEDS_CSUM, TCPV4];
    [54, size, 34, 16].iter().for_each(|word: &u16| frame.extend(word.to_ne_bytes()));
    frame.extend(node_mac);
    frame.extend([2, 0, 0, 0, 0, from, 8, 0]);
    let length = (40 + payload) as u16;
    let mut ip = vec![0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, from, 10, 0, 0, to];
    ip[2..4].copy_from_slice(&length.to_be_bytes());
    let sum: u32 = ip.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    ip[10..12].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
    frame.extend(ip);
    frame.extend([0x10, 0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 4, 0, 0, 0, 0, 0]);
    frame.resize(frame.len() + payload, 0);
    frame
}

#[test]
fn a_long_packet_counts_as_its_segments_before_it_is_let_in() {
    in_namespace(|| {
        let array = WaitingArray::create(128).unwrap();
        let node = Node::with(TcxOptions { waiting: Some((array.clone(), 3)), ..TcxOptions::default() });
        for (payload, size, outcome) in [
            (400, 8, ProgramOutcome::ShareUsed),
            (400, 1, ProgramOutcome::ShareUsed),
            (400, 200, ProgramOutcome::Redirected),
        ] {
            let before = node.veths[0].outcomes().unwrap().get(outcome);
            node.pods[0].run(move || {
                const PACKET_VNET_HDR: libc::c_int = 15;
                let socket = Socket::new(Domain::PACKET, Type::RAW, None).unwrap();
                let on: libc::c_int = 1;
                // SAFETY: all zeros is valid for this plain structure.
                let mut at: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
                at.sll_family = libc::AF_PACKET as u16;
                at.sll_ifindex = nix::net::if_::if_nametoindex("eth0").unwrap() as i32;
                // SAFETY: values live across the calls, and their sizes are given.
                let results = unsafe {
                    let size = size_of::<libc::c_int>() as u32;
                    let fd = socket.as_raw_fd();
                    let set = libc::setsockopt(fd, libc::SOL_PACKET, PACKET_VNET_HDR, (&raw const on).cast(), size);
                    [set, libc::bind(fd, (&raw const at).cast(), size_of::<libc::sockaddr_ll>() as u32)]
                };
                assert_eq!(results, [0, 0]);
                socket.send(&long_segment(node_mac(1), 1, 2, payload, size)).unwrap();
            });
            expect(&node.veths[0], outcome, before + 1);
        }
    });
}

#[test]
fn packets_of_a_cpu_go_to_its_own_worker() {
    let usable = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::count()).filter(|&cpu| usable.is_set(cpu).unwrap()).take(2).collect();
    if cpus.len() < 2 {
        eprintln!("SKIPPED: there is one core");
        return;
    }
    in_namespace(|| {
        ip("link add name pn1 type veth peer name px1");
        ip("link set dev pn1 up");
        ip("link set dev px1 up");
        let node = Node::with_workers(TcxOptions::default(), &[Interface::by_name("pn1").unwrap().index], &cpus);
        let second = Raw::open("px1");
        const CONNECTIONS: u16 = 16;
        for (&cpu, own, other) in [(&cpus[0], &node.worker, &second), (&cpus[1], &second, &node.worker)] {
            for (pod, peer) in [(0, 1), (1, 0)] {
                let (from, to) = (node.pods[pod].address(), node.pods[peer].address());
                node.pods[pod].run(move || {
                    let mut only = CpuSet::new();
                    only.set(cpu).unwrap();
                    sched_setaffinity(Pid::from_raw(0), &only).unwrap();
                    let socket = udp(from);
                    for port in 0..CONNECTIONS {
                        socket.send_to(b"hello", SocketAddr::new(to, 5000 + port)).unwrap();
                    }
                });
                let received = (0..CONNECTIONS).filter(|_| own.next().is_some()).count();
                assert_eq!(received, usize::from(CONNECTIONS), "from CPU {cpu}");
                assert!(other.next().is_none(), "from CPU {cpu}");
            }
        }
    });
}

#[test]
fn a_veth_that_is_not_served_drops_all_but_address_resolution() {
    in_namespace(|| {
        let mut node = Node::new();
        node.veths[0].stop_serving();
        let (from, to) = (node.pods[0].address(), SocketAddr::new(node.pods[1].address(), 4000));
        node.pods[0].run(move || udp(from).send_to(b"early", to).unwrap());
        expect(&node.veths[0], ProgramOutcome::NotReady, 1);
        udp(IpAddr::from([10, 0, 0, 254])).send_to(b"early", SocketAddr::new(from, 4000)).unwrap();
        expect(&node.veths[0], ProgramOutcome::NotReady, 2);
        node.pods[0].run(|| {
            ip("neigh del 10.0.0.254 dev eth0");
            udp(IpAddr::from([10, 0, 0, 1])).send_to(b"resolve first", "10.0.0.254:4000").unwrap();
        });
        let arp = || node.veths[0].outcomes().unwrap().get(ProgramOutcome::Arp);
        wait_until("ARP passes", || arp() > 0);
        assert!(node.worker.next().is_none(), "nothing reaches a worker");
    });
}

#[test]
fn without_the_process_packets_pass_only_by_setting() {
    for open in [false, true] {
        in_namespace(|| {
            let options = TcxOptions { open_without_workers: open, ..TcxOptions::default() };
            let Node { programs, worker, pods: [a, _b], veths: [veth, _other], .. } = Node::with(options);
            let from = a.address();
            let send = move || udp(from).send_to(b"hello", "10.0.0.254:4000").unwrap();
            let socket = udp(IpAddr::from([10, 0, 0, 254]));
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            a.run(send);
            assert!(worker.next().is_some() && socket.recv_from(&mut [0; 16]).is_err(), "the process lives");
            drop(programs);
            // The kernel takes a closed socket out of the map after a grace period.
            wait_until("it is as set", || {
                a.run(send);
                socket.recv_from(&mut [0; 16]).is_ok() == open
            });
            assert_eq!(veth.outcomes().unwrap().get(ProgramOutcome::NoSocket) > 0, open);
        });
    }
}

/// Asserts that root alone may read and write what is below a directory. Returns how many files there are.
fn assert_only_root_may(directory: &Path) -> usize {
    let metadata = std::fs::symlink_metadata(directory).unwrap();
    let owner = (metadata.uid(), metadata.gid());
    assert_eq!((metadata.mode() & 0o7777, owner), (0o700, (0, 0)), "{}", directory.display());
    let paths = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    paths
        .map(|path| {
            if path.is_dir() {
                return assert_only_root_may(&path);
            }
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            let owner = (metadata.uid(), metadata.gid());
            assert_eq!((metadata.mode() & 0o7777, owner), (0o600, (0, 0)), "{}", path.display());
            1
        })
        .sum()
}

#[test]
fn pinned_programs_stay_and_the_next_process_takes_them_over() {
    in_namespace(|| {
        let root = Path::new("/sys/fs/bpf/penstock-test-tcx");
        let pins = Pins::open(root).unwrap();
        let load = || {
            let programs = TcxPrograms::load(&TcxOptions::default(), None).unwrap().with_pins(Some(pins.clone()));
            programs.set_pairs(&[1], &[]).unwrap();
            programs
        };
        ip("addr add 10.0.0.254/32 dev lo");
        let pod = Pod::new(1);
        let mac = node_mac(1).map(|byte| format!("{byte:02x}")).join(":");
        ip(&format!("link set dev v1 address {mac}"));
        let pinned = || {
            let mut programs: Vec<PinnedProgram> = pins.links().into_iter().map(|link| link.program).collect();
            programs.sort_by_key(|program| format!("{program:?}"));
            programs
        };
        load().attach_pod(&pod.interface()).unwrap().keep();
        let of = |count| (count, 64);
        let sizes = ConnectionMapSizes { version: 1, table: 64, tags: of(1), entries: of(32), usage: of(32) };
        ConnectionMaps::open(Some(&pins), &sizes).unwrap();
        assert_eq!(assert_only_root_may(root), 6, "two links and four maps");
        pins.remove_connection_maps();
        assert_eq!(pinned(), [PinnedProgram::FromPod, PinnedProgram::ToPod]);
        let from = pod.address();
        let socket = udp(IpAddr::from([10, 0, 0, 254]));
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let send = move || udp(from).send_to(b"hello", "10.0.0.254:4000").unwrap();
        pod.run(send);
        assert!(socket.recv_from(&mut [0; 16]).is_err(), "closed while no process is there");
        let next = load();
        let mut veth = next.attach_pod(&pod.interface()).unwrap();
        pod.run(send);
        assert_eq!(veth.outcomes().unwrap().get(ProgramOutcome::NotReady), 0, "the earlier program still runs");
        next.take_over([], [&mut veth]).unwrap();
        pod.run(send);
        expect(&veth, ProgramOutcome::NotReady, 1);
        drop(veth);
        assert_eq!(pinned(), []);
        pod.run(send);
        assert!(socket.recv_from(&mut [0; 16]).is_ok(), "detached");
        pins.close();
    });
}

/// An IPv6 datagram of the pod with this number to another one, with the MACs of `like`.
fn ipv6_like(like: &[u8], from: u8, to: u8) -> Vec<u8> {
    let address = |number: u8| [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, number];
    let datagram = [&4000_u16.to_be_bytes()[..], &4000_u16.to_be_bytes(), &[0, 13, 0, 1], b"hello"].concat();
    let header = [0x60, 0, 0, 0, 0, datagram.len() as u8, 17, 64];
    [&like[..12], &[0x86, 0xdd], &header, &address(from), &address(to), &datagram].concat()
}

/// Every flag that a frame on a pair may have, and more, with ports of pods, none, and that of no port; both tags.
fn forged_tags() -> impl Iterator<Item = (u8, u16, [u8; 2])> {
    let ports = [0, 5, 6, 7, NO_PORT];
    (0..=31)
        .flat_map(move |flags| ports.into_iter().map(move |port| (flags, port)))
        .flat_map(|(flags, port)| [TO_WORKER, FROM_WORKER].into_iter().map(move |kind| (flags, port, kind)))
}

/// All numbers among the constants of loaded tcx programs: one is the mark of what has met a worker.
fn constants_of_programs() -> BTreeSet<u32> {
    let maps = MapInfoIter::default().filter(|map| map.name.to_str() == Ok("tcx_bpf.rodata"));
    // It may be another test's, which has ended meanwhile.
    let values = maps.filter_map(|map| MapHandle::from_map_id(map.id).ok()?.lookup(&[0; 4], MapFlags::ANY).ok()?);
    values
        .flat_map(|value| {
            value.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn no_frame_of_a_pod_passes_for_a_workers() {
    in_namespace(|| {
        let node = Node::new();
        let from = node.pods[0].address();
        let to_b = SocketAddr::new(node.pods[1].address(), 4000);
        node.pods[0].run(move || udp(from).send_to(b"hello", to_b).unwrap());
        let frame = node.worker.next().unwrap();
        for like in [frame.clone(), ipv6_like(&frame, 1, 2)] {
            for (flags, port, kind) in forged_tags() {
                let mut forged = tagged(like.clone(), port, flags);
                forged[..2].copy_from_slice(&kind);
                forged[6..8].copy_from_slice(&kind);
                let sent = forged.clone();
                node.pods[0].run(move || Raw::open("eth0").send(&sent));
                assert_is_of_pod(&node, &forged, &format!("{flags} {port} {kind:x?}"));
            }
        }
        // On the pair, what no worker has tagged goes nowhere, nor what is tagged for a port that is not there.
        let socket = udp(IpAddr::from([10, 0, 0, 254]));
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let mut to_node = frame;
        to_node[30..34].copy_from_slice(&[10, 0, 0, 254]);
        node.worker.send(&to_node);
        node.worker.send(&to(to_node.clone(), 7, TO_NODE));
        assert!(socket.recv_from(&mut [0; 16]).is_err());
    });
}

/// Asserts that the worker gets a frame that the first pod has sent, as this pod's.
fn assert_is_of_pod(node: &Node, sent: &[u8], what: &str) {
    let seen = node.worker.next().unwrap_or_else(|| panic!("it does not reach the worker: {what}"));
    let interface = node.pods[0].interface().index.to_be_bytes();
    assert_eq!((&seen[..2], &seen[4..6]), (&TO_WORKER[..], &[0, 5][..]), "as the pod's: {what}");
    assert_eq!((&seen[6..8], &seen[8..12]), (&TO_WORKER[..], &interface[..]), "{what}");
    assert_eq!(seen[2] & !CHECKSUM_OPEN, 0, "not as the node's, nor on its way out: {what}");
    assert_eq!(seen[14..], sent[14..], "{what}");
}

#[test]
fn no_mark_of_a_pods_process_passes_for_a_workers() {
    in_namespace(|| {
        let node = Node::new();
        let [from, to] = [0, 1].map(|index| node.pods[index].address());
        node.pods[0].run(move || udp(from).send_to(b"hello", SocketAddr::new(to, 4000)).unwrap());
        let frame = node.worker.next().unwrap();
        let marks = constants_of_programs();
        assert!(marks.iter().any(|mark| *mark > 0xffff), "a random number is among them: {marks:x?}");
        for mark in marks.into_iter().chain([u32::MAX]) {
            for sent in [tagged(frame.clone(), 5, TO_NODE), ipv6_like(&frame, 1, 2)] {
                let bytes = sent.clone();
                node.pods[0].run(move || {
                    let raw = Raw::open("eth0");
                    raw.0.set_mark(mark).unwrap();
                    raw.send(&bytes);
                });
                assert_is_of_pod(&node, &sent, &format!("mark {mark:x}"));
            }
            let process = node.pods[0].run(move || {
                let socket = udp(from);
                socket2::SockRef::from(&socket).set_mark(mark).unwrap();
                socket.send_to(b"marked", SocketAddr::new(to, 4000)).unwrap()
            });
            assert_eq!(process, 6);
            let seen = node.worker.next().unwrap_or_else(|| panic!("it does not reach the worker: mark {mark:x}"));
            assert_eq!((&seen[..2], seen.ends_with(b"marked")), (&TO_WORKER[..], true), "mark {mark:x}");
        }
    });
}
