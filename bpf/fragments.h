/* Fragments: the first fragment has the ports and is handled like any packet. Its node is recorded,
 * and the later fragments follow it. The first fragments of different packets may arrive in any
 * order. A later fragment that arrives before its first fragment is dropped, and the sender has to
 * repeat the packet. */
#pragma once

#include "maps.h"
#include "packet.h"

/* Reassembly timeout of RFC 791 and Linux (ipfrag_time). */
#define FRAGMENT_LIFE_NS (30 * 1000000000ULL)

/* The key of RFC 791 (source, destination, protocol, identification) and RFC 8200 (the same without
 * the protocol). */
static __always_inline void set_fragment_key(struct fragment_key *key, const struct packet *packet)
{
	*key = (struct fragment_key){ .id = packet->fragment_id,
				      .protocol = packet->ipv6 ? 0 : packet->flow.protocol };
	__builtin_memcpy(key->source, packet->flow.source, 16);
	__builtin_memcpy(key->destination, packet->flow.destination, 16);
}

static __always_inline void record_fragment(const struct packet *packet, __u32 node,
					    __u32 statistics)
{
	struct fragment fragment = { .since_ns = bpf_ktime_get_ns(),
				     .node = node,
				     .statistics = statistics };
	struct fragment_key key;

	set_fragment_key(&key, packet);
	bpf_map_update_elem(&fragments, &key, &fragment, BPF_ANY);
}

static __always_inline const struct fragment *find_first_fragment(const struct packet *packet)
{
	struct fragment_key key;

	set_fragment_key(&key, packet);
	const struct fragment *first = bpf_map_lookup_elem(&fragments, &key);
	return first && bpf_ktime_get_ns() - first->since_ns < FRAGMENT_LIFE_NS ? first : 0;
}
