/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The parts of the kernel that have a say in packets that the node's stack forwards. They are read from the kernel's own structures for each packet: what
 * changes there holds for the next one, whoever has changed it. */
#pragma once
#include "kernel_conntrack.h"
#include "tcx_maps.h"

/* Parts of the kernel's types (include/net/net_namespace.h, include/linux/netdevice.h and others). */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct nf_hook_entries;
struct netns_nf { struct nf_hook_entries *hooks_ipv4[5], *hooks_ipv6[5]; };
struct netns_xfrm { unsigned int policy_count[6]; __u8 policy_default[3]; };
struct ipv4_devconf { int data[8]; };
struct ipv6_devconf { __s32 disable_ipv6, forwarding; };
struct in_device { struct ipv4_devconf cnf; };
struct inet6_dev { struct ipv6_devconf cnf; };
typedef struct { int counter; } atomic_t;
struct netns_ipv4 {
	struct ipv4_devconf *devconf_all;
	_Bool fib_has_custom_rules;
	__u8 sysctl_ip_fwd_update_priority, sysctl_fib_multipath_hash_policy;
	atomic_t rt_genid;
};
struct fib6_table { unsigned int fib_seq; };
struct netns_sysctl_ipv6 { __u8 multipath_hash_policy; };
struct netns_ipv6 {
	struct netns_sysctl_ipv6 sysctl;
	struct ipv6_devconf *devconf_all;
	struct fib6_table *fib6_main_tbl, *fib6_local_tbl;
	_Bool fib6_has_custom_rules;
	atomic_t fib6_sernum;
};
struct hlist_node { struct hlist_node *next; };
struct hlist_head { struct hlist_node *first; };
struct net { struct hlist_head *dev_index_head; struct netns_nf nf; struct netns_xfrm xfrm; struct netns_ipv4 ipv4; struct netns_ipv6 ipv6; };
typedef struct { struct net *net; } possible_net_t;
struct mini_Qdisc;
struct bpf_prog;
struct bpf_mprog_bundle;
struct bpf_mprog_fp { struct bpf_prog *prog; };
struct bpf_mprog_entry { struct bpf_mprog_fp fp_items[2]; struct bpf_mprog_bundle *parent; };
struct bpf_mprog_bundle { struct bpf_mprog_entry a; };
struct tcx_entry { struct mini_Qdisc *miniq; struct bpf_mprog_bundle bundle; };
struct net_device {
	possible_net_t nd_net;
	int ifindex;
	struct hlist_node index_hlist;
	struct in_device *ip_ptr;
	struct inet6_dev *ip6_ptr;
	struct bpf_mprog_entry *tcx_ingress;
	struct nf_hook_entries *nf_hooks_ingress, *nf_hooks_egress;
	void *rx_handler;
	__u64 priv_flags;
};
struct sk_buff___device { struct net_device *dev; };
#pragma clang attribute pop
enum netdev_priv_flags { IFF_L3MDEV_SLAVE = 1 };

extern void *bpf_rdonly_cast(const void *, __u32) __ksym __weak;

/* By what a packet is kept to the node's stack (xdp-redirect/src/tcx/host_routing.rs). */
enum kept_by { BY_NOBODY, BY_SETTING, BY_KERNEL, BY_NETFILTER, BY_IPSEC, BY_FILTERS, BY_CONTROLLER, BY_SYSCTL };

enum { PREROUTING = 0, FORWARD = 2, POSTROUTING = 4 }; /* include/uapi/linux/netfilter.h: NF_INET_… */
enum { POLICY_OUT = 1, POLICY_FORWARD = 2, POLICY_BLOCKS = 1 }; /* include/uapi/linux/xfrm.h */
#define RP_FILTER 7 /* include/uapi/linux/ip.h: IPV4_DEVCONF_RP_FILTER, from 0 */

static __always_inline int has_hooks(const struct net *net, const struct net_device *device, int is_v4)
{
	if (bpf_core_field_exists(device->nf_hooks_ingress) && device->nf_hooks_ingress)
		return 1;
	if (!bpf_core_field_exists(net->nf.hooks_ipv4))
		return 0;
	if (is_v4)
		return net->nf.hooks_ipv4[PREROUTING] || net->nf.hooks_ipv4[FORWARD] || net->nf.hooks_ipv4[POSTROUTING];
	return net->nf.hooks_ipv6[PREROUTING] || net->nf.hooks_ipv6[FORWARD] || net->nf.hooks_ipv6[POSTROUTING];
}

