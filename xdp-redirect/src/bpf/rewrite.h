/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Rewrites a packet that needs no worker as a worker would: MACs and TTL. */
#pragma once
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
