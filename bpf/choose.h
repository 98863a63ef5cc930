/* Choose the node for a packet of a listener.
 * A slot that has kept its node needs no state. Where the tables changed, `previous` names the node that had the slot before:
 * connections from before the change have no entry and stay there, those opened since are the entries. So the tables of
 * connections hold only what was opened after a change, in slots that changed (JET, CoNEXT'21, doi 10.1145/3485983.3494851).
 * Choosing only reads; the one exception is the time of a datagram's entry. What is to be kept of it is kept by `keep`, once it is certain that
 * the packet is dealt with here. */
#pragma once

#include <linux/in.h>

#include "maps.h"
#include "packet.h"

#define SECOND_NS 1000000000ULL
#define NEAR (1 << 17) /* bytes that a client may send before its connection's note has become an entry */

enum keeping {
	NOTHING,
	OPEN,     /* the flow's first packet: a note among the new ones */
	PROMOTE,  /* its second, or one that shows that it was not ended: an entry among the kept ones */
	CLOSE,    /* its client ends it: the entry goes to where it pushes out none that stay */
	REASSIGN, /* its node is none of the slot's any more: the entry gets another */
	FORGET,   /* an older connection with the same ports may have left entries */
};

struct choice {
	__u32 node;
	__u32 otherwise; /* the node if no entry can be made */
	__u32 current;   /* who may answer for a node that has left */
	enum keeping keeping;
	bool changing; /* the slot has more than one node */
	bool opening;
	bool held; /* the entry that tells the node may not be there yet */
	struct flow *entry; /* that of the flow, where keeping changes it */
	__u32 now;          /* the `tick` of a datagram */
};

/* How long the entry of a silent flow of datagrams is valid, in ticks of 2^30 ns: 300 s, as RFC 4787 (REQ-5) recommends. After that
 * the ports may be those of a new flow, which must not go to a node that drains; a node forgets a silent flow after 120 s. */
#define DATAGRAM_LIFETIME 280

/* A coarse clock that is never 0. */
static __always_inline __u32 tick(void)
{
	return (bpf_ktime_get_ns() >> 30) + 1;
}

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

/* So many a second and CPU and no more. */
static __always_inline bool may(enum limited what, __u32 per_s)
{
	struct allowance *allowance = bpf_map_lookup_elem(&allowances, &what);

	if (!allowance)
		return false;
	__u64 now = bpf_ktime_get_ns();
	if (now - allowance->since_ns >= SECOND_NS) {
		allowance->since_ns = now;
		allowance->used = 0;
	}
	return allowance->used++ < per_s;
}

/* `mark`: the sequence number or, for datagrams, the tick. */
static __always_inline bool insert(void *table, enum limited what, const struct flow_key *key, __u32 node, __u32 mark)
{
	const struct settings *limits = read_settings();
	struct flow flow = { .node = node, .sequence = mark };
	bool note = what == NEW_CONNECTIONS || what == NEW_DATAGRAMS;

	return limits && may(what, note ? limits->notes_per_s : limits->inserts_per_s) &&
	       bpf_map_update_elem(table, key, &flow, BPF_ANY) == 0;
}

/* To user space, which tells other gateways. NONE: the entry is gone. With CLOSING: it is in `closing_connections` now. */
static __always_inline void tell(const struct flow_key *key, __u32 node)
{
	const struct settings *wishes = read_settings();
	struct entry entry = { .key = *key, .node = node };

	if (wishes && wishes->flags & TELL && bpf_ringbuf_output(&news, &entry, sizeof(entry), 0))
		count(NEWS_LOST);
}

/* While the entries of an older program are copied, a flow without an entry that opens nothing may have begun at that program, on
 * the current node, or long before, on the previous one. The limit in time lets such flows pass should the copying process die. */
static __always_inline bool is_held(const struct choice *choice, __u32 previous)
{
	const struct settings *settings = read_settings();

	return previous != choice->current && settings && tick() <= settings->copying_until;
}

static __always_inline void forget(const struct flow_key *key)
{
	if (bpf_map_lookup_elem(&new_connections, key))
		bpf_map_delete_elem(&new_connections, key);
	bool kept = bpf_map_lookup_elem(&connections, key) && bpf_map_delete_elem(&connections, key) == 0;
	if (bpf_map_lookup_elem(&closing_connections, key) && bpf_map_delete_elem(&closing_connections, key) == 0)
		kept = true;
	if (kept)
		tell(key, NONE);
}

static __always_inline bool is_keeper(__u32 node, __u32 previous, const struct choice *choice, __u32 statistics)
{
	struct keeper key = { .statistics = statistics, .node = node };

	return node == choice->current || node == previous || bpf_map_lookup_elem(&keepers, &key);
}

