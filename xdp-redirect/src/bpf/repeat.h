/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Opens a connection like one that a worker has opened before: the same ends, protocol and port of the answering end, from the same
 * interface, under a policy that has not changed. The worker has left its answer (dataplane/src/conntrack/answers.rs), and credit for the
 * pod whose share it is: a program takes one of it for each connection, and with none left the packet is a worker's.
 *
 * The entry is written as a worker writes it, and published in the same two steps, so that of all who insert one key at most one goes
 * through (`confirm_one` in dataplane/src/conntrack/insert.rs). A program that sees another's entry gives up its own.
 *
 * An entry of the same key whose connection has ended, and which counts for the same pod, is taken as it is: it needs no credit. */

#define ANSWERS 4096 /* in pairs, of which each question has one */
#define PODS 4096
#define CREDITS (2 * PODS) /* of what each pod opens, and of what others open to each (OwnerId in dataplane/src/conntrack/entry.rs) */
#define EVENTS 16384
#define ELEMENTS_OF_GROUP (LANES + LANES / LINKS + LANES / 4) /* entries, links, openers; the rest is behind those of all groups */

struct answer { __u64 version, low[2], high[2], name, path, verdict; }; /* the opener's port in `name` is 0 */
struct credit { __s64 left, alone; __u64 unused[6]; }; /* `alone`: what is left while no process serves the workers */
struct events { __u64 sent, unused[7]; }; /* before the words of the events, eight to an element */

#define IS_READABLE(version) ((version) && !((version) & 1))
#define VERDICT_EPOCH(verdict) ((__u32)(verdict))
#define VERDICT_OWNER(verdict) ((verdict) >> 32 & 0xffff)
#define VERDICT_ORIGINAL(verdict) ((verdict) >> 48 & 1)

/* Until when programs may repeat answers (`table.repeats`). */
#define REPEATS_ON (1U << 31)
#define REPEATS_WITH_DAEMON (1U << 30) /* alone */

struct { /* a socket of the serving process while it lives */
	__uint(type, BPF_MAP_TYPE_XSKMAP); __uint(max_entries, 1); __type(key, __u32); __type(value, __u32);
} alive SEC(".maps");

#define OWNER_AT 40
#define EMPTY_PATH(control) GENERATION(control)
#define IN_PLACE (1U << 31) /* of one that had ended */
#define EVENT(position, slot, control) \
	((slot) | GENERATION(control) << 32 | ((position) / EVENTS + 1) << 42)

struct repeated { __u64 path, verdict; }; /* what an answer says of a packet */

static __always_inline void *behind_groups(const struct table *table, __u32 element)
{
	return (void *)entry_at(table->groups * ELEMENTS_OF_GROUP + element);
}

/* Whether programs may repeat answers now: the daemon says so from time to time. */
static __always_inline int repeats_now(const struct table *table, __u32 now)
{
	const __u32 until = *(const volatile __u32 *)&table->repeats;
	__u32 process = 0;

	if (!(until & REPEATS_ON) || ((until - now) & TICK_MASK) > TICK_MASK / 2)
		return 0;
	return !(until & REPEATS_WITH_DAEMON) || bpf_map_lookup_elem(&alive, &process);
}

/* Whether such a packet opens a connection: a SYN alone, or a datagram. */
static __always_inline int is_opening(const struct packet *packet)
{
	if (packet->protocol != IPPROTO_TCP)
		return 1;
	return packet->flags == OPENING_SYN && packet->length == packet->headers;
}

/* Whether the connection of an entry with the packet's key has ended, so that a worker would open another one in its place: both ends have
 * sent a FIN, or one a RST; of datagrams, nobody has sent one for as long as such a connection may be idle. */
