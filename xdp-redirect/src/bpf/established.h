/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Looks packets up in the workers' connection table (dataplane/src/conntrack), and says which of them need no worker.
 *
 * Workers write entries; the programs read them, and count packets in `struct kernel_use`, as workers do. Of an entry they write one word: the
 * window of the end that answers a SYN. An entry is one connection as long as the generation in its control word is the same: what is read
 * between two equal control words belongs together. That holds where loads are not reordered; the loader allows it on x86-64 only.
 *
 * A packet that is not understood, or of which anything is in doubt, is for a worker. */

#define LANES 32
struct tags { __u64 words[LANES / 4]; };
struct entry { __u64 control, low[2], high[2], name, tracking[2]; };
struct kernel_use { /* by direction: 0 from the lower end, 1 from the higher */
	__u64 path; /* written by workers, and by programs with an answer, at the end of a handshake and with a FIN */
	__u32 packets[2];
	__u64 used[2]; /* bytes, and below them the tick of the last packet that a program forwarded; 0: none */
};
struct table {
	__u64 identity[2], groups, boot[2], seed[6], names[2], checksum;
	__u32 epoch; /* entries that were last evaluated under an older one are for a worker */
	__u32 timeouts[5]; /* in ticks: TCP established; UDP unreplied, replied, assured; TCP before it is established */
	__u32 repeats; /* until when programs may open connections by themselves (repeat.h) */
};

struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 1); __uint(map_flags, BPF_F_MMAPABLE); __type(key, __u32); __type(value, struct table); } ct_table SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 1); __uint(map_flags, BPF_F_MMAPABLE); __type(key, __u32); __type(value, struct tags); } ct_tags SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 1); __uint(map_flags, BPF_F_MMAPABLE); __type(key, __u32); __type(value, struct entry); } ct_entries SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 1); __uint(map_flags, BPF_F_MMAPABLE); __type(key, __u32); __type(value, struct kernel_use); } ct_uses SEC(".maps");

/* The control word (dataplane/src/conntrack/entry.rs). */
#define STATE(control) ((control) & 15)
#define TENTATIVE (1 << 4)
#define ORIGINAL(control) ((control) >> 5 & 1)
#define REVOKED (1 << 6)
#define VIA_HOST (1 << 7) /* its packets traverse the node's stack */
#define TICK_MASK 0x3fffff
#define TICK(control) ((control) >> 8 & TICK_MASK)
#define EPOCH_MASK 0x7fffff
#define EPOCH(control) ((control) >> 30 & EPOCH_MASK)
#define GENERATION(control) ((control) >> 53 & 0x3ff)
#define TRANSLATION (1ULL << 63) /* one of the two entries of a connection to a Service */
#define IS_WRITTEN(control) (STATE(control) > 1)
#define FREED(control) (GENERATION(control) << 53)
#define CLAIMED_ANEW(free) (((GENERATION(free) + 1) & 0x3ff) << 53 | CLAIMED)
enum { FREE = 0, CLAIMED = 1, UDP_UNREPLIED = 2, UDP_REPLIED = 3, UDP_ASSURED = 4, TCP_SYN_SENT = 2, TCP_SYN_RECEIVED = 4, TCP_ESTABLISHED = 5, TCP_TIME_WAIT = 10, TCP_CLOSE = 11, FRONTEND = 15 };

/* The path (dataplane/src/conntrack/path.rs): the interface of each end, 0 or BY_NODE for the node's stack; whether a program has
 * forwarded the answer to a SYN or a datagram, the end of the handshake, and in which directions a FIN; in which directions packets take
 * the path; and the low bits of the epoch. */
#define END(path, end) ((__u32)((path) >> ((end) ? 21 : 0)) & 0x1fffff)
#define BY_NODE 0x1fffff /* of an address that nobody but the node may send with */
#define ANSWERED (1ULL << 42)
#define CONFIRMED (1ULL << 43)
#define FINISHED(direction) (1ULL << (44 + (direction)))
#define TAKEN(path, direction) ((path) >> (46 + (direction)) & 1)
#define PATH_EPOCH(path) ((path) >> 48)

/* The window of the end that answers a SYN (dataplane/src/conntrack/tcp/mod.rs): before it does, with the number that acknowledges the SYN, and then
 * with its own next number. It offers at most 64 KiB, and its options are not read: the scale of its later offers is unknown. */
