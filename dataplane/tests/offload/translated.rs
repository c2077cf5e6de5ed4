//! Connections of pods whose destination the node's kernel translates, where its stack sends them to what answers: programs open them like those that
//! workers have opened there. The kernel itself translates here: a packet of a test run has no connection of its own.

use std::io::{IoSlice, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Stdio;
use std::time::Instant;

use nix::net::if_::if_nametoindex;
use nix::sys::socket::{AddressFamily, LinkAddr, MsgFlags, SockFlag, SockType, SockaddrLike, sendmsg, socket};
use penstock_dataplane::ProgramOutcome;
use penstock_xdp_redirect::Entrances;

use super::entry::{Fields, VIA_HOST, Words};
use super::mutations::{FORWARD, Mutation, PODS, REPEAT, mutation};
use super::repeat::{answer, flow_of, opening, owner};
use super::*;

/// The interface by which clients' packets enter the node's stack, and its other end.
const INLET: [&str; 2] = ["c0", "c1"];
const LIMIT: Duration = Duration::from_secs(20);

/// Rules of the node, by the hook at which they stand; for both families.
#[derive(Clone, Copy, Default)]
struct Rules {
    prerouting: &'static str,
    postrouting: &'static str,
    untracked: &'static str,
}

/// To the Service, to what answers: pod B at its port.
const TO_B: Rules = Rules {
    prerouting: "meta l4proto {tcp, udp} ip daddr 10.97.0.9 dnat ip to 10.0.0.2:80
        meta l4proto {tcp, udp} ip6 daddr fd00:97::9 dnat ip6 to [fd00::2]:80",
    postrouting: "",
    untracked: "",
};

/// A node whose stack sends what clients send to pod B.
struct Stack {
    node: Node,
    socket: OwnedFd,
    inlet: LinkAddr,
}

fn run(tool: &str, arguments: &[&str], input: &str) {
    let mut child = Command::new(tool).args(arguments).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{tool} {arguments:?}\n{input}");
}

impl Stack {
    /// Client pod A's packets enter the stack by the inlet.
    fn new(rules: Rules) -> Self {
        let node = Node::new();
        node.repeat();
        let Rules { prerouting, postrouting, untracked } = rules;
        // The node itself sends nothing.
        let rules = format!(
            "table inet test {{
             chain raw {{ type filter hook prerouting priority -300; {untracked}
             }}
             chain pre {{ type nat hook prerouting priority -100; {prerouting}
             }}
             chain post {{ type nat hook postrouting priority 100; {postrouting}
             }}
             chain out {{ type filter hook output priority 0; policy drop; }}
             }}"
        );
        run("nft", &["-f", "-"], &rules);
        let [inside, outside] = INLET;
        let links = format!(
            "link add {inside} address 02:00:00:00:00:ee type veth peer name {outside}
             link set lo up\nlink set {inside} up\nlink set {outside} up
             link set v2 up\nlink set veth1 up
             route add 10.0.0.2 dev v2\nroute add fd00::2 dev v2
             route add 10.0.0.1 dev {inside}\nroute add fd00::a dev {inside}
             neigh add 10.0.0.2 lladdr 02:00:00:00:01:02 dev v2 nud permanent
             neigh add fd00::2 lladdr 02:00:00:00:01:02 dev v2 nud permanent
             neigh add 10.0.0.1 lladdr 02:00:00:00:01:01 dev {inside} nud permanent
             neigh add fd00::a lladdr 02:00:00:00:01:01 dev {inside} nud permanent\n"
        );
        run("ip", &["-batch", "-"], &links);
        // Numbers of segments are changed here without their checksums.
        let settings =
            ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.netfilter.nf_conntrack_checksum=0"];
        let unchecked = ["all", inside].map(|name| format!("net.ipv4.conf.{name}.rp_filter=0"));
        run("sysctl", &[&["-q", "-w"], &settings[..], &[&unchecked[0], &unchecked[1]]].concat(), "");
        let entrance = if_nametoindex(inside).unwrap();
        for v4 in [true, false] {
            let entrances = Entrances { veth: entrance, stack: entrance };
            node.programs.set_pod_address(address(End::A, v4), Some(entrances)).unwrap();
        }
        let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None).unwrap();
        Self { node, socket, inlet: link_address(outside) }
    }

    /// Packets to pod B's interface that a program has sent on, and those that it has left to a worker.
    fn counts(&self) -> [u64; 2] {
        let [_, _, to_pod, ..] = self.node.programs.offloaded().unwrap();
        [to_pod.packets, self.node.veths[1].outcomes().unwrap().get(ProgramOutcome::FromStack)]
    }

    fn send(&self, frame: &[u8]) {
        sendmsg(self.socket.as_raw_fd(), &[IoSlice::new(frame)], &[], MsgFlags::empty(), Some(&self.inlet)).unwrap();
    }

    /// Sends a frame into the node's stack. Returns whether a program sends it on to pod B; otherwise it leaves it to a worker.
    fn arrives(&self, frame: &[u8]) -> bool {
        let (before, until) = (self.counts(), Instant::now() + LIMIT);
        self.send(frame);
        loop {
            let after = self.counts();
            match [0, 1].map(|kind| after[kind] - before[kind]) {
                [1, 0] => return true,
                [0, 1] => return false,
                [0, 0] if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
                other => panic!("{other:?}: {frame:02x?}"),
            }
        }
    }

    /// A worker opens a connection like this one behind the translation.
    fn answer(&mut self, there: Sent) {
        self.open_by_worker(Sent { flow: 200, ..there });
    }

    fn open_by_worker(&mut self, there: Sent) {
        let frame = first(there);
        let (verdict, _) = self.node.worker(End::Outside, &frame, Timestamp::now());
        assert!(matches!(verdict, Verdict::Forward(_)), "{there:?}: {verdict:?}");
    }
}

