// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Redirects a port's IP packets to its AF_XDP sockets; address resolution and everything that is not IP pass to the kernel.
 * In address resolution a pod may only claim its own addresses. A second program checks what the node's stack sends to the
 * workers. */
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/icmpv6.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define FAMILY_INET 2 /* AF_INET and AF_INET6, whose header is not for BPF */
#define FAMILY_INET6 10

enum outcome { REDIRECTED, NO_SOCKET, ARP, NEIGHBOUR_DISCOVERY, NOT_IP, NOT_LOCAL, VLAN_TAG, FORGED_NEIGHBOUR, TOO_LONG,
	       SPOOFED_SOURCE, TRANSLATED, UNDECIDED, OUTCOMES };

const volatile __u32 on_miss = XDP_DROP; /* action on a packet whose queue has no socket */
const volatile __u32 uplink = 0;         /* redirect only packets to local pods */
const volatile __u32 pod = 0;            /* the peer is a pod, no other kind of neighbour */
const volatile __u32 bridged = 0;        /* the interface is a port of the bridge with this MAC */
const volatile __u16 bridge_mac[3] = {};

struct { __uint(type, BPF_MAP_TYPE_XSKMAP); __uint(max_entries, 64); __type(key, __u32); __type(value, __u32); } sockets SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY); __uint(max_entries, OUTCOMES); __type(key, __u32); __type(value, __u64); } outcomes SEC(".maps");
struct { /* IPv4 as ::ffff:a.b.c.d; maximum frame length for the pod, 0 if it has no worker; shared by all */
	__uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 8192); __uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr); __type(value, __u16);
} local_pods SEC(".maps");

struct { /* a socket of the serving process while it lives; shared by all */
	__uint(type, BPF_MAP_TYPE_XSKMAP); __uint(max_entries, 1); __type(key, __u32); __type(value, __u32);
} alive SEC(".maps");

struct mac { __u16 parts[3]; };
struct { /* a pod's MAC by each of its addresses and by ::; empty while unknown */
	__uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 32); __type(key, struct in6_addr); __type(value, struct mac);
} own SEC(".maps");

static __always_inline int done(__u32 outcome, int action)
{
	__u64 *count = bpf_map_lookup_elem(&outcomes, &outcome);
	if (count)
		*count += 1;
	return action;
}

/* RFC 4861 section 6.1 and 7.1: types 133 to 137 with hop limit 255, and here without extension headers before them. A
 * packet that the kernel would forward is not neighbour discovery: it would bypass the workers. */
static __always_inline int is_neighbour_discovery(struct xdp_md *ctx, const struct ethhdr *eth, const void *end)
{
	const struct ipv6hdr *ip6 = (const void *)(eth + 1);
	const struct icmp6hdr *icmp6 = (const void *)(ip6 + 1);
	const __u8 *to = ip6->daddr.s6_addr;
	const __u16 *mac = (const void *)eth->h_dest;
	struct bpf_fib_lookup route = { .family = FAMILY_INET6, .ifindex = ctx->ingress_ifindex };

	if (ip6->nexthdr != IPPROTO_ICMPV6 || ip6->hop_limit != 255 || (const void *)(icmp6 + 1) > end)
		return 0;
	if (icmp6->icmp6_type < 133 || icmp6->icmp6_type > 137)
		return 0;
	if (bridged && (mac[0] != bridge_mac[0] || mac[1] != bridge_mac[1] || mac[2] != bridge_mac[2]))
		return 1; /* to a neighbour on the bridge: the node does not route it */
	if ((to[0] == 0xff && (to[1] & 0x0f) == 2) || (to[0] == 0xfe && (to[1] & 0xc0) == 0x80))
		return 1; /* link scope */
	__builtin_memcpy(route.ipv6_src, &ip6->saddr, sizeof(route.ipv6_src));
	__builtin_memcpy(route.ipv6_dst, &ip6->daddr, sizeof(route.ipv6_dst));
	return bpf_fib_lookup(ctx, &route, sizeof(route), 0) == BPF_FIB_LKUP_RET_NOT_FWDED;
}

static __always_inline int is_mac(const struct mac *mac, const __u8 *bytes)
{
	const __u16 *parts = (const void *)bytes;

	return mac->parts[0] == parts[0] && mac->parts[1] == parts[1] && mac->parts[2] == parts[2];
}

static __always_inline struct in6_addr mapped(const __u8 *ip4)
{
	struct in6_addr address = {};

	address.s6_addr[10] = address.s6_addr[11] = 0xff;
	__builtin_memcpy(&address.s6_addr[12], ip4, 4);
	return address;
}

