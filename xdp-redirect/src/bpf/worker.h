/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sends a packet to a worker: which worker, how many packets of a port may wait, and the tag that says whose packet it is. */
#pragma once
#include "checksum.h"
#include "origin.h"
#include "tcx_maps.h"

/* Both Ethernet addresses of a frame on a pair (dataplane/src/tag.rs). Pods cannot write these: the programs replace both addresses of each
 * frame that enters or leaves a pair. The first byte makes each a locally administered unicast address. */
struct tag {
	__u8 to_local, to_kind, flags, uplink;
	__be16 port;
	union {
		struct {
			__u8 from_local, from_kind;
		} __attribute__((packed));
		__be16 to_port; /* with ALLOWED_… */
	};
	union {
		__be32 ifindex;
		__be32 epoch; /* with ALLOWED_…: under which the packet was evaluated */
	};
} __attribute__((packed));

/* TO_WORKER (origin.h): `port`, `ifindex`: the pod at whose veth the frame was, or which sent it to `uplink` */
#define FROM_WORKER 0xfb /* `port`: the pod that it is for, or whose packet it is */
#define NO_PORT 0xffff

enum { /* flags of a frame to a worker; those about the node's stack are in origin.h */
	CHECKSUM_OPEN = 1, /* the transport checksum is that of the pseudo header */
};

enum { /* flags of a frame from a worker */
	TO_NODE = 1,   /* to the node's stack: as the pod's, or with port NO_PORT as the pair's */
	TO_UPLINK = 2, /* out by `uplink` */
	ALLOWED_TCP = 4, /* the next ones of this pod to this address and `to_port` need no worker */
	ALLOWED_UDP = 8,
	ALLOWED_SCTP = 16,
};

/* Counts a packet at an interface, and returns the action. */
static __always_inline int count(__u32 ifindex, __u32 outcome, int action)
{
	void *counters = bpf_map_lookup_elem(&outcomes, &ifindex);
	__u64 *packets = counters ? bpf_map_lookup_elem(counters, &outcome) : 0;

	if (packets)
		*packets += 1;
	return action;
}

/* Which worker: that of this CPU, which wakes no other core; or the same for both directions of a connection. A later fragment may meet
 * another worker than the first: workers share what they know of fragments, too. Not inlined: all frames of a program's calls have 512 bytes of
 * stack. */
static __noinline __u32 select_pair(struct __sk_buff *skb)
{
	struct { union { struct iphdr ip4; struct ipv6hdr ip6; }; } head = {};
	__u32 ports = 0, sum, offset, index = bpf_get_smp_processor_id();
	__u8 protocol;

	if (workers < 2)
		return pairs.of_workers[0];
	if (index < MAX_CPUS && pairs.of_cpus[index])
		return pairs.of_cpus[index];
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &head.ip4, sizeof(head.ip4)))
			return pairs.of_workers[0];
		sum = head.ip4.saddr ^ head.ip4.daddr;
		protocol = head.ip4.frag_off & bpf_htons(0x3fff) ? 0 : head.ip4.protocol;
		offset = head.ip4.ihl * 4;
	} else {
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &head.ip6, sizeof(head.ip6)))
			return pairs.of_workers[0];
		sum = head.ip6.saddr.s6_addr32[0] ^ head.ip6.saddr.s6_addr32[1] ^ head.ip6.saddr.s6_addr32[2] ^
		      head.ip6.saddr.s6_addr32[3] ^ head.ip6.daddr.s6_addr32[0] ^ head.ip6.daddr.s6_addr32[1] ^
		      head.ip6.daddr.s6_addr32[2] ^ head.ip6.daddr.s6_addr32[3];
		protocol = head.ip6.nexthdr;
		offset = sizeof(head.ip6);
	}
	if (protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP)
		bpf_skb_load_bytes(skb, ETH_HLEN + offset, &ports, sizeof(ports));
	sum = (sum ^ (ports >> 16) ^ (ports & 0xffff)) * 0x9e3779b1u;
	index = ((__u64)sum * workers) >> 32;
	return index < MAX_WORKERS ? pairs.of_workers[index] : pairs.of_workers[0];
}

#define SHORTEST_HEADERS (ETH_HLEN + sizeof(struct iphdr) + 8) /* of a segment */

/* Packets that the kernel makes of this one on the way to a worker. It does not know their number where the sender has chosen their
 * size by a virtio header (virtio_net_hdr_to_skb in include/linux/virtio_net.h); then it is rather too high. */
static __always_inline __u32 segments_of(const struct __sk_buff *skb)
{
	const __u32 size = skb->gso_size, length = skb->len;

	if (!size || length <= SHORTEST_HEADERS)
		return 1;
	return skb->gso_segs ? skb->gso_segs : (length - SHORTEST_HEADERS + size - 1) / size;
}

/* Counts a packet of this port to a worker, unless its share is used up, or the packet alone is more. CPUs that count at the same time may
 * exceed the share by a packet each. */
static __always_inline int take_share(struct __sk_buff *skb, __u32 port)
{
	struct waiting *counters = bpf_map_lookup_elem(&waiting, &port);
	const __u32 segments = segments_of(skb);

	if (!counters ||
	    (share && (segments > share || (__s64)(counters->sent - *(volatile __u64 *)&counters->received) >= (__s64)share)))
		return 0;
	__sync_fetch_and_add(&counters->sent, segments);
	return 1;
}

/* Sends a packet to a worker as that of the pod with the interface `ifindex`. */
static __always_inline int tag_for_worker(struct __sk_buff *skb, const struct interface *iface, __u32 ifindex, __u8 flags, __u8 uplink,
					  __u32 outcome)
{
	const struct tag tag = {
		.to_local = LOCAL, .to_kind = TO_WORKER, .port = bpf_htons(iface->port),
		.from_local = LOCAL, .from_kind = TO_WORKER, .ifindex = bpf_htonl(ifindex), .uplink = uplink,
		.flags = flags | (has_partial_checksum(skb) ? CHECKSUM_OPEN : 0),
	};

	if (!take_share(skb, iface->port))
		return count(ifindex, SHARE_USED, TC_ACT_SHOT);
	if (bpf_skb_store_bytes(skb, 0, &tag, sizeof(tag), 0))
		return count(ifindex, NOT_IP, TC_ACT_SHOT);
	return count(ifindex, outcome, bpf_redirect(select_pair(skb), 0));
}

static __always_inline int redirect_to_worker(struct __sk_buff *skb, const struct interface *iface, __u8 flags, __u32 outcome)
{
	return tag_for_worker(skb, iface, skb->ifindex, flags, 0, outcome);
}