/// The socket address of an interface.
fn link_address(interface: &str) -> LinkAddr {
    // SAFETY: numbers, of which each may be zero.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_ifindex = if_nametoindex(interface).unwrap() as i32;
    // SAFETY: it is a complete address of the family that it names.
    unsafe { LinkAddr::from_raw((&raw const address).cast(), Some(size_of_val(&address) as u32)) }.unwrap()
}

/// The frame that opens a connection.
fn first(there: Sent) -> Vec<u8> {
    in_step(opening(there).frame(), there.tcp, SYN, true)
}

/// The same, as the client sends it to the Service.
fn to_service(there: Sent) -> Vec<u8> {
    first(Sent { to: End::Service, ..there })
}

/// The packet with which clients open here.
fn from_client(v4: bool, tcp: bool) -> Sent {
    Sent { v4, ..sent(End::A, End::B, tcp, ACK) }
}

/// The entry of a connection.
fn entry_of(node: &Node, there: Sent) -> (usize, Fields) {
    let words = Words::of(node);
    let found = words.slots().into_iter().map(|slot| (slot, words.read(slot)));
    let found: Vec<_> = found.filter(|(_, fields)| fields.is_of(&flow_of(there))).collect();
    let [one] = found[..] else { panic!("{there:?}: {found:?}") };
    one
}

#[test]
fn a_translated_connection_like_a_workers_meets_no_worker() {
    for (v4, tcp) in [(true, true), (false, true), (true, false), (false, false)] {
        in_namespace(|| {
            let (mut stack, there) = (Stack::new(TO_B), from_client(v4, tcp));
            assert!(!stack.arrives(&to_service(there)), "{there:?}: nobody has answered it");
            stack.answer(there);
            let there = Sent { flow: 2, ..there };
            assert!(stack.arrives(&to_service(there)), "{there:?}");
            assert_eq!(stack.node.hear(), [(flow_of(there), owner(there))]);
            let by_program = entry_of(&stack.node, there).1.lasting();
            assert_eq!(by_program.entry[0] & VIA_HOST, VIA_HOST, "its answers go back by the stack");
            let back = Sent { flags: if tcp { SYN | ACK } else { 0 }, payload: 0, ..there.back() };
            let frame = in_step(back.frame(), tcp, SYN | ACK, false);
            let done = stack.node.program(back.from, back.to, &frame, 0);
            assert_eq!(done.map(|done| done.0), Some(NEXT), "{back:?}: the answer is the stack's to translate");
            // As a worker writes it.
            forget(&stack.node);
            stack.open_by_worker(there);
            let mut by_worker = entry_of(&stack.node, there).1.lasting();
            if tcp {
                by_worker.widen(usize::from(there.ends().0.0 > there.ends().1.0));
            }
            assert_eq!(by_program, by_worker, "{there:?}");
        });
    }
}

