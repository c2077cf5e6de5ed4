/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Addresses and ports, as headers and maps have them. An IPv4 address is ::ffff:a.b.c.d in maps. */
#pragma once

#define FAMILY_INET 2 /* AF_INET and AF_INET6, whose header is not for BPF */
#define FAMILY_INET6 10

struct mac {
	__u16 parts[3];
};

struct ports {
	__be16 from, to;
};

static __always_inline int is_mac(const struct mac *mac, const __u8 *bytes)
{
	const __u16 *parts = (const void *)bytes;

	return mac->parts[0] == parts[0] && mac->parts[1] == parts[1] && mac->parts[2] == parts[2];
}

static __always_inline int has_ports(__u32 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP;
}

static __always_inline int is_v4_mapped(const struct in6_addr *address)
{
	return !address->s6_addr32[0] && !address->s6_addr32[1] && address->s6_addr32[2] == bpf_htonl(0xffff);
}

static __always_inline struct in6_addr v4_mapped(const __u8 *ip4)
{
	struct in6_addr address = {};

	address.s6_addr[10] = address.s6_addr[11] = 0xff;
	__builtin_memcpy(&address.s6_addr[12], ip4, 4);
	return address;
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
