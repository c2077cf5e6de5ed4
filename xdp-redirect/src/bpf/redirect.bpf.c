// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Redirects a port's IP packets to its AF_XDP sockets; address resolution and everything that is not IP pass to the kernel.
 * In address resolution a pod may only claim its own addresses. A second program checks the packets that the node's stack sends to the
 * workers. */
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/icmpv6.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addresses.h"
#include "liveness.h"
#include "neighbour.h"
#include "outcome.h"
#ifdef ASKS_THE_KERNEL
#include "origin.h"
#include "translation.h"
#endif

const volatile __u32 on_miss = XDP_DROP; /* action on a packet whose queue has no socket */
const volatile __u32 uplink = 0;         /* redirect only packets to local pods */
const volatile __u32 pod = 0;            /* the peer is a pod, no other kind of neighbour */
const volatile __u32 bridge = 0;         /* the bridge that the interface is a port of, or 0 */

/* By queue. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OUTCOMES);
	__type(key, __u32);
	__type(value, __u64);
} outcomes SEC(".maps");

/* By address (IPv4 as ::ffff:a.b.c.d): maximum frame length for the pod, 0 if it has no worker; shared by all programs. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr);
	__type(value, __u16);
} local_pods SEC(".maps");

/* A pod's MAC by each of its addresses and by ::; empty while unknown. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 32);
	__type(key, struct in6_addr);
	__type(value, struct mac);
} own_addresses SEC(".maps");

/* Counts a packet, and returns the action. */
static __always_inline int count(__u32 outcome, int action)
{
	__u64 *count = bpf_map_lookup_elem(&outcomes, &outcome);
	if (count)
		*count += 1;
	return action;
}

#ifdef ASKS_THE_KERNEL
/* Packets from the host port with an address of this node are trusted. So the kernel only gets packets from an uplink that
 * it would route back to their sender. */
static __always_inline int passes_reverse_path_check(struct xdp_md *ctx, const struct in6_addr *from)
{
	struct bpf_fib_lookup back = { .ifindex = ctx->ingress_ifindex };
	long found;

	if (bpf_map_lookup_elem(&local_pods, from))
		return 0;
	if (is_v4_mapped(from)) {
		back.family = FAMILY_INET;
		back.ipv4_dst = from->s6_addr32[3];
	} else {
		back.family = FAMILY_INET6;
		__builtin_memcpy(back.ipv6_dst, from, sizeof(back.ipv6_dst));
	}
	found = bpf_fib_lookup(ctx, &back, sizeof(back), 0);
	return found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH;
}

/* Packets to a local pod that an uplink does not redirect:
 *
 * - Coalesced or unsegmented frames that are longer than a socket or the pod's link accepts. The kernel segments them on
 *   the way into the host port.
 * - Packets of a connection that the kernel translates. It restores the address that the pod knows.
 * - Packets for which that is unknown: fragments, of which only the first has ports, and other protocols. */
static __always_inline enum outcome uplink_outcome(struct xdp_md *ctx, const void *start, const void *end, __u16 max_length,
					      const struct in6_addr *from, const struct in6_addr *to)
{
	enum outcome outcome = REDIRECTED;

	if (start + max_length < end)
		outcome = TOO_LONG;
	else
		outcome = outcome_of_transport(ctx, start + sizeof(struct ethhdr), end, from, to);
	return outcome != REDIRECTED && passes_reverse_path_check(ctx, from) ? outcome : REDIRECTED;
}
#else /* a pod's port is no uplink */
static __always_inline enum outcome uplink_outcome(struct xdp_md *ctx, const void *start, const void *end, __u16 max_length,
					      const struct in6_addr *from, const struct in6_addr *to)
{
	return REDIRECTED;
}
#endif

/* Whether this is the address of a pod that is served. It is asked of interfaces without a known pod. */
static __always_inline int belongs_to_other_pod(const struct in6_addr *address, __u32 ifindex)
{
	const __u16 *max_length = bpf_map_lookup_elem(&local_pods, address);

	return max_length && *max_length;
}

