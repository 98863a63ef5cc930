/* Choose the node for a packet of a listener.
 *
 * A slot that has kept its node needs no state. After a change of the tables, `previous` names the
 * node that had the slot before. Connections from before the change have no entry and stay on this
 * node; connections that were opened since have entries. So the tables of connections contain only
 * connections that were opened after a change, in slots that changed (JET, CoNEXT'21, doi
 * 10.1145/3485983.3494851).
 *
 * A flow with only one packet so far has a tentative entry (in `new_connections` or
 * `new_datagrams`). The second packet promotes it to an established entry.
 *
 * `choose` only reads, except for the time of a datagram's entry. `apply_action` makes the changes,
 * once it is certain that this program handles the packet. */
#pragma once

#include <linux/in.h>

#include "maps.h"
#include "packet.h"
#include "shares.h"

#define SECOND_NS 1000000000ULL
#define NEAR (1 << 17) /* bytes that a client may send before its entry is established */

enum flow_action {
	NO_ACTION,
	OPEN, /* the first packet of the flow: create a tentative entry */
	/* The second packet, or a packet that disproves a forged FIN: create an established
	 * entry. */
	PROMOTE,
	CLOSE,    /* the client closes the connection: move the entry to that of closing ones */
	REASSIGN, /* the entry's node does not belong to the slot any more: change the node */
	/* Remove entries that an older connection with the same ports may have left. */
	FORGET,
};

struct choice {
	__u32 node;
	__u32 fallback; /* the node if no entry can be created */
	__u32 current;  /* the slot's current node, which answers for a node that has left */
	enum flow_action action;
	bool in_transition; /* the slot is in transition: connections may be on several nodes */
	bool opening;
	bool refused;       /* no entry could be created for the new flow */
	bool held;          /* the flow entry may not be copied yet; drop the packet */
	struct flow *entry; /* the entry of the flow, if the action changes it */
	__u32 now;          /* the `tick` of a datagram */
	__u32 share;        /* the index of the listener's namespace in `shares` */
};

/* How long the entry of a silent UDP flow is valid, in ticks of 2^30 ns: 300 s, as RFC 4787 (REQ-5)
 * recommends. After this time the ports may belong to a new flow, which must not go to a draining
 * node. A node forgets a silent flow after 120 s. */
#define DATAGRAM_LIFETIME 280

/* Return a coarse clock that is never 0. */
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

/* Return the hash of a flow. It is equal on every gateway, because gateways have to agree without
 * communication. */
static __always_inline __u32 hash_flow(const struct flow_key *flow, bool by_source)
{
	__u64 hash = mix(fold(flow->source));

	if (!by_source) {
		__u64 ports = (__u64)flow->source_port << 24 | (__u32)flow->destination_port << 8 |
			      flow->protocol;
		hash = mix(hash ^ fold(flow->destination) ^ ports * 0x9E3779B97F4A7C15ULL);
	}
	return hash;
}

/* Return the node of the hash's slot. The index is computed by multiply-shift, not by modulo, so
 * that each slot is split into two when the size of a table doubles. The transition between sizes
 * relies on this. */
static __always_inline __u32 slot(__u32 offset, __u32 size, __u32 hash)
{
	__u32 index = (__u64)hash * size >> 32;
	__u32 at = offset + index / SLOTS_PER_CHUNK;
	struct chunk *chunk = bpf_map_lookup_elem(&arena, &at);

	return chunk ? chunk->node[index % SLOTS_PER_CHUNK] : NONE;
}

/* Return whether another action of this type is within its limit for each second and CPU. */
static __always_inline bool within_limit(enum limit limit, __u32 per_s)
{
	struct allowance *allowance = bpf_map_lookup_elem(&allowances, &limit);

	if (!allowance)
		return false;
	__u64 now = bpf_ktime_get_ns();
	if (now - allowance->since >= SECOND_NS) {
		allowance->since = now;
		allowance->used = 0;
	}
	return allowance->used++ < per_s;
}

