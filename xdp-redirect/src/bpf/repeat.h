/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Opens a connection like one that a worker has opened before: the same ends, protocol and port of the answering end, from the same
 * interface, under a policy that still allows it. The worker has left its answer (dataplane/src/conntrack/answers.rs), and credit for the
 * pod whose share it is: a program takes one of it for each connection, and with none left the packet is a worker's.
 *
 * Programs and workers may insert the same key at the same time, each into an entry of its own. So each first publishes its entry as a
 * candidate, with TENTATIVE in its control word, then looks for another entry with the key, and only then takes TENTATIVE away
 * (`confirm_one` in dataplane/src/conntrack/insert.rs). Since the first step is a locked instruction, of two who insert at least one sees the
 * other's candidate; a program that sees one, whatever its state, gives up its own. So at most one entry of a key is ever confirmed.
 *
 * An entry of the same key whose connection has ended, and which counts for the same pod, is taken as it is: it needs no credit.
 *
 * What the node has translated opens a connection by two answers: of the pod and the Service's address at the pod's interface, and of the pod and what
 * answers where the stack sends it there, which has a place of its own: two pods may also talk without a Service. */
#pragma once
#include "established.h"

#define ANSWERS 4096 /* in pairs, of which each question has one */
#define PODS 4096
/* Of the connections that each pod opens, and of those that others open to it (OwnerId in dataplane/src/conntrack/entry.rs). */
#define CREDITS (2 * PODS)
#define EVENTS 16384
#define ELEMENTS_OF_GROUP (LANES + LANES / 4) /* entries, openers; the rest is behind those of all groups */

struct answer {
	__u64 version; /* odd while a worker writes it; 0: never written */
	__u64 low[2], high[2], ports; /* the opener's port is 0, or 1 with VIA_HOST */
	__u64 path, verdict;
};

struct credit {
	__s64 left;
	__s64 alone; /* what is left while no process serves the workers */
	__u64 unused[6];
};

struct events { /* before the words of the events, eight to an element */
	__u64 sent, unused[7];
};

#define IS_READABLE(version) ((version) && !((version) & 1))
#define VERDICT_EPOCH(verdict) ((__u32)(verdict))
#define VERDICT_OWNER(verdict) ((verdict) >> 32 & 0xffff)
#define VERDICT_ORIGINAL(verdict) ((verdict) >> 48 & 1)

#define EMPTY_PATH(control) GENERATION(control)
#define IN_PLACE (1U << 31) /* of a connection that had ended */
#define EVENT(position, slot, control) \
	((slot) | GENERATION(control) << 32 | ((position) / EVENTS + 1) << 42)

struct decision { /* that of an answer */
	__u64 path, verdict;
};

static __always_inline void *element_behind_groups(const struct table *table, __u32 element)
{
	return (void *)entry_at(table->groups * ELEMENTS_OF_GROUP + element);
}

/* Whether programs may repeat answers now: the daemon says so from time to time. */
static __always_inline int may_repeat(const struct table *table, __u32 now)
{
	const __u32 until = *(const volatile __u32 *)&table->repeats;

	if (!(until & REPEATS_ON) || ((until - now) & TICK_MASK) > TICK_MASK / 2)
		return 0;
	return !(until & REPEATS_WITH_DAEMON) || is_served();
}

/* Whether such a packet opens a connection: a SYN alone, or a datagram. */
static __always_inline int is_opening(const struct packet *packet)
{
	if (packet->protocol != IPPROTO_TCP)
		return 1;
	return packet->flags == OPENING_SYN && packet->length == packet->headers;
}

/* Whether a SYN opens another connection, since nobody serves the workers, which would have the other end decide: after a RST that it may not
 * have accepted, or before the last acknowledgement, or with another number than the SYN before it, which its opener has given up. */
static __always_inline int is_over_unserved(const struct packet *packet, __u32 ingress, __u32 slot, __u64 control, __u32 state)
{
	if (is_served())
		return 0;
	/* Another machine's SYN may be forged, and would end the handshake of who has that address. */
	if (state == TCP_SYN_SENT || state == TCP_SYN_RECEIVED)
		return ingress && !is_same_syn(packet, slot, control);
	return state == TCP_RESETTING || state == TCP_LAST_ACK;
}

