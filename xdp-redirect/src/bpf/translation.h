/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Looks up in the kernel's connection tracking whether a packet belongs to a translated connection. */
#include <bpf/bpf_core_read.h>

/* Parts of the kernel's types (include/net/netfilter/nf_conntrack.h), found by name in the running kernel's BTF. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
union nf_inet_addr { __u32 all[4]; };
union nf_conntrack_man_proto { __be16 all; };
struct nf_conntrack_man { union nf_inet_addr u3; union nf_conntrack_man_proto u; };
struct nf_conntrack_tuple { struct nf_conntrack_man src; struct { union nf_inet_addr u3; union { __be16 all; } u; } dst; };
struct nf_conntrack_tuple_hash { struct nf_conntrack_tuple tuple; };
struct nf_conn { struct nf_conntrack_tuple_hash tuplehash[2]; };
struct sk_buff { unsigned long _nfct; }; /* include/linux/skbuff.h */
#pragma clang attribute pop

/* As in include/net/netfilter/nf_conntrack_bpf.h of Linux 5.18. Later ones are longer and accept this too. */
struct bpf_ct_opts { __s32 netns_id; __s32 error; __u8 l4proto; __u8 dir; __u8 reserved[2]; };

extern struct nf_conn *bpf_xdp_ct_lookup(struct xdp_md *ctx, struct bpf_sock_tuple *tuple, __u32 tuple__sz,
					 struct bpf_ct_opts *opts, __u32 opts__sz) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *connection) __ksym __weak;
extern void *bpf_cast_to_kern_ctx(void *) __ksym __weak;

/* What of this the kernel has. The loader sets it: kernels before 6.4 refuse bpf_ksym_exists() of a function that they have
 * (check_pseudo_btf_id in kernel/bpf/verifier.c), and what it becomes differs from one load to the next where connection tracking is a
 * module. */
const volatile __u32 finds_connections = 0; /* bpf_xdp_ct_lookup and bpf_ct_release */
const volatile __u32 reads_connections = 0; /* it describes the structures above */
const volatile __u32 casts_packets = 0;     /* bpf_cast_to_kern_ctx */

/* The kernel's own record of a packet is at the address that a program has as its context. Since Linux 6.2 a program may load from it, and
 * earlier read it as any other memory. */
static __always_inline unsigned long tracked_by(struct __sk_buff *skb)
{
	const struct sk_buff *kernel = (void *)skb;
	unsigned long tracked = 0;

	if (casts_packets) {
		kernel = bpf_cast_to_kern_ctx(skb);
		return kernel->_nfct;
	}
	bpf_core_read(&tracked, sizeof(tracked), &kernel->_nfct);
	return tracked;
}

struct ports { __be16 from, to; };

static __always_inline int is_mapped(const struct in6_addr *address)
{
	return !address->s6_addr32[0] && !address->s6_addr32[1] && address->s6_addr32[2] == bpf_htonl(0xffff);
}

static __always_inline int differs(const union nf_inet_addr *known, const struct in6_addr *address)
{
	if (is_mapped(address))
		return known->all[0] != address->s6_addr32[3];
	return known->all[0] != address->s6_addr32[0] || known->all[1] != address->s6_addr32[1] ||
	       known->all[2] != address->s6_addr32[2] || known->all[3] != address->s6_addr32[3];
}

/* A connection is translated if its reply tuple is not the reverse of the original one. The status bits IPS_SRC_NAT and
 * IPS_DST_NAT are not set for connections that IPVS translates (ip_vs_update_conntrack in net/netfilter/ipvs/ip_vs_nfct.c). */
static __always_inline int is_turned(const struct nf_conntrack_tuple *other, const struct in6_addr *from,
				     const struct in6_addr *to, struct ports ports)
{
	return !differs(&other->src.u3, to) && !differs(&other->dst.u3, from) && other->src.u.all == ports.to &&
	       other->dst.u.all == ports.from;
}

