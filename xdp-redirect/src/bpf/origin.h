/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The origin of a packet that leaves the node's stack: who sent it to where, before the node translated it. It is that of the connection
 * which the kernel itself has found for the packet, so that it holds for any protocol, whatever headers there are, and in
 * fragments. All programs read it here. */
#pragma once
#include "addresses.h"
#include "kernel_conntrack.h"

struct sent_flow { /* a flow after its translation, in network byte order; IPv4 as ::ffff:a.b.c.d; ports of TCP, UDP and SCTP */
	struct in6_addr from, to;
	struct ports ports;
	__u32 protocol;
};

/* The source before it was translated, by flow; shared by all programs, and read by the workers when the connection is opened. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct sent_flow);
	__type(value, struct in6_addr);
} sources SEC(".maps");

struct origin {
	struct sent_flow flow;       /* as it leaves: the packet's addresses, and the ports of its connection */
	struct in6_addr source;      /* as it entered the node */
	struct in6_addr destination; /* the same */
	struct ports ports;          /* the same */
	int known;     /* it is tracked, and no ICMP error */
	int is_error;  /* an ICMP error about a packet of a tracked connection */
	int opens;     /* in the direction in which the connection was opened */
	__u32 ingress; /* where it comes from in the connection table: BY_NODE, or 0 if the node forwards it with the source that it came with */
};

/* Reads the packet's addresses, which are at fixed places. `offset`: bytes before the IP header. Returns whether it has them. */
static __always_inline int read_addresses(struct __sk_buff *skb, __u32 offset, int is_v4, struct sent_flow *flow)
{
	__be32 v4[2];

	if (!is_v4)
		return !bpf_skb_load_bytes(skb, offset + offsetof(struct ipv6hdr, saddr), flow, 2 * sizeof(flow->from));
	if (bpf_skb_load_bytes(skb, offset + offsetof(struct iphdr, saddr), v4, sizeof(v4)))
		return 0;
	to_in6(&flow->from, &v4[0], 1);
	to_in6(&flow->to, &v4[1], 1);
	return 1;
}

/* `_nfct` is the address of the packet's connection and, in the lowest bits, where in the connection the packet is
 * (include/linux/skbuff.h, include/uapi/linux/netfilter/nf_conntrack_common.h). */
static __always_inline void read_connection(struct __sk_buff *skb, struct origin *origin)
{
	enum { RELATED = 1, REPLY = 3, RELATED_REPLY = 4, INFO = 7, INET = 2 };
	const unsigned long tracked = read_nfct(skb), info = tracked & INFO;
	const struct nf_conn *connection = (void *)(tracked & ~(unsigned long)INFO);
	struct tuple tuples[2];
	const struct tuple *entered, *other;

	if (!connection || info > RELATED_REPLY || !read_tuples(connection, &tuples[0], &tuples[1]))
		return;
	origin->opens = info < REPLY;
	origin->is_error = info == RELATED || info == RELATED_REPLY;
	origin->known = !origin->is_error;
	entered = origin->opens ? &tuples[0] : &tuples[1];
	other = origin->opens ? &tuples[1] : &tuples[0];
	to_in6(&origin->source, entered->from, entered->family == INET);
	to_in6(&origin->destination, entered->to, entered->family == INET);
	origin->flow.protocol = entered->protocol;
	/* In other protocols these are identifiers, of which each direction has its own. */
	if (has_ports(entered->protocol)) {
		origin->ports = (struct ports){ entered->from_port, entered->to_port };
		origin->flow.ports = (struct ports){ other->to_port, other->from_port };
	}
}

/* Finds the origin of an outgoing packet, which the kernel may have translated. A reply spoofed as a Service's backend would leave with
 * the Service's address. `offset`: bytes before its IP header. Returns whether the packet's addresses are readable. */
static __always_inline int find_origin(struct __sk_buff *skb, __u32 offset, int is_v4, struct origin *origin)
{
	if (!read_addresses(skb, offset, is_v4, &origin->flow))
		return 0;
	if (reads_connections)
		read_connection(skb, origin);
	return 1;
}

