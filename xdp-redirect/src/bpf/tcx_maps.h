/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Settings and maps of the tcx programs (tcx.bpf.c). The daemon writes them (xdp-redirect/src/tcx), unless something else is said. */
#pragma once
#include "addresses.h"
#include "outcome.h"

#define MAX_PORTS 4096
#define MAX_WORKERS 64
#define MAX_CPUS 1024
#define MAX_UPLINKS 256

const volatile __u32 open_without_workers = 0; /* pass packets to the kernel while no process serves the sockets */
const volatile __u32 workers = 1;              /* in use of `pairs.of_workers` */
const volatile __u32 passed = 0;               /* mark of a packet that goes on behind these programs; random */
const volatile __u32 share = 0;                /* most packets of a port that wait for workers; 0: any number */
const volatile __u32 offload = 0;              /* forward packets of established connections without a worker */
const volatile __u32 host_routing = 0;         /* between pods and other machines past the node's stack, where nothing has a say there */

volatile struct { /* interface indices of the node's ends of workers' pairs, set before the programs are attached */
	__u32 of_workers[MAX_WORKERS];
	__u32 of_cpus[MAX_CPUS]; /* of the worker that takes the packets of this CPU; 0: any worker */
} pairs;

/* Queueing disciplines and filters of somebody else on a pod's interface, as limits of bandwidth are. They stand behind these programs: a
 * packet gets to them if it goes on by TC_ACT_UNSPEC, enters or leaves by that interface, and is not sent to the pod's end at once. */
enum { FILTERS_TO_POD = 1, FILTERS_FROM_POD = 2 };

struct interface { /* the node's end of a pod's veth */
	__u16 port;          /* the number that workers know it by */
	__u8 filtered;       /* FILTERS_… */
	__u8 captured;       /* a capture wants to see all of its packets */
	struct mac node_mac; /* of the node, or the bridge, towards the pod */
	struct mac pod_mac;
	__u32 mtu;           /* longest IP packet to the pod, in bytes */
	__u32 bridge;        /* that it is a port of, or 0 */
};

/* By interface index; without an entry everything is dropped. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_PORTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct interface);
} interfaces SEC(".maps");

struct target { /* where a worker's packets for a port go */
	__u32 ifindex; /* 0: there is no such port */
	struct mac node_mac, pod_mac;
	__u32 filtered;
};

/* By port. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_PORTS);
	__type(key, __u32);
	__type(value, struct target);
} targets SEC(".maps");

/* A pod's MAC by each of its addresses and by ::. Programs add link-local addresses that the pod chooses. The sizes are those of struct
 * in6_addr and struct mac: clang leaves these types out of BTF where only an inner map has them. */
struct pod_macs {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 32);
	__uint(key_size, 16);
	__uint(value_size, 6);
};

/* By interface index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(max_entries, MAX_PORTS);
	__type(key, __u32);
	__array(values, struct pod_macs);
} own_addresses SEC(".maps");

/* Packets by outcome, which programs count. */
struct counters {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OUTCOMES);
	__type(key, __u32);
	__type(value, __u64);
};

/* By interface index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(max_entries, MAX_PORTS);
	__type(key, __u32);
	__array(values, struct counters);
} outcomes SEC(".maps");

/* The interfaces by which a pod's packets come to another pod, 0 for none. */
struct pod_interfaces {
	__u32 veth;  /* its veth, if a bridge forwards them, also after br_netfilter has translated them */
	__u32 stack; /* the veth or the bridge, if the node's stack does */
};

/* Local pods' addresses (IPv4 as ::ffff:a.b.c.d). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr);
	__type(value, struct pod_interfaces);
} pod_addresses SEC(".maps");

struct uplink { /* an interface to other machines */
	__u32 number;
	__u32 header; /* bytes of its link-layer header: that of Ethernet, or none */
	__u32 longest; /* packet, in bytes, that may leave and enter past the node's stack; 0: none */
};

/* By interface index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct uplink);
} uplinks SEC(".maps");

/* Interface indices, by an uplink's number. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_UPLINKS);
	__type(key, __u32);
	__type(value, __u32);
} uplink_interfaces SEC(".maps");

/* Addresses at which a pod may send to a Service (IPv4 as ::ffff:a.b.c.d): its egress policy is for the end that answers, and asked where that
 * is known. Shared with the workers' tables: an address is here before they postpone. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr);
	__type(value, __u32);
} service_addresses SEC(".maps");

struct destination { /* where to a pod may send on another machine, by policy */
	struct in6_addr to;
	__be16 to_port;
	__u16 port; /* of the pod */
	__u32 protocol;
};

struct allowed { /* what a worker has last said of it */
	__u32 epoch; /* under which */
	__u32 tick;  /* when */
};

/* Programs write it. A destination that made room for another is asked again. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct destination);
	__type(value, struct allowed);
} allowed_to_leave SEC(".maps");

struct waiting { /* packets to workers; their difference waits (dataplane/src/worker/waiting.rs) */
	__u64 sent, unused[7], received, padding[7];
};

/* By port. Programs count the packets that they send; workers count those that they receive. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_PORTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct waiting);
} waiting SEC(".maps");

struct traffic {
	__u64 packets, bytes;
};

struct port_traffic {
	struct traffic sent, received;
};

/* By port: what the pod sent and received without a worker, as segments. Programs count it. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_PORTS);
	__type(key, __u32);
	__type(value, struct port_traffic);
} offloaded_ports SEC(".maps");

enum { POD_TO_POD, POD_TO_STACK, STACK_TO_POD, POD_TO_UPLINK, UPLINK_TO_POD, OFFLOAD_PATHS };

/* The same by where it came from and went to. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OFFLOAD_PATHS);
	__type(key, __u32);
	__type(value, struct traffic);
} offloaded SEC(".maps");