/* Whether the connection of an entry with the packet's key has ended, so that a worker would open another one in its place: both ends have
 * sent a FIN, or one a RST; of datagrams, nobody has sent one for as long as such a connection may be idle, or nobody serves the workers. One
 * that policy has revoked ends with the next SYN, too, but a worker looks at it while there is one. */
static __always_inline int has_ended(const struct table *table, const struct packet *packet, __u32 ingress, const struct connection *found)
{
	const __u32 slot = found->slot;
	const __u64 control = found->control;
	const struct kernel_use *use = bpf_map_lookup_elem(&ct_uses, &slot);
	const struct entry *entry = entry_at(slot);
	__u32 state;
	__u64 path;

	if (!use || !entry || !IS_WRITTEN(control) || control & TENTATIVE || (control & VIA_HOST) != found->via_host)
		return 0;
	path = *(const volatile __u64 *)&use->path;
	state = state_of(packet, control, path);
	/* Of datagrams, a port that comes back has an entry that only a worker could evaluate again, under a new policy or after a restart. */
	if (packet->protocol != IPPROTO_TCP)
		return !(control & REVOKED) &&
		       (!is_served() || !is_active(use, control, found->now, table->timeouts[(state - 1) & 3]));
	if (control & REVOKED)
		return !is_served();
	if (state == TCP_TIME_WAIT || state == TCP_CLOSE)
		return 1;
	if (state == TCP_ESTABLISHED)
		return have_both_finished(path) &&
		       (STATE(control) != TCP_SYN_SENT || IS_ANSWERED(entry->tracking[!ORIGINAL(control)]));
	return is_over_unserved(packet, ingress, slot, control, state);
}

/* Whether a SYN goes on in the entry of a connection that nobody knows to be over, since nobody serves the workers: a client comes back to its
 * port, and another machine's RST, or one that a worker had when it ended, has ended nothing here. Who answers judges its number, and the
 * FINs of the last connection are not of this one. */
static __always_inline int goes_on_unserved(const struct packet *packet, const struct connection *found)
{
	const __u32 slot = found->slot;
	const __u64 control = found->control, finished = FINISHED(0) | FINISHED(1);
	struct kernel_use *use = bpf_map_lookup_elem(&ct_uses, &slot);
	__u64 path;

	if (!use || packet->protocol != IPPROTO_TCP || control & (TENTATIVE | REVOKED) ||
	    (control & VIA_HOST) != found->via_host || packet->direction != ORIGINAL(control) || is_served())
		return 0;
	path = *(const volatile __u64 *)&use->path;
	return state_of(packet, control, path) == TCP_ESTABLISHED &&
	       (!(path & finished) || __sync_val_compare_and_swap(&use->path, path, path & ~finished) == path);
}

enum { ESTABLISHED = 1, OPENS = 2 }; /* otherwise the packet is for a worker */

/* Reads the answer to a packet of which look_up has `found` no connection, or one that has ended: `found` gets where it goes. `ingress`: the
 * interface that it comes from, 0: the node's stack, which forwards it as it came. Returns how the packet goes on.
 *
 * A worker makes the version odd, writes, and makes it even again. With the same even version before and after, all that was read is of one
 * answer.
 *
 * Not static, like the functions below: the kernel verifies such a function once, and not for each way that leads to it. */
