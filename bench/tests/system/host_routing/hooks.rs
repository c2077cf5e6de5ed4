//! Past the node's stack no hook of the kernel's is skipped: of the packets that one drops by the stack, none passes.

use std::net::{SocketAddr, UdpSocket};
use std::time::Instant;

use penstock_bench::load::pin;

use super::{LIMIT, Network, shell};
use crate::fixture::pods;

/// A place where a rule can drop datagrams to port 5300, which all of these are to.
struct Hook {
    what: &'static str,
    /// Commands, in which `POD` is the pod's interface on the node, `IP` `ip` or `ip6`, and `ANY` matches all addresses.
    begin: &'static str,
    end: &'static str,
    /// Programs don't see it by themselves: the daemon follows the kernel's messages about it.
    is_followed: bool,
}

const TO: u16 = 5300;

const HOOKS: &[Hook] = &[
    Hook {
        what: "netfilter, prerouting",
        begin: "nft 'table inet drops { chain c { type filter hook prerouting priority 0; udp dport 5300 drop; }; }'",
        end: "nft delete table inet drops",
        is_followed: false,
    },
    Hook {
        what: "netfilter, forward",
        begin: "nft 'table inet drops { chain c { type filter hook forward priority 0; udp dport 5300 drop; }; }'",
        end: "nft delete table inet drops",
        is_followed: false,
    },
    Hook {
        what: "netfilter, postrouting",
        begin: "nft 'table inet drops { chain c { type filter hook postrouting priority 0; udp dport 5300 drop; }; }'",
        end: "nft delete table inet drops",
        is_followed: false,
    },
    Hook {
        what: "netfilter, ingress of the uplink",
        begin: "nft 'table netdev drops { chain c { type filter hook ingress device eth1 priority 0; udp dport 5300 drop; }; }'",
        end: "nft delete table netdev drops",
        is_followed: false,
    },
    Hook {
        what: "netfilter, egress of the uplink",
        begin: "nft 'table netdev drops { chain c { type filter hook egress device eth1 priority 0; udp dport 5300 drop; }; }'",
        end: "nft delete table netdev drops",
        is_followed: false,
    },
    Hook {
        what: "netfilter, ingress of the pod's interface",
        begin: "nft 'table netdev drops { chain c { type filter hook ingress device POD priority 0; udp dport 5300 drop; }; }'",
        end: "nft delete table netdev drops",
        is_followed: false,
    },
    Hook {
        what: "netfilter, egress of the pod's interface",
        begin: "nft 'table netdev drops { chain c { type filter hook egress device POD priority 0; udp dport 5300 drop; }; }'",
        end: "nft delete table netdev drops",
        is_followed: false,
    },
    Hook {
        what: "an IPsec policy of what is forwarded",
        begin: "ip xfrm policy add src ANY dst ANY proto 17 dport 5300 dir fwd action block",
        end: "ip xfrm policy flush",
        is_followed: false,
    },
    Hook {
        what: "an IPsec policy of what leaves",
        begin: "ip xfrm policy add src ANY dst ANY proto 17 dport 5300 dir out action block",
        end: "ip xfrm policy flush",
        is_followed: false,
    },
    Hook {
        what: "a filter on what comes in by the uplink",
        begin: "tc qdisc add dev eth1 clsact; tc filter add dev eth1 ingress MATCH action mirred egress redirect dev sink",
        end: "tc qdisc del dev eth1 clsact",
        is_followed: false,
    },
    Hook {
        what: "a filter on what leaves by the uplink",
        begin: "tc qdisc add dev eth1 clsact; tc filter add dev eth1 egress MATCH action mirred egress redirect dev sink",
        end: "tc qdisc del dev eth1 clsact",
        is_followed: false,
    },
    Hook {
        what: "a filter on what the pod sends",
        begin: "tc qdisc add dev POD clsact; tc filter add dev POD ingress MATCH action mirred egress redirect dev sink",
        end: "tc qdisc del dev POD clsact",
        is_followed: true,
    },
    Hook {
        what: "a filter on what the pod gets",
        begin: "tc qdisc add dev POD clsact; tc filter add dev POD egress MATCH action mirred egress redirect dev sink",
        end: "tc qdisc del dev POD clsact",
        is_followed: true,
    },
    // A packet that is longer than its burst never leaves.
    Hook {
        what: "a queueing discipline of the uplink",
        begin: "tc qdisc add dev eth1 root tbf rate 1mbit burst 100 limit 100",
        end: "tc qdisc del dev eth1 root",
        is_followed: false,
    },
    Hook {
        what: "a queueing discipline of the pod's interface",
        begin: "tc qdisc add dev POD root tbf rate 1mbit burst 100 limit 100",
        end: "tc qdisc del dev POD root",
        is_followed: true,
    },
];

