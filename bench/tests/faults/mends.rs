//! Mutation test of the programs on real packets: takes out one mend at a time, and the frame fuzzer, or the test that is named, must find it.
//! Each check of the programs before they forward a packet by themselves has such a test in `dataplane/tests/offload`.
//!
//! Run by `make test-long`; `PENSTOCK_MUTATION=TEXT` takes only mutants with this in their name. The daemon must be built with
//! `--workspace --features penstock-xdp-redirect/replaceable-programs --bin penstock`.

use std::path::PathBuf;
use std::process::Command;

use self::mutants::{Source, occurs_once};

#[path = "../../../xdp-redirect/tests/mutants/mod.rs"]
mod mutants;

const PROGRAM: &str = "tcx.bpf.c";
const FORWARD: &str = "forward.h";
const ORIGIN: &str = "origin.h";
const PODS: &str = "pods.h";
const EGRESS: &str = "egress.h";
const NEIGHBOUR: &str = "neighbour.h";
const TUNNEL: &str = "tunnel.h";
const KERNEL: &str = "kernel_network.h";
const ROUTES: &str = "routes.h";
const ROUTING: &str = "host_routing.h";

const FUZZER: &str = "faults::fuzz::random_frames_for_a_minute_arrive_only_where_policy_allows";
const TUNNELS: &str = "services::tunnels::a_node_unwraps_no_tunnel_packet_of_another_nodes_pod";
const SAYS: &str = "system::host_routing::packets_pass_the_stack_by_until_somebody_has_a_say";
const CHANGES: &str = "system::host_routing::routes::a_change_of_routes_is_in_effect_for_the_next_packet";
/// Seconds that the fuzzer has for a mutant.
const SECONDS: &str = "90";

