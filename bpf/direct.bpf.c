/* The forwarder of class fairlead.io/direct: hand packets for a listener to a node, unmodified but for the hop limit.
 * In: what an interface receives. Out: packets of listeners go to their node, all others go on as if this program were not
 * there. Replies never come this way.
 *
 * Built twice. At tc ingress (clsact, direct action) it is complete. Built with XDP it is attached in front of that, does what it
 * can do whole, and passes on the rest before it has counted or kept anything: so each packet is dealt with once. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#ifdef XDP
#include "send_xdp.h"
#else
#include "send_tc.h"
#endif

#include "choose.h"
#include "fragments.h"
#include "listeners.h"
#include "maps.h"
#include "packet.h"

static __always_inline int drop(context_t *context, const struct packet *packet, __u32 statistics, enum event reason)
{
	if (!is_ours(context, packet))
		return GO_ON;
	count_drop(statistics, reason);
	return DROP;
}

/* A packet that has passed a gateway already. If this host is a node, the packet stays: that gateway chose the node, whatever our
 * own tables say. Otherwise a node did not serve the packet, and sent it back: drop it. The sender gets no message, because without
 * a fault only traceroute's packets arrive like this. */
static __always_inline int stop(context_t *context, const struct packet *packet, __u32 statistics, __u32 node)
{
	const struct way *way = way_to(node, packet->ipv6);

	if (is_node() || (way && way->kind == HERE) || !is_ours(context, packet))
		return GO_ON;
	if (packet->hop_limit <= 1)
		count_drop(statistics, HOP_LIMIT);
	else
		count_returned(statistics, node);
	return DROP;
}

static __always_inline int deliver(context_t *context, const struct packet *packet, const struct way *way, __u32 node,
				   __u32 statistics, bool opening)
{
	if (!fits(context, packet, way)) {
		count_drop(statistics, TOO_BIG);
		return tell_too_big(context, packet, way->mtu);
	}
	count_packet(statistics, node, opening, frame_length(context, packet));
	show_choice(context, node);
	return send(context, packet, way, statistics);
}

static __always_inline int serve(context_t *context, struct packet *packet, const struct listener *listener)
{
	struct choice choice = {};

	if (listener->flags & RANGES && !in_ranges(listener->ranges, packet->flow.source))
		return drop(context, packet, listener->statistics, FORBIDDEN);
	choose(packet, listener, &choice);
	if (packet->hop_limit <= HOPS_LEFT)
		return stop(context, packet, listener->statistics, choice.node);
	if (choice.held)
		return drop(context, packet, listener->statistics, UPGRADING);
	if (choice.node == NONE && listener->flags & REFUSES)
		return refuse(context, packet, listener->statistics);
	if (choice.node == NONE)
		return drop(context, packet, listener->statistics, NO_MEMBER);
	const struct way *way = way_to(choice.node, packet->ipv6);
	if (!way && choice.current != NONE) {
		/* The node has left the cluster. Another one answers with a reset, which tells the client more than silence. */
		choice.node = choice.current;
		way = way_to(choice.node, packet->ipv6);
	}
	if (!way)
		return drop(context, packet, listener->statistics, NO_WAY);
	if (!can_send(context, packet, way))
		return GO_ON;
	__u32 node = keep(packet, &choice);
	if (node != choice.node) {
		way = way_to(node, packet->ipv6);
		if (!way)
			return drop(context, packet, listener->statistics, NO_WAY);
		if (!can_send(context, packet, way))
			return GO_ON;
	}
	if (packet->fragment)
		note_fragment(packet, node, listener->statistics);
	return deliver(context, packet, way, node, listener->statistics, choice.opening);
}

static __always_inline int forward_flow(context_t *context, struct packet *packet)
{
	struct listener listener;

	return find_listener(packet, &listener) ? serve(context, packet, &listener) : GO_ON;
}

#ifdef XDP
static __always_inline int forward(context_t *context)
{
	struct packet packet = {};

	return read_frame(context, &packet) == FLOW ? forward_flow(context, &packet) : GO_ON;
}
#else
static __always_inline int follow_first(context_t *skb, const struct packet *packet)
{
	const struct fragment *first;

	if (packet->hop_limit <= HOPS_LEFT && is_node())
		return GO_ON;
	first = first_of(packet);
	if (!first) {
		count(FRAGMENT);
		return DROP;
	}
	__u32 node = first->node, statistics = first->statistics;
	if (packet->hop_limit <= HOPS_LEFT)
		return stop(skb, packet, statistics, node);
	const struct way *way = way_to(node, packet->ipv6);
	if (!way)
		return drop(skb, packet, statistics, NO_WAY);
	return deliver(skb, packet, way, node, statistics, false);
}

static __always_inline int forward(context_t *skb)
{
	struct packet packet;
	enum reading reading = read_frame(skb, &packet);

	if (reading == FLOW)
		return forward_flow(skb, &packet);
	if (reading != LATER && reading != ECHO)
		return GO_ON;
	if (!bpf_map_lookup_elem(&addresses, packet.flow.destination))
		return GO_ON;
	return reading == ECHO ? answer_echo(skb, &packet) : follow_first(skb, &packet);
}
#endif

SEC(HOOK)
int direct(context_t *context)
{
	return forward(context);
}

char _license[] SEC("license") = "GPL";
