/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sends each IPv4 packet of a pod to one other pod: the least that a tcx program between two veths can do. It looks nothing up, and leaves the
 * TTL as it is. TO: index of the other pod's veth. MACS: the twelve bytes of both Ethernet addresses there. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>

static long (*const store_bytes)(struct __sk_buff *, __u32, const void *, __u32, __u64) = (void *)BPF_FUNC_skb_store_bytes;
static long (*const redirect_peer)(__u32, __u64) = (void *)BPF_FUNC_redirect_peer;

__attribute__((section("tc"), used)) int redirect(struct __sk_buff *skb)
{
	const __u8 macs[2 * ETH_ALEN] = { MACS };

	if (skb->protocol != __builtin_bswap16(ETH_P_IP))
		return TC_ACT_OK;
	return store_bytes(skb, 0, macs, sizeof(macs), 0) ? TC_ACT_SHOT : redirect_peer(TO, 0);
}

__attribute__((section("license"), used)) char name_of_license[] = "Dual BSD/GPL";
