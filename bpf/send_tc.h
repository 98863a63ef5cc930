/* Send a packet from tc ingress. This variant is complete: it handles every packet that XDP passes
 * on. The kernel's neighbour table gives the MAC address, and packets that the kernel has merged
 * (GRO) stay whole until they leave. */
#pragma once

#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

typedef struct __sk_buff context_t;

#define HOOK "tc"
#define PASS TC_ACT_UNSPEC
#define DROP TC_ACT_SHOT

#include "choose.h"
#include "hops.h"
#include "maps.h"
#include "messages.h"
#include "outer.h"

#define AF_INET 2
#define AF_INET6 10

/* A word of `cb`, the program's scratch space. BPF_PROG_TEST_RUN returns `cb`, so tests read the
 * chosen node from it: the node's number plus 1, or 0 for none. */
#define CHOSEN_NODE 0

/* The number of bytes that are read at most. If the device left less of the packet in the linear
 * part of the buffer, they are pulled in when they are needed. */
#define MAX_HEADERS 512

#define VLAN_ID 0x0fff

/* The value of gso_size for an SCTP packet that is not segmented yet. */
#define GSO_BY_FRAGMENTS 0xffff

static __always_inline __u32 frame_length(context_t *skb, const struct packet *packet)
{
	return skb->len;
}

/* `read_frame` accepts no other frames. */
static __always_inline bool is_ours(context_t *skb, const struct packet *packet)
{
	return true;
}

static __always_inline bool can_send(context_t *skb, const struct packet *packet,
				     const struct next_hop *hop)
{
	return true;
}

/* Parse the frame. A flooded frame belongs to another host, and a frame with a VLAN tag to the
 * interface of that VLAN and the program there. A tag of VLAN 0 means no VLAN, and contains only a
 * priority (802.1Q). If headers are outside of the linear part of the buffer, the first attempt
 * fails, and the second has pulled in enough. */
static __always_inline enum reading read_frame(context_t *skb, struct packet *packet)
{
	enum reading reading = IGNORED;

	if (skb->pkt_type != PACKET_HOST || (skb->vlan_present && skb->vlan_tci & VLAN_ID))
		return IGNORED;
	for (int attempt = 0; attempt < 2; attempt++) {
		void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
		*packet = (struct packet){};
		reading = read_packet(data, end, skb->protocol, sizeof(struct ethhdr), packet);
		if (reading != TRUNCATED || end - data >= skb->len)
			break;
		if (bpf_skb_pull_data(skb, skb->len < MAX_HEADERS ? skb->len : MAX_HEADERS))
			break;
	}
	return packet->length + sizeof(struct ethhdr) <= skb->len || skb->gso_size ? reading
										   : IGNORED;
}

static __always_inline bool limit_hops(context_t *skb, const struct packet *packet)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ipv6 = data + sizeof(struct ethhdr);
	struct iphdr *ipv4 = data + sizeof(struct ethhdr);

	if (packet->ipv6 && (void *)(ipv6 + 1) <= end) {
		/* IPv6 has no header checksum that compensates for the change, so the device's
		 * checksum of the packet must be updated: the word that contains the hop limit has
		 * decreased by this value, in ones' complement. */
		bpf_csum_update(skb, ~(__u32)bpf_htons(ipv6->hop_limit - HOPS_LEFT));
		ipv6->hop_limit = HOPS_LEFT;
	} else if (!packet->ipv6 && (void *)(ipv4 + 1) <= end) {
		limit_ttl(ipv4);
	} else {
		return false;
	}
	return true;
}

/* Write the outer headers. An IPv4 header is written in place, because a header with its own
 * checksum adds nothing to the device's checksum of the packet. All other headers are written
 * through the kernel, which updates that checksum. */
static __always_inline bool write_outer_headers(context_t *skb, const struct packet *packet,
						const struct next_hop *hop, __u32 length)
{
	const struct settings *config = read_settings();
	__u8 outer[MAX_OUTER] = {};

	if (length == sizeof(struct iphdr)) {
		void *at = (void *)(long)skb->data + sizeof(struct ethhdr),
		     *end = (void *)(long)skb->data_end;
		return write_outer(at, end, packet, hop, 0);
	}
	return config &&
	       write_outer(outer, outer + sizeof(outer), packet, hop, config->vxlan_port) &&
	       bpf_skb_store_bytes(skb, sizeof(struct ethhdr), outer, length,
				   BPF_F_RECOMPUTE_CSUM) == 0;
}

/* Add the outer headers. The flags let the kernel segment merged packets (GRO) behind the headers.
 * BPF_F_ADJ_ROOM_ENCAP_L2_ETH exists since Linux 5.13. Without it VXLAN works, except for merged
 * packets, which are lost: before 5.13, switch GRO off on the interface. */
static __always_inline bool encapsulate(context_t *skb, const struct packet *packet,
					const struct next_hop *hop)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;
	__u32 length = outer_length(hop);

	flags |= is_mapped(hop->outer_destination) ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV4
						   : BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;
	if (hop->kind == VXLAN)
		flags |= BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
			 BPF_F_ADJ_ROOM_ENCAP_L2(sizeof(struct ethhdr)) |
			 BPF_F_ADJ_ROOM_ENCAP_L2_ETH;
	if (bpf_skb_adjust_room(skb, length, BPF_ADJ_ROOM_MAC, flags) &&
	    bpf_skb_adjust_room(skb, length, BPF_ADJ_ROOM_MAC,
				flags & ~BPF_F_ADJ_ROOM_ENCAP_L2_ETH))
		return false;
	return write_outer_headers(skb, packet, hop, length);
}

static __always_inline int redirect(const struct next_hop *hop)
{
	struct bpf_redir_neigh next_hop = {};

	if (is_mapped(hop->next_hop)) {
		next_hop.nh_family = AF_INET;
		next_hop.ipv4_nh = hop->next_hop[3];
	} else {
		next_hop.nh_family = AF_INET6;
		__builtin_memcpy(next_hop.ipv6_nh, hop->next_hop, 16);
	}
	return bpf_redirect_neigh(hop->interface, &next_hop, sizeof(next_hop), 0);
}

/* Return whether the packet, or each segment of it, fits the MTU of the path. */
static __always_inline bool fits(context_t *skb, const struct packet *packet,
				 const struct next_hop *hop)
{
	if (hop->kind == LOCAL || !hop->mtu || skb->gso_size == GSO_BY_FRAGMENTS)
		return true;
	return (skb->gso_size ? packet->headers + skb->gso_size : packet->length) <= hop->mtu;
}

static __always_inline int send(context_t *skb, const struct packet *packet,
				const struct next_hop *hop, __u32 statistics)
{
	if (hop->kind == LOCAL)
		return PASS;
	if ((skb->vlan_present && bpf_skb_vlan_pop(skb)) || !limit_hops(skb, packet) ||
	    (has_outer(hop) && !encapsulate(skb, packet, hop))) {
		count_drop(statistics, NOT_SENT);
		return DROP;
	}
	return redirect(hop);
}

static __always_inline void show_choice(context_t *skb, __u32 node)
{
	skb->cb[CHOSEN_NODE] = node + 1;
}