static __always_inline enum outcome of_connection(struct xdp_md *ctx, __u8 protocol, const struct in6_addr *from,
						  const struct in6_addr *to, struct ports ports)
{
	struct bpf_ct_opts options = { .netns_id = BPF_F_CURRENT_NETNS, .l4proto = protocol };
	struct bpf_sock_tuple tuple = {};
	struct nf_conn *connection;
	int turned;

	if (is_mapped(from)) {
		tuple.ipv4.saddr = from->s6_addr32[3];
		tuple.ipv4.daddr = to->s6_addr32[3];
		tuple.ipv4.sport = ports.from;
		tuple.ipv4.dport = ports.to;
		connection = bpf_xdp_ct_lookup(ctx, &tuple, sizeof(tuple.ipv4), &options, sizeof(options));
	} else {
		__builtin_memcpy(tuple.ipv6.saddr, from, sizeof(tuple.ipv6.saddr));
		__builtin_memcpy(tuple.ipv6.daddr, to, sizeof(tuple.ipv6.daddr));
		tuple.ipv6.sport = ports.from;
		tuple.ipv6.dport = ports.to;
		connection = bpf_xdp_ct_lookup(ctx, &tuple, sizeof(tuple.ipv6), &options, sizeof(options));
	}
	if (!connection)
		return REDIRECTED;
	if (options.dir)
		turned = is_turned(&connection->tuplehash[0].tuple, from, to, ports);
	else
		turned = is_turned(&connection->tuplehash[1].tuple, from, to, ports);
	bpf_ct_release(connection);
	return turned ? REDIRECTED : TRANSLATED;
}

/* The transport header behind an IP header: its protocol, or -1 if the packet has no readable ports. */
struct transport { const void *at; int protocol; };

static __always_inline struct transport transport_of(const void *ip, const void *end, int is_v4)
{
	const struct iphdr *ip4 = ip;
	const struct ipv6hdr *ip6 = ip;
	struct transport found = { .protocol = -1 };

	if (!is_v4) { /* an extension header, of which the fragment header is one, is a protocol of its own here */
		if ((const void *)(ip6 + 1) <= end)
			found = (struct transport){ .at = ip6 + 1, .protocol = ip6->nexthdr };
	} else if ((const void *)(ip4 + 1) <= end && ip4->ihl >= 5 && !(ip4->frag_off & bpf_htons(0x3fff))) {
		found = (struct transport){ .at = ip + ip4->ihl * 4, .protocol = ip4->protocol };
	}
	return found;
}

/* In an ICMP error the kernel translates the quoted packet, which is of the other direction. */
static __always_inline enum outcome of_quoted(struct xdp_md *ctx, const void *ip, const void *end, int is_v4)
{
	const struct transport quoted = transport_of(ip, end, is_v4);
	const struct ports *ports = quoted.at;
	const struct iphdr *ip4 = ip;
	const struct ipv6hdr *ip6 = ip;
	struct in6_addr from = {}, to = {};

	if ((quoted.protocol != IPPROTO_TCP && quoted.protocol != IPPROTO_UDP) || (const void *)(ports + 1) > end)
		return UNDECIDED;
	if (is_v4) {
		if ((const void *)(ip4 + 1) > end)
			return UNDECIDED;
		from.s6_addr32[2] = to.s6_addr32[2] = bpf_htonl(0xffff);
		from.s6_addr32[3] = ip4->saddr;
		to.s6_addr32[3] = ip4->daddr;
	} else {
		if ((const void *)(ip6 + 1) > end)
			return UNDECIDED;
		__builtin_memcpy(&from, &ip6->saddr, sizeof(from));
		__builtin_memcpy(&to, &ip6->daddr, sizeof(to));
	}
	return of_connection(ctx, quoted.protocol, &to, &from, (struct ports){ ports->to, ports->from });
}