/// Sends datagrams of these bytes; both are longer than the queueing disciplines let through.
const DROPPED: [u8; 200] = [1; 200];
const LAST: [u8; 200] = [2; 200];
const SENT: usize = 5;

/// Two sockets with the same port, of a pod and of a machine behind the node.
struct Ends {
    sockets: [UdpSocket; 2],
    addresses: [SocketAddr; 2],
}

impl Ends {
    fn new(network: &Network, v6: bool) -> Self {
        let pod = &network.fixture.site("test/pod-0").namespace;
        let (pod_address, outside) = (network.fixture.target("test/pod-0", v6).1, network.address(v6));
        let addresses = [pod_address, outside].map(|address| SocketAddr::new(address, TO));
        let sockets = [pod.udp(addresses[0]), network.outside.namespace().udp(addresses[1])].map(Result::unwrap);
        sockets.iter().for_each(|socket| socket.set_read_timeout(Some(LIMIT)).unwrap());
        Self { sockets, addresses }
    }

    fn send(&self, direction: usize, bytes: &[u8]) {
        self.sockets[direction].send_to(bytes, self.addresses[1 - direction]).unwrap();
    }

    /// How many datagrams come before the last one.
    fn count_until_last(&self, direction: usize) -> usize {
        let mut bytes = [0; 200];
        let comes = |bytes: &mut [u8]| self.sockets[1 - direction].recv(bytes).map(|_| bytes[0]);
        (0..).find(|_| comes(&mut bytes).unwrap() == LAST[0]).unwrap()
    }

    /// How many of the datagrams arrive in each direction while a rule drops some, with a chain that keeps all to the stack or without.
    fn count_arrivals(
        &self,
        network: &Network,
        (begin, end): (&str, &str),
        is_followed: bool,
        by_stack: bool,
    ) -> [usize; 2] {
        let node = network.node();
        if by_stack {
            shell(node, "nft 'table inet stack { chain c { type filter hook forward priority 0; }; }'");
        }
        shell(node, begin);
        wait_until_filtered(network, is_followed);
        [0, 1].iter().for_each(|&direction| (0..SENT).for_each(|_| self.send(direction, &DROPPED)));
        shell(node, end);
        if by_stack {
            shell(node, "nft delete table inet stack");
        }
        wait_until_filtered(network, false);
        [0, 1].map(|direction| {
            self.send(direction, &LAST);
            self.count_until_last(direction)
        })
    }
}

/// Waits until the daemon knows whether others have limits or filters on the pod's interface.
fn wait_until_filtered(network: &Network, is_filtered: bool) {
    let deadline = Instant::now() + LIMIT;
    while network.fixture.status().pods.iter().any(|pod| pod.filtered.is_some()) != is_filtered {
        assert!(Instant::now() < deadline, "limits or filters on the pod's interface: not {is_filtered}");
    }
}

#[test]
fn a_hook_that_drops_packets_by_the_stack_drops_them_past_it() {
    let network = Network::new(&pods(1), "", true);
    let interface = network.fixture.cluster.node.pod("test/pod-0").unwrap().interface().to_owned();
    shell(network.node(), "ip link add sink type veth peer name sink-peer");
    // Programs keep routes by processor, and run where the sender does.
    pin(0).unwrap();
    for v6 in [false, true] {
        let ends = Ends::new(&network, v6);
        let (any, family) = if v6 { ("::/0", "ip6") } else { ("0.0.0.0/0", "ip") };
        let protocol = if v6 { "ipv6" } else { "ip" };
        let filter =
            format!("protocol {protocol} u32 match {family} protocol 17 0xff match {family} dport {TO} 0xffff");
        for Hook { what, begin, end, is_followed } in HOOKS {
            let fill = |text: &str| text.replace("POD", &interface).replace("ANY", any).replace("MATCH", &filter);
            let rule = (&*fill(begin), &*fill(end));
            let [by_stack, past] = [true, false].map(|by_stack| {
                for direction in [0, 1] {
                    network.send_until_past(direction, || {
                        ends.send(direction, &LAST);
                        assert_eq!(ends.count_until_last(direction), 0);
                    });
                }
                ends.count_arrivals(&network, rule, *is_followed, by_stack)
            });
            assert!(by_stack.contains(&0), "{what}, IPv6 {v6}: drops nothing: {by_stack:?}");
            assert_eq!(past, by_stack, "{what}, IPv6 {v6}: of {SENT} sent and {SENT} received");
        }
    }
}
