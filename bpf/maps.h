/* The tables in the kernel. Sizes of `arena`, `connections` and `datagrams` are what tests of the program need: the gateway makes
 * them with its own (drivers/direct/maps/pins.py, Sizes).
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include <stdbool.h>

#include "structs.h"

#define LISTENERS 32768 /* as many as the smallest tables that the arena has room for */
#define NODES 4096
#define NOTES 131072
#define CACHED 4096 /* a power of two */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LISTENERS);
	__type(key, struct listener_key);
	__type(value, struct listener);
} listeners SEC(".maps");

/* What each CPU has found there lately: see listeners.h. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, CACHED);
	__type(key, __u32);
	__type(value, struct cached_listener);
} listener_cache SEC(".maps");

/* Of `listeners`: another after each change there. User space writes it through mmap. */
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

/* All slots of all listeners. User space writes through mmap, beside what is live. */
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
	__type(value, struct way);
} ways SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NODES);
	__type(key, __u32);
	__type(value, struct node_name);
} node_names SEC(".maps");

/* TCP connections and UDP flows apart: a flood of datagrams must not push out connections. And those of which one packet was
 * seen apart from the others: a flood of SYNs, or of datagrams from made-up sources, pushes out only such as itself. And those
 * that their clients have begun to end: connections that come and go do not push out those that stay. */
#define FLOWS(name, entries)                         \
	struct {                                     \
		__uint(type, BPF_MAP_TYPE_LRU_HASH); \
		__uint(max_entries, entries);        \
		__type(key, struct flow_key);        \
		__type(value, struct flow);          \
	} name SEC(".maps")

FLOWS(connections, 131072);
FLOWS(datagrams, 131072);
FLOWS(new_connections, NOTES);
FLOWS(new_datagrams, NOTES);
FLOWS(closing_connections, 32768);

/* Which nodes keep the flows that they have. Of listeners without a previous table none is named, unless they are for UDP: there
 * no entry is asked for. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1048576);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct retained_node);
	__type(value, __u32);
} retained_nodes SEC(".maps");

/* Where the first fragment of a datagram went. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} fragments SEC(".maps");

/* Source ranges of all Services, each Service's in a set of its own. */
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

/* Which frames are for this host, where XDP sees all that is on the wire: the hardware address for each VLAN. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct tag_key);
	__type(value, struct mac);
} tags SEC(".maps");

/* New entries (struct entry), for those who want to know. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} news SEC(".maps");

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
	__uint(max_entries, LIMITED);
	__type(key, __u32);
	__type(value, struct allowance);
} allowances SEC(".maps");

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

static __always_inline void count_packet(__u32 statistics_index, __u32 node, bool opening, __u32 length)
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

/* Whether this host is a node of the cluster; also where the settings cannot be read, which leaves packets to the kernel. */
static __always_inline bool is_node(void)
{
	const struct settings *here = read_settings();

	return !here || here->flags & AMONG_NODES;
}

static __always_inline const struct way *way_to(__u32 node, bool ipv6)
{
	__u32 index = 2 * node + ipv6;
	const struct way *way = bpf_map_lookup_elem(&ways, &index);

	return way && way->kind != NOWHERE ? way : 0;
}