/// The change, in the node and in the frame, and whether a program still sends it on.
type Case<'a> = (&'a str, Rules, &'a (dyn Fn(&mut Stack, Sent) + Sync), &'a (dyn Fn(&mut Vec<u8>) + Sync), bool);

const NO_RULES: Rules = Rules { prerouting: "", postrouting: "", untracked: "" };

/// Its IPv4 address.
fn address_bytes(end: End) -> [u8; 4] {
    let IpAddr::V4(address) = address(end, true) else { unreachable!() };
    address.octets()
}

fn set_source(frame: &mut [u8], end: End) {
    frame[26..30].copy_from_slice(&address_bytes(end));
    headers::seal(frame);
}

fn set_destination(frame: &mut [u8], end: End) {
    frame[30..34].copy_from_slice(&address_bytes(end));
    headers::seal(frame);
}

/// A worker opens the same connection of a machine outside.
fn answer_outside(stack: &mut Stack, there: Sent) {
    answer(&mut stack.node, Sent { from: End::Outside, ..there });
}

/// B sends to the client's port, with the outside's address, and the client answers.
fn ask_first(stack: &mut Stack, there: Sent) {
    let back = Sent { flags: SYN, payload: 0, flow: 2, ..there.back() };
    let mut frame = in_step(back.frame(), there.tcp, SYN, true);
    frame[..6].copy_from_slice(&NODE_MAC);
    stack.send(&frame);
}

fn cases() -> [Case<'static>; 10] {
    let nothing: &(dyn Fn(&mut Stack, Sent) + Sync) = &|_, _| ();
    [
        ("as it is", TO_B, nothing, &|_| (), true),
        (
            "to another port",
            Rules { prerouting: "meta l4proto {tcp, udp} ip daddr 10.97.0.9 dnat ip to 10.0.0.2:81", ..NO_RULES },
            nothing,
            &|_| (),
            false,
        ),
        ("as the client has sent it", TO_B, nothing, &|frame| set_destination(frame, End::B), false),
        (
            "translated without a connection",
            Rules { untracked: "ip daddr 10.97.0.9 notrack ip daddr set 10.0.0.2", ..NO_RULES },
            nothing,
            &|_| (),
            false,
        ),
        (
            "with the address of another",
            Rules { postrouting: "ip saddr 10.0.0.1 snat ip to 203.0.113.7", ..TO_B },
            &answer_outside,
            &|_| (),
            false,
        ),
        (
            "an answer, for the kernel",
            Rules { postrouting: "ip saddr 10.0.0.2 snat ip to 203.0.113.7", ..NO_RULES },
            &ask_first,
            &|frame| set_destination(frame, End::Outside),
            false,
        ),
        (
            "of who is no pod any more",
            TO_B,
            &|stack, _| stack.node.programs.remove_pod_address(address(End::A, true)).unwrap(),
            &|_| (),
            false,
        ),
        ("of the outside", TO_B, &answer_outside, &|frame| set_source(frame, End::Outside), true),
        ("of the outside, as a pod", TO_B, nothing, &|frame| set_source(frame, End::Outside), false),
        ("under another policy", TO_B, &|stack, _| stack.node.next_epoch(true), &|_| (), false),
    ]
}