/* Return whether another flow entry of this type is within its limit for each second and CPU. A
 * namespace may use three quarters of what the others have not used, so that a flood to a Service of
 * one namespace leaves a quarter to the others, and three quarters of that to one of them. This is
 * more than its share of the tables, because what nobody uses within the second is lost. `shared`:
 * false for no such limit. */
static __always_inline bool within_share(enum limit limit, __u32 per_s, __u32 share, bool shared)
{
	struct allowance *all = bpf_map_lookup_elem(&allowances, &limit);
	struct namespace_allowance *own = bpf_map_lookup_elem(&namespace_allowances, &share);

	if (!all || !own)
		return false;
	__u32 now = bpf_ktime_get_ns() / SECOND_NS;
	if (all->since != now) {
		all->since = now;
		all->used = 0;
	}
	if (own->second != now)
		*own = (struct namespace_allowance){ .second = now };
	__u64 used = own->used[limit], others = all->used > used ? all->used - used : 0,
	      left = per_s > others ? per_s - others : 0;
	if (used >= (shared ? left - left / 4 : left))
		return false;
	own->used[limit]++;
	all->used++;
	return true;
}

/* Insert an entry, within the rate limit. `mark`: the sequence number or, for datagrams, the tick.
 */
static __always_inline bool insert(void *table, enum limit limit, const struct flow_key *key,
				   const struct choice *choice, __u32 mark)
{
	const struct settings *config = read_settings();
	struct flow flow = { .node = choice->node, .sequence = mark };
	bool tentative = limit == NEW_CONNECTIONS || limit == NEW_DATAGRAMS;

	return config &&
	       within_share(limit, tentative ? config->tentative_per_s : config->inserts_per_s,
			    choice->share, config->namespace_share < 1 << 16) &&
	       bpf_map_update_elem(table, key, &flow, BPF_ANY) == 0;
}

/* Report an entry to user space, which sends it to other gateways. NONE: the entry was removed.
 * With CLOSING: the entry is in `closing_connections` now. */
static __always_inline void report(const struct flow_key *key, __u32 node)
{
	const struct settings *config = read_settings();
	struct entry entry = { .key = *key, .node = node };

	if (config && config->flags & REPORT_ENTRIES &&
	    bpf_ringbuf_output(&flow_reports, &entry, sizeof(entry), 0))
		count(REPORTS_LOST);
}

/* Return whether a packet that does not open a flow, and has no entry, must be dropped for now.
 * While the entries of an older program are copied, the node of the flow is uncertain: the current
 * node if the older program tracked the flow, and the previous node if the flow is older. The time
 * limit lets the packets pass if the copying process dies. The clock is read only while entries are
 * copied, because reading it costs 30 ns. */
static __always_inline bool is_held(const struct choice *choice, __u32 previous)
{
	const struct settings *config = read_settings();

	return previous != choice->current && config && config->copying_until &&
	       tick() <= config->copying_until;
}

/* Return the established entry of a connection. */
static __always_inline struct flow *find_connection(const struct flow_key *key)
{
	struct flow *flow = bpf_map_lookup_elem(&connections, key);

	return flow ? flow : find_excess(key);
}

/* Return the established entry of a datagram's flow. */
static __always_inline struct flow *find_datagrams(const struct flow_key *key)
{
	struct flow *flow = bpf_map_lookup_elem(&datagrams, key);

	return flow ? flow : find_excess(key);
}

/* Create or replace the established entry of the flow, in the namespace's share of the table if it
 * is not used up. */
static __always_inline bool establish(void *table, enum shared_table shared, enum limit limit,
				      const struct flow_key *key, const struct choice *choice,
				      __u32 mark)
{
	bool known = bpf_map_lookup_elem(table, key);

	if (!known && !has_room(choice->share, shared)) {
		/* Counted first, so that the entry is found as soon as it exists. */
		count_entries(TOTAL, EXCESS, 1);
		return insert(&excess_flows, limit, key, choice, mark);
	}
	if (!insert(table, limit, key, choice, mark))
		return false;
	if (!known) {
		count_entries(choice->share, shared, 1);
		if (find_excess(key))
			bpf_map_delete_elem(&excess_flows, key);
	}
	return true;
}

