// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Programs at the node's ends of pods' veths (tcx), and at the veth pair of each worker.
 *
 *   pod ── from_pod ──▶ pair ──▶ worker ──▶ pair ── from_worker ──▶ pod, or the node's stack as if the pod had sent it
 *   the node's stack ── to_pod ──▶ pair
 *   the node's stack ── to_uplink ──▶ pair ──▶ worker ──▶ pair ── from_worker ──▶ uplink: a pod sent it to its own node, and the
 *                                      node has given it the address of another machine (a node port)
 *   uplink ── from_uplink ──▶ the node's stack: not a tunnel packet of another node's pod (tunnel.h)
 *
 * Packets of established connections take the same way without the worker (established.h, forward.h):
 *
 *   pod ── from_pod ──▶ pod, or the node's stack
 *   the node's stack ── to_pod ──▶ pod
 *
 * Where nothing on the node has a say in a packet, it passes the node's stack by (host_routing.h):
 *
 *   pod ── from_pod ──▶ uplink
 *   uplink ── from_uplink ──▶ pod
 *
 * A frame on a pair carries in its Ethernet addresses what the other side must know (struct tag in worker.h).
 *
 * The headers, in the order in which a packet needs them: tcx_maps.h (settings and maps), neighbour.h (address resolution), packet.h and
 * established.h (its connection), repeat.h (opening one), rewrite.h, forward.h, host_routing.h and routes.h (its way without a worker), worker.h
 * (its way to one), origin.h and pods.h (who sent it, behind the node's stack), egress.h and tunnel.h (other machines). */
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/icmpv6.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "egress.h"
#include "forward.h"
#include "neighbour.h"
#include "pods.h"
#include "tunnel.h"
#include "worker.h"

/* Whether no process serves the sockets, and policy is then not enforced, by setting. */
static __always_inline int is_fail_open(void)
{
	return open_without_workers && !is_served();
}

/* Bytes of address resolution that must be readable: an IPv6 header and a neighbour message with its target and options. */
#define NEIGHBOUR_HEADERS \
	(ETH_HLEN + sizeof(struct ipv6hdr) + sizeof(struct icmp6hdr) + sizeof(struct in6_addr) + MAX_OPTIONS * sizeof(struct option))

static __always_inline int pull_headers(struct __sk_buff *skb)
{
	return bpf_skb_pull_data(skb, skb->len < NEIGHBOUR_HEADERS ? skb->len : NEIGHBOUR_HEADERS);
}

/* On packets that a pod sends. */
SEC("tcx/ingress")
int from_pod(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct interface *iface;
	const struct ethhdr *eth = 0;
	const void *end = 0;
	void *pod_macs = 0;
	int action;

	if (has_passed(skb))
		return TC_ACT_UNSPEC;
	if (is_fail_open())
		return count(ifindex, NO_SOCKET, TC_ACT_UNSPEC);
	/* The kernel treats VLAN 0 as untagged: a pod could bypass the workers. */
	if (skb->vlan_present || skb->protocol == bpf_htons(ETH_P_8021Q) || skb->protocol == bpf_htons(ETH_P_8021AD))
		return count(ifindex, VLAN_TAG, TC_ACT_SHOT);
	iface = bpf_map_lookup_elem(&interfaces, &ifindex);
	if (offload && iface && (skb->protocol == bpf_htons(ETH_P_IP) || skb->protocol == bpf_htons(ETH_P_IPV6))) {
		action = forward_from_pod(skb, iface);
		if (action != FOR_WORKER)
			return action;
	}
	if (skb->protocol != bpf_htons(ETH_P_IP)) {
		if (pull_headers(skb))
			return count(ifindex, NOT_IP, TC_ACT_SHOT);
		pod_macs = bpf_map_lookup_elem(&own_addresses, &ifindex);
		eth = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
		if ((const void *)(eth + 1) > end)
			return count(ifindex, NOT_IP, TC_ACT_SHOT);
	}
	switch (skb->protocol) {
	case bpf_htons(ETH_P_ARP):
		if (has_partial_checksum(skb) || !pod_macs || !is_valid_arp(pod_macs, ifindex, eth, end))
			return count(ifindex, FORGED_NEIGHBOUR, TC_ACT_SHOT);
		return count(ifindex, ARP, TC_ACT_UNSPEC);
	case bpf_htons(ETH_P_IPV6):
		if ((const void *)(eth + 1) + sizeof(struct ipv6hdr) <= end &&
		    is_neighbour_discovery(skb, ifindex, iface ? iface->bridge : 0, &pod_addresses, eth, end)) {
			if (has_partial_checksum(skb) || !pod_macs || !is_valid_discovery(pod_macs, ifindex, eth, end))
				return count(ifindex, FORGED_NEIGHBOUR, TC_ACT_SHOT);
			return count(ifindex, NEIGHBOUR_DISCOVERY, TC_ACT_UNSPEC);
		}
		break;
	case bpf_htons(ETH_P_IP):
		break;
	default:
		if (has_partial_checksum(skb) || (pod_macs && iface && iface->bridge && !has_pod_mac(pod_macs, eth)))
			return count(ifindex, FORGED_NEIGHBOUR, TC_ACT_SHOT);
		return count(ifindex, NOT_IP, TC_ACT_UNSPEC);
	}
	if (!iface)
		return count(ifindex, NOT_READY, TC_ACT_SHOT);
	return redirect_to_worker(skb, iface, is_to_bridge_neighbour(skb, iface) ? TO_NEIGHBOUR : 0, REDIRECTED);
}

/* Whether a frame is for another's Ethernet address: a bridge sends to all of its ports what it has not learnt. The other gets it by its own
 * port. A worker goes by IP addresses, and would send it there once more. */
static __always_inline int is_flooded(struct __sk_buff *skb, const struct interface *iface)
{
	__u8 to[ETH_ALEN] __attribute__((aligned(2)));

	return iface->bridge && !bpf_skb_load_bytes(skb, 0, to, sizeof(to)) && !(to[0] & 1) && !is_mac(&iface->pod_mac, to);
}

/* On packets that the node's stack sends to a pod: of its own processes, or forwarded and translated. */
SEC("tcx/egress")
int to_pod(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct interface *iface = bpf_map_lookup_elem(&interfaces, &ifindex);
	struct { __u8 protocol, ttl; } ip6; /* of its header */
	struct origin origin = {};
	__u8 type;
	int action;

	if (has_passed(skb))
		return TC_ACT_UNSPEC;
	if (is_fail_open())
		return count(ifindex, NO_SOCKET, TC_ACT_UNSPEC);
	switch (skb->protocol) {
	case bpf_htons(ETH_P_ARP):
		return TC_ACT_UNSPEC;
	case bpf_htons(ETH_P_IPV6): /* the kernel forwards no packet with hop limit 255 */
		if (!bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, nexthdr), &ip6, sizeof(ip6)) &&
		    ip6.protocol == IPPROTO_ICMPV6 && ip6.ttl == 255 &&
		    !bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct ipv6hdr), &type, sizeof(type)) && type >= 133 && type <= 137)
			return TC_ACT_UNSPEC;
		break;
	case bpf_htons(ETH_P_IP):
		break;
	case bpf_htons(ETH_P_8021Q): /* behind another tag, which the kernel has taken off: the pod's takes two of VLAN 0 for none */
	case bpf_htons(ETH_P_8021AD):
		return count(ifindex, VLAN_TAG, TC_ACT_SHOT);
	default:
		return TC_ACT_UNSPEC;
	}
	if (!iface)
		return count(ifindex, NOT_READY, TC_ACT_SHOT);
	if (is_flooded(skb, iface))
		return count(ifindex, NOT_LOCAL, TC_ACT_SHOT);
	if (is_spoofed(skb, &origin))
		return count(ifindex, SPOOFED_SOURCE, TC_ACT_SHOT);
	if (offload) {
		action = forward_to_pod(skb, iface, &origin);
		if (action != FOR_WORKER)
			return action;
	}
	return redirect_to_worker(skb, iface, FROM_NODE | sender_flags(skb, &origin), FROM_STACK);
}

