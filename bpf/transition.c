/* The loops over all slots when a table changes. The results equal those of the reference in
 * fairlead.net.transition, about a hundred times faster. Table sizes divide one another: a slot of
 * a smaller table stands for several consecutive slots of a larger one. */
#include <stdbool.h>
#include <stdint.h>

#define NONE 0xffff
#define TRACKED 0xfffe

/* Set out[i] = to[from[i]]. Values that are not a node number stay. */
void renumber(uint32_t size, const uint16_t *from, const uint16_t *to, uint16_t *out)
{
	for (uint32_t i = 0; i < size; i++)
		out[i] = from[i] == NONE || from[i] == TRACKED ? from[i] : to[from[i]];
}

/* Set occurs[number] = 1 for each number in the table. */
void mark_nodes(uint32_t size, const uint16_t *table, uint8_t *occurs)
{
	for (uint32_t i = 0; i < size; i++)
		occurs[table[i]] = 1;
}

static bool is_retained(uint16_t node, const uint8_t *retained_nodes)
{
	return node != NONE && node != TRACKED && retained_nodes[node];
}

static uint16_t rule(uint16_t old_current, uint16_t old_previous, uint16_t current,
		     const uint8_t *retained_nodes, uint32_t count)
{
	if (is_retained(old_previous, retained_nodes))
		return old_previous; /* the oldest node, whose connections have no entries */
	if (old_previous == NONE && old_current == current)
		return NONE;
	if (old_current != current && is_retained(old_current, retained_nodes))
		return old_current;
	if (old_previous == NONE)
		return NONE; /* all connections were on nodes that are not retained */
	return count > is_retained(current, retained_nodes) ? TRACKED : NONE;
}

/* Compute the new previous table from the old current table, the old previous table and the new
 * current table. Each table has its own size; size 0 stands for a table that is NONE everywhere.
 * `retained_nodes[node]`: whether the node may keep connections; `count`: the number of such nodes.
 */
void compute_previous(uint32_t size, uint32_t old_current_size, const uint16_t *old_current,
		      uint32_t old_previous_size, const uint16_t *old_previous,
		      uint32_t current_size, const uint16_t *current, const uint8_t *retained_nodes,
		      uint32_t count, uint16_t *previous)
{
	uint32_t old_current_each = old_current_size ? size / old_current_size : 1,
		 old_previous_each = old_previous_size ? size / old_previous_size : 1;
	uint32_t current_each = current_size ? size / current_size : 1;

	for (uint32_t i = 0; i < size; i++)
		previous[i] = rule(old_current_size ? old_current[i / old_current_each] : NONE,
				   old_previous_size ? old_previous[i / old_previous_each] : NONE,
				   current_size ? current[i / current_each] : NONE, retained_nodes,
				   count);
}
