/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Address resolution of a pod: which frames are part of it, and whether the pod claims only what is its own. Shared by the XDP
 * and the tcx programs.
 *
 * `own` is a map of one pod: its MAC by each of its addresses and by ::; empty while they are unknown. */

#define FAMILY_INET 2 /* AF_INET and AF_INET6, whose header is not for BPF */
#define FAMILY_INET6 10

struct mac { __u16 parts[3]; };

static __always_inline int is_mac(const struct mac *mac, const __u8 *bytes)
{
	const __u16 *parts = (const void *)bytes;

	return mac->parts[0] == parts[0] && mac->parts[1] == parts[1] && mac->parts[2] == parts[2];
}

/* RFC 4861 section 6.1 and 7.1: types 133 to 137 with hop limit 255, and here without extension headers before them. A
 * packet that the kernel would forward is not neighbour discovery: it would bypass the workers. */
static __always_inline int is_neighbour_discovery(void *ctx, __u32 interface, const struct mac *bridge, const struct ethhdr *eth,
						  const void *end)
{
	const struct ipv6hdr *ip6 = (const void *)(eth + 1);
	const struct icmp6hdr *icmp6 = (const void *)(ip6 + 1);
	const __u8 *to = ip6->daddr.s6_addr;
	struct bpf_fib_lookup route = { .family = FAMILY_INET6, .ifindex = interface };

	if (ip6->nexthdr != IPPROTO_ICMPV6 || ip6->hop_limit != 255 || (const void *)(icmp6 + 1) > end)
		return 0;
	if (icmp6->icmp6_type < 133 || icmp6->icmp6_type > 137)
		return 0;
	if (bridge && !is_mac(bridge, eth->h_dest))
		return 1; /* to a neighbour on the bridge: the node does not route it */
	if ((to[0] == 0xff && (to[1] & 0x0f) == 2) || (to[0] == 0xfe && (to[1] & 0xc0) == 0x80))
		return 1; /* link scope */
	__builtin_memcpy(route.ipv6_src, &ip6->saddr, sizeof(route.ipv6_src));
	__builtin_memcpy(route.ipv6_dst, &ip6->daddr, sizeof(route.ipv6_dst));
	return bpf_fib_lookup(ctx, &route, sizeof(route), 0) == BPF_FIB_LKUP_RET_NOT_FWDED;
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
static __always_inline int is_own_arp(void *own, const struct ethhdr *eth, const void *end)
{
	const struct arp *arp = (const void *)(eth + 1);
	struct in6_addr sender = {};
	const struct mac *mac = bpf_map_lookup_elem(own, &sender);

	if (!mac)
		return 1;
	if ((const void *)(arp + 1) > end || !is_mac(mac, eth->h_source) || !is_mac(mac, arp->sender_mac))
		return 0;
	sender = mapped(arp->sender);
	return !(arp->sender[0] | arp->sender[1] | arp->sender[2] | arp->sender[3]) || bpf_map_lookup_elem(own, &sender);
}

/* Its own address; or a link-local one that it chooses itself, as long as the map has room. */
static __always_inline int is_own_address(void *own, const struct mac *mac, const struct in6_addr *address)
{
	struct in6_addr key = *address;

	if (bpf_map_lookup_elem(own, &key))
		return 1;
	return key.s6_addr[0] == 0xfe && (key.s6_addr[1] & 0xc0) == 0x80 &&
	       bpf_map_update_elem(own, &key, mac, BPF_NOEXIST) == 0;
}

/* No pod is a router, so it may neither advertise nor redirect. A known pod may solicit from its own address, or from none
 * to probe for a free one, and advertise only its own (RFC 4861 sections 4.3 and 4.4). */
static __always_inline int is_own_discovery(void *own, const struct ethhdr *eth, const void *end)
{
	const struct ipv6hdr *ip6 = (const void *)(eth + 1);
	const struct icmp6hdr *icmp6 = (const void *)(ip6 + 1);
	const struct in6_addr *target = (const void *)(icmp6 + 1);
	struct in6_addr none = {};
	const struct mac *mac = bpf_map_lookup_elem(own, &none);

	if (icmp6->icmp6_type == 134 || icmp6->icmp6_type == 137)
		return 0;
	if (!mac)
		return 1;
	if (!is_mac(mac, eth->h_source))
		return 0;
	if (icmp6->icmp6_type == 136)
		return (const void *)(target + 1) <= end && is_own_address(own, mac, &ip6->saddr) && is_own_address(own, mac, target);
	return is_own_address(own, mac, &ip6->saddr); /* :: is in the map */
}
