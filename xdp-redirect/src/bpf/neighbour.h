/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Address resolution of a pod: which frames are part of it, and whether the pod claims only its own addresses. Shared by the XDP
 * and the tcx programs.
 *
 * `pod_macs` is a map of one pod: its MAC by each of its addresses and by ::; empty while they are unknown. */
#pragma once
#include "addresses.h"

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
	if (icmp6->icmp6_type < 133 || icmp6->icmp6_type > 137)
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

/* A known pod must name itself as the sender, or nobody in a probe for a free address (RFC 5227). Otherwise each request
 * would create an arbitrary entry in the node's neighbour table, whose capacity all pods share. One that is not known yet may name any
 * address but that of a pod that is served. */
static __always_inline int is_valid_arp(void *pod_macs, __u32 ifindex, const struct ethhdr *eth, const void *end)
{
	const struct arp *arp = (const void *)(eth + 1);
	struct in6_addr sender = {};
	const struct mac *mac = bpf_map_lookup_elem(pod_macs, &sender);

	if ((const void *)(arp + 1) > end)
		return !mac;
	sender = v4_mapped(arp->sender);
	if (!mac)
		return !belongs_to_other_pod(&sender, ifindex);
	if (!is_mac(mac, eth->h_source) || !is_mac(mac, arp->sender_mac))
		return 0;
	return !(arp->sender[0] | arp->sender[1] | arp->sender[2] | arp->sender[3]) || bpf_map_lookup_elem(pod_macs, &sender);
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

/* No pod is a router, so it may neither advertise nor redirect. A known pod may solicit from its own address, or from none
 * to probe for a free one, and advertise only its own (RFC 4861 sections 4.3 and 4.4). */
static __always_inline int is_valid_discovery(void *pod_macs, __u32 ifindex, const struct ethhdr *eth, const void *end)
{
	const struct ipv6hdr *ip6 = (const void *)(eth + 1);
	const struct icmp6hdr *icmp6 = (const void *)(ip6 + 1);
	const struct in6_addr *target = (const void *)(icmp6 + 1);
	struct in6_addr none = {};
	const struct mac *mac = bpf_map_lookup_elem(pod_macs, &none);

	if (icmp6->icmp6_type == 134 || icmp6->icmp6_type == 137)
		return 0;
	if (!mac) {
		struct in6_addr from = ip6->saddr, about = {};

		if (icmp6->icmp6_type == 136 && (const void *)(target + 1) <= end)
			about = *target;
		return !belongs_to_other_pod(&from, ifindex) && !belongs_to_other_pod(&about, ifindex);
	}
	if (!is_mac(mac, eth->h_source))
		return 0;
	if (icmp6->icmp6_type == 136)
		return (const void *)(target + 1) <= end && is_own_address(pod_macs, mac, &ip6->saddr) && is_own_address(pod_macs, mac, target);
	return is_own_address(pod_macs, mac, &ip6->saddr); /* :: is in the map */
}
