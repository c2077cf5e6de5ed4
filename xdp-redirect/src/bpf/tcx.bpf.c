// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Programs at the node's ends of pods' veths (tcx), and at the veth pair of each worker.
 *
 *   pod ── from_pod ──▶ pair ──▶ worker ──▶ pair ── from_worker ──▶ pod, or the node's stack as if the pod had sent it
 *   the node's stack ── to_pod ──▶ pair
 *   the node's stack ── to_uplink ──▶ pair ──▶ worker ──▶ pair ── from_worker ──▶ uplink: what a pod sent to its own node, and the
 *                                      node has given the address of another machine (a node port)
 *   uplink ── from_uplink ──▶ the node's stack: not a tunnel packet of another node's pod (tunnel.h)
 *
 * Packets of established connections take the same way without the worker (established.h):
 *
 *   pod ── from_pod ──▶ pod, or the node's stack
 *   the node's stack ── to_pod ──▶ pod
 *
 * A frame on a pair carries in its Ethernet addresses what the other side must know (struct tag). Pods cannot write these:
 * the programs replace both addresses of each frame that enters or leaves a pair. */
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

#include "established.h"
#include "neighbour.h"
#include "outcome.h"
#include "repeat.h"
#include "translation.h"
#include "tunnel.h"

#define MAX_PORTS 4096
#define MAX_WORKERS 64
#define MAX_CPUS 1024
#define MAX_UPLINKS 256

const volatile __u32 open_without_workers = 0; /* pass packets to the kernel while no process serves the sockets */
const volatile __u32 workers = 1;              /* in use of `pairs.of_workers` */
const volatile __u32 passed = 0;               /* mark of a packet that goes on behind these programs; random */
const volatile __u32 share = 0;                /* most packets of a port that wait for workers; 0: any number */
const volatile __u32 offload = 0;              /* forward packets of established connections without a worker */
const volatile __u32 beside_xdp = 0;           /* XDP serves the pods: the one pair is the host veth, whose packets are the pods', too */

volatile struct { /* interface indices of the node's ends of workers' pairs, set before the programs are attached */
	__u32 of_workers[MAX_WORKERS];
	__u32 of_cpus[MAX_CPUS]; /* of the worker that takes what this CPU sends; 0: any worker */
} pairs;

/* Queueing disciplines and filters of somebody else on a pod's interface, as limits of bandwidth are. They stand behind these programs: a
 * packet gets to them if it goes on by TC_ACT_UNSPEC, enters or leaves by that interface, and is not sent to the pod's end at once. */
enum { FILTERS_TO_POD = 1, FILTERS_FROM_POD = 2 };

struct interface { /* the node's end of a pod's veth */
	__u16 port;            /* the number that workers know it by */
	__u8 filtered, captured; /* FILTERS_…; a capture wants to see all of its packets */
	struct mac node, pod;  /* of the node, or the bridge, towards the pod, and of the pod */
	__u32 mtu;             /* longest IP packet to the pod, in bytes */
	__u32 bridge;          /* that it is a port of, or 0 */
};
struct { /* by interface index; without an entry everything is dropped */
	__uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, MAX_PORTS); __uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); __type(value, struct interface);
} interfaces SEC(".maps");

struct target { /* where a worker's packets for a port go */
	__u32 interface; /* 0: there is no such port */
	struct mac node, pod;
	__u32 filtered;
};
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, MAX_PORTS); __type(key, __u32); __type(value, struct target); } targets SEC(".maps");

/* Sizes of struct in6_addr and struct mac: clang leaves these types out of BTF where only an inner map has them. */
struct own { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 32); __uint(key_size, 16); __uint(value_size, 6); };
struct { /* by interface index: a pod's MAC by each of its addresses and by :: */
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS); __uint(max_entries, MAX_PORTS); __type(key, __u32);
	__array(values, struct own);
} own_addresses SEC(".maps");

struct counters { __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY); __uint(max_entries, OUTCOMES); __type(key, __u32); __type(value, __u64); };
struct { /* by interface index: packets by outcome */
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS); __uint(max_entries, MAX_PORTS); __type(key, __u32);
	__array(values, struct counters);
} outcomes SEC(".maps");

/* The interfaces by which a pod's packets come to another pod, 0 for none: its veth, if a bridge forwards them (also what
 * br_netfilter has translated); the veth or the bridge, if the node's stack does. */
struct entrances {
	__u32 veth;
	__u32 stack;
};

