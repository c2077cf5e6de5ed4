/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Reads the headers of a packet that a program may forward by itself: neither a fragment, nor with IP options or extension headers that its
 * sender has chosen, and with nothing in it that a worker would have to judge. Everything else is for a worker, which reads headers once more. */
#pragma once
#include "addresses.h"

struct packet {
	__u64 low[2], high[2], ports; /* as in struct entry, without an owner */
	__u32 direction; /* 0: from the lower end */
	__u32 length;    /* of the IP packet, in bytes */
	__u16 headers;   /* of IP and transport, in bytes; without the next, which no segment has */
	__u8 is_jumbo;   /* a header with the length is between those of IPv6 and transport */
	__u8 protocol, is_v4, ttl;
	__u8 flags; /* of a TCP segment, those beside ACK: SYN, FIN, RST or none; and ACK where it has none, as OPENING_SYN */
	__u32 sequence, acknowledged; /* of a TCP segment */
};

#define TCP_DECIDES 0x17 /* FIN, SYN, RST and ACK */
#define TCP_ACK 0x10
#define TCP_RST 0x04
#define TCP_SYN 0x02
#define TCP_FIN 0x01
#define OPENING_SYN (TCP_SYN | TCP_ACK) /* as flags of `struct packet`, which has ACK where the segment has not */

/* RFC 1071 */
static __always_inline int has_valid_checksum(const struct iphdr *ip4)
{
	const __u32 *words = (const void *)ip4;
	__u64 sum = (__u64)words[0] + words[1] + words[2] + words[3] + words[4];

	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum == 0xffff;
}

static __always_inline __u64 to_u64(const __u32 *words)
{
	return (__u64)bpf_ntohl(words[0]) << 32 | bpf_ntohl(words[1]);
}

struct addresses {
	__u64 from[2], to[2]; /* in numeric order, IPv4 as ::ffff:a.b.c.d */
};

struct jumbo { /* the hop-by-hop header that the kernel gives an IPv6 packet it has joined (struct hop_jumbo_hdr in include/net/ipv6.h) */
	__u8 next, length, type, size;
	__be32 payload;
};

/* Reads the length of a TCP packet that is too long for the field in its IP header, where that is 0: the kernel has joined many segments, and
 * knows its length by itself (skb_ip_totlen in include/linux/ip.h, ipv6_hop_jumbo in net/ipv6/exthdrs.c). `network`: bytes of the IP header.
 * Returns these with those of a jumbo header, or 0 for a packet that is for a worker. */
static __noinline __u32 read_joined(struct __sk_buff *skb, struct packet *packet, __u32 network)
{
	const struct jumbo *jumbo = (void *)(long)skb->data + ETH_HLEN + network;

	packet->length = skb->len - ETH_HLEN;
	if (!skb->gso_size)
		return 0;
	if (packet->protocol == IPPROTO_TCP)
		return network;
	if (packet->is_v4 || packet->protocol != IPPROTO_HOPOPTS || (const void *)(jumbo + 1) > (void *)(long)skb->data_end ||
	    jumbo->next != IPPROTO_TCP || jumbo->length || jumbo->type != IPV6_TLV_JUMBO || jumbo->size != sizeof(jumbo->payload) ||
	    bpf_ntohl(jumbo->payload) != packet->length - network)
		return 0;
	packet->protocol = IPPROTO_TCP;
	packet->is_jumbo = 1;
	return network + sizeof(*jumbo);
}