static __always_inline int has_ended(const struct table *table, const struct packet *packet, const struct connection *found)
{
	const __u32 slot = found->slot;
	const __u64 control = found->control;
	const struct kernel_use *use = bpf_map_lookup_elem(&ct_uses, &slot);
	const struct entry *entry = entry_at(slot);
	__u32 state;
	__u64 path;

	if (!use || !entry || !IS_WRITTEN(control) || control & (TENTATIVE | REVOKED | VIA_HOST | TRANSLATION))
		return 0;
	path = *(const volatile __u64 *)&use->path;
	state = state_of(packet, control, path);
	if (packet->protocol != IPPROTO_TCP)
		return !is_used(use, control, found->now, table->timeouts[(state - 1) & 3]);
	if (state == TCP_TIME_WAIT || state == TCP_CLOSE)
		return 1;
	return state == TCP_ESTABLISHED && path & FINISHED(0) && path & FINISHED(1) &&
	       (STATE(control) != TCP_SYN_SENT || IS_ANSWERED(entry->tracking[!ORIGINAL(control)]));
}

/* Reads the answer to a packet of which look_up has `found` no connection, or one that has ended: `found` gets where it goes. `at`: the interface
 * that it comes from, 0: the node's stack, which forwards it as it came. Not static, as what follows: the kernel verifies such a function
 * once, and not for each way that leads to it. */
__noinline int find_answer(struct packet *packet, __u32 at, struct connection *found, struct repeated *answered)
{
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);
	__u32 index, lane, direction;
	__u64 name, question;

	if (!packet || !found || !answered) /* never */
		return 0;
	direction = packet->direction & 1;
	name = packet->name;
	question = name & ~(direction ? 0xffff0000ULL : 0xffffULL);
	found->now = bpf_ktime_get_coarse_ns() / TICK_NANOSECONDS & TICK_MASK;
	if (!table || !is_opening(packet) ||
	    (found->slot != NO_SLOT && !has_ended(table, packet, found)) || !repeats_now(table, found->now))
		return 0;
	packet->name = question;
	index = home_of(hash_of(table, packet), ANSWERS);
	packet->name = name;
	for (lane = 0; lane < 2; lane++) {
		const struct answer *answer = behind_groups(table, index ^ lane);
		__u64 version;

		if (!answer)
			return 0;
		version = *(const volatile __u64 *)&answer->version;
		if (!IS_READABLE(version) ||
		    (answer->low[0] ^ packet->low[0]) | (answer->low[1] ^ packet->low[1]) | (answer->high[0] ^ packet->high[0]) |
			    (answer->high[1] ^ packet->high[1]) | (answer->name ^ question))
			continue;
		answered->path = *(const volatile __u64 *)&answer->path;
		answered->verdict = *(const volatile __u64 *)&answer->verdict;
		if (found->slot == NO_SLOT)
			found->control = 0;
		found->leaving = NO_SLOT;
		found->to = leads_to(answered->path, direction);
		/* Nothing of what was read belongs to another answer. */
		return *(const volatile __u64 *)&answer->version == version && VERDICT_ORIGINAL(answered->verdict) == direction &&
		       END(answered->path, direction) == at &&
		       (__s32)(VERDICT_EPOCH(answered->verdict) - *(const volatile __u32 *)&table->epoch) >= 0;
	}
	return 0;
}

enum { ESTABLISHED = 1, OPENS = 2 }; /* otherwise the packet is for a worker */

/* How a packet from `at` goes on without a worker: ESTABLISHED, as look_up says, or OPENS, if it may: open_again opens its connection. */
static __always_inline int find_way(struct packet *packet, __u32 at, int may_open, struct connection *connection,
				    struct repeated *repeated)
{
	if (look_up(packet, at, connection))
		return ESTABLISHED;
	if (!may_open)
		return 0;
	*repeated = (struct repeated){};
	return find_answer(packet, at, connection, repeated) ? OPENS : 0;
}

struct place { /* an entry of the table that this program has claimed */
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
__noinline __u32 find_other(struct packet *packet, __u32 own)
{
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);
	__u64 control;

	return table && packet ? find(table, packet, own, &control) : own;
}

