/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Whose address it is: sources that a packet of the node's stack must not have. */
#pragma once
#include "conntrack_maps.h"
#include "origin.h"
#include "tcx_maps.h"

/* Whether this is the address of a pod that is served at another interface. */
static __always_inline int belongs_to_other_pod(const struct in6_addr *address, __u32 ifindex)
{
	const struct pod_interfaces *found = bpf_map_lookup_elem(&pod_addresses, address);

	return found && found->veth && found->veth != ifindex;
}

/* Whether this is a local pod's address, and the packet did not come in by that pod's interface. */
static __always_inline int is_spoofed_pod(struct __sk_buff *skb, const struct in6_addr *from)
{
	const struct pod_interfaces *found = bpf_map_lookup_elem(&pod_addresses, from);

	return found && !(skb->ingress_ifindex && (skb->ingress_ifindex == found->veth || skb->ingress_ifindex == found->stack));
}

/* Whether the node forwards a pod's packet with its source to another end, or by another port, than the pod has sent it to. It then goes through the
 * stack in both directions, as workers note (opens_via_host in dataplane/src/pipeline/track/open.rs). Of what the kernel does not track nobody knows. */
static __always_inline int is_translated_for_pod(const struct origin *origin)
{
	const struct in6_addr from = origin->flow.from; /* Linux 6.1 takes no memory of a caller for the key of a map */

	return origin->opens && !is_unchanged(origin) && bpf_map_lookup_elem(&pod_addresses, &from);
}

/* Whether a packet that the node's stack sends has the source of a local pod, now or before the node translated it, but did
 * not come from that pod. A pod's packets enter the stack by its interface, after the workers have checked them. The kernel
 * records that interface, which forwarding and translation keep; it is 0 for what the node itself sends.
 *
 * Not static: the kernel verifies such a function once, and by itself. With its paths times those of what follows it verified
 * 600,000 instructions of to_pod, for two seconds, and it refuses a million. */
__noinline int is_spoofed(struct __sk_buff *skb, struct origin *origin)
{
	struct in6_addr from;

	if (!origin || !find_origin(skb, ETH_HLEN, skb->protocol == bpf_htons(ETH_P_IP), origin)) /* the first is never */
		return 1;
	origin->ingress = is_locally_generated(skb) || !is_untranslated(origin) ? BY_NODE : 0;
	/* Copies: Linux 6.1 takes no memory of a caller for the key of a map. */
	from = origin->flow.from;
	if (is_spoofed_pod(skb, &from))
		return 1;
	from = origin->source;
	return origin->known && is_spoofed_pod(skb, &from);
}
