// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* At the far end of a worker's veth pair: hands each packet to the worker's AF_XDP socket. Without the socket it is dropped. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* By queue, of which the veth has one. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

SEC("xdp")
int penstock(struct xdp_md *ctx)
{
	return bpf_redirect_map(&sockets, ctx->rx_queue_index, XDP_DROP);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
