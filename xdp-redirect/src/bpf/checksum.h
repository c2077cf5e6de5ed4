/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The transport checksum of a packet whose sender has left it to its device. */
#pragma once
#include "kernel_conntrack.h"
#include "packet.h"

#define CHECKSUM_PARTIAL 3 /* include/linux/skbuff.h */

/* Parts of the kernel's type; a flavour of that in kernel_conntrack.h. */
struct sk_buff___sum {
	__u8 ip_summed : 2;
	__u16 csum_start, csum_offset;
	unsigned char *head, *data;
} __attribute__((preserve_access_index));

/* Whether the kernel still writes a checksum into the packet. */
static __always_inline int has_partial_checksum(struct __sk_buff *skb)
{
	const struct sk_buff___sum *kernel = (void *)skb;

	if (!casts_packets)
		return BPF_CORE_READ_BITFIELD_PROBED(kernel, ip_summed) == CHECKSUM_PARTIAL;
	kernel = bpf_cast_to_kern_ctx(skb);
	return BPF_CORE_READ_BITFIELD(kernel, ip_summed) == CHECKSUM_PARTIAL;
}

/* Whether the kernel will write at most the checksum of the transport header that was read. A pod that sends with a virtio header
 * chooses where it writes (skb_partial_csum_set in net/core/skbuff.c), after all policy. */
static __always_inline int is_checksum_in_transport_header(struct __sk_buff *skb, const struct packet *packet)
{
	const __u32 network = packet->is_v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr) + packet->is_jumbo * sizeof(struct jumbo);
	const struct sk_buff___sum *kernel = (void *)skb;
	__u64 head, data;
	__u16 start, offset;

	if (!has_partial_checksum(skb))
		return 1;
	if (casts_packets) {
		kernel = bpf_cast_to_kern_ctx(skb);
		start = kernel->csum_start;
		offset = kernel->csum_offset;
		head = (__u64)kernel->head;
		data = (__u64)kernel->data;
	} else {
		start = BPF_CORE_READ(kernel, csum_start);
		offset = BPF_CORE_READ(kernel, csum_offset);
		head = (__u64)BPF_CORE_READ(kernel, head);
		data = (__u64)BPF_CORE_READ(kernel, data);
	}
	return start == data - head + ETH_HLEN + network && offset == (packet->protocol == IPPROTO_UDP ? 6 : 16);
}