/* Outcome of a packet to a local pod, depending on whether the kernel translates its connection. */
static __always_inline enum outcome of_translation(struct xdp_md *ctx, const void *ip, const void *end,
						   const struct in6_addr *from, const struct in6_addr *to)
{
	const int is_v4 = is_mapped(to);
	const struct transport transport = transport_of(ip, end, is_v4);
	const struct ports *ports = transport.at;
	const __u8 *type = transport.at;

	/* The kernel translates nothing; the loader has verified it. */
	if (!finds_connections)
		return REDIRECTED;
	if (transport.protocol == IPPROTO_TCP || transport.protocol == IPPROTO_UDP) {
		if ((const void *)(ports + 1) > end)
			return REDIRECTED; /* a worker determines the drop reason */
		return of_connection(ctx, transport.protocol, from, to, *ports);
	}
	if (transport.protocol == (is_v4 ? IPPROTO_ICMP : IPPROTO_ICMPV6) && (const void *)(type + 8) <= end) {
		/* RFC 792, RFC 4443 section 2.1 */
		if (is_v4 ? *type == 3 || *type == 11 || *type == 12 : *type < 128)
			return of_quoted(ctx, type + 8, end, is_v4);
	}
	return UNDECIDED;
}

struct sent_flow { /* a flow after its translation, in network byte order; IPv4 as ::ffff:a.b.c.d; ports of TCP, UDP and SCTP */
	struct in6_addr from, to;
	struct ports ports;
	__u32 protocol;
};
struct { /* the source before it was translated, by flow; shared by all, and read by the workers when the connection is opened */
	__uint(type, BPF_MAP_TYPE_LRU_HASH); __uint(max_entries, 16384);
	__type(key, struct sent_flow); __type(value, struct in6_addr);
} sources SEC(".maps");

/* What the kernel knows of a packet that leaves the node's stack: the one reading of its translation, for all programs. It is that of the
 * connection which the kernel itself has found, so that it holds for any protocol, whatever headers there are, and in fragments. */
struct origin {
	struct sent_flow flow;       /* as it leaves: the packet's addresses, and the ports of its connection */
	struct in6_addr source;      /* as it entered the node */
	struct in6_addr destination; /* the same */
	struct ports ports;          /* the same */
	int known;    /* it is tracked, and no ICMP error */
	int is_error; /* an ICMP error about a packet of a tracked connection */
	int opens;    /* in the direction in which the connection was opened */
	__u32 at;     /* whose it is for the connection table: BY_NODE, or 0 for what the node forwards with the source that it came with */
};

static __always_inline int has_ports(__u32 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP;
}

static __always_inline void to_in6(struct in6_addr *address, const __u32 *words, int is_v4)
{
	*address = (struct in6_addr){};
	if (is_v4) {
		address->s6_addr32[2] = bpf_htonl(0xffff);
		address->s6_addr32[3] = words[0];
	} else {
		address->s6_addr32[0] = words[0];
		address->s6_addr32[1] = words[1];
		address->s6_addr32[2] = words[2];
		address->s6_addr32[3] = words[3];
	}
}

static __always_inline int is_same_address(const struct in6_addr *one, const struct in6_addr *other)
{
	return one->s6_addr32[0] == other->s6_addr32[0] && one->s6_addr32[1] == other->s6_addr32[1] &&
	       one->s6_addr32[2] == other->s6_addr32[2] && one->s6_addr32[3] == other->s6_addr32[3];
}

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

/* A copy of struct nf_conntrack_tuple (include/net/netfilter/nf_conntrack_tuple.h). */
struct tuple {
	__u32 from[4];
	__be16 from_port;
	__u16 family;
	__u32 to[4];
	__be16 to_port;
	__u8 protocol, direction;
};

