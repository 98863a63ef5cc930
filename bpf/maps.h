/* The tables in the kernel. Sizes of `arena`, `connections` and `datagrams` are defaults; the loader may set others. */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "structs.h"

#define LISTENERS 16384
#define NODES 4096

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LISTENERS);
	__type(key, struct listener_key);
	__type(value, struct listener);
} listeners SEC(".maps");

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
	__uint(max_entries, NODES);
	__type(key, __u32);
	__type(value, struct node);
} nodes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NODES);
	__type(key, __u32);
	__type(value, struct node_name);
} node_names SEC(".maps");

/* TCP connections and UDP flows apart: a flood of datagrams must not push out connections. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 131072);
	__type(key, struct flow_key);
	__type(value, struct flow);
} connections SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow_key);
	__type(value, struct flow);
} datagrams SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LISTENERS);
	__type(key, __u32);
	__type(value, struct traffic);
} statistics SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, EVENTS);
	__type(key, enum event);
	__type(value, __u64);
} events SEC(".maps");

/* 0: connections, 1: datagrams */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
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