__noinline int find_answer(struct packet *packet, __u32 ingress, struct connection *found, struct decision *decision)
{
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);
	__u32 index, lane, direction, opens, applies;
	__u64 ports, question;

	if (!packet || !found || !decision) /* never */
		return 0;
	direction = packet->direction & 1;
	ports = packet->ports;
	question = (ports & ~(direction ? 0xffff0000ULL : 0xffffULL)) | (found->via_host ? 1ULL : 0) << 16 * direction;
	found->now = tick_of_now();
	if (!table || !is_opening(packet) || !may_repeat(table, found->now))
		return 0;
	opens = found->slot == NO_SLOT || has_ended(table, packet, ingress, found);
	if (!opens && is_served())
		return 0;
	packet->ports = question;
	index = home_of(hash_of(table, packet), ANSWERS);
	packet->ports = ports;
	for (lane = 0; lane < 2; lane++) {
		const struct answer *answer = element_behind_groups(table, index ^ lane);
		__u64 version;

		if (!answer)
			return 0;
		version = *(const volatile __u64 *)&answer->version;
		if (!IS_READABLE(version) ||
		    (answer->low[0] ^ packet->low[0]) | (answer->low[1] ^ packet->low[1]) | (answer->high[0] ^ packet->high[0]) |
			    (answer->high[1] ^ packet->high[1]) | (answer->ports ^ question))
			continue;
		decision->path = *(const volatile __u64 *)&answer->path;
		decision->verdict = *(const volatile __u64 *)&answer->verdict;
		if (found->slot == NO_SLOT)
			found->control = 0;
		found->to_ifindex = target_of(decision->path, direction);
		applies = *(const volatile __u64 *)&answer->version == version && VERDICT_ORIGINAL(decision->verdict) == direction &&
			  END(decision->path, direction) == ingress &&
			  (__s32)(VERDICT_EPOCH(decision->verdict) - *(const volatile __u32 *)&table->epoch) >= 0;
		if (!applies)
			return 0;
		return opens ? OPENS : goes_on_unserved(packet, found) ? ESTABLISHED : 0;
	}
	return 0;
}

/* How a packet goes on of which look_up has found no connection: OPENS, if open_connection may open it. */
static __always_inline int find_opening(struct packet *packet, __u32 ingress, struct connection *connection, struct decision *decision)
{
	*decision = (struct decision){};
	return find_answer(packet, ingress, connection, decision);
}

/* How a packet goes on without a worker: ESTABLISHED, as look_up says, or OPENS. */
static __always_inline int find_connection(struct packet *packet, __u32 ingress, struct connection *connection, struct decision *decision)
{
	return look_up(packet, ingress, connection) ? ESTABLISHED : find_opening(packet, ingress, connection, decision);
}

struct claimed_entry { /* that this program has claimed, and nobody else writes */
	__u64 *tags; /* those of four entries */
	struct entry *entry;
	struct kernel_use *use;
	__u32 shift;
};

/* Claims a free entry of a group, and returns its slot; NO_SLOT: there is none, or another one was faster. */
__noinline __u32 claim(__u32 group)
{
	const __u64 ones = 0x0001000100010001ULL;
	const struct tags *of_group = bpf_map_lookup_elem(&ct_tags, &group);
	struct entry *entry;
	__u64 zeros = 0, free;
	__u32 word, lane, slot;

	if (!of_group)
		return NO_SLOT;
	for (word = 0; word < LANES / 4; word++) {
		const __u64 tags = *(const volatile __u64 *)&of_group->words[word];

		/* The lowest bit is that of a lane without a tag. */
		zeros = (tags - ones) & ~tags & ones << 15;
		if (zeros)
			break;
	}
	if (!zeros || word >= LANES / 4)
		return NO_SLOT;
	lane = zeros & 1 << 15 ? 0 : zeros & 1ULL << 31 ? 1 : zeros & 1ULL << 47 ? 2 : 3;
	slot = group * LANES + word * 4 + lane;
	entry = (struct entry *)entry_at(slot);
	if (!entry)
		return NO_SLOT;
	free = control_of(entry);
	if (STATE(free) != FREE || __sync_val_compare_and_swap(&entry->control, free, CLAIMED_ANEW(free)) != free)
		return NO_SLOT;
	return slot;
}

/* The slot of another entry with a packet's key, in whatever state; NO_SLOT: there is none. */
__noinline __u32 find_other(struct packet *packet, __u32 claimed)
{
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);
	__u64 control;

	return table && packet ? find(table, packet, claimed, &control) : claimed;
}