#define UNKNOWN_SCALE (15ULL << 57)
#define UNANSWERED(acknowledged) (UNKNOWN_SCALE | (acknowledged))
#define WINDOW_FROM(next) ((next) | (__u64)((__u32)((next) + 4095) >> 12) << 32 | 16ULL << 52 | UNKNOWN_SCALE | 1ULL << 61)
#define IS_ANSWERED(window) ((window) >> 52 & 31)

/* The links of translated connections (dataplane/src/conntrack/beside.rs) are behind the entries, eight to an element. */
#define LINKS 8
#define LINK_TO(slot, control) ((slot) | GENERATION(control) << 32 | 1ULL << 63)

#define NAME_MASK 0xffffffffffULL
#define TICK_NANOSECONDS 512000000
#define STREAM 4 /* ticks: a datagram of the opener this long after its first one opens a stream (conntrack/track.rs) */
#define TCP_DECIDES 0x17 /* FIN, SYN, RST and ACK */
#define TCP_ACK 0x10
#define TCP_SYN 0x02
#define TCP_FIN 0x01
#define OPENING_SYN (TCP_SYN | TCP_ACK) /* as flags of `struct packet`, which has ACK where the segment has not */
#define NO_SLOT 0xffffffff

struct packet {
	__u64 low[2], high[2], name;
	__u32 direction; /* 0: from the lower end */
	__u32 length;    /* of the IP packet, in bytes */
	__u32 headers;   /* of IP and transport, in bytes */
	__u8 protocol, is_v4, hops, flags; /* flags: of a TCP segment, what is beside ACK: SYN, FIN or none; of a SYN without ACK both */
	__u32 sequence, acknowledged; /* of a TCP segment */
};

static __always_inline __u64 fold(__u64 a, __u64 b)
{
	__u64 a0 = (__u32)a, a1 = a >> 32, b0 = (__u32)b, b1 = b >> 32;
	__u64 low = a0 * b0, middle = a1 * b0 + (low >> 32), other = a0 * b1 + (__u32)middle;

	return (other << 32 | (__u32)low) ^ (a1 * b1 + (middle >> 32) + (other >> 32));
}

static __always_inline __u64 hash_of(const struct table *table, const struct packet *packet)
{
	__u64 low = fold(packet->low[0] ^ table->seed[0], packet->low[1] ^ table->seed[1]);
	__u64 high = fold(packet->high[0] ^ table->seed[2], packet->high[1] ^ table->seed[3]);
	__u64 both = fold((low << 23 | low >> 41) ^ high ^ packet->name, table->seed[4]);

	return fold(both ^ low, table->seed[5] | 1);
}

static __always_inline __u32 home_of(__u64 hash, __u32 groups)
{
	return ((hash >> 32) * groups) >> 32;
}

static __always_inline const struct entry *entry_at(__u32 slot)
{
	return bpf_map_lookup_elem(&ct_entries, &slot);
}

static __always_inline __u64 control_of(const struct entry *entry)
{
	return *(const volatile __u64 *)&entry->control;
}

/* The connection with this packet's key in one group, and its control word; not that in slot `except`. */
static __always_inline __u32 find_in(__u32 group, __u64 wanted, const struct packet *packet, __u32 except, __u64 *control)
{
	const struct tags *tags = bpf_map_lookup_elem(&ct_tags, &group);
	const __u64 ones = 0x0001000100010001ULL;
	__u32 word, lane, slot;

	if (!tags)
		return NO_SLOT;
	for (word = 0; word < LANES / 4; word++) {
		const __u64 differs = tags->words[word] ^ wanted;
		/* The top bit of each lane without a difference, and perhaps of others: the entry decides. */
		const __u64 equal = (differs - ones) & ~differs & ones << 15;

		if (!equal)
			continue;
		for (lane = 0; lane < 4; lane++) {
			const struct entry *entry;

			if (!(equal & 1ULL << (16 * lane + 15)))
				continue;
			slot = group * LANES + word * 4 + lane;
			entry = entry_at(slot);
			if (!entry || slot == except)
				continue;
			*control = control_of(entry);
			if (!((entry->low[0] ^ packet->low[0]) | (entry->low[1] ^ packet->low[1]) |
			      (entry->high[0] ^ packet->high[0]) | (entry->high[1] ^ packet->high[1]) |
			      ((entry->name ^ packet->name) & NAME_MASK)))
				return slot;
		}
	}
	return NO_SLOT;
}