struct { /* local pods' addresses (IPv4 as ::ffff:a.b.c.d) */
	__uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 131072); __uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr); __type(value, struct entrances);
} pod_addresses SEC(".maps");

struct uplink { /* an interface to other machines */
	__u32 number;
	__u32 header; /* bytes of its link-layer header: that of Ethernet, or none */
};
struct { /* by interface index */
	__uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 65536); __uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); __type(value, struct uplink);
} uplinks SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, MAX_UPLINKS); __type(key, __u32); __type(value, __u32); } uplink_interfaces SEC(".maps");

/* Addresses at which a pod may send to a Service: its egress policy is for what answers, and asked where that is known. */
struct { /* IPv4 as ::ffff:a.b.c.d; shared with the workers' tables: an address is here before they postpone */
	__uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 65536); __uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr); __type(value, __u32);
} service_addresses SEC(".maps");

struct destination { /* what a pod may send to another machine, by policy */
	struct in6_addr to;
	__be16 to_port;
	__u16 port; /* of the pod */
	__u32 protocol;
};
struct { /* the epoch under which a worker has last allowed it; what makes room for another is asked again */
	__uint(type, BPF_MAP_TYPE_LRU_HASH); __uint(max_entries, 16384);
	__type(key, struct destination); __type(value, __u32);
} allowed_to_leave SEC(".maps");

struct waiting { /* packets to workers; their difference waits (dataplane/src/worker/waiting.rs) */
	__u64 sent, unused[7], received, padding[7];
};
struct { /* by port; workers count what they receive */
	__uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, MAX_PORTS); __uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32); __type(value, struct waiting);
} waiting SEC(".maps");

struct traffic { __u64 packets, bytes; };
struct of_port { struct traffic sent, received; };
struct { /* by port: what the pod sent and received without a worker, as segments */
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY); __uint(max_entries, MAX_PORTS); __type(key, __u32); __type(value, struct of_port);
} offloaded_ports SEC(".maps");
enum { POD_TO_POD, POD_TO_STACK, STACK_TO_POD, WAYS };
struct { /* the same by where it came from and went to */
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY); __uint(max_entries, WAYS); __type(key, __u32); __type(value, struct traffic);
} offloaded SEC(".maps");

#define CHECKSUM_PARTIAL 3 /* include/linux/skbuff.h */

/* Parts of the kernel's type; a flavour of that in translation.h. */
struct sk_buff___sum {
	__u8 ip_summed : 2;
	__u16 csum_start, csum_offset;
	unsigned char *head, *data;
} __attribute__((preserve_access_index));

/* Whether the kernel still writes a checksum into the packet. */
static __always_inline int is_checksum_open(struct __sk_buff *skb)
{
	const struct sk_buff___sum *kernel = (void *)skb;

	if (!casts_packets)
		return BPF_CORE_READ_BITFIELD_PROBED(kernel, ip_summed) == CHECKSUM_PARTIAL;
	kernel = bpf_cast_to_kern_ctx(skb);
	return BPF_CORE_READ_BITFIELD(kernel, ip_summed) == CHECKSUM_PARTIAL;
}

/* Whether the kernel will write at most the checksum of the transport header that was read. A pod that sends with a virtio header
 * chooses where it writes (skb_partial_csum_set in net/core/skbuff.c), after all policy. */
