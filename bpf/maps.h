/* The maps. The gateway creates most of them with sizes of its own (drivers/direct/maps/pins.py,
 * Sizes); here are the sizes for tests of the program. The names of maps, fields and events are part
 * of the pinned layout, which an upgrade copies by name. */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include <stdbool.h>

#include "structs.h"

#define LISTENERS 32768
#define NODES 4096
#define ONE_PACKET_FLOWS 131072
#define SHARES 4096 /* the number of namespaces, and one */
#define CACHED_LISTENERS 4096 /* a power of two */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LISTENERS);
	__type(key, struct listener_key);
	__type(value, struct listener);
} listeners SEC(".maps");

/* The cache of `listeners` on each CPU: see listeners.h. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, CACHED_LISTENERS);
	__type(key, __u32);
	__type(value, struct cached_listener);
} listener_cache SEC(".maps");

/* The generation of `listeners`, which user space changes through mmap after each change there. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} generation SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LISTENERS);
	__type(key, struct listener_key);
	__type(value, struct owner);
} owners SEC(".maps");

/* All slots of all listeners. User space writes them through mmap, beside the tables that are in
 * effect. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct chunk);
} arena SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * NODES);
	__type(key, __u32);
	__type(value, struct next_hop);
} next_hops SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NODES);
	__type(key, __u32);
	__type(value, struct node_name);
} node_names SEC(".maps");

/* The flow entries, in six tables:
 * - UDP flows are separate from connections, so that a flood of datagrams does not displace
 *   connections.
 * - Flows with only one packet so far (`new_*`: their entries are tentative) are separate from
 *   established flows, so that a flood of SYNs, or of datagrams with forged sources, displaces only
 *   tentative entries.
 * - Connections that their clients have begun to close are separate, so that short connections do
 *   not displace open ones.
 * - Established and closing flows of a namespace beyond its share are separate (`excess_flows`), so
 *   that they displace only each other: see shares.h. */
#define FLOWS(name, entries)                         \
	struct {                                     \
		__uint(type, BPF_MAP_TYPE_LRU_HASH); \
		__uint(max_entries, entries);        \
		__type(key, struct flow_key);        \
		__type(value, struct flow);          \
	} name SEC(".maps")

FLOWS(connections, 131072);
FLOWS(datagrams, 131072);
FLOWS(new_connections, ONE_PACKET_FLOWS);
FLOWS(new_datagrams, ONE_PACKET_FLOWS);
FLOWS(closing_connections, 32768);
FLOWS(excess_flows, 65536);

/* The number of entries of each namespace. User space changes its part through mmap. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SHARES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct share);
} shares SEC(".maps");

/* The nodes that keep their open flows. A listener for TCP or SCTP without a previous table, and
 * not converging, has no elements here, because its flow entries are not looked up. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1048576);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct retained_node);
	__type(value, __u32);
} retained_nodes SEC(".maps");

/* The node of the first fragment of a datagram. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} fragments SEC(".maps");

/* The source ranges of all Services, in separate sets for each Service. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1048576);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct range_key);
	__type(value, __u32);
} ranges SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LISTENERS);
	__type(key, __u32[4]);
	__type(value, struct address);
} addresses SEC(".maps");

/* The frames that are for this host: the MAC address for each interface and VLAN. XDP sees every
 * frame on the wire. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct tag_key);
	__type(value, struct mac);
} tags SEC(".maps");

/* Reports of flow entries (struct entry) to user space. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} flow_reports SEC(".maps");

/* Scratch space of packet.h. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct walk);
} walks SEC(".maps");

/* Scratch space of messages.h. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct quote);
} quotes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LISTENERS);
	__type(key, __u32);
	__type(value, struct traffic);
} statistics SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, NODES);
	__type(key, __u32);
	__type(value, struct node_traffic);
} node_statistics SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, EVENTS);
	__type(key, enum event);
	__type(value, __u64);
} events SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LIMITS);
	__type(key, __u32);
	__type(value, struct allowance);
} allowances SEC(".maps");

/* The same for each namespace, by its index in `shares`. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SHARES);
	__type(key, __u32);
	__type(value, struct namespace_allowance);
} namespace_allowances SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct settings);
} settings SEC(".maps");

static __always_inline void count(enum event event)
{
	__u64 *counter = bpf_map_lookup_elem(&events, &event);
	if (counter)
		(*counter)++;
}

static __always_inline void count_drop(__u32 statistics_index, enum event reason)
{
	struct traffic *traffic = bpf_map_lookup_elem(&statistics, &statistics_index);

	count(reason);
	if (traffic)
		traffic->drops[reason]++;
}

static __always_inline void count_packet(__u32 statistics_index, __u32 node, bool opening,
					 __u32 length)
{
	struct traffic *traffic = bpf_map_lookup_elem(&statistics, &statistics_index);
	struct node_traffic *of_node = bpf_map_lookup_elem(&node_statistics, &node);

	if (!traffic || !of_node)
		return;
	traffic->packets++;
	traffic->bytes += length;
	of_node->packets++;
	of_node->bytes += length;
	if (opening) {
		traffic->flows++;
		of_node->flows++;
	}
}

static __always_inline void count_returned(__u32 statistics_index, __u32 node)
{
	struct node_traffic *of_node = bpf_map_lookup_elem(&node_statistics, &node);

	count_drop(statistics_index, RETURNED);
	if (of_node)
		of_node->returned++;
}

static __always_inline const struct settings *read_settings(void)
{
	__u32 only = 0;

	return bpf_map_lookup_elem(&settings, &only);
}

/* Return whether this host is a node of the cluster. If the settings cannot be read, return true:
 * then the kernel handles the packet. */
static __always_inline bool is_node(void)
{
	const struct settings *here = read_settings();

	return !here || here->flags & IS_NODE;
}

static __always_inline const struct next_hop *next_hop_to(__u32 node, bool ipv6)
{
	__u32 index = 2 * node + ipv6;
	const struct next_hop *hop = bpf_map_lookup_elem(&next_hops, &index);

	return hop && hop->kind != UNREACHABLE ? hop : 0;
}
