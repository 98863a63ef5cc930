/* Find the listener of a packet.
 *
 * A lookup in a hash map takes as long as all other steps of the program together: the kernel uses
 * function calls for it, which are slow on processors with mitigations against speculation about
 * return addresses. Therefore each CPU caches the listeners that it used recently in an array,
 * which the program reads inline (before Linux 6.10 an array lookup is a call too, and the gain is
 * smaller). After every change of `listeners`, user space changes `generation`, which invalidates
 * all caches. With a generation of 0 nothing is cached: this is for kernels on which programs of
 * one CPU can interrupt each other. */
#pragma once

#include "choose.h"
#include "maps.h"
#include "packet.h"

static __always_inline bool is_same(const struct listener_key *one,
				    const struct listener_key *other)
{
	const __u64 *ours = (const void *)one, *theirs = (const void *)other;

	return ours[0] == theirs[0] && ours[1] == theirs[1] && ours[2] == theirs[2];
}

/* Copy the listener, because the kernel may reuse a replaced element of a preallocated map while
 * the program still reads it. */
static __always_inline bool find_listener(const struct packet *packet, struct listener *listener)
{
	struct listener_key key;
	/* Written as one word, as the lookup reads it: reading a word that was written in parts
	 * stalls the processor. */
	__u64 rest = packet->flow.destination_port | (__u32)packet->flow.protocol << 16;
	__u32 only = 0, at = mix(fold(packet->flow.destination) ^ rest * 0x9E3779B97F4A7C15ULL) %
			     CACHED_LISTENERS;
	struct cached_listener *cached = bpf_map_lookup_elem(&listener_cache, &at);
	/* The generation is read before the listener, so a listener that is cached with a new
	 * generation is never older than the change. (A processor that reorders reads, as arm64
	 * may, would have to do so over microseconds; each audit changes the generation again.) */
	const volatile __u64 *current = bpf_map_lookup_elem(&generation, &only);
	__u64 now = current ? *current : 0;

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
		*cached = (struct cached_listener){ .key = key,
						    .generation = now,
						    .listener = *listener };
	return true;
}