/* Claims the entry of a connection of the same key and owner that has ended, and which stays counted; NO_SLOT: it is another one by now. */
static __always_inline __u32 claim_ended(const struct packet *packet, const struct repeated *what, const struct connection *ended)
{
	struct entry *entry = (struct entry *)entry_at(ended->slot);

	/* Also without a SYN that is held, and not about to be cleared. */
	if (!entry || entry->name != (packet->name | VERDICT_OWNER(what->verdict) << OWNER_AT) ||
	    __sync_val_compare_and_swap(&entry->control, ended->control, CLAIMED_ANEW(ended->control)) != ended->control)
		return NO_SLOT;
	return ended->slot;
}

/* Finds the parts of the entry that this program has claimed. */
static __always_inline int find_parts(__u32 slot, struct place *place)
{
	const __u32 group = slot / LANES;
	struct tags *tags = bpf_map_lookup_elem(&ct_tags, &group);

	place->shift = (slot & 3) * 16;
	place->entry = (struct entry *)entry_at(slot);
	place->use = bpf_map_lookup_elem(&ct_uses, &slot);
	if (!tags || !place->entry || !place->use) /* never */
		return 0;
	place->tags = &tags->words[slot % LANES / 4];
	return 1;
}

/* Frees the claimed entry of this generation. */
static __always_inline void unclaim(const struct place *place, __u64 control)
{
	__sync_fetch_and_and(place->tags, ~(0xffffULL << place->shift));
	*(volatile __u64 *)&place->entry->control = FREED(control);
}

/* Writes the key of a packet into the claimed entry. The tag first: who sees the entry published finds it. */
static __always_inline void write_key(const struct place *place, const struct packet *packet, const struct repeated *what, __u64 hash)
{
	const __u64 tag = hash & 0xffff ? hash & 0xffff : 1;
	struct entry *entry = place->entry;

	__sync_fetch_and_or(place->tags, tag << place->shift);
	entry->low[0] = packet->low[0];
	entry->low[1] = packet->low[1];
	entry->high[0] = packet->high[0];
	entry->high[1] = packet->high[1];
	entry->name = packet->name | VERDICT_OWNER(what->verdict) << OWNER_AT;
}

/* Writes what is known of the connection that a packet opens into the claimed entry with its key. */
static __always_inline void write_entry(const struct place *place, const struct packet *packet, __u64 control, __u32 now)
{
	const __u32 direction = packet->direction & 1;
	struct entry *entry = place->entry;

	*(volatile __u64 *)&place->use->path = EMPTY_PATH(control);
	place->use->packets[0] = place->use->packets[1] = 0;
	place->use->used[0] = place->use->used[1] = 0;
	if (packet->protocol == IPPROTO_TCP) {
		entry->tracking[direction] = WINDOW_FROM((__u64)(__u32)(packet->sequence + 1));
		entry->tracking[!direction] = UNANSWERED((__u64)(__u32)(packet->sequence + 1));
	} else {
		entry->tracking[0] = now;
		entry->tracking[1] = 0;
	}
}

static __always_inline struct credit *credit_of(const struct table *table, const struct repeated *what)
{
	const __u32 owner = VERDICT_OWNER(what->verdict), place = (owner & (PODS - 1)) + (owner >> 15) * PODS;

	return behind_groups(table, ANSWERS + place);
}

static __always_inline int takes_one(__s64 *left)
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
static __always_inline int takes_credit(struct credit *credit)
{
	__u32 process = 0;

	if (!credit)
		return 0;
	return takes_one(&credit->left) || (!bpf_map_lookup_elem(&alive, &process) && takes_one(&credit->alone));
}

/* What is counted for a pod counts again as one that programs may open. */
static __always_inline void give_back(const struct table *table, const struct repeated *what)
{
	struct credit *credit = credit_of(table, what);

	if (credit)
		__sync_fetch_and_add(&credit->left, 1);
}

