/* Find the listener that a packet is for.
 * A look into a hash map takes as long as all the rest of the program: the kernel does it by calls, and a processor that has to be
 * kept from guessing where a call returns to is slow at them. So each CPU keeps the listeners that it has found lately, in an
 * array, which the program reads by itself (before Linux 6.10 that is a call, too, and less is gained). Whoever changes `listeners`
 * then changes `generation`, and nothing kept counts any more. A generation of 0 says that nothing is to be kept: where programs of
 * one CPU can interrupt each other. */
#pragma once

#include "choose.h"
#include "maps.h"
#include "packet.h"

static __always_inline bool is_same(const struct listener_key *one, const struct listener_key *other)
{
	const __u64 *ours = (const void *)one, *theirs = (const void *)other;

	return ours[0] == theirs[0] && ours[1] == theirs[1] && ours[2] == theirs[2];
}

/* A copy: a replaced element of a preallocated map may be used anew while it is still being read. */
static __always_inline bool find_listener(const struct packet *packet, struct listener *listener)
{
	struct listener_key key;
	/* As one word: the lookup reads it so, and would have to wait for what is written in pieces. */
	__u64 rest = packet->flow.destination_port | (__u32)packet->flow.protocol << 16;
	__u32 only = 0, at = mix(fold(packet->flow.destination) ^ rest * 0x9E3779B97F4A7C15ULL) % CACHED;
	struct cached_listener *cached = bpf_map_lookup_elem(&listener_cache, &at);
	/* Read before the listener is: what is found after a change has been told is never older than that. (A processor that does
	 * not keep the order of reads, as arm64, would have to be microseconds out; audits tell anew.) */
	const volatile __u64 *told = bpf_map_lookup_elem(&generation, &only);
	__u64 now = told ? *told : 0;

	__builtin_memcpy(key.address, packet->flow.destination, 16);
	__builtin_memcpy(&key.port, &rest, 8);
	if (now && cached && cached->generation == now && is_same(&cached->key, &key)) {
		*listener = cached->listener;
		return true;
	}
	const struct listener *found = bpf_map_lookup_elem(&listeners, &key);
	if (!found)
		return false;
	*listener = *found;
	if (now && cached)
		*cached = (struct cached_listener){ .key = key, .generation = now, .listener = *listener };
	return true;
}