/* Anybody can send a SYN with the ports of an open connection, whose own segments have other sequence numbers: they stay where
 * they are. An SCTP INIT carries nothing that could be compared. */
static __always_inline bool speaks_for(const struct flow *note, const struct packet *packet)
{
	return packet->error || packet->flow.protocol != IPPROTO_TCP || packet->sequence - note->sequence < NEAR;
}

/* Whether the client may have sent this after what ended the connection, by its own word: else somebody has forged that. Of what
 * another gateway has told, the sequence is not known. */
static __always_inline bool has_ended(const struct flow *ending, const struct packet *packet)
{
	return packet->flow.protocol != IPPROTO_TCP || !ending->sequence || packet->sequence - ending->sequence < NEAR;
}

static __always_inline void choose_opening(const struct packet *packet, const struct listener *listener, __u32 previous,
					   __u32 untracked, struct choice *choice)
{
	struct flow *flow;

	choice->opening = true;
	if (choice->current == NONE)
		return;
	if (previous == NONE) {
		choice->keeping = FORGET;
		return;
	}
	flow = bpf_map_lookup_elem(&connections, &packet->flow);
	if (!flow)
		flow = bpf_map_lookup_elem(&closing_connections, &packet->flow);
	choice->keeping = OPEN;
	choice->entry = flow;
	/* Without a note the connection's later packets go where those of the flow go now, so its SYN has to go there too. */
	choice->otherwise = flow && is_keeper(flow->node, previous, choice, listener->statistics) ? flow->node : untracked;
}

static __always_inline void choose_stream(const struct packet *packet, const struct listener *listener, __u32 previous,
					  struct choice *choice)
{
	__u32 untracked = previous == NONE || previous == TRACKED ? choice->current : previous;
	struct flow *flow, *note = 0;
	bool kept, ending = false;

	choice->node = choice->current;
	if (packet->opening) {
		choose_opening(packet, listener, previous, untracked, choice);
		return;
	}
	if (previous == NONE)
		return;
	choice->node = untracked;
	flow = bpf_map_lookup_elem(&connections, &packet->flow);
	kept = flow;
	if (!flow || (flow->challenged && !packet->error))
		note = bpf_map_lookup_elem(&new_connections, &packet->flow);
	if (note && speaks_for(note, packet))
		flow = note;
	if (!flow) {
		flow = bpf_map_lookup_elem(&closing_connections, &packet->flow);
		ending = flow;
	}
	if (!flow && !packet->error)
		choice->held = is_held(choice, untracked);
	if (!flow || !is_keeper(flow->node, previous, choice, listener->statistics))
		return;
	choice->node = flow->node;
	if (packet->error)
		return;
	if (packet->closing) {
		/* A SYN and what ends it again, both of which anybody can send, take nothing from an older entry. */
		choice->keeping = ending || (flow == note && kept) ? NOTHING : CLOSE;
		choice->entry = flow == note ? note : 0;
	} else if (flow == note || (ending && !has_ended(flow, packet))) {
		choice->keeping = PROMOTE;
		choice->entry = flow;
	}
}

/* UDP has no SYN: every flow has an entry, worth something as long as its node serves the listener. Where the slot has had one
 * node only, no flow that lives is on another: what says so is about an older flow of the same ports, which went this way or
 * another gateway's before the tables changed. */
static __always_inline void choose_datagram(const struct packet *packet, const struct listener *listener, __u32 previous,
					    struct choice *choice)
{
	struct flow *flow = bpf_map_lookup_elem(&datagrams, &packet->flow);
	bool kept = flow, alive;

	if (!flow)
		flow = bpf_map_lookup_elem(&new_datagrams, &packet->flow);
	choice->node = choice->current;
	choice->now = tick();
	/* A QUIC datagram that opens nothing belongs to the flow of the entry, however long that was silent. */
	alive = flow && (!flow->seen || choice->now - flow->seen < DATAGRAM_LIFETIME || packet->continuing);
	if (flow && (choice->changing ? alive && is_keeper(flow->node, previous, choice, listener->statistics)
				      : flow->node == choice->current)) {
		choice->node = flow->node;
		if (!packet->error && flow->seen != choice->now)
			flow->seen = choice->now;
		choice->keeping = kept || packet->error ? NOTHING : PROMOTE;
		return;
	}
	if (!flow && packet->continuing && choice->changing && previous != TRACKED) {
		choice->node = previous; /* it came by another gateway so far */
		choice->held = is_held(choice, previous);
	} else {
		choice->opening = choice->current != NONE && !packet->error;
	}
	choice->otherwise = choice->node;
	if (choice->node == NONE || packet->error)
		return;
	choice->keeping = flow ? REASSIGN : OPEN;
	choice->entry = flow;
}

