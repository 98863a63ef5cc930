/* The forwarder of class fairlead.io/direct: hand packets for a listener to a node, unmodified but for the hop limit.
 * In: what an interface receives. Out: packets of listeners go to their node on the link (the kernel's neighbour table
 * gives the MAC address), all others go on as if this program were not there. Replies never come this way.
 * Attached at tc ingress (clsact, direct action). */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <linux/if_packet.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "choose.h"
#include "maps.h"
#include "packet.h"

#define AF_INET 2
#define AF_INET6 10

/* A word of the scratch space that ends with this program. BPF_PROG_TEST_RUN hands it out: so one can ask which node was chosen. */
#define CHOSEN_NODE 0

static __always_inline bool spend_hop(struct __sk_buff *skb, const struct packet *packet)
{
	if (packet->ipv6) {
		__u8 less = packet->hop_limit - 1;
		__u32 at = sizeof(struct ethhdr) + __builtin_offsetof(struct ipv6hdr, hop_limit);
		/* IPv6 has no header checksum to make up for the change, so the device's checksum of the packet must follow it. */
		return bpf_skb_store_bytes(skb, at, &less, 1, BPF_F_RECOMPUTE_CSUM) == 0;
	}
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + sizeof(struct ethhdr);
	if ((void *)(ip + 1) > end)
		return false;
	__u32 sum = ip->check + bpf_htons(0x0100); /* RFC 1624, for a first octet one less */
	ip->check = sum + (sum >= 0xffff);
	ip->ttl--;
	return true;
}

static __always_inline bool reachable(const struct node *node, bool ipv6)
{
	return node && (ipv6 ? node->interface6 : node->interface4);
}

static __always_inline int drop(enum event event)
{
	count(event);
	return TC_ACT_SHOT;
}

static __always_inline int send(struct __sk_buff *skb, const struct packet *packet, const struct node *node)
{
	struct bpf_redir_neigh next_hop = {};

	if (node->mode == HERE)
		return TC_ACT_UNSPEC;
	if (packet->hop_limit <= 1)
		return drop(HOP_LIMIT);
	if (!spend_hop(skb, packet))
		return TC_ACT_SHOT;
	if (!packet->ipv6) {
		next_hop.nh_family = AF_INET;
		next_hop.ipv4_nh = node->ipv4;
		return bpf_redirect_neigh(node->interface4, &next_hop, sizeof(next_hop), 0);
	}
	next_hop.nh_family = AF_INET6;
	__builtin_memcpy(next_hop.ipv6_nh, node->ipv6, 16);
	return bpf_redirect_neigh(node->interface6, &next_hop, sizeof(next_hop), 0);
}

static __always_inline void account(__u32 index, const struct packet *packet, __u32 length)
{
	struct traffic *traffic = bpf_map_lookup_elem(&statistics, &index);

	if (!traffic)
		return;
	traffic->packets++;
	traffic->bytes += length;
	if (packet->opening)
		traffic->flows++;
}

static __always_inline int serve(struct __sk_buff *skb, struct packet *packet, const struct listener *listener)
{
	if (packet->fragment)
		return drop(FRAGMENT);
	__u32 current, chosen = choose(packet, listener, &current);
	account(listener->statistics, packet, skb->len);
	if (chosen == NONE)
		return drop(NO_MEMBER);
	struct node *node = bpf_map_lookup_elem(&nodes, &chosen);
	if (!reachable(node, packet->ipv6) && chosen != current && current != NONE) {
		/* The node has left the cluster. Another one answers with a reset, which tells the client more than silence. */
		chosen = current;
		node = bpf_map_lookup_elem(&nodes, &chosen);
	}
	if (!node || !reachable(node, packet->ipv6))
		return drop(NO_NEXT_HOP);
	skb->cb[CHOSEN_NODE] = chosen;
	return send(skb, packet, node);
}

SEC("tc")
int direct(struct __sk_buff *skb)
{
	/* A frame that was flooded to us belongs to another host; one with a VLAN tag to the interface of that VLAN. */
	if (skb->pkt_type != PACKET_HOST || skb->vlan_present)
		return TC_ACT_UNSPEC;
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	if (end - data < LONGEST_HEADERS && end - data < skb->len) {
		/* Part of the headers may lie in fragments of the buffer, which cannot be read directly. */
		if (bpf_skb_pull_data(skb, skb->len < LONGEST_HEADERS ? skb->len : LONGEST_HEADERS))
			return TC_ACT_UNSPEC;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	struct packet packet = {};
	if (!read_packet(data, end, &packet))
		return TC_ACT_UNSPEC;
	struct listener_key key = { .port = packet.flow.destination_port, .protocol = packet.flow.protocol };
	__builtin_memcpy(key.address, packet.flow.destination, 16);
	struct listener *found = bpf_map_lookup_elem(&listeners, &key);
	if (!found)
		return TC_ACT_UNSPEC;
	/* A copy at once: a replaced element of a preallocated map may be used anew while it is still being read. */
	struct listener listener = *found;
	return serve(skb, &packet, &listener);
}

char _license[] SEC("license") = "GPL";