#[test]
fn behind_the_nodes_translation_only_what_it_says_is_repeated() {
    for (what, rules, prepare, change, passes) in cases() {
        for tcp in [true, false] {
            in_namespace(|| {
                let (mut stack, there) = (Stack::new(rules), from_client(true, tcp));
                stack.answer(there);
                prepare(&mut stack, there);
                let mut frame = to_service(Sent { flow: 2, ..there });
                change(&mut frame);
                assert_eq!(stack.arrives(&frame), passes, "{what}, TCP: {tcp}");
                let listed = stack.node.pipeline.connections().iter(Timestamp::now());
                let opened = listed.filter(|found| found.original.src_port == 1002).map(|found| found.via_host);
                let is_pods = frame[26..30] == address_bytes(End::A);
                assert_eq!(
                    opened.collect::<Vec<_>>(),
                    if passes { vec![is_pods] } else { vec![] },
                    "{what}, TCP: {tcp}"
                );
            });
        }
    }
}

#[test]
fn a_pods_connections_by_a_service_and_without_differ() {
    in_namespace(|| {
        let (mut stack, there) = (Stack::new(TO_B), from_client(true, true));
        // Each has an answer of its own.
        stack.answer(there);
        assert!(stack.node.opened_by_program(there).is_none(), "by the Service alone");
        forget(&stack.node);
        answer(&mut stack.node, there);
        assert!(stack.node.opened_by_program(Sent { flow: 3, ..there }).is_some());
        assert!(stack.arrives(&to_service(Sent { flow: 4, ..there })));
        let is_via_host =
            |stack: &Stack, flow| entry_of(&stack.node, Sent { flow, ..there }).1.entry[0] & VIA_HOST != 0;
        assert_eq!([3, 4].map(|flow| is_via_host(&stack, flow)), [false, true]);
        // And none takes the entry of the other that has ended.
        let words = Words::of(&stack.node);
        for (flow, by_service, passes) in [(3, true, false), (4, false, false), (3, false, true), (4, true, true)] {
            let there = Sent { flow, ..there };
            let (slot, mut ended) = entry_of(&stack.node, there);
            const TIME_WAIT: u64 = 10;
            ended.set_state(TIME_WAIT);
            words.write(slot, &ended);
            let opens = if by_service {
                stack.arrives(&to_service(there))
            } else {
                stack.node.opened_by_program(there).is_some()
            };
            let generation = entry_of(&stack.node, there).1.generation();
            let is_taken = generation == (ended.generation() + 1) & 0x3ff;
            assert_eq!((opens, is_taken), (passes, passes), "flow {flow}, by the Service: {by_service}");
            assert_eq!(is_via_host(&stack, flow), flow == 4);
        }
    });
}

const OPENS: &str = "translated::a_translated_connection_like_a_workers_meets_no_worker";
const SAYS: &str = "translated::behind_the_nodes_translation_only_what_it_says_is_repeated";
const DIFFER: &str = "translated::a_pods_connections_by_a_service_and_without_differ";

/// Changes to the programs that a test here must notice.
pub(crate) const MUTATIONS: &[Mutation] = &[
    mutation(
        SAYS,
        "what the node has not translated counts as translated",
        PODS,
        " && !is_unchanged(origin) &&",
        " &&",
    ),
    mutation(SAYS, "an answer counts as translated on its way there", PODS, "return origin->opens && ", "return "),
    mutation(SAYS, "what others send counts as a pod's", PODS, " && bpf_map_lookup_elem(&pod_addresses, &from);", ";"),
    mutation(
        SAYS,
        "what has another's address opens a connection",
        FORWARD,
        "!found && origin->ingress != BY_NODE && skb->ingress_ifindex",
        "!found && skb->ingress_ifindex",
    ),
    mutation(
        OPENS,
        "it is not said that answers go by the stack",
        REPEAT,
        "(packet->direction & 1) << 5 | candidate->via_host |",
        "(packet->direction & 1) << 5 |",
    ),
    mutation(
        DIFFER,
        "a connection by a Service and one without have one answer",
        REPEAT,
        " | (found->via_host ? 1ULL : 0) << 16 * direction;",
        ";",
    ),
    mutation(
        OPENS,
        "the opener's port is the lower end's",
        REPEAT,
        "(found->via_host ? 1ULL : 0) << 16 * direction;",
        "(found->via_host ? 1ULL : 0);",
    ),
    mutation(
        DIFFER,
        "an ended entry is taken whatever its way was",
        REPEAT,
        " || (control & VIA_HOST) != found->via_host)",
        ")",
    ),
];