static __always_inline int is_checksum_in_place(struct __sk_buff *skb, const struct packet *packet)
{
	const __u32 network = packet->is_v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	const struct sk_buff___sum *kernel = (void *)skb;
	__u64 head, data;
	__u16 start, offset;

	if (!is_checksum_open(skb))
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

/* Both Ethernet addresses of a frame on a pair. The first byte makes each a locally administered unicast address. */
struct tag {
	__u8 to_local, to_kind, flags, uplink;
	__be16 port;
	union {
		struct { __u8 from_local, from_kind; } __attribute__((packed));
		__be16 to_port; /* with ALLOWED_… */
	};
	union {
		__be32 interface;
		__be32 epoch; /* with ALLOWED_…: under which the packet was evaluated */
	};
} __attribute__((packed));

#define LOCAL 0x02
#define TO_WORKER 0xfa   /* `port`, `interface`: the pod at whose veth the frame was, or which sent it to `uplink` */
#define FROM_WORKER 0xfb /* `port`: the pod that it is for, or whose packet it is */

enum { /* flags of a frame to a worker; those about the node's stack are in translation.h */
	CHECKSUM_OPEN = 1, /* the transport checksum is that of the pseudo header */
};
enum { /* flags of a frame from a worker */
	TO_NODE = 1, /* to the node's stack: as the pod's, or with port NO_PORT as the pair's */
	TO_UPLINK = 2, /* out by `uplink` */
	ALLOWED_TCP = 4, ALLOWED_UDP = 8, ALLOWED_SCTP = 16, /* the next ones of this pod to this address and `to_port` need no worker */
};
#define NO_PORT 0xffff

static __always_inline int count(__u32 interface, __u32 outcome, int action)
{
	void *counters = bpf_map_lookup_elem(&outcomes, &interface);
	__u64 *packets = counters ? bpf_map_lookup_elem(counters, &outcome) : 0;

	if (packets)
		*packets += 1;
	return action;
}

/* Which worker: that of this CPU, which wakes no other core; or the same for both directions of a connection. A later fragment may meet
 * another worker than the first: workers share what they know of fragments, too. Not inlined: all frames of a program's calls have 512 bytes of
 * stack. */
static __noinline __u32 pair_of(struct __sk_buff *skb)
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

/* Counts a packet of this port to a worker, unless its share is used up, or the packet alone is more. */
static __always_inline int takes_share(struct __sk_buff *skb, __u32 port)
{
	struct waiting *counters = bpf_map_lookup_elem(&waiting, &port);
	const __u32 segments = segments_of(skb);

	if (!counters ||
	    (share && (segments > share || (__s64)(counters->sent - *(volatile __u64 *)&counters->received) >= (__s64)share)))
		return 0;
	__sync_fetch_and_add(&counters->sent, segments);
	return 1;
}

/* `interface`: that of the pod `at`. */
static __always_inline int tag_for_worker(struct __sk_buff *skb, const struct interface *at, __u32 interface, __u8 flags, __u8 uplink,
					  __u32 outcome)
{
	struct tag tag = {
		.to_local = LOCAL, .to_kind = TO_WORKER, .port = bpf_htons(at->port),
		.from_local = LOCAL, .from_kind = TO_WORKER, .interface = bpf_htonl(interface), .uplink = uplink,
	};

	if (!takes_share(skb, at->port))
		return count(interface, SHARE_USED, TC_ACT_SHOT);
	tag.flags = flags | (is_checksum_open(skb) ? CHECKSUM_OPEN : 0);
	if (bpf_skb_store_bytes(skb, 0, &tag, sizeof(tag), 0))
		return count(interface, NOT_IP, TC_ACT_SHOT);
	return count(interface, outcome, bpf_redirect(pair_of(skb), 0));
}

static __always_inline int redirect_to_worker(struct __sk_buff *skb, const struct interface *at, __u8 flags, __u32 outcome)
{
	return tag_for_worker(skb, at, skb->ifindex, flags, 0, outcome);
}

/* No process serves the sockets, and then policy is not enforced by setting. */
static __always_inline int is_open(void)
{
	__u32 process = 0;

	return open_without_workers && !bpf_map_lookup_elem(&alive, &process);
}

/* Bytes of address resolution that must be readable: an IPv6 header and a neighbour message with its target. */
#define RESOLUTION (ETH_HLEN + sizeof(struct ipv6hdr) + sizeof(struct icmp6hdr) + sizeof(struct in6_addr))

static __always_inline int pull(struct __sk_buff *skb)
{
	return bpf_skb_pull_data(skb, skb->len < RESOLUTION ? skb->len : RESOLUTION);
}

static __always_inline void add(struct traffic *traffic, __u32 packets, __u32 bytes)
{
	traffic->packets += packets;
	traffic->bytes += bytes;
}

/* `from`, `to`: the pods' ends; 0: the node's stack. */
static __always_inline void count_offloaded(struct __sk_buff *skb, const struct packet *packet, const struct connection *connection,
					    const struct interface *from, const struct interface *to)
{
	__u32 way = !from ? STACK_TO_POD : to ? POD_TO_POD : POD_TO_STACK;
	struct traffic *all = bpf_map_lookup_elem(&offloaded, &way);
	__u32 packets = skb->gso_segs ? skb->gso_segs : 1, port;
	struct of_port *of_port;

	count_use(packet, connection, packets);
	if (all)
		add(all, packets, skb->len);
	if (from) {
		port = from->port;
		of_port = bpf_map_lookup_elem(&offloaded_ports, &port);
		if (of_port)
			add(&of_port->sent, packets, skb->len);
	}
	if (to) {
		port = to->port;
		of_port = bpf_map_lookup_elem(&offloaded_ports, &port);
		if (of_port)
			add(&of_port->received, packets, skb->len);
	}
}

/* Whether a pod on a bridge has sent a frame to a neighbour there. Between these nobody decrements the TTL. */
static __always_inline int is_to_neighbour(struct __sk_buff *skb, const struct interface *at)
{
	const struct ethhdr *eth = (void *)(long)skb->data;

	return at->bridge && (const void *)(eth + 1) <= (void *)(long)skb->data_end && !is_mac(&at->node, eth->h_dest);
}

/* Rewrites a packet for its pod as workers do: MACs, and, unless it is `bridged`, TTL with the header's checksum (RFC 1624), or the hop
 * limit. */
static __always_inline int rewrite(struct __sk_buff *skb, const struct packet *packet, const struct interface *to, int bridged)
{
	const void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct { struct mac to, from; __be16 protocol; __u16 ip[6]; } head = { .to = to->pod, .from = to->node };
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
struct head_v4 { struct mac to, from; __be16 protocol; __u16 ip[6], addresses[2][2]; __be16 ports[2]; };
struct head_v6 { struct mac to, from; __be16 protocol; __u16 ip[4], addresses[2][8]; __be16 ports[2]; };

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

struct change { __u32 addresses, ports; };

/* Writes the flow that a packet of a translated connection leaves with. */
static __always_inline struct change write_flow(const struct entry *entry, __u32 direction, __be16 *from, __be16 *to, __be16 *ports,
						const __u32 words)
{
	const __u32 from_higher = direction & 1;
	const __u64 name = entry->name;
	struct change change;

	change.addresses = write_address(from, from_higher ? entry->high : entry->low, words) +
			   write_address(to, from_higher ? entry->low : entry->high, words);
	change.ports = write_word(ports, from_higher ? name >> 16 : name) + write_word(ports + 1, from_higher ? name : name >> 16);
	return change;
}

/* Updates the transport checksum. One that the sender left to its device covers only the addresses so far; 0 of UDP is none
 * (RFC 768). */
static __always_inline int update_checksum(struct __sk_buff *skb, const struct packet *packet, struct change change)
{
	const __u32 is_udp = packet->protocol == IPPROTO_UDP, is_open = is_checksum_open(skb);
	const __u32 network = packet->is_v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);

	return bpf_l4_csum_replace(skb, ETH_HLEN + network + (is_udp ? 6 : 16), 0,
				   is_open ? change.addresses : change.addresses + change.ports,
				   BPF_F_PSEUDO_HDR | (is_udp ? BPF_F_MARK_MANGLED_0 : 0));
}

enum { ENDED = 1 }; /* meanwhile: the packet is for a worker */

static __noinline int translate_v4(struct __sk_buff *skb, const struct packet *packet, const struct connection *connection,
				   const struct interface *to)
{
	const struct entry *leaving = entry_at(connection->leaving);
	struct head_v4 head;
	struct change change;
	__u32 sum = 0, i;

	if (!leaving || bpf_skb_load_bytes(skb, 0, &head, sizeof(head)))
		return -1;
	change = write_flow(leaving, connection->leaving_direction, head.addresses[0], head.addresses[1], head.ports, 2);
	if (control_of(leaving) != connection->leaving_control)
		return ENDED;
	if (to) {
		head.to = to->pod;
		head.from = to->node;
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
	const struct entry *leaving = entry_at(connection->leaving);
	struct head_v6 head;
	struct change change;

	if (!leaving || bpf_skb_load_bytes(skb, 0, &head, sizeof(head)))
		return -1;
	change = write_flow(leaving, connection->leaving_direction, head.addresses[0], head.addresses[1], head.ports, 8);
	if (control_of(leaving) != connection->leaving_control)
		return ENDED;
	if (to) {
		head.to = to->pod;
		head.from = to->node;
		head.ip[3] -= bpf_htons(1); /* next header and hop limit, which is at least 2 */
	}
	return update_checksum(skb, packet, change) || bpf_skb_store_bytes(skb, 0, &head, sizeof(head), 0) ? -1 : 0;
}

/* Rewrites a packet as workers do: MACs and TTL for its pod, addresses and ports of a translated connection, and the checksums that
 * cover them. `to`: the pod's interface, 0 where the node's stack forwards it. */
static __always_inline int rewrite_for(struct __sk_buff *skb, const struct packet *packet, const struct connection *connection,
				       const struct interface *to, int bridged)
{
	if (connection->leaving == NO_SLOT)
		return to ? rewrite(skb, packet, to, bridged) : 0;
	return packet->is_v4 ? translate_v4(skb, packet, connection, to) : translate_v6(skb, packet, connection, to);
}

/* Length of the longest IP packet that this one becomes on a wire: a long TCP segment is segmented. */
static __always_inline __u32 longest(const struct __sk_buff *skb, const struct packet *packet)
{
	return skb->gso_size ? packet->headers + skb->gso_size : packet->length;
}

/* Whether workers must see all packets of a pod, for a capture. It ends with their process, whatever the flag says. */
static __always_inline int is_captured(const struct interface *at)
{
	__u32 process = 0;

	return at->captured && bpf_map_lookup_elem(&alive, &process);
}

enum { FOR_WORKER = -2 }; /* no action of a program: it does not forward the packet */

/* Sends a packet that policy has allowed to a pod. */
static __always_inline int send_to_pod(struct __sk_buff *skb, __u32 interface, __u32 filtered)
{
	if (!(filtered & FILTERS_TO_POD))
		return bpf_redirect_peer(interface, 0);
	skb->mark = passed;
	return bpf_redirect(interface, 0);
}

/* Whether a worker, or the other program, has sent it on to here; takes the mark off. The kernel clears marks on the way out of a pod's
 * namespace (skb_scrub_packet in net/core/skbuff.c). */
static __always_inline int has_passed(struct __sk_buff *skb)
{
	if (skb->mark != passed)
		return 0;
	skb->mark = 0;
	return 1;
}

/* Forwards a packet of an established connection as a worker would; FOR_WORKER: as it says. */
static __always_inline int forward_from_pod(struct __sk_buff *skb, const struct interface *at)
{
	const struct interface *to = 0;
	struct connection connection = {};
	struct repeated repeated;
	const struct ethhdr *eth;
	struct packet packet;
	int way, rewritten, bridged = 0;

	if (is_captured(at) || !read_packet(skb, &packet) || !is_checksum_in_place(skb, &packet))
		return FOR_WORKER;
	way = find_way(&packet, skb->ifindex, 1, &connection, &repeated);
	if (!way)
		return FOR_WORKER;
	if (connection.to) {
		to = bpf_map_lookup_elem(&interfaces, &connection.to);
		if (!to || is_captured(to) || connection.control & VIA_HOST || at->filtered & FILTERS_FROM_POD)
			return FOR_WORKER;
		bridged = at->bridge == to->bridge && connection.leaving == NO_SLOT && is_to_neighbour(skb, at);
		if ((packet.hops <= 1 && !bridged) || longest(skb, &packet) > to->mtu)
			return FOR_WORKER;
	} else {
		/* A worker would have given it these MACs; a bridge forwards by them. */
		eth = (void *)(long)skb->data;
		if ((const void *)(eth + 1) > (void *)(long)skb->data_end || !is_mac(&at->node, eth->h_dest) ||
		    !is_mac(&at->pod, eth->h_source))
			return FOR_WORKER;
	}
	if (way == OPENS && !open_again(&packet, &repeated, &connection))
		return FOR_WORKER;
	rewritten = rewrite_for(skb, &packet, &connection, to, bridged);
	if (rewritten)
		return rewritten == ENDED ? FOR_WORKER : count(skb->ifindex, NO_MEMORY, TC_ACT_SHOT);
	count_offloaded(skb, &packet, &connection, at, to);
	if (!to)
		return TC_ACT_UNSPEC;
	/* The pod may have given it any MAC. */
	if (skb->pkt_type)
		bpf_skb_change_type(skb, 0 /* PACKET_HOST */);
	return send_to_pod(skb, connection.to, to->filtered);
}

/* The same for what the node's stack sends to the pod. Its addresses, and those of Services, are no evidence in what it forwards as it
 * came: any machine may send with them. Of all else, what opens a connection is a worker's. */
static __always_inline int forward_to_pod(struct __sk_buff *skb, const struct interface *at, const struct origin *origin)
{
	struct connection connection = {};
	struct repeated repeated;
	struct packet packet;
	int way, rewritten;

	if (is_captured(at) || !read_packet(skb, &packet) || !is_checksum_in_place(skb, &packet) || longest(skb, &packet) > at->mtu)
		return FOR_WORKER;
	way = find_way(&packet, origin->at, origin->at != BY_NODE && skb->ingress_ifindex, &connection, &repeated);
	if (!way || connection.to != skb->ifindex || (way == OPENS && !open_again(&packet, &repeated, &connection)))
		return FOR_WORKER;
	rewritten = rewrite_for(skb, &packet, &connection, 0, 0);
	if (rewritten)
		return rewritten == ENDED ? FOR_WORKER : count(skb->ifindex, NO_MEMORY, TC_ACT_SHOT);
	count_offloaded(skb, &packet, &connection, 0, at);
	return TC_ACT_UNSPEC;
}

/* Whether this is the address of a pod that is served at another interface. */
static __always_inline int is_of_another(const struct in6_addr *address, __u32 interface)
{
	const struct entrances *by = bpf_map_lookup_elem(&pod_addresses, address);

	return by && by->veth && by->veth != interface;
}

/* What a pod sends. */
SEC("tcx/ingress")
int from_pod(struct __sk_buff *skb)
{
	__u32 interface = skb->ifindex;
	const struct interface *at;
	const struct ethhdr *eth = 0;
	const void *end = 0;
	void *own = 0;
	int action;

	if (has_passed(skb))
		return TC_ACT_UNSPEC;
	if (is_open())
		return count(interface, NO_SOCKET, TC_ACT_UNSPEC);
	/* The kernel treats VLAN 0 as untagged: a pod could bypass the workers. */
	if (skb->vlan_present || skb->protocol == bpf_htons(ETH_P_8021Q) || skb->protocol == bpf_htons(ETH_P_8021AD))
		return count(interface, VLAN_TAG, TC_ACT_SHOT);
	at = bpf_map_lookup_elem(&interfaces, &interface);
	if (offload && at && (skb->protocol == bpf_htons(ETH_P_IP) || skb->protocol == bpf_htons(ETH_P_IPV6))) {
		action = forward_from_pod(skb, at);
		if (action != FOR_WORKER)
			return action;
	}
	if (skb->protocol != bpf_htons(ETH_P_IP)) {
		if (pull(skb))
			return count(interface, NOT_IP, TC_ACT_SHOT);
		own = bpf_map_lookup_elem(&own_addresses, &interface);
		eth = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
		if ((const void *)(eth + 1) > end)
			return count(interface, NOT_IP, TC_ACT_SHOT);
	}
	switch (skb->protocol) {
	case bpf_htons(ETH_P_ARP):
		if (is_checksum_open(skb) || !own || !is_own_arp(own, interface, eth, end))
			return count(interface, FORGED_NEIGHBOUR, TC_ACT_SHOT);
		return count(interface, ARP, TC_ACT_UNSPEC);
	case bpf_htons(ETH_P_IPV6):
		if ((const void *)(eth + 1) + sizeof(struct ipv6hdr) <= end &&
		    is_neighbour_discovery(skb, interface, at ? at->bridge : 0, &pod_addresses, eth, end)) {
			if (is_checksum_open(skb) || !own || !is_own_discovery(own, interface, eth, end))
				return count(interface, FORGED_NEIGHBOUR, TC_ACT_SHOT);
			return count(interface, NEIGHBOUR_DISCOVERY, TC_ACT_UNSPEC);
		}
		break;
	case bpf_htons(ETH_P_IP):
		break;
	default:
		if (is_checksum_open(skb) || (own && at && at->bridge && !is_own_frame(own, eth)))
			return count(interface, FORGED_NEIGHBOUR, TC_ACT_SHOT);
		return count(interface, NOT_IP, TC_ACT_UNSPEC);
	}
	if (!at)
		return count(interface, NOT_READY, TC_ACT_SHOT);
	return redirect_to_worker(skb, at, is_to_neighbour(skb, at) ? TO_NEIGHBOUR : 0, REDIRECTED);
}

/* Whether this is a local pod's address, and the packet did not come in by that pod's interface. */
static __always_inline int is_another_pods(struct __sk_buff *skb, const struct in6_addr *from)
{
	const struct entrances *by = bpf_map_lookup_elem(&pod_addresses, from);

	return by && (!skb->ingress_ifindex || (skb->ingress_ifindex != by->veth && skb->ingress_ifindex != by->stack));
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
	origin->at = is_local_output(skb) || !is_untranslated(origin) ? BY_NODE : 0;
	/* Copies: Linux 6.1 takes no memory of a caller for the key of a map. */
	from = origin->flow.from;
	if (is_another_pods(skb, &from))
		return 1;
	from = origin->source;
	return origin->known && is_another_pods(skb, &from);
}

/* What the node's stack sends to a pod: of its own processes, or forwarded and translated. */
SEC("tcx/egress")
int to_pod(struct __sk_buff *skb)
{
	__u32 interface = skb->ifindex;
	const struct interface *at = bpf_map_lookup_elem(&interfaces, &interface);
	struct { __u8 protocol, hops; } ip6; /* of its header */
	struct origin origin = {};
	__u8 type;
	int action;

	if (has_passed(skb))
		return TC_ACT_UNSPEC;
	if (is_open())
		return count(interface, NO_SOCKET, TC_ACT_UNSPEC);
	switch (skb->protocol) {
	case bpf_htons(ETH_P_ARP):
		return TC_ACT_UNSPEC;
	case bpf_htons(ETH_P_IPV6): /* the kernel forwards no packet with hop limit 255 */
		if (!bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, nexthdr), &ip6, sizeof(ip6)) &&
		    ip6.protocol == IPPROTO_ICMPV6 && ip6.hops == 255 &&
		    !bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct ipv6hdr), &type, sizeof(type)) && type >= 133 && type <= 137)
			return TC_ACT_UNSPEC;
		break;
	case bpf_htons(ETH_P_IP):
		break;
	default:
		return TC_ACT_UNSPEC;
	}
	if (!at)
		return count(interface, NOT_READY, TC_ACT_SHOT);
	if (is_spoofed(skb, &origin))
		return count(interface, SPOOFED_SOURCE, TC_ACT_SHOT);
	if (offload) {
		action = forward_to_pod(skb, at, &origin);
		if (action != FOR_WORKER)
			return action;
	}
	return redirect_to_worker(skb, at, FROM_NODE | sender_of(skb, &origin), FROM_STACK);
}