static __always_inline int is_recent(__u32 tick, __u32 now, __u32 timeout)
{
	const __u32 age = (now - tick) & TICK_MASK;

	return age <= timeout || age > TICK_MASK - (1 << 16); /* slightly ahead of this CPU's clock */
}

/* Whether a worker or a program has forwarded a packet of a connection within this time. */
static __always_inline int is_used(const struct kernel_use *use, __u64 control, __u32 now, __u32 timeout)
{
	const __u32 one = use->used[0] & TICK_MASK, other = use->used[1] & TICK_MASK;

	return is_recent(TICK(control), now, timeout) || (one && is_recent(one, now, timeout)) || (other && is_recent(other, now, timeout));
}

/* The state of a connection, after what programs have noted in its path. */
static __always_inline __u32 state_of(const struct packet *packet, __u64 control, __u64 path)
{
	const __u32 is_tcp = packet->protocol == IPPROTO_TCP;
	__u32 state = STATE(control);

	if (state == (is_tcp ? TCP_SYN_SENT : UDP_UNREPLIED) && path & ANSWERED)
		state = is_tcp ? TCP_SYN_RECEIVED : UDP_REPLIED;
	return is_tcp && state == TCP_SYN_RECEIVED && path & CONFIRMED ? TCP_ESTABLISHED : state;
}

/* Whether this segment belongs to a handshake: it has no data, and the numbers that the SYNs before it have announced. Anything else,
 * such as data in a SYN-ACK, or one that acknowledges a part of the SYN (RFC 7413), is for a worker. */
static __always_inline int is_next_of_handshake(const struct packet *packet, __u32 slot, __u64 control, __u32 state)
{
	const __u32 direction = packet->direction & 1, answers = packet->flags & TCP_SYN;
	const struct entry *entry = entry_at(slot);

	if (!entry || state != (answers ? TCP_SYN_SENT : TCP_SYN_RECEIVED) || (direction == ORIGINAL(control)) == !!answers ||
	    packet->length != packet->headers || packet->acknowledged != (__u32)entry->tracking[!direction])
		return 0;
	if (answers)
		return entry->tracking[direction] == UNANSWERED(packet->acknowledged);
	/* A late program may have set the bit in the path for the entry's last connection, but not the number. */
	return packet->sequence == (__u32)entry->tracking[direction] &&
	       (STATE(control) != TCP_SYN_SENT || IS_ANSWERED(entry->tracking[!direction]));
}

/* Whether every packet of this kind belongs to the connection in this state and leaves it there, whatever its contents, or leads to
 * another one that programs note in the path; and which timeout it has. `slot`: of the entry with this control word. */
static __always_inline int is_certain(const struct packet *packet, __u32 slot, __u64 control, __u32 state, __u32 now, __u32 *timeout)
{
	const __u32 from_opener = packet->direction == ORIGINAL(control);
	const struct entry *entry;

	if (control & (TENTATIVE | REVOKED))
		return 0;
	if (packet->protocol == IPPROTO_TCP) {
		*timeout = state == TCP_ESTABLISHED ? 0 : 4;
		if (state == TCP_ESTABLISHED)
			return !(packet->flags & TCP_SYN);
		return is_next_of_handshake(packet, slot, control, state);
	}
	*timeout = (state - 1) & 3;
	if (state != UDP_REPLIED || !from_opener)
		return state == UDP_ASSURED || state == UDP_REPLIED || state == UDP_UNREPLIED;
	entry = entry_at(slot);
	return entry && ((now - (__u32)entry->tracking[0]) & TICK_MASK) < STREAM;
}

/* What workers must know of this packet of a connection in this state, as the path has it afterwards. */
static __always_inline __u64 note(const struct packet *packet, __u64 control, __u32 state, __u64 path)
{
	if (packet->protocol != IPPROTO_TCP)
		return path | (state == UDP_UNREPLIED && packet->direction != ORIGINAL(control) ? ANSWERED : 0);
	return path | (packet->flags & TCP_FIN ? FINISHED(packet->direction & 1) : 0) |
	       (state == TCP_SYN_SENT ? ANSWERED : state == TCP_SYN_RECEIVED ? CONFIRMED : 0);
}