/* Claims a free entry of the home group for a pod that has credit. */
static __always_inline __u32 claim_free(const struct table *table, const struct repeated *what, __u64 hash)
{
	__u32 slot;

	if (!takes_credit(credit_of(table, what)))
		return NO_SLOT;
	slot = claim(home_of(hash, table->groups));
	if (slot == NO_SLOT)
		give_back(table, what);
	return slot;
}

/* Tells the workers of the connection. */
static __always_inline void tell(const struct table *table, __u32 slot, __u64 control)
{
	struct events *events = behind_groups(table, ANSWERS + CREDITS);
	__u64 position, *words;

	if (!events)
		return;
	position = __sync_fetch_and_add(&events->sent, 1);
	words = behind_groups(table, ANSWERS + CREDITS + 1 + (position & (EVENTS - 1)) / 8);
	if (words)
		*(volatile __u64 *)&words[position & 7] = EVENT(position, slot, control);
}

enum { FREE_ENTRY = 1, ENDED_ENTRY = 2 };

/* Writes the connection of a packet into an entry, by an answer that was found for it, and publishes that as a candidate. Returns which entry
 * it is; 0: the packet is for a worker. */
__noinline int propose(struct packet *packet, struct repeated *what, struct connection *proposed)
{
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);
	struct place place;
	__u32 slot, is_new;
	__u64 hash, before;

	if (!table || !packet || !what || !proposed) /* never */
		return 0;
	hash = hash_of(table, packet);
	is_new = proposed->slot == NO_SLOT;
	slot = is_new ? claim_free(table, what, hash) : claim_ended(packet, what, proposed);
	if (slot == NO_SLOT || !find_parts(slot, &place))
		return 0;
	before = control_of(place.entry);
	if (is_new)
		write_key(&place, packet, what, hash);
	write_entry(&place, packet, before, proposed->now);
	proposed->slot = slot;
	/* SYN_SENT and UNREPLIED have one number. */
	proposed->control = FREED(before) | UDP_UNREPLIED | (packet->direction & 1) << 5 | (__u64)proposed->now << 8 |
			    (__u64)(VERDICT_EPOCH(what->verdict) & EPOCH_MASK) << 30;
	/* A locked instruction, so that what is read after it is no older: one of two who publish candidates sees the other's. */
	__sync_val_compare_and_swap(&place.entry->control, before, proposed->control | TENTATIVE);
	return is_new ? FREE_ENTRY : ENDED_ENTRY;
}

/* Publishes the candidate as the entry of its key, unless there is another. Returns whether the packet goes on. */
__noinline int settle(struct repeated *what, struct connection *proposed, __u32 entry, __u32 other)
{
	const __u32 zero = 0;
	const struct table *table = bpf_map_lookup_elem(&ct_table, &zero);
	__u64 candidate, control;
	struct place place;

	if (!table || !what || !proposed || !find_parts(proposed->slot, &place)) /* never */
		return 0;
	control = proposed->control;
	candidate = control | TENTATIVE;
	if (other != NO_SLOT) {
		/* If it fails, a worker has removed the candidate, which is then no longer counted, or has made it the one. */
		if (__sync_val_compare_and_swap(&place.entry->control, candidate, FREED(control) | CLAIMED) == candidate) {
			unclaim(&place, control);
			give_back(table, what);
		}
		return 0;
	}
	if (__sync_val_compare_and_swap(&place.entry->control, candidate, control) != candidate)
		return 0;
	tell(table, proposed->slot | (entry == ENDED_ENTRY ? IN_PLACE : 0), control);
	/* It differs only if the connection has ended already. */
	return __sync_val_compare_and_swap(&place.use->path, EMPTY_PATH(control), what->path) == EMPTY_PATH(control);
}

/* Opens the connection of a packet by an answer that was found for it; 0: it is for a worker. In steps that the programs call one after the
 * other: all frames of nested calls have 512 bytes of stack. */
static __always_inline int open_again(struct packet *packet, struct repeated *what, struct connection *opened)
{
	const __u32 entry = propose(packet, what, opened);

	return entry && settle(what, opened, entry, find_other(packet, opened->slot));
}