/* Remove the entry of a connection from a table with shares. Return whether there was one. A lookup
 * is cheaper than an attempt to delete an entry, and mostly there is none. */
static __always_inline bool remove_within(void *table, enum shared_table shared,
					  const struct flow_key *key, __u32 share)
{
	if (!bpf_map_lookup_elem(table, key) || bpf_map_delete_elem(table, key))
		return false;
	count_entries(share, shared, -1);
	return true;
}

/* Remove the established entry of a connection. Return whether there was one. */
static __always_inline bool remove_connection(const struct flow_key *key, __u32 share)
{
	return remove_within(&connections, CONNECTIONS, key, share) ||
	       (find_excess(key) && bpf_map_delete_elem(&excess_flows, key) == 0);
}

/* Remove all entries of the flow. */
static __always_inline void forget(const struct flow_key *key, __u32 share)
{
	if (bpf_map_lookup_elem(&new_connections, key))
		bpf_map_delete_elem(&new_connections, key);
	bool established = remove_connection(key, share);
	if (remove_within(&closing_connections, CLOSING_CONNECTIONS, key, share) || established)
		report(key, NONE);
}

/* Return whether the node may have connections of this slot. An entry with another node is void. */
static __always_inline bool is_retained(__u32 node, __u32 previous, const struct choice *choice,
					__u32 statistics)
{
	struct retained_node key = { .statistics = statistics, .node = node };

	return node == choice->current || node == previous ||
	       bpf_map_lookup_elem(&retained_nodes, &key);
}

/* Return whether the packet belongs to the connection of the tentative entry. A SYN with the ports
 * of an open connection can be forged; the segments of the open connection have other sequence
 * numbers, and stay on their node. An SCTP INIT contains nothing to compare. */
static __always_inline bool matches_tentative(const struct flow *tentative,
					      const struct packet *packet)
{
	return packet->error || packet->flow.protocol != IPPROTO_TCP ||
	       packet->sequence - tentative->sequence < NEAR;
}

/* Return whether the client may have sent this packet after the segment that closed the connection.
 * If not, that segment was forged. True if the sequence number is unknown, as in an entry that
 * another gateway has sent. */
static __always_inline bool follows_close(const struct flow *ending, const struct packet *packet)
{
	return packet->flow.protocol != IPPROTO_TCP || !ending->sequence ||
	       packet->sequence - ending->sequence < NEAR;
}

/* Choose for the first packet of a TCP connection or SCTP association. `untracked`: the node of
 * connections without an entry. */
static __always_inline void choose_opening(const struct packet *packet,
					   const struct listener *listener, __u32 previous,
					   __u32 untracked, struct choice *choice)
{
	struct flow *flow;

	choice->opening = true;
	if (choice->current == NONE)
		return;
	if (previous == NONE) {
		choice->action = FORGET;
		return;
	}
	flow = find_connection(&packet->flow);
	if (!flow)
		flow = bpf_map_lookup_elem(&closing_connections, &packet->flow);
	choice->action = OPEN;
	choice->entry = flow;
	/* Without a tentative entry, the next packets of the connection go where packets of the
	 * flow go now, so the SYN must go there too. */
	choice->fallback = flow && is_retained(flow->node, previous, choice, listener->statistics)
				   ? flow->node
				   : untracked;
}

/* Choose for TCP and SCTP. */
static __always_inline void choose_stream(const struct packet *packet,
					  const struct listener *listener, __u32 previous,
					  struct choice *choice)
{
	__u32 untracked = previous == NONE || previous == TRACKED ? choice->current : previous;
	struct flow *flow, *tentative = 0;
	bool established, ending = false;