/* Notes the number of a SYN-ACK for the end of the handshake. Who comes late changes no other connection: nothing but the answering end of
 * a TCP connection in SYN_SENT, with a SYN of this number, has this word before. */
static __always_inline int note_number(const struct packet *packet, __u32 slot)
{
	struct entry *entry = (struct entry *)entry_at(slot);
	const __u64 window = WINDOW_FROM((__u64)(packet->sequence + 1)), before = UNANSWERED(packet->acknowledged);

	return entry && __sync_val_compare_and_swap(&entry->tracking[packet->direction & 1], before, window) == before;
}

/* RFC 1071 */
static __always_inline int is_sound(const struct iphdr *ip4)
{
	const __u32 *words = (const void *)ip4;
	__u64 sum = (__u64)words[0] + words[1] + words[2] + words[3] + words[4];

	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum == 0xffff;
}

static __always_inline __u64 half(const __u32 *words)
{
	return (__u64)bpf_ntohl(words[0]) << 32 | bpf_ntohl(words[1]);
}

struct addresses { __u64 from[2], to[2]; /* in numeric order, IPv4 as ::ffff:a.b.c.d */ };

/* Reads an IP header; returns its length in bytes, or 0 for a packet that is for a worker. */
static __always_inline __u32 read_network(struct __sk_buff *skb, struct packet *packet, struct addresses *addresses)
{
	const void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	const struct iphdr *ip4 = data + ETH_HLEN;
	const struct ipv6hdr *ip6 = data + ETH_HLEN;

	packet->is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	if (packet->is_v4) {
		if ((const void *)(ip4 + 1) > end || *(const __u8 *)ip4 != 0x45 || ip4->frag_off & bpf_htons(0x3fff) || !is_sound(ip4))
			return 0;
		packet->protocol = ip4->protocol;
		packet->hops = ip4->ttl;
		packet->length = bpf_ntohs(ip4->tot_len);
		addresses->from[0] = addresses->to[0] = 0;
		addresses->from[1] = 0xffff00000000ULL | bpf_ntohl(ip4->saddr);
		addresses->to[1] = 0xffff00000000ULL | bpf_ntohl(ip4->daddr);
		return sizeof(*ip4);
	}
	if ((const void *)(ip6 + 1) > end || (*(const __u8 *)ip6 & 0xf0) != 0x60)
		return 0;
	packet->protocol = ip6->nexthdr;
	packet->hops = ip6->hop_limit;
	packet->length = sizeof(*ip6) + bpf_ntohs(ip6->payload_len);
	addresses->from[0] = half(ip6->saddr.s6_addr32);
	addresses->from[1] = half(ip6->saddr.s6_addr32 + 2);
	addresses->to[0] = half(ip6->daddr.s6_addr32);
	addresses->to[1] = half(ip6->daddr.s6_addr32 + 2);
	/* RFC 4942 section 2.2: mapped addresses must not appear on the wire. */
	if ((!addresses->from[0] && addresses->from[1] >> 32 == 0xffff) || (!addresses->to[0] && addresses->to[1] >> 32 == 0xffff))
		return 0;
	return sizeof(*ip6);
}

struct pair_of_ports { __be16 from, to; };

/* The ports of a TCP segment with ACK that has no RST and at most one of SYN and FIN, or of a SYN alone, or of a UDP datagram; of any other
 * packet 0. */
static __always_inline const struct pair_of_ports *read_transport(struct __sk_buff *skb, struct packet *packet, __u32 network)
{
	const void *end = (void *)(long)skb->data_end;
	const __u8 *transport = (void *)(long)skb->data + ETH_HLEN + network;
	const __u32 length = packet->length - network;

	packet->flags = 0;
	if (packet->protocol == IPPROTO_TCP) {
		const __u32 header = (const void *)(transport + 20) > end ? 0 : (transport[12] >> 4) * 4;

		if (header < 20 || header > length)
			return 0;
		packet->flags = (transport[13] & TCP_DECIDES) ^ TCP_ACK;
		if (packet->flags != OPENING_SYN && (packet->flags & ~(TCP_SYN | TCP_FIN) || packet->flags == (TCP_SYN | TCP_FIN)))
			return 0;
		packet->headers = network + header;
		packet->sequence = bpf_ntohl(*(const __be32 *)(transport + 4));
		packet->acknowledged = bpf_ntohl(*(const __be32 *)(transport + 8));
	} else if (packet->protocol == IPPROTO_UDP) {
		const __u16 *udp = (const void *)transport;
		const __u32 said = (const void *)(transport + 8) > end ? 0 : bpf_ntohs(udp[2]);

		if (said < 8 || said > length)
			return 0;
		packet->headers = network + 8;
		packet->sequence = packet->acknowledged = 0; /* a function that is verified by itself gets no memory that was not written */
	} else {
		return 0;
	}
	return (const void *)transport;
}

