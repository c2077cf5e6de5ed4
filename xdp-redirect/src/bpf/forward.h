/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Forwards packets that need no worker, as a worker would. */
#pragma once
#include "host_routing.h"
#include "pods.h"
#include "repeat.h"
#include "rewrite.h"
#include "worker.h"

static __always_inline void add_traffic(struct traffic *traffic, __u32 packets, __u32 bytes)
{
	traffic->packets += packets;
	traffic->bytes += bytes;
}

/* `from`, `to`: the pods' ends, 0 for any other. */
static __always_inline void count_offloaded(struct __sk_buff *skb, const struct packet *packet, const struct connection *connection,
					    const struct interface *from, const struct interface *to, __u32 path)
{
	struct traffic *all = bpf_map_lookup_elem(&offloaded, &path);
	__u32 packets = skb->gso_segs ? skb->gso_segs : 1, port;
	struct port_traffic *port_traffic;

	count_packets(packet, connection, packets);
	if (all)
		add_traffic(all, packets, skb->len);
	if (from) {
		port = from->port;
		port_traffic = bpf_map_lookup_elem(&offloaded_ports, &port);
		if (port_traffic)
			add_traffic(&port_traffic->sent, packets, skb->len);
	}
	if (to) {
		port = to->port;
		port_traffic = bpf_map_lookup_elem(&offloaded_ports, &port);
		if (port_traffic)
			add_traffic(&port_traffic->received, packets, skb->len);
	}
}

/* Whether a pod on a bridge has sent a frame to a neighbour there. Between these nobody decrements the TTL. */
static __always_inline int is_to_bridge_neighbour(struct __sk_buff *skb, const struct interface *iface)
{
	const struct ethhdr *eth = (void *)(long)skb->data;

	return iface->bridge && (const void *)(eth + 1) <= (void *)(long)skb->data_end && !is_mac(&iface->node_mac, eth->h_dest);
}

/* Length of the longest IP packet that this one becomes on a wire: a long TCP segment is segmented. */
static __always_inline __u32 longest_packet(const struct __sk_buff *skb, const struct packet *packet)
{
	return skb->gso_size ? packet->headers + skb->gso_size : packet->length;
}

/* Whether workers must see all packets of a pod, for a capture. It ends with their process, whatever the flag says. */
static __always_inline int is_captured(const struct interface *iface)
{
	return iface->captured && is_served();
}

/* Sends a packet that policy has allowed to a pod. */
static __always_inline int send_to_pod(struct __sk_buff *skb, __u32 ifindex, __u32 filtered)
{
	if (!(filtered & FILTERS_TO_POD))
		return bpf_redirect_peer(ifindex, 0);
	skb->mark = passed;
	return bpf_redirect(ifindex, 0);
}

/* Whether a worker, or the other program, has sent it on to here; takes the mark off. The kernel clears marks on the way out of a pod's
 * namespace (skb_scrub_packet in net/core/skbuff.c). */
static __always_inline int has_passed(struct __sk_buff *skb)
{
	if (skb->mark != passed)
		return 0;
	skb->mark = 0;
	return 1;
}

enum { FOR_WORKER = -2 }; /* no action of a program: it does not forward the packet */

/* Forwards a packet that a pod sends. Returns FOR_WORKER where it does not. */
static __always_inline int forward_from_pod(struct __sk_buff *skb, const struct interface *iface)
{
	const struct interface *to = 0;
	struct connection connection = {};
	struct decision decision;
	const struct ethhdr *eth;
	struct packet packet;
	int found, action, bridged = 0;

	if (is_captured(iface) || !read_packet(skb, &packet) || !is_checksum_in_transport_header(skb, &packet))
		return FOR_WORKER;
	found = find_connection(&packet, skb->ifindex, &connection, &decision);
	if (!found)
		return FOR_WORKER;
	if (connection.to_ifindex) {
		to = bpf_map_lookup_elem(&interfaces, &connection.to_ifindex);
		if (!to || is_captured(to) || connection.control & VIA_HOST || iface->filtered & FILTERS_FROM_POD)
			return FOR_WORKER;
		bridged = iface->bridge == to->bridge && is_to_bridge_neighbour(skb, iface);
		if ((packet.ttl <= 1 && !bridged) || longest_packet(skb, &packet) > to->mtu)
			return FOR_WORKER;
	} else {
		/* A worker would have given it these MACs; a bridge forwards by them. */
		eth = (void *)(long)skb->data;
		if ((const void *)(eth + 1) > (void *)(long)skb->data_end || !is_mac(&iface->node_mac, eth->h_dest) ||
		    !is_mac(&iface->pod_mac, eth->h_source))
			return FOR_WORKER;
	}
	if (found == OPENS && !open_connection(&packet, &decision, &connection))
		return FOR_WORKER;
	if (to && rewrite(skb, &packet, to, bridged))
		return count(skb->ifindex, NO_MEMORY, TC_ACT_SHOT);
	if (!to) {
		action = connection.control & VIA_HOST ? FOR_STACK : send_out(skb, &packet, iface, longest_packet(skb, &packet));
		count_offloaded(skb, &packet, &connection, iface, 0, action == FOR_STACK ? POD_TO_STACK : POD_TO_UPLINK);
		return action == FOR_STACK ? TC_ACT_UNSPEC : action;
	}
	count_offloaded(skb, &packet, &connection, iface, to, POD_TO_POD);
	/* The pod may have given it any MAC. */
	if (skb->pkt_type)
		bpf_skb_change_type(skb, 0 /* PACKET_HOST */);
	return send_to_pod(skb, connection.to_ifindex, to->filtered);
}