/* Claims the entry of a connection of the same key and owner that has ended, and which stays counted; NO_SLOT: it is another one by now. */
static __always_inline __u32 claim_ended(const struct packet *packet, const struct decision *decision, const struct connection *ended)
{
	const __u64 ports = packet->ports | VERDICT_OWNER(decision->verdict) << OWNER_AT;
	struct entry *entry = (struct entry *)entry_at(ended->slot);

	/* With the owner, and without the flag above it: no worker is about to clear the entry. */
	if (!entry || (entry->ports & ~HELD_SYN) != ports ||
	    __sync_val_compare_and_swap(&entry->control, ended->control, CLAIMED_ANEW(ended->control)) != ended->control)
		return NO_SLOT;
	/* A SYN that was held has left its bits, which are read only where a window says so. A worker that is late may write them once more. */
	*(volatile __u64 *)&entry->ports = ports;
	return ended->slot;
}

/* Finds the parts of the entry that this program has claimed. */
static __always_inline int find_parts(__u32 slot, struct claimed_entry *claimed)
{
	const __u32 group = slot / LANES;
	struct tags *tags = bpf_map_lookup_elem(&ct_tags, &group);

	claimed->shift = (slot & 3) * 16;
	claimed->entry = (struct entry *)entry_at(slot);
	claimed->use = bpf_map_lookup_elem(&ct_uses, &slot);
	if (!tags || !claimed->entry || !claimed->use) /* never */
		return 0;
	claimed->tags = &tags->words[slot % LANES / 4];
	return 1;
}

/* Frees the claimed entry of this generation. */
static __always_inline void unclaim(const struct claimed_entry *claimed, __u64 control)
{
	__sync_fetch_and_and(claimed->tags, ~(0xffffULL << claimed->shift));
	*(volatile __u64 *)&claimed->entry->control = FREED(control);
}

/* Writes the key of a packet into the claimed entry. The tag first: who sees the entry published finds it. */
static __always_inline void write_key(const struct claimed_entry *claimed, const struct packet *packet, const struct decision *decision,
				      __u64 hash)
{
	const __u64 tag = hash & 0xffff ? hash & 0xffff : 1;
	struct entry *entry = claimed->entry;

	__sync_fetch_and_or(claimed->tags, tag << claimed->shift);
	entry->low[0] = packet->low[0];
	entry->low[1] = packet->low[1];
	entry->high[0] = packet->high[0];
	entry->high[1] = packet->high[1];
	entry->ports = packet->ports | VERDICT_OWNER(decision->verdict) << OWNER_AT;
}

/* Writes the state of the connection that a packet opens into the claimed entry with its key. */
static __always_inline void write_entry(const struct claimed_entry *claimed, const struct packet *packet, __u64 control, __u32 now)
{
	const __u32 direction = packet->direction & 1;
	struct entry *entry = claimed->entry;

	*(volatile __u64 *)&claimed->use->path = EMPTY_PATH(control);
	claimed->use->packets[0] = claimed->use->packets[1] = 0;
	claimed->use->used[0] = claimed->use->used[1] = 0;
	if (packet->protocol == IPPROTO_TCP) {
		entry->tracking[direction] = WINDOW_FROM_SYN((__u64)(__u32)(packet->sequence + 1));
		entry->tracking[!direction] = UNANSWERED((__u64)(__u32)(packet->sequence + 1));
	} else {
		entry->tracking[0] = now;
		entry->tracking[1] = 0;
	}
}

static __always_inline struct credit *credit_of(const struct table *table, const struct decision *decision)
{
	const __u32 owner = VERDICT_OWNER(decision->verdict), index = (owner & (PODS - 1)) + (owner >> 15) * PODS;

	return element_behind_groups(table, ANSWERS + index);
}

/* Several CPUs may read the last one; who takes more than there is gives it back. */
static __always_inline int take_one(__s64 *left)
{
	if (*(volatile __s64 *)left <= 0)
		return 0;
	if ((__s64)__sync_fetch_and_add(left, -1) > 0)
		return 1;
	__sync_fetch_and_add(left, 1);
	return 0;
}

/* Takes one of a pod's credit. Without a daemon nobody gives more, and what has ended is not taken away: then also what else the pod's share
 * had room for. */
static __always_inline int take_credit(struct credit *credit)
{
	return credit && (take_one(&credit->left) || (!is_served() && take_one(&credit->alone)));
}

static __always_inline void return_credit(const struct table *table, const struct decision *decision)
{
	struct credit *credit = credit_of(table, decision);

	if (credit)
		__sync_fetch_and_add(&credit->left, 1);
}