/* Reads both directions of a connection. Returns 0 if they cannot be read, or if this kernel has another structure. */
static __always_inline int read_tuples(const struct nf_conn *connection, struct tuple *original, struct tuple *reply)
{
	const struct nf_conntrack_tuple *any = 0;

	if (bpf_core_type_size(struct nf_conntrack_tuple) != sizeof(*original) ||
	    __builtin_preserve_field_info(any->dst, BPF_FIELD_BYTE_OFFSET) != offsetof(struct tuple, to))
		return 0;
	return !bpf_core_read(original, sizeof(*original), &connection->tuplehash[0].tuple) &&
	       !bpf_core_read(reply, sizeof(*reply), &connection->tuplehash[1].tuple);
}

/* `_nfct` is the address of the packet's connection and, in the lowest bits, where in the connection the packet is
 * (include/linux/skbuff.h, include/uapi/linux/netfilter/nf_conntrack_common.h). */
static __always_inline void read_connection(struct __sk_buff *skb, struct origin *origin)
{
	enum { RELATED = 1, REPLY = 3, RELATED_REPLY = 4, INFO = 7, INET = 2 };
	const unsigned long tracked = tracked_by(skb), info = tracked & INFO;
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
	/* Of other protocols these are identifiers, of which each direction has its own. */
	if (has_ports(entered->protocol)) {
		origin->ports = (struct ports){ entered->from_port, entered->to_port };
		origin->flow.ports = (struct ports){ other->to_port, other->from_port };
	}
}

/* Finds what the kernel knows of an outgoing packet, which it may have translated. A reply spoofed as a Service's backend would leave with
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
static __always_inline int is_local_output(const struct __sk_buff *skb)
{
	return !skb->ingress_ifindex && skb->sk;
}

/* Tells the workers who opens this connection if the node has translated its source. Returns whether it has. */
static __always_inline int note_origin(const struct origin *origin)
{
	const struct in6_addr *noted;

	if (!origin->known || !origin->opens || is_same_address(&origin->source, &origin->flow.from))
		return 0;
	/* Without writing for each packet, which takes a lock. */
	noted = bpf_map_lookup_elem(&sources, &origin->flow);
	if (!noted || !is_same_address(noted, &origin->source))
		bpf_map_update_elem(&sources, &origin->flow, &origin->source, BPF_ANY);
	return 1;
}

/* Whether the kernel tracks the packet, and it leaves with the addresses and ports that it entered the node with. What is not tracked
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
 * Linux 6.13). What it has put together and cuts up again loses its interface (ip_copy_metadata in net/ipv4/ip_output.c), but then is in
 * pieces. */
static __always_inline int has_entered(struct __sk_buff *skb)
{
	return skb->ingress_ifindex || !is_whole_segment(skb);
}

/* Whether it leaves with the source that it entered with. What is not tracked has met no rule that translates. */
static __always_inline int is_untranslated(const struct origin *origin)
{
	return reads_connections && !origin->is_error && (!origin->known || is_same_address(&origin->source, &origin->flow.from));
}

enum { /* what workers are told of a packet of the node's stack: flags of its tag (dataplane/src/io/tag.rs) */
	FROM_NODE = 2,         /* from the node's stack, otherwise from the pod */
	LOCAL_PROCESS = 4,     /* sent by the node itself, not forwarded */
	SOURCE_TRANSLATED = 8, /* forwarded, with another source than it came with: that is in `sources` */
	LEAVING = 16,          /* of a pod, and forwarded to another machine by `uplink` */
	UNCHANGED = 32,        /* forwarded as it came */
	UNTRANSLATED = 64,     /* forwarded with the source that it came with, as far as is known */
	TO_NEIGHBOUR = 128,    /* of a pod on a bridge, to another address there than the bridge's own */
};

static __always_inline __u8 sender_of(struct __sk_buff *skb, const struct origin *origin)
{
	if (is_local_output(skb))
		return LOCAL_PROCESS;
	if (note_origin(origin))
		return SOURCE_TRANSLATED;
	if (!has_entered(skb))
		return 0;
	return is_unchanged(origin) ? UNCHANGED : is_untranslated(origin) ? UNTRANSLATED : 0;
}