/* Whether a worker sent it. The kernel keeps the interface that it came in by on the way through all that it leaves by: a VLAN, a bond,
 * and the interface below, or a tunnel. */
static __always_inline int is_from_worker(const struct __sk_buff *skb)
{
	__u32 i;

	if (beside_xdp)
		return skb->mark == passed;
	for (i = 0; i < MAX_WORKERS && i < workers; i++)
		if (skb->ingress_ifindex == pairs.of_workers[i])
			return 1;
	return 0;
}

/* A frame on a pair has an Ethernet header. */
static __always_inline int give_header(struct __sk_buff *skb)
{
	const __be16 protocol = skb->protocol;

	return bpf_skb_change_head(skb, ETH_HLEN, 0) ||
	       bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_proto), &protocol, sizeof(protocol), 0);
}

/* Whether a worker has not seen a packet with the destination that it leaves with: the node has given it another address or port. Or it has,
 * and egress policy was postponed, since the address is a Service's, but nothing has translated it: then also of a connection that the other
 * end has opened, as far as the kernel knows. Any machine may begin one with that address, and the kernel tracks what a worker drops. Other
 * answers follow their connections. */
static __always_inline int is_to_be_asked(const struct origin *origin)
{
	const int is_opened = (origin->known || origin->is_error) && origin->opens;

	return (is_opened && (!is_same_address(&origin->destination, &origin->flow.to) || origin->ports.to != origin->flow.ports.to)) ||
	       bpf_map_lookup_elem(&service_addresses, &origin->flow.to);
}

