/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tunnel packets from other machines. A node decapsulates those of other nodes, and never those of pods: policy does not see the packets inside,
 * which may have any source. The sender's node drops what it knows to end at a node; this one knows all of its own addresses. */
#pragma once
#include "origin.h"

/* UDP ports at which nodes decapsulate packets. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
} tunnel_ports SEC(".maps");

enum { POD_NETWORK = 1 };

struct network {
	__u32 length;
	struct in6_addr address;
};

/* Pods' networks of other nodes, and among them these nodes' own addresses, without POD_NETWORK; IPv4 as ::ffff:a.b.c.d. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct network);
	__type(value, __u32);
} remote_networks SEC(".maps");

/* Tunnel packets of pods that this node did not decapsulate. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} refused_tunnels SEC(".maps");

/* Protocols that Linux decapsulates without a key, as in dataplane/src/forward/encapsulation.rs: IPIP, IPv6, GRE, PIM, IPComp, L2TP, MPLS,
 * Ethernet. */
static __always_inline int is_encapsulation(__u8 protocol)
{
	return protocol == 4 || protocol == 41 || protocol == 47 || protocol == 103 || protocol == 108 || protocol == 115 ||
	       protocol == 137 || protocol == 143;
}

#define MAX_HEADERS 8 /* before the transport header */

/* Finds the transport protocol of an IPv6 packet, and where its header begins; 0: none, as in later fragments of all but encapsulating
 * protocols. Behind more headers than are read it is taken for an encapsulating one. */
static __always_inline __u8 find_transport_v6(struct __sk_buff *skb, __u32 *offset)
{
	struct { __u8 next, length; __be16 fragment; } head;
	__u8 next;
	int i;

	if (bpf_skb_load_bytes(skb, *offset + offsetof(struct ipv6hdr, nexthdr), &next, sizeof(next)))
		return 0;
	*offset += sizeof(struct ipv6hdr);
#pragma clang loop unroll(disable)
	for (i = 0; i < MAX_HEADERS; i++) {
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS && next != IPPROTO_FRAGMENT &&
		    next != IPPROTO_AH)
			return next;
		if (bpf_skb_load_bytes(skb, *offset, &head, sizeof(head)))
			return 0;
		if (next == IPPROTO_FRAGMENT && head.fragment & bpf_htons(0xfff8))
			return is_encapsulation(head.next) ? head.next : 0;
		*offset += next == IPPROTO_FRAGMENT ? 8 : next == IPPROTO_AH ? (head.length + 2) * 4 : (head.length + 1) * 8;
		next = head.next;
	}
	return IPPROTO_IPV6;
}

/* Whether a node to which this packet is addressed would decapsulate it. `offset`: where its IP header begins. */
static __always_inline int is_tunnel_packet(struct __sk_buff *skb, __u32 offset, int is_v4)
{
	struct iphdr ip4;
	__be16 ports[2];
	__u8 protocol;
	__u32 port;

	if (is_v4) {
		if (bpf_skb_load_bytes(skb, offset, &ip4, sizeof(ip4)))
			return 0;
		protocol = ip4.protocol == IPPROTO_UDP && ip4.frag_off & bpf_htons(0x1fff) ? 0 : ip4.protocol;
		offset += ip4.ihl * 4;
	} else {
		protocol = find_transport_v6(skb, &offset);
	}
	if (protocol != IPPROTO_UDP)
		return is_encapsulation(protocol);
	if (bpf_skb_load_bytes(skb, offset, ports, sizeof(ports)))
		return 0;
	port = bpf_ntohs(ports[1]);
	return !!bpf_map_lookup_elem(&tunnel_ports, &port);
}

/* Whether the node takes the packet for its own: it does not send it on. */
static __always_inline int is_for_this_node(struct __sk_buff *skb, const struct sent_flow *flow, int is_v4)
{
	struct bpf_fib_lookup route = { .family = is_v4 ? FAMILY_INET : FAMILY_INET6, .ifindex = skb->ifindex };
	long found;

	if (is_v4) {
		route.ipv4_src = flow->from.s6_addr32[3];
		route.ipv4_dst = flow->to.s6_addr32[3];
	} else {
		__builtin_memcpy(route.ipv6_src, &flow->from, sizeof(route.ipv6_src));
		__builtin_memcpy(route.ipv6_dst, &flow->to, sizeof(route.ipv6_dst));
	}
	found = bpf_fib_lookup(skb, &route, sizeof(route), 0);
	return found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH && found != BPF_FIB_LKUP_RET_FRAG_NEEDED;
}

/* Whether it is a pod of another node that has this address. */
static __always_inline int is_remote_pod(const struct in6_addr *address)
{
	const struct network network = { .length = 128, .address = *address };
	const __u32 *found = bpf_map_lookup_elem(&remote_networks, &network);

	return found && *found & POD_NETWORK;
}
