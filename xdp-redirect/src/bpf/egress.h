/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A pod's egress policy where a packet leaves for another machine. The policy is for the end that answers: a packet that a pod has sent to its
 * own node or to a Service may have got that end's address only here. */
#pragma once
#include "established.h"
#include "origin.h"
#include "worker.h"

/* Whether a worker sent it. The kernel keeps the interface that it came in by on the way through all that it leaves by: a VLAN, a bond,
 * and the interface below, or a tunnel. */
static __always_inline int is_from_worker(const struct __sk_buff *skb)
{
	__u32 i;

	for (i = 0; i < MAX_WORKERS && i < workers; i++)
		if (skb->ingress_ifindex == pairs.of_workers[i])
			return 1;
	return 0;
}

/* A frame on a pair has an Ethernet header. */
static __always_inline int add_ethernet_header(struct __sk_buff *skb)
{
	const __be16 protocol = skb->protocol;

	return bpf_skb_change_head(skb, ETH_HLEN, 0) ||
	       bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_proto), &protocol, sizeof(protocol), 0);
}

/* Whether a worker has not seen a packet with the destination that it leaves with: the node has given it another address or port. Or it has,
 * and egress policy was postponed, since the address is a Service's, but nothing has translated it: then also of a connection that the other
 * end has opened, as far as the kernel knows. Any machine may begin one with that address, and the kernel tracks what a worker drops. Other
 * answers follow their connections. */
static __always_inline int needs_egress_check(const struct origin *origin)
{
	const int is_opened = (origin->known || origin->is_error) && origin->opens;

	return (is_opened && (!is_same_address(&origin->destination, &origin->flow.to) || origin->ports.to != origin->flow.ports.to)) ||
	       bpf_map_lookup_elem(&service_addresses, &origin->flow.to);
}

/* Ticks, of half a second, for which that counts while there is a daemon: then a worker sees one packet, so that a rule which decides has hits. */
#define ALLOWED_FOR 4

/* Whether a worker has just allowed this pod to send there, under the epoch in effect. */
static __always_inline int is_egress_allowed(const struct origin *origin, const struct interface *iface)
{
	const struct destination destination = {
		.to = origin->flow.to, .to_port = origin->flow.ports.to, .port = iface->port, .protocol = origin->flow.protocol,
	};
	const struct allowed *allowed = offload && origin->known ? bpf_map_lookup_elem(&allowed_to_leave, &destination) : 0;
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);

	return allowed && table && (__s32)(allowed->epoch - *(const volatile __u32 *)&table->epoch) >= 0 &&
	       (((tick_of_now() - allowed->tick) & TICK_MASK) < ALLOWED_FOR || !is_served());
}

/* Caches for is_egress_allowed what the worker says in the tag of a packet that it has allowed. */
static __always_inline void cache_egress_verdict(struct __sk_buff *skb, const struct tag *tag)
{
	struct destination destination = { .to_port = tag->to_port, .port = bpf_ntohs(tag->port) };
	const struct allowed allowed = { .epoch = bpf_ntohl(tag->epoch), .tick = tick_of_now() };
	struct sent_flow flow = {};

	destination.protocol = tag->flags & ALLOWED_TCP ? IPPROTO_TCP : tag->flags & ALLOWED_UDP ? IPPROTO_UDP : IPPROTO_SCTP;
	if (!read_addresses(skb, ETH_HLEN, skb->protocol == bpf_htons(ETH_P_IP), &flow))
		return;
	destination.to = flow.to;
	bpf_map_update_elem(&allowed_to_leave, &destination, &allowed, BPF_ANY);
}