/* Whether a worker has allowed this pod to send there, under the epoch in force. */
static __always_inline int is_allowed_to_leave(const struct origin *origin, const struct interface *at)
{
	const struct destination destination = {
		.to = origin->flow.to, .to_port = origin->flow.ports.to, .port = at->port, .protocol = origin->flow.protocol,
	};
	const __u32 zero = 0, *allowed = offload && origin->known ? bpf_map_lookup_elem(&allowed_to_leave, &destination) : 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);

	return allowed && table && (__s32)(*allowed - *(const volatile __u32 *)&table->epoch) >= 0;
}

static __always_inline void allow_to_leave(struct __sk_buff *skb, const struct tag *tag)
{
	struct destination destination = { .to_port = tag->to_port, .port = bpf_ntohs(tag->port) };
	const __u32 epoch = bpf_ntohl(tag->epoch);
	struct sent_flow flow = {};

	destination.protocol = tag->flags & ALLOWED_TCP ? IPPROTO_TCP : tag->flags & ALLOWED_UDP ? IPPROTO_UDP : IPPROTO_SCTP;
	if (!read_addresses(skb, ETH_HLEN, skb->protocol == bpf_htons(ETH_P_IP), &flow))
		return;
	destination.to = flow.to;
	bpf_map_update_elem(&allowed_to_leave, &destination, &epoch, BPF_ANY);
}

