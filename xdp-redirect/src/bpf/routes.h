/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The node's routes (bpf_fib_lookup). An answer stands for what was asked, between two ends, until the node's routes, rules, or settings change,
 * as it does for a socket of the node; and for one tick of the table's clock at most. Some things change without that: a route expires, the MTU of
 * the way is learnt, a neighbour that decides among several routes is gone, or IPv6 loses a route that it took although another comes before. */
#pragma once
#include "established.h"
#include "kernel_network.h"

#define ROUTE_BITS 10
#define NO_TICK 0xffffffff /* above all of the clock */

struct route {
	struct bpf_fib_lookup question, answer;
	__u32 version, tick;
	__u32 sequence; /* odd while it is written: with PREEMPT_RT another program may come between on the same CPU */
};

/* By hash of the question. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1 << ROUTE_BITS);
	__type(key, __u32);
	__type(value, struct route);
} routes SEC(".maps");

/* Reads a number that changes of the node's routes increase (rt_cache_flush in net/ipv4/route.c; fib6_new_sernum and
 * call_fib6_entry_notifiers in net/ipv6/ip6_fib.c). Returns 0 if there is none: IPv6 counts in each table, and rules may lead to any of them. */
static __always_inline int read_routes_version(const struct net *net, int is_v4, __u32 *version)
{
	const struct netns_ipv6 *ip6 = &net->ipv6;

	if (is_v4) {
		if (!bpf_core_field_exists(net->ipv4.rt_genid))
			return 0;
		*version = net->ipv4.rt_genid.counter;
		return 1;
	}
	if (!bpf_core_field_exists(ip6->fib6_sernum) || !bpf_core_field_exists(ip6->fib6_main_tbl->fib_seq) ||
	    !bpf_core_field_exists(ip6->fib6_local_tbl) || ip6->fib6_has_custom_rules)
		return 0;
	*version = ip6->fib6_sernum.counter + ip6->fib6_main_tbl->fib_seq + ip6->fib6_local_tbl->fib_seq;
	return 1;
}

/* Whether ports may decide which route a packet takes: by rules, or among several next hops. */
static __always_inline int are_routes_by_ports(const struct net *net, int is_v4)
{
	if (!is_v4)
		return net->ipv6.fib6_has_custom_rules || net->ipv6.sysctl.multipath_hash_policy;
	return net->ipv4.fib_has_custom_rules || (bpf_core_field_exists(net->ipv4.sysctl_fib_multipath_hash_policy) &&
						  net->ipv4.sysctl_fib_multipath_hash_policy);
}

static __always_inline __u32 place_of_route(const struct bpf_fib_lookup *question)
{
	const __u32 *from = question->ipv6_src, *to = question->ipv6_dst; /* the last of IPv6, the first of IPv4 */
	const __u64 ends = (__u64)(from[0] ^ from[3]) << 32 | (to[0] ^ to[3]);
	const __u64 flow = (__u64)question->flowinfo << 32 | (__u32)question->sport << 16 | question->dport;

	return ((ends ^ flow * 0xff51afd7ed558ccdULL) * 0x9e3779b97f4a7c15ULL) >> (64 - ROUTE_BITS);
}

static __always_inline int is_same_question(const struct bpf_fib_lookup *one, const struct bpf_fib_lookup *other)
{
	const __u64 *left = (const void *)one, *right = (const void *)other;
	__u64 differs = 0;
	__u32 i;

	for (i = 0; i < sizeof(*one) / sizeof(*left); i++)
		differs |= left[i] ^ right[i];
	return !differs;
}

/* Asks as bpf_fib_lookup does, about a packet of `length` bytes in the flow of `route`, where the answer is. Returns whether there is a route.
 * `flags`: the same for all that comes in by an interface, as they are no part of the question. Not static, as what is verified once. */
__noinline int find_route(struct __sk_buff *skb, struct bpf_fib_lookup *route, __u32 length, __u32 flags)
{
	const struct sk_buff___device *kernel;
	const struct net *net;
	const __u32 now = tick_of_now();
	__u32 version = 0, place, sequence;
	int has_version, is_written, is_found;
	struct route *known;

	if (!casts_packets || !host_routing || !route) /* never: kept_by() */
		return 0;
	kernel = bpf_cast_to_kern_ctx(skb);
	net = kernel->dev->nd_net.net;
	if (!are_routes_by_ports(net, route->family == FAMILY_INET))
		route->sport = route->dport = 0;
	has_version = read_routes_version(net, route->family == FAMILY_INET, &version);
	place = place_of_route(route);
	known = bpf_map_lookup_elem(&routes, &place);
	if (!known) /* never */
		return 0;
	sequence = *(volatile __u32 *)&known->sequence;
	if (has_version && !(sequence & 1) && known->version == version && known->tick == now && length <= known->answer.mtu_result &&
	    is_same_question(&known->question, route)) {
		*route = known->answer;
		return *(volatile __u32 *)&known->sequence == sequence;
	}
	is_written = has_version && !(sequence & 1) &&
		     __sync_val_compare_and_swap(&known->sequence, sequence, sequence + 1) == sequence;
	if (is_written) {
		known->tick = NO_TICK;
		known->question = *route;
	}
	route->tot_len = length;
	is_found = bpf_fib_lookup(skb, route, sizeof(*route), flags) == BPF_FIB_LKUP_RET_SUCCESS;
	if (is_written) {
		if (is_found) {
			known->answer = *route;
			known->version = version;
			known->tick = now;
		}
		__sync_fetch_and_add(&known->sequence, 1);
	}
	return is_found;
}