/* On packets that the node's stack sends to another machine. Policy is for the end that answers: where the node has given the packet of a pod to
 * its own node or to a Service that end's address, the pod's egress policy is asked here. Everything else that a pod sends has met a
 * worker with the destination that it has here. */
SEC("tcx/egress")
int to_uplink(struct __sk_buff *skb)
{
	const int is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	const struct pod_interfaces *sent_by;
	const struct uplink *uplink;
	const struct interface *iface;
	struct origin origin = {};
	__u32 ifindex = skb->ifindex;

	if (has_passed(skb) || (!is_v4 && skb->protocol != bpf_htons(ETH_P_IPV6)) || is_locally_generated(skb) || is_from_worker(skb) ||
	    is_fail_open())
		return TC_ACT_UNSPEC; /* the next program */
	uplink = bpf_map_lookup_elem(&uplinks, &ifindex);
	if (!uplink)
		return TC_ACT_SHOT;
	if (!find_origin(skb, uplink->header ? ETH_HLEN : 0, is_v4, &origin) || !needs_egress_check(&origin))
		return TC_ACT_UNSPEC; /* the next program */
	sent_by = bpf_map_lookup_elem(&pod_addresses, origin.known || origin.is_error ? &origin.source : &origin.flow.from);
	if (!sent_by)
		return TC_ACT_UNSPEC; /* the next program */
	ifindex = sent_by->veth;
	iface = bpf_map_lookup_elem(&interfaces, &ifindex);
	if (iface && is_egress_allowed(&origin, iface))
		return TC_ACT_UNSPEC; /* the next program */
	if (!iface || (!uplink->header && add_ethernet_header(skb)))
		return count(ifindex, NOT_READY, TC_ACT_SHOT);
	return tag_for_worker(skb, iface, ifindex, FROM_NODE | LEAVING, uplink->number, FROM_STACK);
}