/// Who must find a mutant.
#[derive(Clone, Copy)]
enum Finder {
    /// The fuzzer, with a setting whose description has this text.
    Fuzzer(&'static str),
    /// A test of this program.
    Test(&'static str),
}
use Finder::{Fuzzer, Test};

/// A mend that is taken out: a part of the source, which occurs once, and its replacement.
struct Mutant {
    breaks: &'static str,
    finder: Finder,
    file: &'static str,
    from: &'static str,
    to: &'static str,
}

const MUTANTS: &[Mutant] = &[
    // The kernel has translated the packet.
    Mutant {
        breaks: "behind IPv6 options the node's translation is not seen",
        finder: Fuzzer("offload: true, is_bridged: false, translation: Kernel(Nftables)"),
        file: ORIGIN,
        from: "\tif (reads_connections)\n\t\tread_connection(skb, origin);",
        to: "\t__u8 next = 6;\n\tif (!is_v4)\n\t\tbpf_skb_load_bytes(skb, offset + offsetof(struct ipv6hdr, nexthdr), &next, 1);\n\
             \tif (reads_connections && next != 0 && next != 60)\n\t\tread_connection(skb, origin);",
    },
    Mutant {
        breaks: "in later fragments the node's translation is not seen",
        finder: Fuzzer("offload: true, is_bridged: false, translation: Kernel(Nftables)"),
        file: ORIGIN,
        from: "\tif (reads_connections)\n\t\tread_connection(skb, origin);",
        to: "\t__be16 place = 0;\n\tif (is_v4)\n\t\tbpf_skb_load_bytes(skb, offset + offsetof(struct iphdr, frag_off), &place, 2);\n\
             \tif (reads_connections && !(place & bpf_htons(0x1fff)))\n\t\tread_connection(skb, origin);",
    },
    Mutant {
        breaks: "what has no interface is the node's own",
        finder: Fuzzer("offload: true, is_bridged: false, translation: Kernel(Nftables)"),
        file: ORIGIN,
        from: "return !skb->ingress_ifindex && skb->sk;",
        to: "return !skb->ingress_ifindex;",
    },
    Mutant {
        breaks: "pieces that the node cuts up have not entered it",
        finder: Test("services::answering::fragments_from_outside_are_not_the_nodes_own"),
        file: ORIGIN,
        from: "return skb->ingress_ifindex || !is_whole_segment(skb);",
        to: "return !!skb->ingress_ifindex;",
    },
    Mutant {
        breaks: "nobody notes who sent what the node masquerades",
        finder: Test("services::masquerade::a_block_admits_masqueraded_clients_by_their_own_address"),
        file: ORIGIN,
        from: "\tif (record_source(origin))\n\t\treturn SOURCE_TRANSLATED;",
        to: "",
    },
    Mutant {
        breaks: "a machine outside answers as a Service's backend",
        finder: Fuzzer("offload: true, is_bridged: false, translation: Kernel"),
        file: PODS,
        from: "return origin->known && is_spoofed_pod(skb, &from);",
        to: "return 0;",
    },
    Mutant {
        breaks: "a machine outside sends as a pod",
        finder: Fuzzer("offload: true, is_bridged: false, translation: None"),
        file: PODS,
        from: "\tif (is_spoofed_pod(skb, &from))\n\t\treturn 1;",
        to: "",
    },
    Mutant {
        breaks: "what enters with the node's address, or a Service's, is its own",
        finder: Test("services::answering::outside_answers_neither_as_the_node_nor_as_a_service"),
        file: PODS,
        from: "origin->ingress = is_locally_generated(skb) || !is_untranslated(origin) ? BY_NODE : 0;",
        to: "origin->ingress = BY_NODE;",
    },
    Mutant {
        breaks: "no worker is asked about what the node sends on to another machine",
        finder: Fuzzer("offload: true, is_bridged: true, translation: Kernel"),
        file: EGRESS,
        from: "return (is_opened && (!is_same_address(&origin->destination, &origin->flow.to) || \
               origin->ports.to != origin->flow.ports.to)) ||\n\t       bpf_map_lookup_elem",
        to: "return !!bpf_map_lookup_elem",
    },
    Mutant {
        breaks: "what answers who has sent as a Service leaves unasked",
        finder: Test("services::answering::who_sends_as_a_service_first_opens_no_way_back"),
        file: EGRESS,
        from: "const int is_opened = (origin->known || origin->is_error) && origin->opens;",
        to: "const int is_opened = origin->known || origin->is_error;\n\n\tif (is_opened && !origin->opens)\n\t\treturn 0;",
    },
    // A packet leaves as it was judged.
    Mutant {
        breaks: "the kernel writes a checksum wherever the pod says",
        finder: Fuzzer("offload: true"),
        file: FORWARD,
        from: "!read_packet(skb, &packet) || !is_checksum_in_transport_header(skb, &packet))\n",
        to: "!read_packet(skb, &packet))\n",
    },
    Mutant {
        breaks: "a frame may have a VLAN tag",
        finder: Fuzzer("offload: false"),
        file: PROGRAM,
        from: "if (skb->vlan_present || skb->protocol == bpf_htons(ETH_P_8021Q) || skb->protocol == bpf_htons(ETH_P_8021AD))",
        to: "if (skb->vlan_present)\n\t\treturn TC_ACT_UNSPEC;\n\tif (0)",
    },
    // Tunnels.
    Mutant {
        breaks: "a node unwraps what another node's pod sends",
        finder: Test(TUNNELS),
        file: TUNNEL,
        from: "return found && *found & POD_NETWORK;",
        to: "return 0;",
    },
    Mutant {
        breaks: "a tunnel's port is not seen behind IPv6 options",
        finder: Test(TUNNELS),
        file: TUNNEL,
        from: "next != IPPROTO_DSTOPTS && ",
        to: "",
    },
    Mutant {
        breaks: "of a tunnel packet in fragments the first is none",
        finder: Test(TUNNELS),
        file: TUNNEL,
        from: "ip4.frag_off & bpf_htons(0x1fff)",
        to: "ip4.frag_off & bpf_htons(0x3fff)",
    },
    Mutant {
        breaks: "only tunnels by UDP are refused",
        finder: Test(TUNNELS),
        file: TUNNEL,
        from: "if (protocol != IPPROTO_UDP)\n\t\treturn is_encapsulation(protocol);",
        to: "if (protocol != IPPROTO_UDP)\n\t\treturn 0;",
    },
    Mutant {
        breaks: "tunnels between pods are refused, too",
        finder: Test(TUNNELS),
        file: TUNNEL,
        from: "return found != BPF_FIB_LKUP_RET_SUCCESS && found",
        to: "return 1 || found",
    },
    // Who a pod is on a bridge.
    Mutant {
        breaks: "neighbour discovery to a port's MAC is routed",
        finder: Fuzzer("offload: true, is_bridged: true"),
        file: NEIGHBOUR,
        from: "\tif (bridge)\n\t\treturn stays_on_bridge(ctx, bridge, pods, ip6);",
        to: "\tif (bridge)\n\t\treturn 1;",
    },
    Mutant {
        breaks: "an unknown pod claims a served pod's address",
        finder: Test("faults::identity::an_unknown_pod_cuts_nobody_off_by_arp"),
        file: NEIGHBOUR,
        from: "return !belongs_to_other_pod(&claimed, ifindex);",
        to: "return 1;",
    },
    Mutant {
        breaks: "a known pod speaks for another in ARP",
        finder: Test("faults::spoofing::spoofed_arp_and_neighbour_discovery_are_dropped_and_counted"),
        file: NEIGHBOUR,
        from: "\treturn is_mac(mac, eth->h_source) && is_mac(mac, arp->sender_mac) && bpf_map_lookup_elem(pod_macs, &claimed);",
        to: "\treturn 1;",
    },
    // The way past the node's stack.
    Mutant {
        breaks: "past the stack the forward chain of IPv4 has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: "net->nf.hooks_ipv4[PREROUTING] || net->nf.hooks_ipv4[FORWARD] || ",
        to: "net->nf.hooks_ipv4[PREROUTING] || ",
    },
    Mutant {
        breaks: "past the stack the chain of what leaves by IPv4 has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: " || net->nf.hooks_ipv4[POSTROUTING];",
        to: ";",
    },
    Mutant {
        breaks: "past the stack the chain of what leaves by IPv6 has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: " || net->nf.hooks_ipv6[POSTROUTING];",
        to: ";",
    },
    Mutant {
        breaks: "past the stack the chain of what enters by IPv6 has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: "return net->nf.hooks_ipv6[PREROUTING] || ",
        to: "return ",
    },
    Mutant {
        breaks: "past the stack a chain at an interface has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: "if (bpf_core_field_exists(device->nf_hooks_ingress) && device->nf_hooks_ingress)\n\t\treturn 1;",
        to: "",
    },
    Mutant {
        breaks: "past the stack an IPsec policy has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: "\tif (has_policies(net))\n\t\treturn BY_IPSEC;\n",
        to: "",
    },
    Mutant {
        breaks: "past the stack a filter of traffic control has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: "return !!entry->miniq;",
        to: "return 0;",
    },
    Mutant {
        breaks: "past the stack a macvlan has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: "return device->rx_handler || ",
        to: "return ",
    },
    Mutant {
        breaks: "past the stack a setting of priorities has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: "return !net->ipv4.sysctl_ip_fwd_update_priority;",
        to: "return 0;",
    },
    Mutant {
        breaks: "past the stack the setting of the daemon has no say",
        finder: Test("system::host_routing::with_the_setting_or_without_offload_all_goes_by_the_stack"),
        file: KERNEL,
        from: "\tif (!host_routing)\n\t\treturn BY_SETTING;\n",
        to: "",
    },
    Mutant {
        breaks: "past the stack the chain of what enters by IPv4 has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: "return net->nf.hooks_ipv4[PREROUTING] || ",
        to: "return ",
    },
    Mutant {
        breaks: "past the stack an IPsec policy of what leaves has no say",
        finder: Test(SAYS),
        file: KERNEL,
        from: "return net->xfrm.policy_count[POLICY_OUT] || ",
        to: "return ",
    },
    Mutant {
        breaks: "past the stack the source is not checked",
        finder: Test("system::host_routing::routes::what_comes_in_takes_the_routes_of_that_moment"),
        file: ROUTING,
        from: " && (!is_v4 || passes_rp_filter(skb, &route));",
        to: ";",
    },
    Mutant {
        breaks: "past the stack what comes in takes no route",
        finder: Test("system::host_routing::routes::what_comes_in_takes_the_routes_of_that_moment"),
        file: ROUTING,
        from: "find_route(skb, &route, length, BPF_FIB_LOOKUP_SKIP_NEIGH) && route.ifindex == ifindex && ",
        to: "",
    },
    Mutant {
        breaks: "past the stack a changed route of IPv4 is not seen",
        finder: Test(CHANGES),
        file: ROUTES,
        from: "*version = net->ipv4.rt_genid.counter;",
        to: "*version = 0;",
    },
    Mutant {
        breaks: "past the stack a route of IPv6 that is gone is not seen",
        finder: Test(CHANGES),
        file: ROUTES,
        from: "ip6->fib6_sernum.counter + ip6->fib6_main_tbl->fib_seq",
        to: "ip6->fib6_sernum.counter",
    },
    Mutant {
        breaks: "past the stack another next hop of IPv6 is not seen",
        finder: Test(CHANGES),
        file: ROUTES,
        from: "ip6->fib6_sernum.counter + ip6->fib6_main_tbl->fib_seq",
        to: "ip6->fib6_main_tbl->fib_seq",
    },
    Mutant {
        breaks: "past the stack routes that a rule of IPv6 leads to are not seen",
        finder: Test(CHANGES),
        file: ROUTES,
        from: "||\n\t    !bpf_core_field_exists(ip6->fib6_local_tbl) || ip6->fib6_has_custom_rules)",
        to: "||\n\t    !bpf_core_field_exists(ip6->fib6_local_tbl))",
    },
    Mutant {
        breaks: "past the stack a route is kept for ever",
        finder: Test("system::host_routing::routes::a_route_that_has_expired_is_not_taken"),
        file: ROUTES,
        from: " && known->tick == now && ",
        to: " && known->tick != NO_TICK && ",
    },
    Mutant {
        breaks: "past the stack a route is that of any flow in its place",
        finder: Test("system::host_routing::routes::each_of_many_addresses_has_its_own_route"),
        file: ROUTES,
        from: " &&\n\t    is_same_question(&known->question, route)) {",
        to: ") {",
    },
];

/// The finder's answer about a mutant.
enum Outcome {
    Found,
    Missed,
    /// The kernel does not load it, or the test fails for something else.
    Broken(String),
}

fn run(objects: &[(&str, PathBuf)], finder: Finder) -> Outcome {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.envs(objects.iter().map(|(variable, object)| (variable, object)));
    match finder {
        Fuzzer(only) => command
            .args(["--ignored", "--exact", FUZZER])
            .env("FUZZ_ONLY", only)
            .env("FUZZ_SECONDS", SECONDS)
            .env_remove("FUZZ_SEED"),
        Test(test) => command.args(["--include-ignored", "--exact", test]),
    };
    let output = command.output().expect("this program runs");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let is_found = !output.status.success()
        && match finder {
            Fuzzer(_) => printed.contains("; sent to "),
            Test(_) => !printed.contains("the daemon did not get ready"),
        };
    match (is_found, output.status.success() && printed.contains("1 passed")) {
        (true, _) => Outcome::Found,
        (false, true) => Outcome::Missed,
        (false, false) => Outcome::Broken(printed),
    }
}

#[test]
fn every_mend_of_the_programs_occurs_exactly_once() {
    let others: Vec<_> = MUTANTS.iter().filter(|mutant| !occurs_once(mutant.file, mutant.from)).collect();
    let others: Vec<_> = others.iter().map(|mutant| (mutant.breaks, mutant.from)).collect();
    assert!(others.is_empty(), "{others:#?}");
}

#[test]
#[ignore = "takes a minute for each mutant; make test-long runs it"]
fn each_mend_that_is_taken_out_of_the_programs_is_found() {
    let source = Source::new("mends");
    let nothing = run(&[("TCX_OBJECT", PathBuf::from("/dev/null"))], Fuzzer("offload: true"));
    let is_replaceable =
        matches!(nothing, Outcome::Broken(printed) if printed.contains("the daemon did not get ready"));
    assert!(is_replaceable, "the daemon is built without --features replaceable-programs: no mutant is loaded");
    let wanted = std::env::var("PENSTOCK_MUTATION").unwrap_or_default();
    let mut missed = Vec::new();
    for mutant in MUTANTS.iter().filter(|mutant| mutant.breaks.contains(&wanted)) {
        source.restore();
        source.replace(mutant.file, mutant.from, mutant.to);
        let objects = source.compile(mutant.file, mutant.breaks);
        match run(&objects, mutant.finder) {
            Outcome::Found => println!("found   {}", mutant.breaks),
            Outcome::Missed => {
                println!("MISSED  {}", mutant.breaks);
                missed.push(mutant.breaks);
            }
            Outcome::Broken(printed) => panic!("{}: no test of it:\n{printed}", mutant.breaks),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:#?}");
}