static __always_inline void choose(struct packet *packet, const struct listener *listener, struct choice *choice)
{
	bool by_source = listener->flags & BY_SOURCE, previous_by_source = listener->flags & PREVIOUS_BY_SOURCE;
	__u32 previous = NONE;

	packet->hash = hash_flow(&packet->flow, by_source);
	choice->current = listener->current_size ? slot(listener->current_offset, listener->current_size, packet->hash) : NONE;
	if (listener->previous_size) {
		__u32 hash = by_source == previous_by_source ? packet->hash : hash_flow(&packet->flow, previous_by_source);
		previous = slot(listener->previous_offset, listener->previous_size, hash);
	}
	if (previous == NONE && listener->flags & YOUNG)
		previous = TRACKED;
	choice->changing = previous != NONE;
	if (packet->flow.protocol == IPPROTO_UDP)
		choose_datagram(packet, listener, previous, choice);
	else
		choose_stream(packet, listener, previous, choice);
}

/* A flow that is opened is noted in a table of its own. What an older connection of the same ports left speaks for its own packets
 * until one of the new connection's shows that there is one. */
static __always_inline __u32 open(const struct packet *packet, const struct choice *choice)
{
	const struct flow_key *key = &packet->flow;
	bool datagram = key->protocol == IPPROTO_UDP, noted;

	if (datagram) {
		noted = insert(&new_datagrams, NEW_DATAGRAMS, key, choice->node, choice->now);
	} else {
		noted = insert(&new_connections, NEW_CONNECTIONS, key, choice->node, packet->sequence);
		if (noted && choice->entry)
			choice->entry->challenged = true;
	}
	if (noted)
		return choice->node;
	count(TRACK_REFUSED);
	/* A SYN that is sent again has its note, which speaks for what follows. */
	struct flow *note = datagram ? 0 : bpf_map_lookup_elem(&new_connections, key);
	return note && speaks_for(note, packet) ? note->node : choice->otherwise;
}

/* The second packet shows that there is somebody. Where no entry can be made now, the next packet tries again. */
static __always_inline void promote(const struct packet *packet, const struct choice *choice)
{
	const struct flow_key *key = &packet->flow;

	if (key->protocol == IPPROTO_UDP) {
		if (!insert(&datagrams, KEPT_DATAGRAMS, key, choice->node, choice->now))
			return;
		bpf_map_delete_elem(&new_datagrams, key);
	} else {
		if (!choice->entry)
			return; /* the verifier cannot know */
		if (!insert(&connections, KEPT_CONNECTIONS, key, choice->node, 0)) {
			choice->entry->sequence = packet->sequence;
			return;
		}
		bpf_map_delete_elem(&new_connections, key);
		bpf_map_delete_elem(&closing_connections, key); /* of an older connection */
	}
	if (choice->changing) /* elsewhere the tables say it, to every gateway */
		tell(key, choice->node);
}

/* A table that only pushes out what was not used for long would hold what has ended, and lose who is silent for a while. What ends
 * is not taken out: a client that sends nothing more may be sent much yet, and anybody can send a FIN. */
static __always_inline void close(const struct packet *packet, const struct choice *choice)
{
	const struct flow_key *key = &packet->flow;

	if (!insert(&closing_connections, CLOSED_CONNECTIONS, key, choice->node, packet->sequence))
		return;
	if (choice->entry)
		bpf_map_delete_elem(&new_connections, key);
	else
		bpf_map_delete_elem(&connections, key);
	if (choice->changing)
		tell(key, choice->node | CLOSING);
}

/* Do what choosing left to be done. The node, which is another one if no entry could be made. */
static __always_inline __u32 keep(const struct packet *packet, const struct choice *choice)
{
	switch (choice->keeping) {
	case OPEN:
		return open(packet, choice);
	case PROMOTE:
		promote(packet, choice);
		break;
	case CLOSE:
		close(packet, choice);
		break;
	case REASSIGN:
		choice->entry->node = choice->node;
		choice->entry->seen = choice->now;
		tell(&packet->flow, choice->node); /* whatever the tables say: others may have been told of the node before */
		break;
	case FORGET:
		forget(&packet->flow);
		break;
	case NOTHING:
		break;
	}
	return choice->node;
}

static __always_inline bool in_ranges(__u32 set, const __u32 *source)
{
	struct range_key key = { .prefix_length = 32 + 128, .set = set };

	__builtin_memcpy(key.address, source, 16);
	return bpf_map_lookup_elem(&ranges, &key);
}
