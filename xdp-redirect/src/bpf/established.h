/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Looks packets up in the workers' connection table, and says which of them need no worker.
 *
 * Workers write entries. The programs read them, and count packets in `struct kernel_use`, as workers do. Into the entry of a connection that
 * a worker has opened they write one word: the window of the end that answers a SYN. Entries that they open themselves they write whole
 * (repeat.h).
 *
 * Programs and workers take no lock. An entry is one connection as long as the generation in its control word is the same, so whoever reads
 * an entry reads its control word first and last: what is read between two equal control words belongs to one connection and one verdict. That
 * holds where loads are not reordered; the loader allows it on x86-64 only. Whatever a program writes into an entry that it has not claimed
 * (repeat.h) it writes by compare-and-swap, of a word that no other connection in the same entry can have; if that fails, the packet is for a
 * worker.
 *
 * A packet that is not understood, or of which anything is in doubt, is for a worker. */
#pragma once
#include "conntrack_maps.h"
#include "liveness.h"
#include "packet.h"

/* The clock of the table, as Tick in dataplane/src/conntrack/time.rs. */
static __always_inline __u32 tick_of_now(void)
{
	return bpf_ktime_get_coarse_ns() / TICK_NANOSECONDS & TICK_MASK;
}

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
	__u64 both = fold((low << 23 | low >> 41) ^ high ^ packet->ports, table->seed[4]);

	return fold(both ^ low, table->seed[5] | 1);
}

static __always_inline __u32 home_of(__u64 hash, __u32 groups)
{
	return ((hash >> 32) * groups) >> 32;
}

/* The slot of the connection with this packet's key in one group, and its control word; not that in slot `except`. */
static __always_inline __u32 find_in_group(__u32 group, __u64 wanted, const struct packet *packet, __u32 except, __u64 *control)
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
			      ((entry->ports ^ packet->ports) & PORTS_MASK)))
				return slot;
		}
	}
	return NO_SLOT;
}

/* The slot of the connection that a packet belongs to, in either of the two groups that its hash gives; not `except`. */
static __always_inline __u32 find(const struct table *table, const struct packet *packet, __u32 except, __u64 *control)
{
	const __u64 hash = hash_of(table, packet);
	const __u32 group = home_of(hash, table->groups);
	__u32 slot, other = home_of(hash * 0x9e3779b97f4a7c15ULL, table->groups);
	__u64 tag = hash & 0xffff ? hash & 0xffff : 1;

	tag |= tag << 16;
	tag |= tag << 32;
	slot = find_in_group(group, tag, packet, except, control);
	if (slot != NO_SLOT)
		return slot;
	if (other == group)
		other = group + 1 < table->groups ? group + 1 : 0;
	return find_in_group(other, tag, packet, except, control);
}

static __always_inline int is_recent(__u32 tick, __u32 now, __u32 timeout)
{
	const __u32 age = (now - tick) & TICK_MASK;

	return age <= timeout || age > TICK_MASK - (1 << 16); /* slightly ahead of this CPU's clock */
}

/* Whether a worker or a program has forwarded a packet of a connection within this time. */
static __always_inline int is_active(const struct kernel_use *use, __u64 control, __u32 now, __u32 timeout)
{
	const __u32 one = use->used[0] & TICK_MASK, other = use->used[1] & TICK_MASK;

	return is_recent(TICK(control), now, timeout) || (one && is_recent(one, now, timeout)) || (other && is_recent(other, now, timeout));
}

/* The state of a connection, with the changes that programs have recorded in its path. */
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

/* Whether a packet of this kind belongs to a connection in this state, whatever else is in it, and either leaves it in that state or leads to one
 * that programs record in the path. Also says which timeout the state has. `slot`: of the entry with this control word. */