/* On packets that another machine sends to this node. */
SEC("tcx/ingress")
int from_uplink(struct __sk_buff *skb)
{
	const int is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	const struct uplink *uplink;
	struct sent_flow flow = {};
	__u32 ifindex = skb->ifindex, zero = 0, offset;
	__u64 *refused;
	int action;

	if ((!is_v4 && skb->protocol != bpf_htons(ETH_P_IPV6)) || is_fail_open())
		return TC_ACT_UNSPEC; /* the next program */
	uplink = bpf_map_lookup_elem(&uplinks, &ifindex);
	if (host_routing && uplink && uplink->longest) {
		action = forward_from_uplink(skb, uplink);
		if (action != FOR_STACK)
			return action;
	}
	offset = uplink ? uplink->header : ETH_HLEN;
	if (!is_tunnel_packet(skb, offset, is_v4) || !read_addresses(skb, offset, is_v4, &flow) || !is_remote_pod(&flow.from) ||
	    !is_for_this_node(skb, &flow, is_v4))
		return TC_ACT_UNSPEC; /* the next program */
	refused = bpf_map_lookup_elem(&refused_tunnels, &zero);
	if (refused)
		*refused += 1;
	return TC_ACT_SHOT;
}

/* Never attached: a test run on an interface says what keeps packets that come in there to the node's stack. */
SEC("tcx/ingress")
int what_keeps(struct __sk_buff *skb)
{
	const int by = kept_by(skb);

	return by == BY_NOBODY && has_egress_hooks(skb, skb->ifindex) ? BY_NETFILTER : by;
}

/* On packets that a worker sends, at the node's end of its pair. */
SEC("tcx/ingress")
int from_worker(struct __sk_buff *skb)
{
	const struct target *target;
	struct mac macs[2];
	struct tag tag;
	__u32 port, *uplink;

	if (bpf_skb_load_bytes(skb, 0, &tag, sizeof(tag)) || tag.to_local != LOCAL || tag.to_kind != FROM_WORKER)
		return TC_ACT_SHOT;
	bpf_skb_change_type(skb, 0 /* PACKET_HOST */);
	if (tag.flags & TO_NODE && tag.port == bpf_htons(NO_PORT))
		return TC_ACT_OK;
	if (tag.flags & TO_UPLINK) {
		port = tag.uplink;
		uplink = bpf_map_lookup_elem(&uplink_interfaces, &port);
		if (!uplink || !*uplink)
			return TC_ACT_SHOT;
		if (tag.flags & (ALLOWED_TCP | ALLOWED_UDP | ALLOWED_SCTP))
			cache_egress_verdict(skb, &tag);
		return bpf_redirect_neigh(*uplink, 0, 0, 0);
	}
	port = bpf_ntohs(tag.port);
	target = bpf_map_lookup_elem(&targets, &port);
	if (!target || !target->ifindex)
		return TC_ACT_SHOT;
	macs[0] = tag.flags & TO_NODE ? target->node_mac : target->pod_mac;
	macs[1] = tag.flags & TO_NODE ? target->pod_mac : target->node_mac;
	if (bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return TC_ACT_SHOT;
	if (!(tag.flags & TO_NODE))
		return send_to_pod(skb, target->ifindex, target->filtered);
	skb->mark = passed;
	return bpf_redirect(target->ifindex, BPF_F_INGRESS);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
