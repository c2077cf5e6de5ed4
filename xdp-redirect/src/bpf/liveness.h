/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Whether a process serves. The kernel closes a process's sockets when it ends, however it ends, and takes them out of this map. */
#pragma once

/* A socket of the serving process while it lives; shared by all programs. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} alive SEC(".maps");

/* Whether a process serves the workers. */
static __always_inline int is_served(void)
{
	__u32 process = 0;

	return !!bpf_map_lookup_elem(&alive, &process);
}
