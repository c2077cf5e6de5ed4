/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The kernel's own connection tracking: its types, its functions, and how a program reads them. */
#pragma once
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

extern void *bpf_cast_to_kern_ctx(void *) __ksym __weak;

/* Which of these the kernel has. The loader sets it: kernels before 6.4 refuse bpf_ksym_exists() of a function that they have
 * (check_pseudo_btf_id in kernel/bpf/verifier.c), and the result differs from one load to the next where connection tracking is a
 * module. */
const volatile __u32 reads_connections = 0; /* it describes the structures above */
const volatile __u32 casts_packets = 0;     /* bpf_cast_to_kern_ctx */

/* The kernel's own record of a packet is at the address that a program has as its context. Since Linux 6.2 a program may load from it, and
 * earlier read it as any other memory. */
static __always_inline unsigned long read_nfct(struct __sk_buff *skb)
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
