/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The way between pods and other machines past the node's stack, for packets in which nothing on the node has a say (kernel_network.h). The route is
 * the node's own answer (routes.h), by all of its rules.
 *
 * A packet that the stack would answer, fragment, drop, or wait with is for the stack: one with its last hop, one that is too long for the way,
 * or without a route or a neighbour that is known. */
#pragma once
#include "origin.h"
#include "rewrite.h"
#include "routes.h"
#include "worker.h"

enum { FOR_STACK = -3 }; /* no action of a program: the node's stack forwards the packet */

/* Whether routers forward packets with such an address, as struct packet has it. Of IPv6: global and unique local addresses. */
static __always_inline int is_routable_address(const __u64 *address, int is_v4)
{
	const __u32 first = is_v4 ? (address[1] >> 24) & 0xff : address[0] >> 56;

	return is_v4 ? first && first != 127 && first < 224 : first >> 5 == 1 || first >> 1 == 0x7e;
}

static __always_inline int is_routable(const struct packet *packet)
{
	return packet->ttl > 1 && !packet->is_jumbo && is_routable_address(packet->low, packet->is_v4) && is_routable_address(packet->high, packet->is_v4);
}

/* Reads the question for the node's route of a packet without options that comes in by this interface. */
static __always_inline int read_question(struct __sk_buff *skb, int is_v4, struct bpf_fib_lookup *route)
{
	const void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	const struct iphdr *ip4 = data + ETH_HLEN;
	const struct ipv6hdr *ip6 = data + ETH_HLEN;
	const struct ports *ports = is_v4 ? (const void *)(ip4 + 1) : (const void *)(ip6 + 1);

	if ((const void *)(ports + 1) > end) /* never */
		return 0;
	route->ifindex = skb->ifindex;
	route->sport = ports->from;
	route->dport = ports->to;
	if (is_v4) {
		route->family = FAMILY_INET;
		route->l4_protocol = ip4->protocol;
		route->tos = ip4->tos;
		route->ipv4_src = ip4->saddr;
		route->ipv4_dst = ip4->daddr;
	} else {
		route->family = FAMILY_INET6;
		route->l4_protocol = ip6->nexthdr;
		route->flowinfo = *(const __be32 *)ip6 & bpf_htonl(0x0fffffff);
		__builtin_memcpy(route->ipv6_src, &ip6->saddr, sizeof(route->ipv6_src));
		__builtin_memcpy(route->ipv6_dst, &ip6->daddr, sizeof(route->ipv6_dst));
	}
	return 1;
}

/* Whether the check of an IPv4 source passes (rp_filter, fib_validate_source in net/ipv4/fib_frontend.c): the node's route back to it leads to the
 * interface that it came in by. A loose check is taken for a strict one; the check asks rules otherwise than a packet. `back`: memory of the
 * caller's, as a program has little. */
static __always_inline int passes_rp_filter(struct __sk_buff *skb, struct bpf_fib_lookup *back)
{
	const struct sk_buff___device *kernel;
	const struct net_device *device;
	const struct net *net;
	struct ports ports;
	__be32 from;

	if (!casts_packets || !host_routing) /* never: kept_by() */
		return 0;
	kernel = bpf_cast_to_kern_ctx(skb);
	device = kernel->dev;
	net = device->nd_net.net;
	if (!net->ipv4.devconf_all->data[RP_FILTER] && !device->ip_ptr->cnf.data[RP_FILTER])
		return 1;
	*back = (struct bpf_fib_lookup){};
	if (net->ipv4.fib_has_custom_rules || !read_question(skb, 1, back))
		return 0;
	ports = (struct ports){ .from = back->dport, .to = back->sport };
	from = back->ipv4_dst;
	back->ipv4_dst = back->ipv4_src;
	back->ipv4_src = from;
	back->sport = ports.from;
	back->dport = ports.to;
	return find_route(skb, back, 0, BPF_FIB_LOOKUP_SKIP_NEIGH) && back->ifindex == skb->ifindex;
}

/* A hop limit that was rewritten in a packet whose checksum the NIC has computed (CHECKSUM_COMPLETE). IPv4's header checksum makes up for it. */
static __always_inline void update_complete_checksum(struct __sk_buff *skb, int is_v4)
{
	if (!is_v4)
		bpf_csum_update(skb, (__u16)~bpf_htons(1));
}

/* The priority that ip_forward gives a packet by its type of service (ip_tos2prio in net/ipv4/route.c). */
static __always_inline __u32 priority_of(__u8 tos)
{
	return 0x4620 >> (tos >> 3 & 3) * 4 & 0xf;
}

/* Sends what a pod sends out by the interface that the node's route names, as the node's stack would; FOR_STACK: that has to. Not static, as
 * what is verified once. `iface`: the pod's; `length`: of the longest packet that this one becomes. */
__noinline int send_out(struct __sk_buff *skb, struct packet *packet, const struct interface *iface, __u32 length)
{
	struct bpf_fib_lookup route = {};
	struct bpf_redir_neigh next = {};
	const struct uplink *uplink;
	struct sent_flow flow;
	__u32 ifindex;
	__u8 tos;

	if (!packet || !iface) /* never */
		return FOR_STACK;
	if (skb->mark || !is_routable(packet) || kept_by(skb) != BY_NOBODY)
		return FOR_STACK;
	/* to_uplink, which the mark passes, asks about these. */
	if (!read_addresses(skb, ETH_HLEN, packet->is_v4, &flow) || bpf_map_lookup_elem(&service_addresses, &flow.to))
		return FOR_STACK;
	/* Not packet->is_v4: a second read of it is another number to verifiers before Linux 6.6. */
	if (!read_question(skb, skb->protocol == bpf_htons(ETH_P_IP), &route))
		return FOR_STACK;
	tos = route.tos; /* the answer takes its place */
	if (!find_route(skb, &route, length, 0))
		return FOR_STACK;
	ifindex = route.ifindex;
	uplink = bpf_map_lookup_elem(&uplinks, &ifindex);
	if (!uplink || length > uplink->longest || has_egress_hooks(skb, ifindex))
		return FOR_STACK;
	next.nh_family = route.family;
	__builtin_memcpy(next.ipv6_nh, route.ipv6_dst, sizeof(next.ipv6_nh));
	if (rewrite(skb, packet, iface, 0))
		return count(skb->ifindex, NO_MEMORY, TC_ACT_SHOT);
	update_complete_checksum(skb, packet->is_v4);
	if (packet->is_v4)
		skb->priority = priority_of(tos);
	skb->mark = passed;
	return bpf_redirect_neigh(ifindex, &next, sizeof(next), 0);
}

/* Whether the node's route of a packet of another machine leads to the pod at this interface. Its MAC is known without a neighbour. */
__noinline int is_routed_to(struct __sk_buff *skb, __u32 ifindex, __u32 length)
{
	const int is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	struct bpf_fib_lookup route = {};

	return !has_egress_hooks(skb, ifindex) && read_question(skb, is_v4, &route) &&
	       find_route(skb, &route, length, BPF_FIB_LOOKUP_SKIP_NEIGH) && route.ifindex == ifindex && (!is_v4 || passes_rp_filter(skb, &route));
}
