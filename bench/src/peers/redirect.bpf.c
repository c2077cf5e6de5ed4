/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sends each IPv4 packet to one pod: the least that a tcx program between two veths can do. It looks nothing up, and leaves the TTL as it is.
 * TO: index of the pod's veth. MACS: the twelve bytes of both Ethernet addresses there. With REMOTE, another machine's address, what is for it
 * leaves by the interface OUT to the next hop GATEWAY. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>

static long (*const store_bytes)(struct __sk_buff *, __u32, const void *, __u32, __u64) = (void *)BPF_FUNC_skb_store_bytes;
static long (*const redirect_peer)(__u32, __u64) = (void *)BPF_FUNC_redirect_peer;
#ifdef REMOTE
static long (*const load_bytes)(const void *, __u32, void *, __u32) = (void *)BPF_FUNC_skb_load_bytes;
static long (*const redirect_neigh)(__u32, struct bpf_redir_neigh *, int, __u64) = (void *)BPF_FUNC_redirect_neigh;
#endif

__attribute__((section("tc"), used)) int redirect(struct __sk_buff *skb)
{
	const __u8 macs[2 * ETH_ALEN] = { MACS };

	if (skb->protocol != __builtin_bswap16(ETH_P_IP))
		return TC_ACT_OK;
#ifdef REMOTE
	struct bpf_redir_neigh next = { .nh_family = 2 /* AF_INET */, .ipv4_nh = GATEWAY };
	__u32 to = 0;

	if (!load_bytes(skb, ETH_HLEN + 16, &to, sizeof(to)) && to == REMOTE)
		return redirect_neigh(OUT, &next, sizeof(next), 0);
#endif
	return store_bytes(skb, 0, macs, sizeof(macs), 0) ? TC_ACT_SHOT : redirect_peer(TO, 0);
}

__attribute__((section("license"), used)) char name_of_license[] = "Dual BSD/GPL";