/* Claims a free entry of the home group for a pod that has credit. */
static __always_inline __u32 claim_free(const struct table *table, const struct decision *decision, __u64 hash)
{
	__u32 slot;

	if (!take_credit(credit_of(table, decision)))
		return NO_SLOT;
	slot = claim(home_of(hash, table->groups));
	if (slot == NO_SLOT)
		return_credit(table, decision);
	return slot;
}

/* Tells the workers of the connection. */
static __always_inline void send_event(const struct table *table, __u32 slot, __u64 control)
{
	struct events *events = element_behind_groups(table, ANSWERS + CREDITS);
	__u64 position, *words;

	if (!events)
		return;
	position = __sync_fetch_and_add(&events->sent, 1);
	words = element_behind_groups(table, ANSWERS + CREDITS + 1 + (position & (EVENTS - 1)) / 8);
	if (words)
		*(volatile __u64 *)&words[position & 7] = EVENT(position, slot, control);
}

enum { FREE_ENTRY = 1, ENDED_ENTRY = 2 };

/* Writes the connection of a packet into an entry, by an answer that was found for it, and publishes that as a candidate. Returns which entry
 * it is; 0: the packet is for a worker. */
__noinline int publish_candidate(struct packet *packet, struct decision *decision, struct connection *candidate)
{
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);
	struct claimed_entry claimed;
	__u32 slot, is_new;
	__u64 hash, before;

	if (!table || !packet || !decision || !candidate) /* never */
		return 0;
	hash = hash_of(table, packet);
	is_new = candidate->slot == NO_SLOT;
	slot = is_new ? claim_free(table, decision, hash) : claim_ended(packet, decision, candidate);
	if (slot == NO_SLOT || !find_parts(slot, &claimed))
		return 0;
	before = control_of(claimed.entry);
	if (is_new)
		write_key(&claimed, packet, decision, hash);
	write_entry(&claimed, packet, before, candidate->now);
	candidate->slot = slot;
	/* SYN_SENT and UNREPLIED have one number. */
	candidate->control = FREED(before) | UDP_UNREPLIED | (packet->direction & 1) << 5 | candidate->via_host |
			    (__u64)candidate->now << 8 | (__u64)(VERDICT_EPOCH(decision->verdict) & EPOCH_MASK) << 30;
	/* A locked instruction: find_other reads nothing older than this. */
	__sync_val_compare_and_swap(&claimed.entry->control, before, candidate->control | TENTATIVE);
	return is_new ? FREE_ENTRY : ENDED_ENTRY;
}

/* Publishes the candidate as the entry of its key, unless there is another. Returns whether the packet goes on. */
__noinline int commit_candidate(struct decision *decision, struct connection *candidate, __u32 entry, __u32 other)
{
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);
	__u64 tentative, control;
	struct claimed_entry claimed;

	if (!table || !decision || !candidate || !find_parts(candidate->slot, &claimed)) /* never */
		return 0;
	control = candidate->control;
	tentative = control | TENTATIVE;
	if (other != NO_SLOT) {
		/* If this fails, a worker has removed the candidate, which is then no longer counted, or has confirmed it. */
		if (__sync_val_compare_and_swap(&claimed.entry->control, tentative, FREED(control) | CLAIMED) == tentative) {
			unclaim(&claimed, control);
			return_credit(table, decision);
		}
		return 0;
	}
	if (__sync_val_compare_and_swap(&claimed.entry->control, tentative, control) != tentative)
		return 0;
	send_event(table, candidate->slot | (entry == ENDED_ENTRY ? IN_PLACE : 0), control);
	/* The path is another only if the connection has ended already. */
	return __sync_val_compare_and_swap(&claimed.use->path, EMPTY_PATH(control), decision->path) == EMPTY_PATH(control);
}

/* Opens the connection of a packet by an answer that was found for it; 0: it is for a worker. In steps that the programs call one after the
 * other: all frames of nested calls have 512 bytes of stack. */
static __always_inline int open_connection(struct packet *packet, struct decision *decision, struct connection *opened)
{
	const __u32 entry = publish_candidate(packet, decision, opened);

	return entry && commit_candidate(decision, opened, entry, find_other(packet, opened->slot));
}
