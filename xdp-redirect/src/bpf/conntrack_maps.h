/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The workers' connection table (dataplane/src/conntrack), as arrays that both sides map: workers write entries, programs read them, and
 * write where established.h and repeat.h say so. */
#pragma once

/* Entries are in groups. A group's tags, 16 bits of each entry's hash, are what a lookup compares first. */
#define LANES 32
struct tags {
	__u64 words[LANES / 4];
};

struct entry {
	__u64 control;
	__u64 low[2], high[2]; /* the ends' addresses in numeric order, IPv4 as ::ffff:a.b.c.d; the end with the lower address, then port, first */
	__u64 ports;           /* of the lower end, of the higher from bit 16 on, the protocol from 32, the owner from OWNER_AT */
	__u64 tracking[2];     /* TCP: the window of each end; UDP: when the first datagram came, in ticks */
};

/* By direction: 0 from the lower end, 1 from the higher. */
struct kernel_use {
	__u64 path; /* written by workers, and by programs with an answer, at the end of a handshake and with a FIN */
	__u32 packets[2];
	__u64 used[2]; /* bytes, and below them the tick of the last packet that a program forwarded; 0: none */
};

struct table {
	__u64 identity[2], groups, boot[2], seed[6], names[2], checksum;
	__u32 epoch;       /* entries that were last evaluated under an older one are for a worker */
	__u32 timeouts[5]; /* in ticks: TCP established; UDP unreplied, replied, assured; TCP before it is established */
	__u32 repeats;     /* until when programs may open connections by themselves (may_repeat) */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct table);
} ct_table SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct tags);
} ct_tags SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct entry);
} ct_entries SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct kernel_use);
} ct_uses SEC(".maps");

#define NO_SLOT 0xffffffff
#define PORTS_MASK 0xffffffffffULL /* of `ports`, without the owner */
#define OWNER_AT 40
#define HELD_SYN (127ULL << 57) /* of `ports`, above the owner and a flag (dataplane/src/conntrack/entry.rs) */

#define TICK_NANOSECONDS 512000000
#define STREAM 4 /* ticks: a datagram of the opener this long after its first one opens a stream (conntrack/track.rs) */

/* The control word (dataplane/src/conntrack/entry.rs). */
#define STATE(control) ((control) & 15)
#define TENTATIVE (1 << 4)
/* The direction as an index. In C the compiler may use another copy of the number, whose bounds verifiers up to Linux 6.5 don't know. */
static __always_inline __u32 original_direction(__u64 control)
{
	__u64 direction = control >> 5;

	asm volatile("%0 &= 1" : "+r"(direction));
	return direction;
}
#define ORIGINAL(control) original_direction(control)
#define REVOKED (1 << 6)
#define VIA_HOST (1 << 7) /* its packets traverse the node's stack */
#define TICK_MASK 0x3fffff
#define TICK(control) ((control) >> 8 & TICK_MASK)
#define EPOCH_MASK 0x7fffff
#define EPOCH(control) ((control) >> 30 & EPOCH_MASK)
#define GENERATION(control) ((control) >> 53 & 0x3ff)
#define IS_WRITTEN(control) (STATE(control) > 1)
#define FREED(control) (GENERATION(control) << 53)
#define CLAIMED_ANEW(free) (((GENERATION(free) + 1) & 0x3ff) << 53 | CLAIMED)
enum state {
	FREE = 0,
	CLAIMED = 1,
	UDP_UNREPLIED = 2,
	UDP_REPLIED = 3,
	UDP_ASSURED = 4,
	TCP_SYN_SENT = 2,
	TCP_SYN_RECEIVED = 4,
	TCP_ESTABLISHED = 5,
	TCP_RESETTING = 6,
	TCP_LAST_ACK = 9,
	TCP_TIME_WAIT = 10,
	TCP_CLOSE = 11,
};

/* The path (dataplane/src/conntrack/path.rs): the interface of each end, 0 or BY_NODE for the node's stack; whether a program has
 * forwarded the answer to a SYN or a datagram, the end of the handshake, and in which directions a FIN (or without a daemon a RST, of both); in which directions packets take
 * the path; and the low bits of the epoch. */
#define END(path, end) ((__u32)((path) >> ((end) ? 21 : 0)) & 0x1fffff)
#define BY_NODE 0x1fffff /* of an address that nobody but the node may send with */
#define ANSWERED (1ULL << 42)
#define CONFIRMED (1ULL << 43)
#define FINISHED(direction) (1ULL << (44 + (direction)))
#define TAKEN(path, direction) ((path) >> (46 + (direction)) & 1)
#define PATH_EPOCH(path) ((path) >> 48)

/* The window of the end that answers a SYN (dataplane/src/conntrack/tcp/mod.rs): before it does, with the number that acknowledges the
 * SYN, and then with its own next number. It offers at most 64 KiB, and its options are not read: the scale of its later offers is
 * unknown. */
#define UNKNOWN_SCALE (15ULL << 57)
#define UNANSWERED(acknowledged) (UNKNOWN_SCALE | (acknowledged))
#define WINDOW_FROM(next) ((next) | (__u64)((__u32)((next) + 4095) >> 12) << 32 | 16ULL << 52 | UNKNOWN_SCALE | 1ULL << 61)
/* Of an opener whose SYN a program has read: with the largest scale, not with an unknown one, since workers take a connection without any known
 * scale for one whose beginning was not seen. */
#define WINDOW_FROM_SYN(next) (WINDOW_FROM(next) & ~(1ULL << 57))
#define IS_ANSWERED(window) ((window) >> 52 & 31)

/* Until when programs may repeat answers (`table.repeats`). */
#define REPEATS_ON (1U << 31)
#define REPEATS_WITH_DAEMON (1U << 30) /* alone */


static __always_inline const struct entry *entry_at(__u32 slot)
{
	return bpf_map_lookup_elem(&ct_entries, &slot);
}

static __always_inline __u64 control_of(const struct entry *entry)
{
	return *(const volatile __u64 *)&entry->control;
}
