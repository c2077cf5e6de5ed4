/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Address resolution of a pod: which frames are part of it, and whether the pod claims only its own addresses.
 *
 * `pod_macs` is a map of one pod: its MAC by each of its addresses and by ::; empty while they are unknown. */
#pragma once
#include "addresses.h"

enum { /* ICMPv6 types */
	ROUTER_SOLICITATION = 133,
	ROUTER_ADVERTISEMENT = 134,
	NEIGHBOUR_SOLICITATION = 135,
	NEIGHBOUR_ADVERTISEMENT = 136,
	REDIRECT = 137,
};

/* Each program defines whether this is the address of a pod that is served, and at another interface. */
static __always_inline int belongs_to_other_pod(const struct in6_addr *address, __u32 ifindex);

/* Whether the bridge delivers a packet from one of its ports to a neighbour there, and the node does not route it. MACs do not tell: the node
 * routes packets to the MAC of any port, which the pods know. A packet that it routes to a local pod meets that pod's program,
 * and one that it routes back to the bridge goes to a neighbour whom the pod reaches there by itself. */
static __always_inline int stays_on_bridge(void *ctx, __u32 bridge, void *pods, const struct ipv6hdr *ip6)
{
	struct bpf_fib_lookup route = { .family = FAMILY_INET6, .ifindex = bridge };
	struct in6_addr to = ip6->daddr;
	int found;

	if (bpf_map_lookup_elem(pods, &to))
		return 1;
	__builtin_memcpy(route.ipv6_src, &ip6->saddr, sizeof(route.ipv6_src));
	__builtin_memcpy(route.ipv6_dst, &to, sizeof(route.ipv6_dst));
	found = bpf_fib_lookup(ctx, &route, sizeof(route), 0);
	if (found == BPF_FIB_LKUP_RET_NOT_FWDED || found == BPF_FIB_LKUP_RET_FWD_DISABLED)
		return 1;
	/* A gateway takes the destination's place. */
	return (found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH) && route.ifindex == bridge &&
	       route.ipv6_dst[0] == to.s6_addr32[0] && route.ipv6_dst[1] == to.s6_addr32[1] &&
	       route.ipv6_dst[2] == to.s6_addr32[2] && route.ipv6_dst[3] == to.s6_addr32[3];
}

/* RFC 4861 section 6.1 and 7.1: types 133 to 137 with hop limit 255, and here without extension headers before them. A
 * packet that the kernel would forward is not neighbour discovery: it would bypass the workers. `bridge`: that of the port, or 0;
 * `pods`: a map by local pods' addresses. */
static __always_inline int is_neighbour_discovery(void *ctx, __u32 ifindex, __u32 bridge, void *pods, const struct ethhdr *eth,
						  const void *end)
{
	const struct ipv6hdr *ip6 = (const void *)(eth + 1);
	const struct icmp6hdr *icmp6 = (const void *)(ip6 + 1);
	const __u8 *to = ip6->daddr.s6_addr;
	struct bpf_fib_lookup route = { .family = FAMILY_INET6, .ifindex = ifindex };

	if (ip6->nexthdr != IPPROTO_ICMPV6 || ip6->hop_limit != 255 || (const void *)(icmp6 + 1) > end)
		return 0;
	if (icmp6->icmp6_type < ROUTER_SOLICITATION || icmp6->icmp6_type > REDIRECT)
		return 0;
	if ((to[0] == 0xff && (to[1] & 0x0f) == 2) || (to[0] == 0xfe && (to[1] & 0xc0) == 0x80))
		return 1; /* link scope */
	if (bridge)
		return stays_on_bridge(ctx, bridge, pods, ip6);
	__builtin_memcpy(route.ipv6_src, &ip6->saddr, sizeof(route.ipv6_src));
	__builtin_memcpy(route.ipv6_dst, &ip6->daddr, sizeof(route.ipv6_dst));
	return bpf_fib_lookup(ctx, &route, sizeof(route), 0) == BPF_FIB_LKUP_RET_NOT_FWDED;
}

struct arp { /* of IPv4 over Ethernet (RFC 826) */
	__be16 hardware, protocol;
	__u8 hardware_len, protocol_len;
	__be16 operation;
	__u8 sender_mac[ETH_ALEN], sender[4], target_mac[ETH_ALEN], target[4];
};

/* A known pod must name itself as the sender, or nobody in a probe for its own address (RFC 5227): a probe for another's keeps that one from
 * taking it. Otherwise each request would create an arbitrary entry in the node's neighbour table, whose capacity all pods share. One that
 * is not known yet may name any address but that of a pod that is served. */