	choice->node = choice->current;
	if (packet->opening) {
		choose_opening(packet, listener, previous, untracked, choice);
		return;
	}
	if (previous == NONE)
		return; /* not in transition: all connections are on the current node */
	choice->node = untracked;
	flow = find_connection(&packet->flow);
	established = flow;
	/* A challenged entry may be of an older connection: the tentative entry of the newer
	 * connection shows which of the two has sent this packet. */
	if (!flow || (flow->challenged && !packet->error))
		tentative = bpf_map_lookup_elem(&new_connections, &packet->flow);
	if (tentative && matches_tentative(tentative, packet))
		flow = tentative;
	if (!flow) {
		flow = bpf_map_lookup_elem(&closing_connections, &packet->flow);
		ending = flow;
	}
	if (!flow && !packet->error)
		choice->held = is_held(choice, untracked);
	if (!flow || !is_retained(flow->node, previous, choice, listener->statistics))
		return;
	choice->node = flow->node;
	if (packet->error)
		return;
	if (packet->closing) {
		/* A forged SYN and a forged FIN or RST must not remove an older established
		 * entry. */
		choice->action = ending || (flow == tentative && established) ? NO_ACTION : CLOSE;
		choice->entry = flow == tentative ? tentative : 0;
	} else if (flow == tentative || (ending && !follows_close(flow, packet))) {
		choice->action = PROMOTE;
		choice->entry = flow;
	}
}

/* Choose for UDP. UDP has no SYN, so every flow gets an entry, which is valid while its node serves
 * the listener. If the slot is not in transition, all live flows are on its node: an entry with
 * another node is of an older flow with the same ports, which passed this gateway or another one
 * before the tables changed. */
static __always_inline void choose_datagram(const struct packet *packet,
					    const struct listener *listener, __u32 previous,
					    struct choice *choice)
{
	struct flow *flow = find_datagrams(&packet->flow);
	bool established = flow, alive;

	if (!flow)
		flow = bpf_map_lookup_elem(&new_datagrams, &packet->flow);
	choice->node = choice->current;
	choice->now = tick();
	/* A QUIC datagram that cannot open a connection belongs to the flow of the entry, however
	 * long the flow was silent. */
	alive = flow &&
		(!flow->seen || choice->now - flow->seen < DATAGRAM_LIFETIME || packet->continuing);
	if (flow && (choice->in_transition ? alive && is_retained(flow->node, previous, choice,
								  listener->statistics)
					   : flow->node == choice->current)) {
		choice->node = flow->node;
		if (!packet->error && flow->seen != choice->now)
			flow->seen = choice->now;
		choice->action = established || packet->error ? NO_ACTION : PROMOTE;
		return;
	}
	if (!flow && packet->continuing && choice->in_transition && previous != TRACKED) {
		choice->node = previous; /* its earlier packets went through another gateway */
		choice->held = is_held(choice, previous);
	} else {
		choice->opening = choice->current != NONE && !packet->error;
	}
	choice->fallback = choice->node;
	if (choice->node == NONE || packet->error)
		return;
	choice->action = flow ? REASSIGN : OPEN;
	choice->entry = flow;
}

/* Choose the node for the packet, and the action for the flow's entry. */
static __always_inline void choose(struct packet *packet, const struct listener *listener,
				   struct choice *choice)
{
	bool by_source = listener->flags & BY_SOURCE,
	     previous_by_source = listener->flags & PREVIOUS_BY_SOURCE;
	__u32 previous = NONE;

	packet->hash = hash_flow(&packet->flow, by_source);
	choice->current = listener->current_size ? slot(listener->current_offset,
							listener->current_size, packet->hash)
						 : NONE;
	if (listener->previous_size) {
		__u32 hash = by_source == previous_by_source
				     ? packet->hash
				     : hash_flow(&packet->flow, previous_by_source);
		previous = slot(listener->previous_offset, listener->previous_size, hash);
	}
	if (previous == NONE && listener->flags & CONVERGING)
		previous = TRACKED;
	choice->in_transition = previous != NONE;
	choice->share = listener->share;
	if (packet->flow.protocol == IPPROTO_UDP)
		choose_datagram(packet, listener, previous, choice);
	else
		choose_stream(packet, listener, previous, choice);
}

/* Create the tentative entry of a new flow, and return the node. An established entry of an older
 * connection with the same ports still applies to packets of the older connection, until a further
 * packet of the new connection arrives. */
