/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Rewrites a packet that needs no worker as a worker would: MACs and TTL, addresses and ports of a translated connection, and the checksums
 * that cover them. */
#pragma once
#include "checksum.h"
#include "established.h"
#include "tcx_maps.h"

/* Rewrites a packet for its pod: MACs, and, unless it is `bridged`, TTL with the header's checksum (RFC 1624), or the hop
 * limit. */
static __always_inline int rewrite(struct __sk_buff *skb, const struct packet *packet, const struct interface *to, int bridged)
{
	const void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct { struct mac to, from; __be16 protocol; __u16 ip[6]; } head = { .to = to->pod_mac, .from = to->node_mac };
	const __u16 *words = data + ETH_HLEN;
	__u32 sum;

	if ((const void *)(words + 6) > end)
		return -1;
	if (bridged)
		return bpf_skb_store_bytes(skb, 0, &head, 2 * ETH_ALEN, 0);
	head.protocol = skb->protocol;
	__builtin_memcpy(head.ip, words, sizeof(head.ip));
	if (!packet->is_v4) {
		head.ip[3] -= bpf_htons(1); /* next header and hop limit, which is at least 2 */
		return bpf_skb_store_bytes(skb, 0, &head, ETH_HLEN + 8, 0);
	}
	head.ip[4] -= bpf_htons(0x0100); /* TTL, which is at least 2, and protocol */
	sum = (__u16)~words[5] + (__u16)~words[4] + head.ip[4];
	sum = (sum & 0xffff) + (sum >> 16);
	head.ip[5] = ~(sum + (sum >> 16));
	return bpf_skb_store_bytes(skb, 0, &head, sizeof(head), 0);
}

/* Headers of a packet without IP options, up to the ports. */
struct head_v4 {
	struct mac to, from;
	__be16 protocol;
	__u16 ip[6], addresses[2][2];
	__be16 ports[2];
};

struct head_v6 {
	struct mac to, from;
	__be16 protocol;
	__u16 ip[4], addresses[2][8];
	__be16 ports[2];
};

/* Write a word, or the last `words` of an address, into a header. They return what that adds to a checksum (RFC 1624). */
static __always_inline __u32 write_word(__be16 *to, __u16 word)
{
	const __u32 before = (__u16)~*to;

	*to = bpf_htons(word);
	return before + *to;
}

static __always_inline __u32 write_address(__be16 *to, const __u64 *address, const __u32 words)
{
	__u32 i, change = 0;

#pragma clang loop unroll(disable)
	for (i = 8 - words; i < 8; i++)
		change += write_word(to++, address[i / 4] >> (48 - 16 * (i & 3)));
	return change;
}

struct change {
	__u32 addresses, ports;
};

/* Writes the flow that a packet of a translated connection leaves with. */
static __always_inline struct change write_flow(const struct entry *entry, __u32 direction, __be16 *from, __be16 *to, __be16 *ports,
						const __u32 words)
{
	const __u32 from_higher = direction & 1;
	const __u64 pair = entry->ports;
	struct change change;

	change.addresses = write_address(from, from_higher ? entry->high : entry->low, words) +
			   write_address(to, from_higher ? entry->low : entry->high, words);
	change.ports = write_word(ports, from_higher ? pair >> 16 : pair) + write_word(ports + 1, from_higher ? pair : pair >> 16);
	return change;
}

/* Updates the transport checksum. One that the sender left to its device covers only the addresses so far; 0 of UDP is none
 * (RFC 768). */
static __always_inline int update_checksum(struct __sk_buff *skb, const struct packet *packet, struct change change)
{
	const __u32 is_udp = packet->protocol == IPPROTO_UDP, is_partial = has_partial_checksum(skb);
	const __u32 network = packet->is_v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);

	return bpf_l4_csum_replace(skb, ETH_HLEN + network + (is_udp ? 6 : 16), 0,
				   is_partial ? change.addresses : change.addresses + change.ports,
				   BPF_F_PSEUDO_HDR | (is_udp ? BPF_F_MARK_MANGLED_0 : 0));
}

/* The connection has ended meanwhile: the packet is for a worker.
 *
 * The lookup has compared the control word of the entry that it found by the packet's key; that of the other entry, whose key the packet
 * leaves with, is in nat_control. Between lookup and here that other entry may be freed and get another connection's key. So its key is
 * copied first, and its control word compared after that; only then is anything written to the packet. */
enum { CONNECTION_ENDED = 1 };

static __noinline int translate_v4(struct __sk_buff *skb, const struct packet *packet, const struct connection *connection,
				   const struct interface *to)
{
	const struct entry *leaving = entry_at(connection->nat_slot);
	struct head_v4 head;
	struct change change;
	__u32 sum = 0, i;

	if (!leaving || bpf_skb_load_bytes(skb, 0, &head, sizeof(head)))
		return -1;
	change = write_flow(leaving, connection->nat_direction, head.addresses[0], head.addresses[1], head.ports, 2);
	if (control_of(leaving) != connection->nat_control)
		return CONNECTION_ENDED;
	if (to) {
		head.to = to->pod_mac;
		head.from = to->node_mac;
		head.ip[4] -= bpf_htons(0x0100); /* TTL, which is at least 2, and protocol */
	}
	head.ip[5] = 0;
	for (i = 0; i < 6; i++)
		sum += head.ip[i];
	sum += head.addresses[0][0] + head.addresses[0][1] + head.addresses[1][0] + head.addresses[1][1];
	sum = (sum & 0xffff) + (sum >> 16);
	head.ip[5] = ~(sum + (sum >> 16));
	return update_checksum(skb, packet, change) || bpf_skb_store_bytes(skb, 0, &head, sizeof(head), 0) ? -1 : 0;
}

static __noinline int translate_v6(struct __sk_buff *skb, const struct packet *packet, const struct connection *connection,
				   const struct interface *to)
{
	const struct entry *leaving = entry_at(connection->nat_slot);
	struct head_v6 head;
	struct change change;

	if (!leaving || bpf_skb_load_bytes(skb, 0, &head, sizeof(head)))
		return -1;
	change = write_flow(leaving, connection->nat_direction, head.addresses[0], head.addresses[1], head.ports, 8);
	if (control_of(leaving) != connection->nat_control)
		return CONNECTION_ENDED;
	if (to) {
		head.to = to->pod_mac;
		head.from = to->node_mac;
		head.ip[3] -= bpf_htons(1); /* next header and hop limit, which is at least 2 */
	}
	return update_checksum(skb, packet, change) || bpf_skb_store_bytes(skb, 0, &head, sizeof(head), 0) ? -1 : 0;
}

/* Rewrites a packet as a worker would. `to`: the pod's interface, 0 where the node's stack forwards it. */
static __always_inline int rewrite_for(struct __sk_buff *skb, const struct packet *packet, const struct connection *connection,
				       const struct interface *to, int bridged)
{
	if (connection->nat_slot == NO_SLOT)
		return to ? rewrite(skb, packet, to, bridged) : 0;
	return packet->is_v4 ? translate_v4(skb, packet, connection, to) : translate_v6(skb, packet, connection, to);
}
