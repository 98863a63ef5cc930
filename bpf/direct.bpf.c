/* The forwarder of class fairlead.io/direct: forwards packets for a listener to a node, unmodified
 * except for the hop limit.
 *
 * In: packets that an interface receives. Out: packets of listeners go to their node; all others
 * pass as if this program did not exist. Replies never take this path.
 *
 * This file is compiled twice. At tc ingress (clsact, direct action) the program is complete. The
 * XDP variant runs before it: it handles packets that it can handle completely, and passes all
 * others on before it has counted or recorded anything. So each packet is handled once. */
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

static __always_inline int drop(context_t *context, const struct packet *packet, __u32 statistics,
				enum event reason)
{
	if (!is_ours(context, packet))
		return PASS;
	count_drop(statistics, reason);
	return DROP;
}

/* Handle a packet that has passed a gateway already. If this host is a node, the packet stays here:
 * that gateway chose this node, whatever our own tables contain. Otherwise a node did not serve the
 * packet and sent it back: drop it. The sender gets no message, because without a fault only
 * packets of traceroute arrive like this. A node also sends back what its conntrack calls invalid,
 * such as a reset of a connection that it does not know, because it translates no such packet. So
 * only packets that begin a connection show that a node does not serve the Service. */
static __always_inline int handle_returned(context_t *context, const struct packet *packet,
					   __u32 statistics, __u32 node)
{
	const struct next_hop *hop = next_hop_to(node, packet->ipv6);

	if (is_node() || (hop && hop->kind == LOCAL) || !is_ours(context, packet))
		return PASS;
	if (packet->hop_limit <= 1)
		count_drop(statistics, HOP_LIMIT);
	else if (packet->error || packet->later ||
		 (packet->flow.protocol != IPPROTO_UDP && (!packet->opening || packet->closing)))
		count_drop(statistics, STRAY);
	else
		count_returned(statistics, node);
	return DROP;
}

static __always_inline int deliver(context_t *context, const struct packet *packet,
				   const struct next_hop *hop, __u32 node, __u32 statistics,
				   bool opening)
{
	if (!fits(context, packet, hop)) {
		count_drop(statistics, TOO_BIG);
		return report_too_big(context, packet, hop->mtu);
	}
	count_packet(statistics, node, opening, frame_length(context, packet));
	show_choice(context, node);
	return send(context, packet, hop, statistics);
}

static __always_inline int serve(context_t *context, struct packet *packet,
				 const struct listener *listener)
{
	struct choice choice = {};

	if (listener->flags & RANGES && !in_ranges(listener->ranges, packet->flow.source))
		return drop(context, packet, listener->statistics, FORBIDDEN);
	choose(packet, listener, &choice);
	if (packet->hop_limit <= HOPS_LEFT)
		return handle_returned(context, packet, listener->statistics, choice.node);
	if (choice.held)
		return drop(context, packet, listener->statistics, UPGRADING);
	if (choice.node == NONE && listener->flags & REFUSES)
		return refuse(context, packet, listener->statistics);
	if (choice.node == NONE)
		return drop(context, packet, listener->statistics, NO_MEMBER);
	const struct next_hop *hop = next_hop_to(choice.node, packet->ipv6);
	if (!hop && choice.current != NONE) {
		/* The node has left the cluster. Another node answers with a reset, which tells the
		 * client more than silence. */
		choice.node = choice.current;
		hop = next_hop_to(choice.node, packet->ipv6);
	}
	if (!hop)
		return drop(context, packet, listener->statistics, NO_NEXT_HOP);
	if (!can_send(context, packet, hop))
		return PASS;
	__u32 node = apply_action(packet, &choice);
	if (node != choice.node) {
		/* No entry could be created: the packet has changed nothing, and may still be passed
		 * on. */
		hop = next_hop_to(node, packet->ipv6);
		if (!hop)
			return drop(context, packet, listener->statistics, NO_NEXT_HOP);
		if (!can_send(context, packet, hop))
			return PASS;
	}
	if (choice.refused)
		count(TRACK_REFUSED);
	if (packet->fragment)
		record_fragment(packet, node, listener->statistics);
	return deliver(context, packet, hop, node, listener->statistics, choice.opening);
}

static __always_inline int forward_flow(context_t *context, struct packet *packet)
{
	struct listener listener;

	return find_listener(packet, &listener) ? serve(context, packet, &listener) : PASS;
}

#ifdef XDP
static __always_inline int forward(context_t *context)
{
	struct packet packet = {};

	return read_frame(context, &packet) == FLOW ? forward_flow(context, &packet) : PASS;
}
#else
static __always_inline int forward_later_fragment(context_t *skb, const struct packet *packet)
{
	const struct fragment *first;

	if (packet->hop_limit <= HOPS_LEFT && is_node())
		return PASS;
	first = find_first_fragment(packet);
	if (!first) {
		count(FRAGMENT);
		return DROP;
	}
	__u32 node = first->node, statistics = first->statistics;
	if (packet->hop_limit <= HOPS_LEFT)
		return handle_returned(skb, packet, statistics, node);
	const struct next_hop *hop = next_hop_to(node, packet->ipv6);
	if (!hop)
		return drop(skb, packet, statistics, NO_NEXT_HOP);
	return deliver(skb, packet, hop, node, statistics, false);
}

static __always_inline int forward(context_t *skb)
{
	struct packet packet;
	enum reading reading = read_frame(skb, &packet);

	if (reading == FLOW)
		return forward_flow(skb, &packet);
	if (reading != LATER_FRAGMENT && reading != ECHO_REQUEST)
		return PASS;
	if (!bpf_map_lookup_elem(&addresses, packet.flow.destination))
		return PASS;
	return reading == ECHO_REQUEST ? answer_echo(skb, &packet)
				       : forward_later_fragment(skb, &packet);
}
#endif

SEC(HOOK)
int direct(context_t *context)
{
	return forward(context);
}

char _license[] SEC("license") = "GPL";