static __always_inline __u32 open(const struct packet *packet, struct choice *choice)
{
	const struct flow_key *key = &packet->flow;
	bool datagram = key->protocol == IPPROTO_UDP, inserted;

	if (datagram) {
		inserted = insert(&new_datagrams, NEW_DATAGRAMS, key, choice, choice->now);
	} else {
		inserted = insert(&new_connections, NEW_CONNECTIONS, key, choice, packet->sequence);
		if (inserted && choice->entry)
			choice->entry->challenged = true;
	}
	if (inserted)
		return choice->node;
	choice->refused = true;
	/* If the SYN is a retransmission, its tentative entry exists and decides where the next
	 * packets go. */
	struct flow *tentative = datagram ? 0 : bpf_map_lookup_elem(&new_connections, key);
	return tentative && matches_tentative(tentative, packet) ? tentative->node
								 : choice->fallback;
}

/* Create an established entry: the second packet shows that the client exists. If no entry can be
 * created now, the next packet tries again. */
static __always_inline void promote(const struct packet *packet, const struct choice *choice)
{
	const struct flow_key *key = &packet->flow;

	if (key->protocol == IPPROTO_UDP) {
		if (!establish(&datagrams, DATAGRAMS, ESTABLISHED_DATAGRAMS, key, choice,
			       choice->now))
			return;
		bpf_map_delete_elem(&new_datagrams, key);
	} else {
		if (!choice->entry)
			return; /* never happens, but the verifier requires the check */
		if (!establish(&connections, CONNECTIONS, ESTABLISHED_CONNECTIONS, key, choice,
			       0)) {
			choice->entry->sequence = packet->sequence;
			return;
		}
		bpf_map_delete_elem(&new_connections, key);
		/* This entry is of the same connection, or of an older one. */
		remove_within(&closing_connections, CLOSING_CONNECTIONS, key, choice->share);
	}
	if (choice->in_transition) /* in other slots the tables of every gateway name the node */
		report(key, choice->node);
}

/* Move the entry of a connection that its client closes.
 *
 * A single LRU table would keep closed connections and displace open ones that are silent for a
 * while. The entry is not deleted: the server may still be sending, and a FIN can be forged. Beyond
 * the share of its namespace, the entry is treated as that of an open connection beyond the share. */
static __always_inline void close(const struct packet *packet, const struct choice *choice)
{
	const struct flow_key *key = &packet->flow;
	bool known = bpf_map_lookup_elem(&closing_connections, key),
	     within = known || has_room(choice->share, CLOSING_CONNECTIONS);

	if (within) {
		if (!insert(&closing_connections, CLOSED_CONNECTIONS, key, choice, packet->sequence))
			return;
		if (!known)
			count_entries(choice->share, CLOSING_CONNECTIONS, 1);
	} else {
		if (find_excess(key))
			return;
		count_entries(TOTAL, EXCESS, 1);
		if (!insert(&excess_flows, CLOSED_CONNECTIONS, key, choice, 0))
			return;
	}
	if (choice->entry)
		bpf_map_delete_elem(&new_connections, key);
	else if (within)
		remove_connection(key, choice->share);
	else
		remove_within(&connections, CONNECTIONS, key, choice->share);
	if (choice->in_transition)
		report(key, choice->node | CLOSING);
}

/* Apply the action of the choice. Return the node, which differs from the choice if no entry could
 * be created. */
static __always_inline __u32 apply_action(const struct packet *packet, struct choice *choice)
{
	switch (choice->action) {
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
		/* Also if the slot is not in transition: other gateways may have received the
		 * former node. */
		report(&packet->flow, choice->node);
		break;
	case FORGET:
		forget(&packet->flow, choice->share);
		break;
	case NO_ACTION:
		break;
	}
	return choice->node;
}

/* Return whether the source is in this set of source ranges. */
static __always_inline bool in_ranges(__u32 set, const __u32 *source)
{
	struct range_key key = { .prefix_length = 32 + 128, .set = set };

	__builtin_memcpy(key.address, source, 16);
	return bpf_map_lookup_elem(&ranges, &key);
}