struct arp { /* of IPv4 over Ethernet (RFC 826) */
	__be16 hardware, protocol; __u8 hardware_len, protocol_len; __be16 operation;
	__u8 sender_mac[ETH_ALEN], sender[4], target_mac[ETH_ALEN], target[4];
};

/* A known pod must name itself as the sender, or nobody in a probe for a free address (RFC 5227). Otherwise each request
 * would create an arbitrary entry in the node's neighbour table, whose capacity all pods share. */
static __always_inline int is_own_arp(const struct ethhdr *eth, const void *end)
{
	const struct arp *arp = (const void *)(eth + 1);
	struct in6_addr sender = {};
	const struct mac *mac = bpf_map_lookup_elem(&own, &sender);

	if (!mac)
		return 1;
	if ((const void *)(arp + 1) > end || !is_mac(mac, eth->h_source) || !is_mac(mac, arp->sender_mac))
		return 0;
	sender = mapped(arp->sender);
	return !(arp->sender[0] | arp->sender[1] | arp->sender[2] | arp->sender[3]) || bpf_map_lookup_elem(&own, &sender);
}

/* Its own address; or a link-local one that it chooses itself, as long as the map has room. */
static __always_inline int is_own_address(const struct mac *mac, const struct in6_addr *address)
{
	struct in6_addr key = *address;

	if (bpf_map_lookup_elem(&own, &key))
		return 1;
	return key.s6_addr[0] == 0xfe && (key.s6_addr[1] & 0xc0) == 0x80 &&
	       bpf_map_update_elem(&own, &key, mac, BPF_NOEXIST) == 0;
}

/* No pod is a router, so it may neither advertise nor redirect. A known pod may solicit from its own address, or from none
 * to probe for a free one, and advertise only its own (RFC 4861 sections 4.3 and 4.4). */
static __always_inline int is_own_discovery(const struct ethhdr *eth, const void *end)
{
	const struct ipv6hdr *ip6 = (const void *)(eth + 1);
	const struct icmp6hdr *icmp6 = (const void *)(ip6 + 1);
	const struct in6_addr *target = (const void *)(icmp6 + 1);
	struct in6_addr none = {};
	const struct mac *mac = bpf_map_lookup_elem(&own, &none);

	if (icmp6->icmp6_type == 134 || icmp6->icmp6_type == 137)
		return 0;
	if (!mac)
		return 1;
	if (!is_mac(mac, eth->h_source))
		return 0;
	if (icmp6->icmp6_type == 136)
		return (const void *)(target + 1) <= end && is_own_address(mac, &ip6->saddr) && is_own_address(mac, target);
	return is_own_address(mac, &ip6->saddr); /* :: is in the map */
}

#ifdef ASKS_THE_KERNEL
#include "translation.h"

/* Packets from the host port with an address of this node are trusted. So the kernel only gets packets from an uplink that
 * it would route back to their sender (reverse path check). */
static __always_inline int may_be_the_kernels(struct xdp_md *ctx, const struct in6_addr *from)
{
	struct bpf_fib_lookup back = { .ifindex = ctx->ingress_ifindex };
	long way;

	if (bpf_map_lookup_elem(&local_pods, from))
		return 0;
	if (is_mapped(from)) {
		back.family = FAMILY_INET;
		back.ipv4_dst = from->s6_addr32[3];
	} else {
		back.family = FAMILY_INET6;
		__builtin_memcpy(back.ipv6_dst, from, sizeof(back.ipv6_dst));
	}
	way = bpf_fib_lookup(ctx, &back, sizeof(back), 0);
	return way == BPF_FIB_LKUP_RET_SUCCESS || way == BPF_FIB_LKUP_RET_NO_NEIGH;
}

/* Packets to a local pod that an uplink does not redirect:
 *
 * - Coalesced or unsegmented frames that are longer than a socket or the pod's link accepts. The kernel segments them on
 *   the way into the host port.
 * - Packets of a connection that the kernel translates. It restores the address that the pod knows.
 * - Packets for which that is unknown: fragments, of which only the first has ports, and other protocols. */
static __always_inline enum outcome on_uplink(struct xdp_md *ctx, const void *start, const void *end, __u16 longest,
					      const struct in6_addr *from, const struct in6_addr *to)
{
	enum outcome outcome = REDIRECTED;

	if (start + longest < end)
		outcome = TOO_LONG;
	else
		outcome = of_translation(ctx, start + sizeof(struct ethhdr), end, from, to);
	return outcome != REDIRECTED && may_be_the_kernels(ctx, from) ? outcome : REDIRECTED;
}
#else /* a pod's port is no uplink */
static __always_inline enum outcome on_uplink(struct xdp_md *ctx, const void *start, const void *end, __u16 longest,
					      const struct in6_addr *from, const struct in6_addr *to)
{
	return REDIRECTED;
}
#endif