static __always_inline int is_expected(const struct packet *packet, __u32 slot, __u64 control, __u32 state, __u32 now, __u32 *timeout)
{
	const __u32 from_opener = packet->direction == ORIGINAL(control);
	const struct entry *entry;

	if (control & (TENTATIVE | REVOKED))
		return 0;
	if (packet->protocol == IPPROTO_TCP) {
		*timeout = state == TCP_ESTABLISHED ? 0 : 4;
		if (packet->flags & ~(TCP_SYN | TCP_FIN))
			return 0;
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

/* Whether this SYN opens an unanswered connection once more, with the number of its first one. */
static __always_inline int is_same_syn(const struct packet *packet, __u32 slot, __u64 control)
{
	const struct entry *entry = entry_at(slot);

	return entry && packet->sequence + 1 == (__u32)entry->tracking[ORIGINAL(control)];
}

static __always_inline int have_both_finished(__u64 path)
{
	return path & FINISHED(0) && path & FINISHED(1);
}

/* The path as it is after this packet: with the change of state that workers must know. */
static __always_inline __u64 path_after(const struct packet *packet, __u64 control, __u32 state, __u64 path)
{
	if (packet->protocol != IPPROTO_TCP)
		return path | (state == UDP_UNREPLIED && packet->direction != ORIGINAL(control) ? ANSWERED : 0);
	return path | (packet->flags & TCP_FIN ? FINISHED(packet->direction & 1) : 0) |
	       (state == TCP_SYN_SENT ? ANSWERED : state == TCP_SYN_RECEIVED ? CONFIRMED : 0);
}

/* Records the sequence number of a SYN-ACK, which the end of the handshake must acknowledge.
 *
 * Between the lookup and this write the connection may end and another one get its entry. The write then fails: the only entry
 * that has the word `before` is a TCP connection in SYN_SENT, whose SYN had the number that this segment acknowledges, at the end that
 * has not answered. */
static __always_inline int record_syn_ack(const struct packet *packet, __u32 slot)
{
	struct entry *entry = (struct entry *)entry_at(slot);
	const __u64 window = WINDOW_FROM((__u64)(packet->sequence + 1)), before = UNANSWERED(packet->acknowledged);

	return entry && __sync_val_compare_and_swap(&entry->tracking[packet->direction & 1], before, window) == before;
}

/* The connection of a packet. It has slots, not addresses: these would be numbers behind a function that is verified by itself. */
struct connection {
	__u64 control;    /* of its entry */
	__u32 slot;       /* of that; NO_SLOT: there is none */
	__u32 to_ifindex; /* the interface of the other end, 0: the node's stack */
	__u32 now;        /* in ticks */
	__u32 via_host;   /* of the caller: VIA_HOST, if one that the packet opens traverses the node's stack */
};

/* Whether a segment that only a worker could place goes on with an allowed connection, since nobody serves the workers. Whoever gets it judges
 * its numbers (RFC 9293 section 3.10.7, RFC 5961), and the entry stays as it is, but for path_unserved.
 *
 * A RST: without it a server keeps what its client has given up. A SYN or a SYN-ACK that is sent again. An acknowledgement of a server that
 * still has the port's last connection: the client answers it by a RST. Of a connection that is no longer established also all else. */
static __always_inline int passes_unserved(const struct packet *packet, __u32 slot, __u64 control, __u32 state)
{
	const __u32 from_opener = packet->direction == ORIGINAL(control);

	if (packet->protocol != IPPROTO_TCP || control & (TENTATIVE | REVOKED) || is_served())
		return 0;
	if (packet->flags & TCP_RST)
		return 1;
	if (!(packet->flags & TCP_SYN) && state > TCP_ESTABLISHED)
		return 1;
	if (packet->length != packet->headers)
		return 0;
	if (!packet->flags)
		return !from_opener && state == TCP_SYN_SENT;
	if (packet->flags == TCP_SYN)
		return !from_opener && state <= TCP_ESTABLISHED;
	return packet->flags == OPENING_SYN && from_opener && (state == TCP_SYN_SENT || state == TCP_SYN_RECEIVED) &&
	       is_same_syn(packet, slot, control);
}

/* The path after such a segment: a RST that a pod sends ends its own connection, as a FIN of each end would. */
static __always_inline __u64 path_unserved(const struct packet *packet, __u32 state, __u64 path, __u32 ingress)
{
	const int ends = packet->flags & TCP_RST && state == TCP_ESTABLISHED && ingress && ingress != BY_NODE;

	return ends ? path | FINISHED(0) | FINISHED(1) : path;
}

/* Whether packets from `ingress` take this direction of a path. */
static __always_inline int starts_at(__u64 path, __u32 direction, __u32 ingress)
{
	const __u32 end = END(path, direction);

	return TAKEN(path, direction) && (end == ingress || (ingress == BY_NODE && !end));
}

/* The interface that a path leads to, 0: the node's stack. */
static __always_inline __u32 target_of(__u64 path, __u32 direction)
{
	const __u32 end = END(path, !direction);

	return end == BY_NODE ? 0 : end;
}

/* Whether a packet needs no worker: its connection is allowed under the epoch in effect, and a worker has sent a packet of this
 * direction on from this interface, or knows that it would. `ingress`: the interface; from the node's stack BY_NODE, or 0 for what
 * the stack forwards as it came. Otherwise `found` has the entry with its key, whatever that is.
 *
 * Not static: the kernel verifies such a function once, and by itself, and not for each kind of headers that a packet may have; nor what
 * comes after it for each place in which a connection may be. */
__noinline int look_up(struct packet *packet, __u32 ingress, struct connection *found)
{
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);
	const struct entry *entry;
	__u32 epoch, slot, kind, direction, state, unserved;
	__u64 path, updated;
	struct kernel_use *use;

	if (!table || !packet || !found) /* never */
		return 0;
	epoch = *(const volatile __u32 *)&table->epoch;
	found->slot = slot = find(table, packet, NO_SLOT, &found->control);
	if (slot == NO_SLOT || (packet->flags == OPENING_SYN && is_served()))
		return 0;
	entry = entry_at(slot);
	found->now = tick_of_now();
	if (!entry)
		return 0;
	/* Serial numbers as of RFC 1982; 0: not evaluated. */
	if (!EPOCH(found->control) || (EPOCH(found->control) - epoch) & EPOCH_MASK & 0x400000)
		return 0;
	use = bpf_map_lookup_elem(&ct_uses, &slot);
	if (!use)
		return 0;
	direction = packet->direction & 1;
	path = *(volatile __u64 *)&use->path;
	if (!starts_at(path, direction, ingress) || PATH_EPOCH(path) != (EPOCH(found->control) & 0xffff))
		return 0;
	state = state_of(packet, found->control, path);
	unserved = !is_expected(packet, slot, found->control, state, found->now, &kind);
	if (unserved) {
		if (!passes_unserved(packet, slot, found->control, state))
			return 0;
		kind = state == TCP_ESTABLISHED ? 0 : 4;
	}
	if (kind > 4) /* never */
		return 0;
	found->to_ifindex = target_of(path, direction);
	if (!is_active(use, found->control, found->now, table->timeouts[kind]))
		return 0;
	/* With the same control word as before, all that was read is of one connection and verdict. */
	if (control_of(entry) != found->control)
		return 0;
	if (!unserved && packet->flags & TCP_SYN && !record_syn_ack(packet, slot))
		return 0;
	/* A worker may just have withdrawn the path, or revoked the connection. To write it again would undo that. */
	updated = unserved ? path_unserved(packet, state, path, ingress) : path_after(packet, found->control, state, path);
	return updated == path || __sync_val_compare_and_swap(&use->path, path, updated) == path;
}

static __always_inline void count_packets(const struct packet *packet, const struct connection *found, __u32 packets)
{
	const __u32 direction = packet->direction & 1, slot = found->slot;
	struct kernel_use *use = bpf_map_lookup_elem(&ct_uses, &slot);

	if (!use) /* never */
		return;
	use->packets[direction] += packets;
	use->used[direction] = ((use->used[direction] >> 22) + packet->length) << 22 | (found->now ? found->now : 1);
}
