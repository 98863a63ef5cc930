/* Choose the node for a packet of a listener.
 * A slot that has kept its node needs no state. Where the tables changed, `previous` names the node that had the slot before:
 * connections from before the change have no entry and stay there, those opened since are the entries. So the connection
 * table holds only what was opened after a change, in slots that changed (JET, CoNEXT'21, doi 10.1145/3485983.3494851). */
#pragma once

#include <linux/in.h>

#include "maps.h"
#include "packet.h"

#define SECOND_NS 1000000000ULL

static __always_inline __u64 mix(__u64 value)
{
	value ^= value >> 32;
	value *= 0xD6E8FEB86659FD93ULL;
	value ^= value >> 32;
	value *= 0xD6E8FEB86659FD93ULL;
	return value ^ value >> 32;
}

static __always_inline __u64 fold(const __u32 *address)
{
	__u64 high = (__u64)address[0] << 32 | address[1];
	__u64 low = (__u64)address[2] << 32 | address[3];
	return high * 0x9E3779B97F4A7C15ULL ^ low;
}

/* The same for equal flows on every gateway: they have to agree without talking to each other. */
static __always_inline __u32 hash_flow(const struct flow_key *flow, bool by_source)
{
	__u64 hash = mix(fold(flow->source));

	if (!by_source) {
		__u64 ports = (__u64)flow->source_port << 24 | (__u32)flow->destination_port << 8 | flow->protocol;
		hash = mix(hash ^ fold(flow->destination) ^ ports * 0x9E3779B97F4A7C15ULL);
	}
	return hash;
}

/* Multiply-shift, not modulo: a table twice as long then splits each slot into two, which the transition between sizes rests on. */
static __always_inline __u32 slot(__u32 offset, __u32 size, __u32 hash)
{
	__u32 index = (__u64)hash * size >> 32;
	__u32 at = offset + index / SLOTS_PER_CHUNK;
	struct chunk *chunk = bpf_map_lookup_elem(&arena, &at);

	return chunk ? chunk->node[index % SLOTS_PER_CHUNK] : NONE;
}

/* So many inserts a second and CPU and no more, so that a flood of SYNs cannot push out the entries that matter. */
static __always_inline bool may_insert(__u32 kind)
{
	__u32 only = 0;
	struct settings *limit = bpf_map_lookup_elem(&settings, &only);
	struct allowance *allowance = bpf_map_lookup_elem(&allowances, &kind);

	if (!limit || !allowance)
		return false;
	__u64 now = bpf_ktime_get_ns();
	if (now - allowance->since_ns >= SECOND_NS) {
		allowance->since_ns = now;
		allowance->used = 0;
	}
	return allowance->used++ < limit->inserts_per_s;
}

static __always_inline bool insert(void *table, __u32 kind, const struct flow_key *key, __u32 node)
{
	struct flow flow = { .node = node };

	if (may_insert(kind) && bpf_map_update_elem(table, key, &flow, BPF_ANY) == 0)
		return true;
	count(TRACK_REFUSED);
	return false;
}

/* A SYN where connections are tracked makes an entry. Where they are not, and when no entry can be made, one that an older
 * connection of the same ports left has to go: it would speak for the new one, at once or after the next change. */
static __always_inline __u32 open_tcp(const struct flow_key *key, __u32 current, __u32 previous)
{
	if (current == NONE)
		return NONE;
	if (previous != NONE && insert(&connections, 0, key, current))
		return current;
	if (bpf_map_lookup_elem(&connections, key))
		bpf_map_delete_elem(&connections, key);
	/* Without an entry the connection's later packets go where untracked ones go, so its SYN has to go there too. */
	return previous == NONE || previous == TRACKED ? current : previous;
}

static __always_inline __u32 choose_tcp(const struct packet *packet, __u32 current, __u32 previous)
{
	__u32 untracked = previous == TRACKED ? current : previous;

	if (packet->opening)
		return open_tcp(&packet->flow, current, previous);
	if (previous == NONE)
		return current;
	struct flow *flow = bpf_map_lookup_elem(&connections, &packet->flow);
	return flow ? flow->node : untracked;
}

/* UDP has no SYN: every flow has an entry, worth something as long as its node is one that the slot knows. */
static __always_inline __u32 choose_udp(const struct packet *packet, __u32 current, __u32 previous, bool *opening)
{
	struct flow *flow = bpf_map_lookup_elem(&datagrams, &packet->flow);

	if (flow && (flow->node == current || flow->node == previous))
		return flow->node;
	if (current != NONE && !packet->error) {
		*opening = true;
		insert(&datagrams, 1, &packet->flow, current);
	}
	return current;
}

static __always_inline __u32 choose(struct packet *packet, const struct listener *listener, __u32 *current)
{
	bool by_source = listener->flags & BY_SOURCE, previous_by_source = listener->flags & PREVIOUS_BY_SOURCE;
	__u32 hash = hash_flow(&packet->flow, by_source);
	__u32 previous = NONE;

	*current = listener->current_size ? slot(listener->current_offset, listener->current_size, hash) : NONE;
	if (listener->previous_size) {
		if (by_source != previous_by_source)
			hash = hash_flow(&packet->flow, previous_by_source);
		previous = slot(listener->previous_offset, listener->previous_size, hash);
	}
	if (packet->flow.protocol == IPPROTO_UDP)
		return choose_udp(packet, *current, previous, &packet->opening);
	return choose_tcp(packet, *current, previous);
}
