/* Send a packet from tc ingress. Complete: what the program at XDP passes on is done here. The kernel's neighbour table gives
 * the hardware address, and packets that the kernel has put together (GRO) stay whole until they leave. */
#pragma once

#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

typedef struct __sk_buff context_t;

#define HOOK "tc"
#define GO_ON TC_ACT_UNSPEC
#define DROP TC_ACT_SHOT

#include "choose.h"
#include "hops.h"
#include "maps.h"
#include "messages.h"
#include "outer.h"

#define AF_INET 2
#define AF_INET6 10

/* A word of the scratch space that ends with this program. BPF_PROG_TEST_RUN hands it out: so one can ask which node was chosen.
 * Its number plus 1; 0 says that none was. */
#define CHOSEN_NODE 0

/* The most that is read: where a device leaves less in the buffer's head, it is fetched if need be. */
#define LONGEST_HEADERS 512

#define VLAN_ID 0x0fff

/* Of an SCTP packet that is still to be segmented, in place of a size. */
#define GSO_BY_FRAGMENTS 0xffff

static __always_inline __u32 frame_length(context_t *skb, const struct packet *packet)
{
	return skb->len;
}

/* `read_frame` lets no other pass. */
static __always_inline bool is_ours(context_t *skb, const struct packet *packet)
{
	return true;
}

static __always_inline bool can_send(context_t *skb, const struct packet *packet, const struct way *way)
{
	return true;
}

/* A frame that was flooded to us belongs to another host; one with a VLAN tag to the interface of that VLAN, and to the program
 * there. A tag for VLAN 0 stands for none, and says the frame's priority (802.1Q). Of headers that lie in pieces of the buffer not yet read, the second attempt has fetched enough. */
static __always_inline enum reading read_frame(context_t *skb, struct packet *packet)
{
	enum reading reading = FOREIGN;

	if (skb->pkt_type != PACKET_HOST || (skb->vlan_present && skb->vlan_tci & VLAN_ID))
		return FOREIGN;
	for (int attempt = 0; attempt < 2; attempt++) {
		void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
		*packet = (struct packet){};
		reading = read_packet(data, end, skb->protocol, sizeof(struct ethhdr), packet);
		if (reading != CUT || end - data >= skb->len)
			break;
		if (bpf_skb_pull_data(skb, skb->len < LONGEST_HEADERS ? skb->len : LONGEST_HEADERS))
			break;
	}
	return packet->length + sizeof(struct ethhdr) <= skb->len || skb->gso_size ? reading : FOREIGN;
}

static __always_inline bool limit_hops(context_t *skb, const struct packet *packet)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ipv6 = data + sizeof(struct ethhdr);
	struct iphdr *ipv4 = data + sizeof(struct ethhdr);

	if (packet->ipv6 && (void *)(ipv6 + 1) <= end) {
		/* IPv6 has no header checksum that compensates for the change, so the device's checksum of the packet must be updated:
		 * the word that contains the hop limit has become less by this, in ones' complement. */
		bpf_csum_update(skb, ~(__u32)bpf_htons(ipv6->hop_limit - HOPS_LEFT));
		ipv6->hop_limit = HOPS_LEFT;
	} else if (!packet->ipv6 && (void *)(ipv4 + 1) <= end) {
		limit_ttl(ipv4);
	} else {
		return false;
	}
	return true;
}

/* An IPv4 header is written where it is to stand: with its own checksum it adds nothing to the device's checksum of the packet.
 * What does add to it goes by way of the kernel, which keeps that sum right. */
static __always_inline bool write_in_front(context_t *skb, const struct packet *packet, const struct way *way, __u32 length)
{
	const struct settings *wishes = read_settings();
	__u8 outer[LONGEST_OUTER] = {};

	if (length == sizeof(struct iphdr)) {
		void *at = (void *)(long)skb->data + sizeof(struct ethhdr), *end = (void *)(long)skb->data_end;
		return write_outer(at, end, packet, way, 0);
	}
	return wishes && write_outer(outer, outer + sizeof(outer), packet, way, wishes->vxlan_port) &&
	       bpf_skb_store_bytes(skb, sizeof(struct ethhdr), outer, length, BPF_F_RECOMPUTE_CSUM) == 0;
}

/* Put the outer headers in front. The flags let the kernel segment what GRO has put together behind them.
 * BPF_F_ADJ_ROOM_ENCAP_L2_ETH is there since Linux 5.13. Without it, VXLAN works but for such packets, which are lost: before
 * 5.13, switch GRO off on the interface. */
static __always_inline bool enter_tunnel(context_t *skb, const struct packet *packet, const struct way *way)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;
	__u32 length = outer_length(way);

	flags |= is_mapped(way->outer_destination) ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;
	if (way->kind == VXLAN)
		flags |= BPF_F_ADJ_ROOM_ENCAP_L4_UDP | BPF_F_ADJ_ROOM_ENCAP_L2(sizeof(struct ethhdr)) | BPF_F_ADJ_ROOM_ENCAP_L2_ETH;
	if (bpf_skb_adjust_room(skb, length, BPF_ADJ_ROOM_MAC, flags) &&
	    bpf_skb_adjust_room(skb, length, BPF_ADJ_ROOM_MAC, flags & ~BPF_F_ADJ_ROOM_ENCAP_L2_ETH))
		return false;
	return write_in_front(skb, packet, way, length);
}

static __always_inline int hand_over(const struct way *way)
{
	struct bpf_redir_neigh next_hop = {};

	if (is_mapped(way->next_hop)) {
		next_hop.nh_family = AF_INET;
		next_hop.ipv4_nh = way->next_hop[3];
	} else {
		next_hop.nh_family = AF_INET6;
		__builtin_memcpy(next_hop.ipv6_nh, way->next_hop, 16);
	}
	return bpf_redirect_neigh(way->interface, &next_hop, sizeof(next_hop), 0);
}

/* Whether it fits the way, or each segment of it does. */
static __always_inline bool fits(context_t *skb, const struct packet *packet, const struct way *way)
{
	if (way->kind == HERE || !way->mtu || skb->gso_size == GSO_BY_FRAGMENTS)
		return true;
	return (skb->gso_size ? packet->headers + skb->gso_size : packet->length) <= way->mtu;
}

static __always_inline int send(context_t *skb, const struct packet *packet, const struct way *way, __u32 statistics)
{
	if (way->kind == HERE)
		return GO_ON;
	if ((skb->vlan_present && bpf_skb_vlan_pop(skb)) || !limit_hops(skb, packet) || (has_outer(way) && !enter_tunnel(skb, packet, way))) {
		count_drop(statistics, NOT_SENT);
		return DROP;
	}
	return hand_over(way);
}

static __always_inline void show_choice(context_t *skb, __u32 node)
{
	skb->cb[CHOSEN_NODE] = node + 1;
}