/* Reads a packet that a program may forward: neither a fragment nor with options or extension headers. Any other: 0. */
static __always_inline int read_packet(struct __sk_buff *skb, struct packet *packet)
{
	struct addresses addresses;
	const struct pair_of_ports *ports;
	const __u64 *from = addresses.from, *to = addresses.to;
	__u16 from_port, to_port;
	__u32 network = read_network(skb, packet, &addresses);

	if (!network || packet->length > skb->len - ETH_HLEN || packet->length < network)
		return 0;
	ports = read_transport(skb, packet, network);
	if (!ports)
		return 0;
	from_port = bpf_ntohs(ports->from);
	to_port = bpf_ntohs(ports->to);
	/* The end with the lower address, then port, comes first. */
	packet->direction = from[0] != to[0] ? from[0] > to[0] : from[1] != to[1] ? from[1] > to[1] : from_port > to_port;
	packet->low[0] = packet->direction ? to[0] : from[0];
	packet->low[1] = packet->direction ? to[1] : from[1];
	packet->high[0] = packet->direction ? from[0] : to[0];
	packet->high[1] = packet->direction ? from[1] : to[1];
	packet->name = (__u64)packet->protocol << 32 |
		       (packet->direction ? (__u32)from_port << 16 | to_port : (__u32)to_port << 16 | from_port);
	return 1;
}

struct connection { /* of a packet. Slots, not addresses: these would be numbers behind a function that is verified by itself */
	__u64 control;           /* of the entry with state and verdict */
	__u64 leaving_control;
	__u32 slot;              /* of that entry; NO_SLOT: there is none */
	__u32 leaving;           /* of a translated connection: the packet leaves with the key in this slot, otherwise NO_SLOT */
	__u32 leaving_direction; /* in which direction of that key */
	__u32 to;                /* the interface of the other end, 0: the node's stack */
	__u32 now;               /* in ticks */
};

static __always_inline __u64 link_of(const struct table *table, __u32 slot)
{
	const __u64 *links = (const void *)entry_at(table->groups * LANES + slot / LINKS);

	return links ? *(const volatile __u64 *)&links[slot & (LINKS - 1)] : 0;
}

/* For a packet of a translated connection, found in `slot`: the entry that it leaves with, and the slot of the one with state and
 * verdict, whose direction the packet gets. NO_SLOT: the connection has ended, or another one's packet has its key. */
static __always_inline __u32 turn(const struct table *table, struct packet *packet, __u32 slot, struct connection *found)
{
	const __u64 control = found->control, link = link_of(table, slot);
	const __u32 other = link, is_of_client = STATE(control) == FRONTEND;
	const struct entry *entry;
	__u64 leaving;

	if (other >= table->groups * LANES || link_of(table, other) != LINK_TO(slot, control))
		return NO_SLOT;
	entry = entry_at(other);
	if (!entry)
		return NO_SLOT;
	found->leaving = other;
	found->leaving_control = leaving = control_of(entry);
	if (link != LINK_TO(other, leaving) || !(leaving & TRANSLATION) || !IS_WRITTEN(leaving) || (control | leaving) & TENTATIVE ||
	    is_of_client == (STATE(leaving) == FRONTEND))
		return NO_SLOT;
	/* The client knows the Service alone, and the backend is found by its own address alone. */
	if (is_of_client != (packet->direction == ORIGINAL(control)))
		return NO_SLOT;
	found->leaving_direction = is_of_client ? ORIGINAL(leaving) : !ORIGINAL(leaving);
	if (!is_of_client)
		return slot;
	packet->direction = ORIGINAL(leaving);
	found->control = leaving;
	return other;
}