#define NETDEV_HASHENTRIES 256  /* include/linux/netdevice.h */
#define MAX_HASHED_DEVICES 16   /* with one hash; beyond them a device counts as one with hooks */

/* Whether netfilter has a hook on packets that leave by this interface (family `netdev`, hook `egress`). The kernel skips it for a packet that a
 * program redirects there (nf_skip_egress in net/core/dev.c). The device is looked up as __dev_get_by_index does. Not static, as what is verified once. */
__noinline int has_egress_hooks(struct __sk_buff *skb, __u32 ifindex)
{
	const struct sk_buff___device *kernel;
	const struct net_device *device = 0;
	const struct hlist_head *heads;
	const struct hlist_node *node;
	const void *address;
	const struct net *net;
	__u32 i;

	if (!bpf_core_field_exists(device->nf_hooks_egress))
		return 0;
	if (!casts_packets)
		return 1;
	kernel = bpf_cast_to_kern_ctx(skb);
	net = kernel->dev->nd_net.net;
	address = net->dev_index_head;
	address += (ifindex & (NETDEV_HASHENTRIES - 1)) * sizeof(*heads);
	heads = bpf_rdonly_cast(address, bpf_core_type_id_kernel(struct hlist_head));
	node = heads->first;
	for (i = 0; i < MAX_HASHED_DEVICES && node; i++) {
		address = node;
		device = bpf_rdonly_cast(address - __builtin_preserve_field_info(device->index_hlist, BPF_FIELD_BYTE_OFFSET),
					 bpf_core_type_id_kernel(struct net_device));
		if (device->ifindex == (int)ifindex)
			return !!device->nf_hooks_egress;
		node = node->next;
	}
	return 1;
}

static __always_inline int has_policies(const struct net *net)
{
	if (!bpf_core_field_exists(net->xfrm.policy_count))
		return 0;
	return net->xfrm.policy_count[POLICY_OUT] || net->xfrm.policy_count[POLICY_FORWARD] ||
	       net->xfrm.policy_default[POLICY_OUT] == POLICY_BLOCKS || net->xfrm.policy_default[POLICY_FORWARD] == POLICY_BLOCKS;
}

/* Whether somebody else has a program by tcx, or a filter of traffic control, on what comes in by this interface, behind ours. */
static __always_inline int has_filters(const struct net_device *device)
{
	const struct bpf_mprog_entry *programs = device->tcx_ingress;
	const struct tcx_entry *entry = 0;
	const void *bundle;

	if (!programs) /* ours is not there: a test run */
		return 0;
	if (programs->fp_items[1].prog)
		return 1;
	bundle = programs->parent;
	entry = bpf_rdonly_cast(bundle - __builtin_preserve_field_info(entry->bundle, BPF_FIELD_BYTE_OFFSET),
				bpf_core_type_id_kernel(struct tcx_entry));
	return !!entry->miniq;
}

/* A bridge or bond above the interface, a macvlan, or a VRF: what comes in there is another interface's. */
static __always_inline int has_controller(const struct net_device *device)
{
	return device->rx_handler || BPF_CORE_READ_BITFIELD(device, priv_flags) & bpf_core_enum_value(enum netdev_priv_flags, IFF_L3MDEV_SLAVE);
}

/* Checks that the route does not make: ip6_forward in net/ipv6/ip6_output.c, ipv6_rcv, and ip_forward in net/ipv4/ip_forward.c. */
static __always_inline int is_set_otherwise(const struct net *net, const struct net_device *device, int is_v4)
{
	if (is_v4)
		return !net->ipv4.sysctl_ip_fwd_update_priority;
	return !net->ipv6.devconf_all->forwarding || device->ip6_ptr->cnf.disable_ipv6;
}

/* Whether something keeps a packet that came in by this interface to the node's stack. Not static, as what is verified once. */
__noinline int kept_by(struct __sk_buff *skb)
{
	const int is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	const struct sk_buff___device *kernel;
	const struct net_device *device;
	const struct net *net;

	if (!host_routing)
		return BY_SETTING;
	if (!casts_packets)
		return BY_KERNEL;
	kernel = bpf_cast_to_kern_ctx(skb);
	device = kernel->dev;
	net = device->nd_net.net;
	if (has_hooks(net, device, is_v4))
		return BY_NETFILTER;
	if (has_policies(net))
		return BY_IPSEC;
	if (has_filters(device))
		return BY_FILTERS;
	if (has_controller(device))
		return BY_CONTROLLER;
	return is_set_otherwise(net, device, is_v4) ? BY_SYSCTL : BY_NOBODY;
}
