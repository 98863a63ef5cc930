/* Compute the slots of a listener whose table changes. The results are the same as those of the
 * reference implementation in fairlead.net.transition, about a hundred times faster. Tables of
 * different sizes are compared slot by slot: sizes divide one another, so each slot of the larger
 * table lies within one slot of the smaller one. */
#include <stdbool.h>
#include <stdint.h>

#define NONE 0xffff
#define TRACKED 0xfffe

/* out[i] = to[from[i]]; NONE and TRACKED stay. */
void renumber(uint32_t size, const uint16_t *from, const uint16_t *to, uint16_t *out)
{
	for (uint32_t i = 0; i < size; i++)
		out[i] = from[i] == NONE || from[i] == TRACKED ? from[i] : to[from[i]];
}

/* occurs[number] = 1 for each number in the table. */
void mark_nodes(uint32_t size, const uint16_t *table, uint8_t *occurs)
{
	for (uint32_t i = 0; i < size; i++)
		occurs[table[i]] = 1;
}

static bool is_retained(uint16_t node, const uint8_t *retained_nodes)
{
	return node != NONE && node != TRACKED && retained_nodes[node];
}

/* The value of `previous` for one hash, from its old current node, its old value in `previous`, and
 * its new current node. See _rule in fairlead.net.transition. */
static uint16_t rule(uint16_t was, uint16_t before, uint16_t now, const uint8_t *retained_nodes,
		     uint32_t count)
{
	if (is_retained(before, retained_nodes))
		return before; /* the oldest node: only its connections have no flow entries */
	if (before == NONE && was == now)
		return NONE;
	if (was != now && is_retained(was, retained_nodes))
		return was;
	if (before == NONE)
		return NONE; /* all connections were on a node that is gone */
	return count > is_retained(now, retained_nodes) ? TRACKED : NONE;
}

/* Compute the new table `previous` from the old current table (`was`), the old previous table
 * (`before`) and the new current table (`now`). A table of size 0 stands for NONE in every slot.
 * retained_nodes[node]: whether the node may keep connections; `count`: how many nodes may. */
void compute_previous(uint32_t size, uint32_t was_size, const uint16_t *was, uint32_t before_size,
		      const uint16_t *before, uint32_t now_size, const uint16_t *now,
		      const uint8_t *retained_nodes, uint32_t count, uint16_t *previous)
{
	/* How many slots of `previous` one slot of each table covers. */
	uint32_t was_each = was_size ? size / was_size : 1;
	uint32_t before_each = before_size ? size / before_size : 1;
	uint32_t now_each = now_size ? size / now_size : 1;

	for (uint32_t i = 0; i < size; i++)
		previous[i] = rule(was_size ? was[i / was_each] : NONE,
				   before_size ? before[i / before_each] : NONE,
				   now_size ? now[i / now_each] : NONE, retained_nodes, count);
}
