/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Asks the kernel's connection tracking whether it translates the connection of a packet from an uplink. By XDP a packet comes before the
 * kernel has looked for its connection, so this looks for it by addresses and ports. */
#pragma once
#include "addresses.h"
#include "kernel_conntrack.h"
#include "outcome.h"

static __always_inline int differs(const union nf_inet_addr *known, const struct in6_addr *address)
{
	if (is_v4_mapped(address))
		return known->all[0] != address->s6_addr32[3];
	return known->all[0] != address->s6_addr32[0] || known->all[1] != address->s6_addr32[1] ||
	       known->all[2] != address->s6_addr32[2] || known->all[3] != address->s6_addr32[3];
}

/* A connection is translated if its reply tuple is not the reverse of the original one. The status bits IPS_SRC_NAT and
 * IPS_DST_NAT are not set for connections that IPVS translates (ip_vs_update_conntrack in net/netfilter/ipvs/ip_vs_nfct.c). */
static __always_inline int is_reverse(const struct nf_conntrack_tuple *other, const struct in6_addr *from,
				     const struct in6_addr *to, struct ports ports)
{
	return !differs(&other->src.u3, to) && !differs(&other->dst.u3, from) && other->src.u.all == ports.to &&
	       other->dst.u.all == ports.from;
}

static __always_inline enum outcome outcome_of_connection(struct xdp_md *ctx, __u8 protocol, const struct in6_addr *from,
						  const struct in6_addr *to, struct ports ports)
{
	struct bpf_ct_opts options = { .netns_id = BPF_F_CURRENT_NETNS, .l4proto = protocol };
	struct bpf_sock_tuple tuple = {};
	struct nf_conn *connection;
	int is_plain;

	if (is_v4_mapped(from)) {
		tuple.ipv4.saddr = from->s6_addr32[3];
		tuple.ipv4.daddr = to->s6_addr32[3];
		tuple.ipv4.sport = ports.from;
		tuple.ipv4.dport = ports.to;
		connection = bpf_xdp_ct_lookup(ctx, &tuple, sizeof(tuple.ipv4), &options, sizeof(options));
	} else {
		__builtin_memcpy(tuple.ipv6.saddr, from, sizeof(tuple.ipv6.saddr));
		__builtin_memcpy(tuple.ipv6.daddr, to, sizeof(tuple.ipv6.daddr));
		tuple.ipv6.sport = ports.from;
		tuple.ipv6.dport = ports.to;
		connection = bpf_xdp_ct_lookup(ctx, &tuple, sizeof(tuple.ipv6), &options, sizeof(options));
	}
	if (!connection)
		return REDIRECTED;
	if (options.dir)
		is_plain = is_reverse(&connection->tuplehash[0].tuple, from, to, ports);
	else
		is_plain = is_reverse(&connection->tuplehash[1].tuple, from, to, ports);
	bpf_ct_release(connection);
	return is_plain ? REDIRECTED : TRANSLATED;
}

/* The transport header behind an IP header: its protocol, or -1 if the packet has no readable ports. */
struct transport {
	const void *at;
	int protocol;
};

static __always_inline struct transport transport_of(const void *ip, const void *end, int is_v4)
{
	const struct iphdr *ip4 = ip;
	const struct ipv6hdr *ip6 = ip;
	struct transport found = { .protocol = -1 };

	if (!is_v4) { /* an extension header, of which the fragment header is one, is a protocol of its own here */
		if ((const void *)(ip6 + 1) <= end)
			found = (struct transport){ .at = ip6 + 1, .protocol = ip6->nexthdr };
	} else if ((const void *)(ip4 + 1) <= end && ip4->ihl >= 5 && !(ip4->frag_off & bpf_htons(0x3fff))) {
		found = (struct transport){ .at = ip + ip4->ihl * 4, .protocol = ip4->protocol };
	}
	return found;
}

/* In an ICMP error the kernel translates the quoted packet, which is of the other direction. */
static __always_inline enum outcome outcome_of_quoted(struct xdp_md *ctx, const void *ip, const void *end, int is_v4)
{
	const struct transport quoted = transport_of(ip, end, is_v4);
	const struct ports *ports = quoted.at;
	const struct iphdr *ip4 = ip;
	const struct ipv6hdr *ip6 = ip;
	struct in6_addr from = {}, to = {};

	if ((quoted.protocol != IPPROTO_TCP && quoted.protocol != IPPROTO_UDP) || (const void *)(ports + 1) > end)
		return UNDECIDED;
	if (is_v4) {
		if ((const void *)(ip4 + 1) > end)
			return UNDECIDED;
		from.s6_addr32[2] = to.s6_addr32[2] = bpf_htonl(0xffff);
		from.s6_addr32[3] = ip4->saddr;
		to.s6_addr32[3] = ip4->daddr;
	} else {
		if ((const void *)(ip6 + 1) > end)
			return UNDECIDED;
		__builtin_memcpy(&from, &ip6->saddr, sizeof(from));
		__builtin_memcpy(&to, &ip6->daddr, sizeof(to));
	}
	return outcome_of_connection(ctx, quoted.protocol, &to, &from, (struct ports){ ports->to, ports->from });
}

/* Outcome of a packet to a local pod, depending on whether the kernel translates its connection. */
static __always_inline enum outcome outcome_of_transport(struct xdp_md *ctx, const void *ip, const void *end,
						   const struct in6_addr *from, const struct in6_addr *to)
{
	const int is_v4 = is_v4_mapped(to);
	const struct transport transport = transport_of(ip, end, is_v4);
	const struct ports *ports = transport.at;
	const __u8 *type = transport.at;

	/* The kernel translates nothing; the loader has verified it. */
	if (!finds_connections)
		return REDIRECTED;
	if (transport.protocol == IPPROTO_TCP || transport.protocol == IPPROTO_UDP) {
		if ((const void *)(ports + 1) > end)
			return REDIRECTED; /* a worker determines the drop reason */
		return outcome_of_connection(ctx, transport.protocol, from, to, *ports);
	}
	if (transport.protocol == (is_v4 ? IPPROTO_ICMP : IPPROTO_ICMPV6) && (const void *)(type + 8) <= end) {
		/* RFC 792, RFC 4443 section 2.1 */
		if (is_v4 ? *type == 3 || *type == 11 || *type == 12 : *type < 128)
			return outcome_of_quoted(ctx, type + 8, end, is_v4);
	}
	return UNDECIDED;
}