/* What the node's stack sends to another machine. Policy is for the end that answers: where the node has given the packet of a pod to its
 * own node or to a Service that end's address, the pod's egress policy is asked here. Everything else that a pod sends has met a
 * worker with the destination that it has here. */
SEC("tcx/egress")
int to_uplink(struct __sk_buff *skb)
{
	const int is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	const struct entrances *sent_by;
	const struct uplink *uplink;
	const struct interface *at;
	struct origin origin = {};
	__u32 interface = skb->ifindex;

	if ((!is_v4 && skb->protocol != bpf_htons(ETH_P_IPV6)) || is_local_output(skb) || is_from_worker(skb) || is_open())
		return TC_ACT_UNSPEC; /* the next program */
	uplink = bpf_map_lookup_elem(&uplinks, &interface);
	if (!uplink)
		return TC_ACT_SHOT;
	if (!find_origin(skb, uplink->header ? ETH_HLEN : 0, is_v4, &origin) || !is_to_be_asked(&origin))
		return TC_ACT_UNSPEC; /* the next program */
	sent_by = bpf_map_lookup_elem(&pod_addresses, origin.known || origin.is_error ? &origin.source : &origin.flow.from);
	if (!sent_by)
		return TC_ACT_UNSPEC; /* the next program */
	interface = sent_by->veth;
	at = bpf_map_lookup_elem(&interfaces, &interface);
	if (at && is_allowed_to_leave(&origin, at))
		return TC_ACT_UNSPEC; /* the next program */
	if (!at || (!uplink->header && give_header(skb)))
		return count(interface, NOT_READY, TC_ACT_SHOT);
	return tag_for_worker(skb, at, interface, FROM_NODE | LEAVING, uplink->number, FROM_STACK);
}

