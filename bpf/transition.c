/* The work over all slots of a change of tables. Gives the same as the reference in fairlead.net.transition, some hundred times
 * faster. A table of another size says the same of a slot as the table of which it is a part: sizes divide one another. */
#include <stdbool.h>
#include <stdint.h>

#define NONE 0xffff
#define TRACKED 0xfffe

/* out[i] = to[from[i]]; what stands for no node stays. */
void renumber(uint32_t size, const uint16_t *from, const uint16_t *to, uint16_t *out)
{
	for (uint32_t i = 0; i < size; i++)
		out[i] = from[i] == NONE || from[i] == TRACKED ? from[i] : to[from[i]];
}

/* occurs[number] = 1 for each number in the table. */
void note(uint32_t size, const uint16_t *table, uint8_t *occurs)
{
	for (uint32_t i = 0; i < size; i++)
		occurs[table[i]] = 1;
}

static bool keeps(uint16_t node, const uint8_t *retained_nodes)
{
	return node != NONE && node != TRACKED && retained_nodes[node];
}

static uint16_t rule(uint16_t was, uint16_t before, uint16_t now, const uint8_t *retained_nodes, uint32_t count)
{
	if (keeps(before, retained_nodes))
		return before; /* the oldest: only its connections have no entries */
	if (before == NONE && was == now)
		return NONE;
	if (was != now && keeps(was, retained_nodes))
		return was;
	if (before == NONE)
		return NONE; /* all connections were on a node that is gone */
	return count > keeps(now, retained_nodes) ? TRACKED : NONE;
}

/* What `previous` becomes: from the old current table, the old previous one and the new current one, each with its size, of
 * which 0 says NONE everywhere. retained_nodes[node]: whether it may keep connections; `count`: how many may. */
void follow(uint32_t size, uint32_t was_size, const uint16_t *was, uint32_t before_size, const uint16_t *before,
	    uint32_t now_size, const uint16_t *now, const uint8_t *retained_nodes, uint32_t count, uint16_t *previous)
{
	uint32_t was_each = was_size ? size / was_size : 1, before_each = before_size ? size / before_size : 1;
	uint32_t now_each = now_size ? size / now_size : 1;

	for (uint32_t i = 0; i < size; i++)
		previous[i] = rule(was_size ? was[i / was_each] : NONE, before_size ? before[i / before_each] : NONE,
				   now_size ? now[i / now_each] : NONE, retained_nodes, count);
}