/* The slot of the connection that a packet belongs to, by either of its groups; not `except`. */
static __always_inline __u32 find(const struct table *table, const struct packet *packet, __u32 except, __u64 *control)
{
	const __u64 hash = hash_of(table, packet);
	const __u32 group = home_of(hash, table->groups);
	__u32 slot, other = home_of(hash * 0x9e3779b97f4a7c15ULL, table->groups);
	__u64 tag = hash & 0xffff ? hash & 0xffff : 1;

	tag |= tag << 16;
	tag |= tag << 32;
	slot = find_in(group, tag, packet, except, control);
	if (slot != NO_SLOT)
		return slot;
	if (other == group)
		other = group + 1 < table->groups ? group + 1 : 0;
	return find_in(other, tag, packet, except, control);
}

/* Whether a packet that came from `at` may take this direction of a path. */
static __always_inline int comes_from(__u64 path, __u32 direction, __u32 at)
{
	const __u32 end = END(path, direction);

	return TAKEN(path, direction) && (end == at || (at == BY_NODE && !end));
}

/* The interface where a path leads to, 0: the node's stack. */
static __always_inline __u32 leads_to(__u64 path, __u32 direction)
{
	const __u32 end = END(path, !direction);

	return end == BY_NODE ? 0 : end;
}

/* Whether a packet needs no worker: its connection is allowed under the present epoch, and a worker has sent a packet of this
 * direction on from this interface, or knows that it would; from the node's stack `at` is BY_NODE, or 0 for what the stack forwards as it
 * came. Otherwise `found` has the entry with its key, whatever that is.
 *
 * Not static: the kernel verifies such a function once, and by itself, and not for each kind of headers that a packet may have; nor what
 * comes after it for each place in which a connection may be. */
__noinline int look_up(struct packet *packet, __u32 at, struct connection *found)
{
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);
	const struct entry *entry;
	__u32 epoch, slot, kind, direction, state;
	__u64 before, path, noted;
	struct kernel_use *use;

	if (!table || !packet || !found) /* never */
		return 0;
	epoch = *(const volatile __u32 *)&table->epoch;
	found->slot = slot = find(table, packet, NO_SLOT, &found->control);
	if (slot == NO_SLOT || packet->flags == OPENING_SYN)
		return 0;
	entry = entry_at(slot);
	before = found->control;
	found->leaving = NO_SLOT;
	if (before & TRANSLATION)
		slot = turn(table, packet, slot, found);
	found->now = bpf_ktime_get_coarse_ns() / TICK_NANOSECONDS & TICK_MASK;
	if (!entry || slot == NO_SLOT)
		return 0;
	/* Serial numbers as of RFC 1982; 0: not evaluated. */
	if (!EPOCH(found->control) || (EPOCH(found->control) - epoch) & EPOCH_MASK & 0x400000)
		return 0;
	use = bpf_map_lookup_elem(&ct_uses, &slot);
	if (!use)
		return 0;
	direction = packet->direction & 1;
	path = *(volatile __u64 *)&use->path;
	if (!comes_from(path, direction, at) || PATH_EPOCH(path) != (EPOCH(found->control) & 0xffff))
		return 0;
	state = state_of(packet, found->control, path);
	if (!is_certain(packet, slot, found->control, state, found->now, &kind) || kind > 4)
		return 0;
	found->slot = slot;
	found->to = leads_to(path, direction);
	if (!is_used(use, found->control, found->now, table->timeouts[kind]))
		return 0;
	/* Nothing of what was read belongs to another connection or verdict. */
	if (control_of(entry) != before)
		return 0;
	if (packet->flags & TCP_SYN && !note_number(packet, slot))
		return 0;
	/* If someone else has just changed the path, the packet is for a worker. */
	noted = note(packet, found->control, state, path);
	return noted == path || __sync_val_compare_and_swap(&use->path, path, noted) == path;
}

static __always_inline void count_use(const struct packet *packet, const struct connection *found, __u32 packets)
{
	const __u32 direction = packet->direction & 1, slot = found->slot;
	struct kernel_use *use = bpf_map_lookup_elem(&ct_uses, &slot);

	if (!use) /* never */
		return;
	use->packets[direction] += packets;
	use->used[direction] = ((use->used[direction] >> 22) + packet->length) << 22 | (found->now ? found->now : 1);
}