/* The same for a packet of the node's stack to the pod. In packets that the stack forwards as they came, the node's own addresses and those
 * of Services prove nothing: any machine may send with them. Of all others, a packet that opens a connection is for a worker. */
static __always_inline int forward_to_pod(struct __sk_buff *skb, const struct interface *iface, const struct origin *origin)
{
	struct connection connection = {};
	struct decision decision;
	struct packet packet;
	int found;

	if (is_captured(iface) || !read_packet(skb, &packet) || !is_checksum_in_transport_header(skb, &packet) ||
	    longest_packet(skb, &packet) > iface->mtu)
		return FOR_WORKER;
	found = look_up(&packet, origin->ingress, &connection) ? ESTABLISHED : 0;
	if (!found && origin->ingress != BY_NODE && skb->ingress_ifindex) {
		connection.via_host = is_translated_for_pod(origin) ? VIA_HOST : 0;
		found = find_opening(&packet, 0, &connection, &decision);
	}
	if (!found || connection.to_ifindex != skb->ifindex || (found == OPENS && !open_connection(&packet, &decision, &connection)))
		return FOR_WORKER;
	count_offloaded(skb, &packet, &connection, 0, iface, STACK_TO_POD);
	return TC_ACT_UNSPEC;
}

/* Sends a packet of another machine to its pod as the node's stack and to_pod would. Returns FOR_STACK where it does not. Whatever may keep it to
 * the stack is asked before its connection is looked up, which leaves a note that only the first to look leaves. */
static __always_inline int forward_from_uplink(struct __sk_buff *skb, const struct uplink *uplink)
{
	struct connection connection = {};
	const struct pod_interfaces *pod;
	const struct interface *iface;
	struct decision decision;
	struct sent_flow flow;
	struct packet packet;
	__u32 length, ifindex;
	int found;

	if (skb->vlan_present || skb->pkt_type || skb->mark || kept_by(skb) != BY_NOBODY ||
	    !read_addresses(skb, ETH_HLEN, skb->protocol == bpf_htons(ETH_P_IP), &flow))
		return FOR_STACK;
	pod = bpf_map_lookup_elem(&pod_addresses, &flow.to);
	if (!pod)
		return FOR_STACK;
	ifindex = pod->veth;
	iface = bpf_map_lookup_elem(&interfaces, &ifindex);
	/* No other machine has a local pod's address. */
	if (!iface || iface->bridge || is_captured(iface) || bpf_map_lookup_elem(&pod_addresses, &flow.from))
		return FOR_STACK;
	if (!read_packet(skb, &packet) || !is_checksum_in_transport_header(skb, &packet) || !is_routable(&packet))
		return FOR_STACK;
	length = longest_packet(skb, &packet);
	if (length > iface->mtu || length > uplink->longest || !is_routed_to(skb, ifindex, length))
		return FOR_STACK;
	found = find_connection(&packet, 0, &connection, &decision);
	if (!found || connection.to_ifindex != ifindex || (found == OPENS && !open_connection(&packet, &decision, &connection)))
		return FOR_STACK;
	if (rewrite(skb, &packet, iface, 0))
		return count(ifindex, NO_MEMORY, TC_ACT_SHOT);
	update_complete_checksum(skb, packet.is_v4);
	count_offloaded(skb, &packet, &connection, 0, iface, UPLINK_TO_POD);
	return send_to_pod(skb, ifindex, iface->filtered);
}