/* Whether the node itself sends it. A packet that the node forwards has no socket: the kernel takes it away on the way in, and forwards none
 * that has one (ip_rcv_core, ip_forward and ip6_forward in net/ipv4 and net/ipv6). One that a bridge forwards may have its sender's,
 * but has an interface that it came in by. */
static __always_inline int is_locally_generated(const struct __sk_buff *skb)
{
	return !skb->ingress_ifindex && skb->sk;
}

/* Records for the workers who opens this connection, if the node has translated its source. Returns whether it has. */
static __always_inline int record_source(const struct origin *origin)
{
	const struct in6_addr *recorded;

	if (!origin->known || !origin->opens || is_same_address(&origin->source, &origin->flow.from))
		return 0;
	/* Without writing for each packet, which takes a lock. */
	recorded = bpf_map_lookup_elem(&sources, &origin->flow);
	if (!recorded || !is_same_address(recorded, &origin->source))
		bpf_map_update_elem(&sources, &origin->flow, &origin->source, BPF_ANY);
	return 1;
}

/* Whether the kernel tracks the packet, and it leaves with the addresses and ports that it entered the node with. A packet that is not tracked
 * may have been translated by something else, such as IPVS. */
static __always_inline int is_unchanged(const struct origin *origin)
{
	const struct sent_flow *flow = &origin->flow;

	return origin->known && is_same_address(&origin->source, &flow->from) &&
	       is_same_address(&origin->destination, &flow->to) && origin->ports.from == flow->ports.from &&
	       origin->ports.to == flow->ports.to;
}

/* Whether this is a TCP segment in one piece, right behind the IP header. */
static __always_inline int is_whole_segment(struct __sk_buff *skb)
{
	__u8 head[10];

	if (bpf_skb_load_bytes(skb, ETH_HLEN, head, sizeof(head)))
		return 0;
	if (head[0] >> 4 == 6)
		return head[offsetof(struct ipv6hdr, nexthdr)] == IPPROTO_TCP;
	return head[offsetof(struct iphdr, protocol)] == IPPROTO_TCP && !((head[6] & 0x3f) | head[7]);
}

/* Whether a packet without a socket has entered the node. Without interface and socket the kernel sends resets, and answers for TCP
 * sockets that it no longer has (nf_send_reset in net/ipv4/netfilter/nf_reject_ipv4.c; tcp_v6_send_response in net/ipv6/tcp_ipv6.c before
 * Linux 6.13). A packet that it has reassembled and fragments again loses its interface (ip_copy_metadata in net/ipv4/ip_output.c), but then is in
 * fragments. */
static __always_inline int has_entered(struct __sk_buff *skb)
{
	return skb->ingress_ifindex || !is_whole_segment(skb);
}

/* Whether it leaves with the source that it entered with. A packet that is not tracked has met no rule that translates. */
static __always_inline int is_untranslated(const struct origin *origin)
{
	return reads_connections && !origin->is_error && (!origin->known || is_same_address(&origin->source, &origin->flow.from));
}

/* Both Ethernet addresses of a frame to a worker begin so (struct tag in worker.h). */
#define LOCAL 0x02
#define TO_WORKER 0xfa

enum { /* flags of a frame to a worker, about a packet of the node's stack (dataplane/src/tag.rs) */
	FROM_NODE = 2,         /* from the node's stack, otherwise from the pod */
	LOCAL_PROCESS = 4,     /* sent by the node itself, not forwarded */
	SOURCE_TRANSLATED = 8, /* forwarded, with another source than it came with: that is in `sources` */
	LEAVING = 16,          /* of a pod, and forwarded to another machine by `uplink` */
	UNCHANGED = 32,        /* forwarded as it came */
	UNTRANSLATED = 64,     /* forwarded with the source that it came with, as far as is known */
	TO_NEIGHBOUR = 128,    /* of a pod on a bridge, to another address there than the bridge's own */
};

static __always_inline __u8 sender_flags(struct __sk_buff *skb, const struct origin *origin)
{
	if (is_locally_generated(skb))
		return LOCAL_PROCESS;
	if (record_source(origin))
		return SOURCE_TRANSLATED;
	if (!has_entered(skb))
		return 0;
	return is_unchanged(origin) ? UNCHANGED : is_untranslated(origin) ? UNTRANSLATED : 0;
}