SEC("xdp")
int penstock(struct xdp_md *ctx)
{
	const void *end = (void *)(long)ctx->data_end;
	const struct ethhdr *eth = (void *)(long)ctx->data;
	const struct iphdr *ip4 = (void *)(eth + 1);
	const struct ipv6hdr *ip6 = (void *)(eth + 1);
	struct in6_addr to = {}, from = {};
	const __u16 *max_length;
	int has_header, action;
	enum outcome outcome;

	/* The process is gone, even if the kernel has not yet closed its sockets, which takes time for each. */
	if (on_miss == XDP_PASS && !is_served())
		return count(NO_SOCKET, XDP_PASS);
	if ((void *)(eth + 1) > end)
		return count(NOT_IP, XDP_PASS);
	switch (eth->h_proto) {
	case bpf_htons(ETH_P_ARP):
		return pod && !is_valid_arp(&own_addresses, ctx->ingress_ifindex, eth, end) ? count(FORGED_NEIGHBOUR, XDP_DROP) : count(ARP, XDP_PASS);
	case bpf_htons(ETH_P_8021Q):
	case bpf_htons(ETH_P_8021AD): /* the kernel treats VLAN 0 as untagged: a pod could bypass the workers */
		return uplink ? count(NOT_IP, XDP_PASS) : count(VLAN_TAG, XDP_DROP);
	case bpf_htons(ETH_P_IP):
		has_header = (void *)(ip4 + 1) <= end;
		if (has_header) {
			to.s6_addr32[2] = bpf_htonl(0xffff);
			to.s6_addr32[3] = ip4->daddr;
			from.s6_addr32[2] = bpf_htonl(0xffff);
			from.s6_addr32[3] = ip4->saddr;
		}
		break;
	case bpf_htons(ETH_P_IPV6):
		has_header = (void *)(ip6 + 1) <= end;
		if (has_header && is_neighbour_discovery(ctx, ctx->ingress_ifindex, bridge, &local_pods, eth, end))
			return pod && !is_valid_discovery(&own_addresses, ctx->ingress_ifindex, eth, end) ?
				       count(FORGED_NEIGHBOUR, XDP_DROP) :
				       count(NEIGHBOUR_DISCOVERY, XDP_PASS);
		if (has_header) {
			__builtin_memcpy(&to, &ip6->daddr, sizeof(to));
			__builtin_memcpy(&from, &ip6->saddr, sizeof(from));
		}
		break;
	default:
		return pod && bridge && !has_pod_mac(&own_addresses, eth) ? count(FORGED_NEIGHBOUR, XDP_DROP) : count(NOT_IP, XDP_PASS);
	}
	if (uplink) {
		max_length = has_header ? bpf_map_lookup_elem(&local_pods, &to) : 0;
		if (!max_length || !*max_length)
			return count(NOT_LOCAL, XDP_PASS);
		outcome = uplink_outcome(ctx, eth, end, *max_length, &from, &to);
		if (outcome != REDIRECTED)
			return count(outcome, XDP_PASS);
	}
	action = bpf_redirect_map(&sockets, ctx->rx_queue_index, on_miss);
	return count(action == XDP_REDIRECT ? REDIRECTED : NO_SOCKET, action);
}

/* On the node's end of the host port: packets that the node's stack sends to the workers.
 *
 * Packets of a pod enter the node's stack through this interface, after the workers have checked their source. The kernel
 * records the ingress interface (skb->skb_iif, which forwarding and translation keep). It distinguishes a pod's own
 * packets, which return because the node translated their destination, from packets with a spoofed source: those from
 * outside or out of a tunnel arrived on another interface, and those of a process on the node have 0. */
#ifdef ASKS_THE_KERNEL
/* Writes into the Ethernet destination who sent a packet to the workers (dataplane/src/tag.rs). */
static __always_inline int write_sender_tag(struct __sk_buff *skb, const struct origin *origin)
{
	__u8 tag[3] = { LOCAL, TO_WORKER, FROM_NODE };

	tag[2] |= sender_flags(skb, origin);
	return bpf_skb_store_bytes(skb, 0, tag, sizeof(tag), 0) ? TC_ACT_SHOT : TC_ACT_OK;
}

SEC("tc")
int penstock_leave(struct __sk_buff *skb)
{
	struct origin origin = {};
	const int is_pods_own = skb->ingress_ifindex == skb->ifindex; /* of a pod, checked by the workers */
	__be16 kind;

	if (bpf_skb_load_bytes(skb, offsetof(struct ethhdr, h_proto), &kind, sizeof(kind)) ||
	    (kind != bpf_htons(ETH_P_IP) && kind != bpf_htons(ETH_P_IPV6)))
		return TC_ACT_OK; /* the workers only receive IP */
	if (is_tagged(skb))
		return TC_ACT_OK; /* a program of tcx.bpf.c has checked it */
	if (!find_origin(skb, ETH_HLEN, kind == bpf_htons(ETH_P_IP), &origin) ||
	    (!is_pods_own && bpf_map_lookup_elem(&local_pods, &origin.flow.from)) ||
	    (!is_pods_own && origin.known && bpf_map_lookup_elem(&local_pods, &origin.source)))
		return count(SPOOFED_SOURCE, TC_ACT_SHOT);
	return write_sender_tag(skb, &origin);
}
#endif

char LICENSE[] SEC("license") = "Dual BSD/GPL";