SEC("xdp")
int penstock(struct xdp_md *ctx)
{
	const void *end = (void *)(long)ctx->data_end;
	const struct ethhdr *eth = (void *)(long)ctx->data;
	const struct iphdr *ip4 = (void *)(eth + 1);
	const struct ipv6hdr *ip6 = (void *)(eth + 1);
	struct in6_addr to = {}, from = {};
	const __u16 *longest;
	__u32 process = 0;
	int whole, action;
	enum outcome outcome;

	/* The process is gone, even if the kernel has not yet closed its sockets, which takes time for each. */
	if (on_miss == XDP_PASS && !bpf_map_lookup_elem(&alive, &process))
		return done(NO_SOCKET, XDP_PASS);
	if ((void *)(eth + 1) > end)
		return done(NOT_IP, XDP_PASS);
	switch (eth->h_proto) {
	case bpf_htons(ETH_P_ARP):
		return pod && !is_own_arp(eth, end) ? done(FORGED_NEIGHBOUR, XDP_DROP) : done(ARP, XDP_PASS);
	case bpf_htons(ETH_P_8021Q):
	case bpf_htons(ETH_P_8021AD): /* the kernel treats VLAN 0 as untagged: a pod could bypass the workers */
		return uplink ? done(NOT_IP, XDP_PASS) : done(VLAN_TAG, XDP_DROP);
	case bpf_htons(ETH_P_IP):
		whole = (void *)(ip4 + 1) <= end;
		if (whole) {
			to.s6_addr32[2] = bpf_htonl(0xffff);
			to.s6_addr32[3] = ip4->daddr;
			from.s6_addr32[2] = bpf_htonl(0xffff);
			from.s6_addr32[3] = ip4->saddr;
		}
		break;
	case bpf_htons(ETH_P_IPV6):
		whole = (void *)(ip6 + 1) <= end;
		if (whole && is_neighbour_discovery(ctx, eth, end))
			return pod && !is_own_discovery(eth, end) ? done(FORGED_NEIGHBOUR, XDP_DROP) : done(NEIGHBOUR_DISCOVERY, XDP_PASS);
		if (whole) {
			__builtin_memcpy(&to, &ip6->daddr, sizeof(to));
			__builtin_memcpy(&from, &ip6->saddr, sizeof(from));
		}
		break;
	default:
		return done(NOT_IP, XDP_PASS);
	}
	if (uplink) {
		longest = whole ? bpf_map_lookup_elem(&local_pods, &to) : 0;
		if (!longest || !*longest)
			return done(NOT_LOCAL, XDP_PASS);
		outcome = on_uplink(ctx, eth, end, *longest, &from, &to);
		if (outcome != REDIRECTED)
			return done(outcome, XDP_PASS);
	}
	action = bpf_redirect_map(&sockets, ctx->rx_queue_index, on_miss);
	return done(action == XDP_REDIRECT ? REDIRECTED : NO_SOCKET, action);
}

/* On the node's end of the host port: packets that the node's stack sends to the workers.
 *
 * Packets of a pod enter the node's stack through this interface, after the workers have checked their source. The kernel
 * records the ingress interface (skb->skb_iif, which forwarding and translation keep). It distinguishes a pod's own
 * packets, which return because the node translated their destination, from packets with a spoofed source: those from
 * outside or out of a tunnel arrived on another interface, and those of a process on the node have 0. */
#ifdef ASKS_THE_KERNEL
SEC("tc")
int penstock_leave(struct __sk_buff *skb)
{
	struct in6_addr from = {};
	__be16 kind;
	long unread;

	if (skb->ingress_ifindex == skb->ifindex)
		return TC_ACT_OK;
	if (bpf_skb_load_bytes(skb, offsetof(struct ethhdr, h_proto), &kind, sizeof(kind)))
		return TC_ACT_OK; /* not IP */
	switch (kind) {
	case bpf_htons(ETH_P_IP):
		from.s6_addr32[2] = bpf_htonl(0xffff);
		unread = bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct iphdr, saddr), &from.s6_addr32[3], 4);
		break;
	case bpf_htons(ETH_P_IPV6):
		unread = bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, saddr), &from, sizeof(from));
		break;
	default:
		return TC_ACT_OK; /* the workers only receive IP */
	}
	if (unread || bpf_map_lookup_elem(&local_pods, &from))
		return done(SPOOFED_SOURCE, TC_ACT_SHOT);
	if (source_before(skb, kind == bpf_htons(ETH_P_IP), &from) && bpf_map_lookup_elem(&local_pods, &from))
		return done(SPOOFED_SOURCE, TC_ACT_SHOT);
	return TC_ACT_OK;
}
#endif

char LICENSE[] SEC("license") = "Dual BSD/GPL";