/* What another machine sends to this node. */
SEC("tcx/ingress")
int from_uplink(struct __sk_buff *skb)
{
	const int is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	const struct uplink *uplink;
	struct sent_flow flow = {};
	__u32 interface = skb->ifindex, zero = 0, at;
	__u64 *refused;

	if ((!is_v4 && skb->protocol != bpf_htons(ETH_P_IPV6)) || is_open())
		return TC_ACT_UNSPEC; /* the next program */
	uplink = bpf_map_lookup_elem(&uplinks, &interface);
	at = uplink ? uplink->header : ETH_HLEN;
	if (!is_tunnel_packet(skb, at, is_v4) || !read_addresses(skb, at, is_v4, &flow) || !is_remote_pod(&flow.from) ||
	    !ends_here(skb, &flow, is_v4))
		return TC_ACT_UNSPEC; /* the next program */
	refused = bpf_map_lookup_elem(&refused_tunnels, &zero);
	if (refused)
		*refused += 1;
	return TC_ACT_SHOT;
}

/* What a worker sends, at the node's end of its pair. */
SEC("tcx/ingress")
int from_worker(struct __sk_buff *skb)
{
	const struct target *target;
	struct mac macs[2];
	struct tag tag;
	__u32 port, *uplink;

	if (bpf_skb_load_bytes(skb, 0, &tag, sizeof(tag)) || tag.to_local != LOCAL || tag.to_kind != FROM_WORKER ||
	    (beside_xdp && !(tag.flags & TO_UPLINK)))
		return beside_xdp ? TC_ACT_UNSPEC : TC_ACT_SHOT;
	bpf_skb_change_type(skb, 0 /* PACKET_HOST */);
	if (tag.flags & TO_NODE && tag.port == bpf_htons(NO_PORT))
		return TC_ACT_OK;
	if (tag.flags & TO_UPLINK) {
		port = tag.uplink;
		uplink = bpf_map_lookup_elem(&uplink_interfaces, &port);
		if (!uplink || !*uplink)
			return TC_ACT_SHOT;
		if (tag.flags & (ALLOWED_TCP | ALLOWED_UDP | ALLOWED_SCTP))
			allow_to_leave(skb, &tag);
		if (beside_xdp)
			skb->mark = passed;
		return bpf_redirect_neigh(*uplink, 0, 0, 0);
	}
	port = bpf_ntohs(tag.port);
	target = bpf_map_lookup_elem(&targets, &port);
	if (!target || !target->interface)
		return TC_ACT_SHOT;
	macs[0] = tag.flags & TO_NODE ? target->node : target->pod;
	macs[1] = tag.flags & TO_NODE ? target->pod : target->node;
	if (bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return TC_ACT_SHOT;
	if (!(tag.flags & TO_NODE))
		return send_to_pod(skb, target->interface, target->filtered);
	skb->mark = passed;
	return bpf_redirect(target->interface, BPF_F_INGRESS);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