/* Reads an IP header; returns the length of the headers before that of transport in bytes, or 0 for a packet that is for a worker. */
static __always_inline __u32 read_network(struct __sk_buff *skb, struct packet *packet, struct addresses *addresses)
{
	const void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	const struct iphdr *ip4 = data + ETH_HLEN;
	const struct ipv6hdr *ip6 = data + ETH_HLEN;

	packet->is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	packet->is_jumbo = 0;
	if (packet->is_v4) {
		if ((const void *)(ip4 + 1) > end || *(const __u8 *)ip4 != 0x45 || ip4->frag_off & bpf_htons(0x3fff) ||
		    !has_valid_checksum(ip4))
			return 0;
		packet->protocol = ip4->protocol;
		packet->ttl = ip4->ttl;
		packet->length = bpf_ntohs(ip4->tot_len);
		addresses->from[0] = addresses->to[0] = 0;
		addresses->from[1] = 0xffff00000000ULL | bpf_ntohl(ip4->saddr);
		addresses->to[1] = 0xffff00000000ULL | bpf_ntohl(ip4->daddr);
		return packet->length ? sizeof(*ip4) : read_joined(skb, packet, sizeof(*ip4));
	}
	if ((const void *)(ip6 + 1) > end || (*(const __u8 *)ip6 & 0xf0) != 0x60)
		return 0;
	packet->protocol = ip6->nexthdr;
	packet->ttl = ip6->hop_limit;
	packet->length = sizeof(*ip6) + bpf_ntohs(ip6->payload_len);
	addresses->from[0] = to_u64(ip6->saddr.s6_addr32);
	addresses->from[1] = to_u64(ip6->saddr.s6_addr32 + 2);
	addresses->to[0] = to_u64(ip6->daddr.s6_addr32);
	addresses->to[1] = to_u64(ip6->daddr.s6_addr32 + 2);
	/* RFC 4942 section 2.2: mapped addresses must not appear on the wire. */
	if ((!addresses->from[0] && addresses->from[1] >> 32 == 0xffff) || (!addresses->to[0] && addresses->to[1] >> 32 == 0xffff))
		return 0;
	return ip6->payload_len ? sizeof(*ip6) : read_joined(skb, packet, sizeof(*ip6));
}

/* Reads a TCP segment with ACK and at most one of SYN and FIN, a SYN alone, a RST, or a UDP datagram. Returns its ports, or 0 for any other
 * packet. */
static __always_inline const struct ports *read_transport(struct __sk_buff *skb, struct packet *packet, __u32 network)
{
	const void *end = (void *)(long)skb->data_end;
	const __u8 *transport = (void *)(long)skb->data + ETH_HLEN + network;
	const __u32 length = packet->length - network;

	packet->flags = 0;
	if (packet->protocol == IPPROTO_TCP) {
		const __u32 header = (const void *)(transport + 20) > end ? 0 : (transport[12] >> 4) * 4;

		if (header < 20 || header > length)
			return 0;
		packet->flags = (transport[13] & TCP_DECIDES) ^ TCP_ACK;
		if (packet->flags != OPENING_SYN && (packet->flags & ~TCP_ACK) != TCP_RST &&
		    (packet->flags & ~(TCP_SYN | TCP_FIN) || packet->flags == (TCP_SYN | TCP_FIN)))
			return 0;
		packet->headers = network + header - packet->is_jumbo * sizeof(struct jumbo);
		packet->sequence = bpf_ntohl(*(const __be32 *)(transport + 4));
		packet->acknowledged = bpf_ntohl(*(const __be32 *)(transport + 8));
	} else if (packet->protocol == IPPROTO_UDP) {
		const __u16 *udp = (const void *)transport;
		const __u32 udp_length = (const void *)(transport + 8) > end ? 0 : bpf_ntohs(udp[2]);

		if (udp_length < 8 || udp_length > length)
			return 0;
		packet->headers = network + 8;
		packet->sequence = packet->acknowledged = 0; /* a function that is verified by itself gets no memory that was not written */
	} else {
		return 0;
	}
	return (const void *)transport;
}

/* Reads a packet that a program may forward. Returns 0 for any other. */
static __always_inline int read_packet(struct __sk_buff *skb, struct packet *packet)
{
	struct addresses addresses;
	const struct ports *ports;
	const __u64 *from = addresses.from, *to = addresses.to;
	__u16 from_port, to_port;
	__u32 network = read_network(skb, packet, &addresses);

	if (!network || packet->length > skb->len - ETH_HLEN || packet->length < network)
		return 0;
	ports = read_transport(skb, packet, network);
	if (!ports)
		return 0;
	from_port = bpf_ntohs(ports->from);
	to_port = bpf_ntohs(ports->to);
	/* The end with the lower address, then port, comes first. */
	packet->direction = from[0] != to[0] ? from[0] > to[0] : from[1] != to[1] ? from[1] > to[1] : from_port > to_port;
	packet->low[0] = packet->direction ? to[0] : from[0];
	packet->low[1] = packet->direction ? to[1] : from[1];
	packet->high[0] = packet->direction ? from[0] : to[0];
	packet->high[1] = packet->direction ? from[1] : to[1];
	packet->ports = (__u64)packet->protocol << 32 |
			(packet->direction ? (__u32)from_port << 16 | to_port : (__u32)to_port << 16 | from_port);
	return 1;
}