static __noinline int is_valid_arp(void *pod_macs, __u32 ifindex, const struct ethhdr *eth, const void *end)
{
	const struct arp *arp = (const void *)(eth + 1);
	struct in6_addr claimed = {};
	const struct mac *mac = bpf_map_lookup_elem(pod_macs, &claimed);

	if ((const void *)(arp + 1) > end)
		return !mac;
	claimed = v4_mapped(arp->sender[0] | arp->sender[1] | arp->sender[2] | arp->sender[3] ? arp->sender : arp->target);
	if (!mac)
		return !belongs_to_other_pod(&claimed, ifindex);
	return is_mac(mac, eth->h_source) && is_mac(mac, arp->sender_mac) && bpf_map_lookup_elem(pod_macs, &claimed);
}

/* Whether a frame is from the pod's MAC, as far as that is known. A bridge sends to this port whatever is for a MAC that it has seen here. */
static __always_inline int has_pod_mac(void *pod_macs, const struct ethhdr *eth)
{
	struct in6_addr none = {};
	const struct mac *mac = bpf_map_lookup_elem(pod_macs, &none);

	return !mac || is_mac(mac, eth->h_source);
}

/* Its own address; or a link-local one that it chooses itself, as long as the map has room. */
static __always_inline int is_own_address(void *pod_macs, const struct mac *mac, const struct in6_addr *address)
{
	struct in6_addr key = *address;

	if (bpf_map_lookup_elem(pod_macs, &key))
		return 1;
	return key.s6_addr[0] == 0xfe && (key.s6_addr[1] & 0xc0) == 0x80 &&
	       bpf_map_update_elem(pod_macs, &key, mac, BPF_NOEXIST) == 0;
}

struct option { /* of neighbour discovery, in 8 bytes: an Ethernet address, or a nonce (RFC 4861 section 4.6, RFC 7527) */
	__u8 type, length, mac[ETH_ALEN];
};

enum { SOURCE_MAC = 1, TARGET_MAC = 2, MAX_OPTIONS = 4 };

/* Whether the options of a message name no other MAC than the pod's. One with more, or with longer options, is no pod's. */
static __always_inline int has_own_macs(const struct mac *mac, const struct ipv6hdr *ip6, const struct option *options, const void *end)
{
	const __u32 fixed = (const void *)options - (const void *)(ip6 + 1), length = bpf_ntohs(ip6->payload_len);
	__u32 i;

	if (length < fixed || length > fixed + MAX_OPTIONS * sizeof(*options) || (length - fixed) % sizeof(*options))
		return 0;
#pragma unroll
	for (i = 0; i < MAX_OPTIONS; i++) {
		if (length <= fixed + i * sizeof(*options))
			return 1;
		if ((const void *)(options + i + 1) > end || options[i].length != 1)
			return 0;
		if ((options[i].type == SOURCE_MAC || options[i].type == TARGET_MAC) && !is_mac(mac, options[i].mac))
			return 0;
	}
	return 1;
}

/* No pod is a router, so it may neither advertise nor redirect. A known pod may solicit from its own address, or from none to probe for its own, and
 * advertise only its own, each with its own MAC (RFC 4861 sections 4.1, 4.3 and 4.4): a probe for another's address keeps that one
 * from taking it (RFC 4862 section 5.4). */
static __noinline int is_valid_discovery(void *pod_macs, __u32 ifindex, const struct ethhdr *eth, const void *end)
{
	const struct ipv6hdr *ip6 = (const void *)(eth + 1);
	const struct icmp6hdr *icmp6 = (const void *)(ip6 + 1);
	const struct in6_addr *target = (const void *)(icmp6 + 1);
	struct in6_addr none = {}, from = ip6->saddr, claimed;
	const struct mac *mac = bpf_map_lookup_elem(pod_macs, &none);
	const int solicits_router = icmp6->icmp6_type == ROUTER_SOLICITATION;

	if (icmp6->icmp6_type == ROUTER_ADVERTISEMENT || icmp6->icmp6_type == REDIRECT)
		return 0;
	if (!solicits_router && (const void *)(target + 1) > end)
		return 0;
	claimed = !solicits_router && (icmp6->icmp6_type == NEIGHBOUR_ADVERTISEMENT || is_same_address(&from, &none)) ? *target : from;
	if (!mac)
		return !belongs_to_other_pod(&from, ifindex) && !belongs_to_other_pod(&claimed, ifindex);
	return is_mac(mac, eth->h_source) && is_own_address(pod_macs, mac, &from) /* :: is in the map */ &&
	       is_own_address(pod_macs, mac, &claimed) &&
	       has_own_macs(mac, ip6, solicits_router ? (const void *)target : (const void *)(target + 1), end);
}
