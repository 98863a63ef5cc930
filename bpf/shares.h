/* The share of each namespace in the tables of established and closing flows.
 *
 * These tables evict the entry that was not used for longest when they are full. So without shares a
 * client that opens, or forges, many connections to a Service of one namespace would evict the
 * entries of silent connections of all others. Here the tables never become full: a namespace has
 * at most a fraction of what the other namespaces leave free (as for the resources of
 * drivers/direct/maps/quota.py), and the entries beyond it are in `excess_flows`, where they evict
 * only each other.
 *
 * An entry is in one of these tables. A flow whose entry was evicted from `excess_flows` goes
 * where a flow without an entry goes. Mostly `excess_flows` is empty, and is not looked up. */
#pragma once

#include "maps.h"

static __always_inline __u64 entries_of(const struct share *share, enum shared_table table)
{
	__s64 entries = share->counted[table] + share->corrected[table];

	return entries > 0 ? entries : 0;
}

/* Return whether the namespace may have another entry in the table. */
static __always_inline bool has_room(__u32 index, enum shared_table table)
{
	const struct settings *config = read_settings();
	__u32 at_total = TOTAL;
	const struct share *total = bpf_map_lookup_elem(&shares, &at_total),
			   *own = bpf_map_lookup_elem(&shares, &index);

	if (!config || !total || !own)
		return false;
	__u64 usable = table == CONNECTIONS ? config->usable_connections
		       : table == DATAGRAMS ? config->usable_datagrams
					    : config->usable_closing;
	if (!usable)
		return true;
	__u64 of_all = entries_of(total, table), of_own = entries_of(own, table);
	if (index == TOTAL || of_all >= usable)
		return false;
	__u64 others = of_all > of_own ? of_all - of_own : 0;
	return of_own < (usable - others) * config->namespace_share >> 16;
}

/* Count entries that were added to the table (or removed from it). */
static __always_inline void count_entries(__u32 index, enum shared_table table, __s64 added)
{
	__u32 at_total = TOTAL;
	struct share *total = bpf_map_lookup_elem(&shares, &at_total),
		     *own = bpf_map_lookup_elem(&shares, &index);

	if (!total || !own)
		return;
	__sync_fetch_and_add(&total->counted[table], added);
	if (index != TOTAL)
		__sync_fetch_and_add(&own->counted[table], added);
}

/* Return the entry of the flow that is beyond the share of its namespace. */
static __always_inline struct flow *find_excess(const struct flow_key *key)
{
	__u32 at_total = TOTAL;
	const struct share *total = bpf_map_lookup_elem(&shares, &at_total);

	return total && entries_of(total, EXCESS) ? bpf_map_lookup_elem(&excess_flows, key) : 0;
}
