/* Send a packet directly from the network driver (XDP), as fast as possible and without the kernel:
 * the MAC address is in the next hop. Packets that cannot be sent like this are passed on,
 * unchanged, to the program at tc. */
#pragma once

#include <linux/if_ether.h>

typedef struct xdp_md context_t;

#define HOOK "xdp"
#define PASS XDP_PASS
#define DROP XDP_DROP

#include "hops.h"
#include "maps.h"
#include "outer.h"

struct tag {
	__be16 vlan;
	__be16 type;
};

static __always_inline __u32 frame_length(context_t *context, const struct packet *packet)
{
	return packet->network + packet->length;
}

static __always_inline bool is_unknown(const __u8 *mac)
{
	return !(*(const __u32 *)mac | *(const __u16 *)(mac + 4));
}

static __always_inline bool same_mac(const void *one, const void *other)
{
	return *(const __u16 *)one == *(const __u16 *)other &&
	       *(const __u32 *)(one + 2) == *(const __u32 *)(other + 2);
}

/* Return whether the frame is addressed to this host, without a VLAN tag or with a tag of our
 * interfaces. XDP also sees all other frames. */
static __always_inline bool is_ours(context_t *context, const struct packet *packet)
{
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct tag_key key = { .interface = context->ingress_ifindex };
	struct ethhdr *ethernet = data;
	struct tag *tag = (void *)(ethernet + 1);

	if ((void *)(tag + 1) > end)
		return false;
	if (packet->network > sizeof(*ethernet))
		key.vlan = bpf_ntohs(tag->vlan) & 0x0fff;
	const struct mac *own = bpf_map_lookup_elem(&tags, &key);
	return own && same_mac(own->octets, ethernet->h_dest);
}

/* The common case of `is_ours`, without a map lookup: the frame arrived at the interface through
 * which it leaves. */
static __always_inline bool arrived_at_exit(context_t *context, const struct packet *packet,
					    const struct next_hop *hop)
{
	struct ethhdr *ethernet = (void *)(long)context->data;

	if ((void *)(ethernet + 1) > (void *)(long)context->data_end)
		return false;
	return packet->network == sizeof(*ethernet) && hop->lower == context->ingress_ifindex &&
	       !hop->tag && same_mac(hop->own_mac, ethernet->h_dest);
}

static __always_inline bool can_send(context_t *context, const struct packet *packet,
				     const struct next_hop *hop)
{
	if (packet->fragment || hop->kind == LOCAL || is_unknown(hop->mac))
		return false;
	if (hop->mtu && packet->length > hop->mtu)
		return false;
	return arrived_at_exit(context, packet, hop) || is_ours(context, packet);
}

/* Packets that do not fit have been left to the program at tc. */
static __always_inline bool fits(context_t *context, const struct packet *packet,
				 const struct next_hop *hop)
{
	return true;
}

static __always_inline int report_too_big(context_t *context, const struct packet *packet,
					  __u32 mtu)
{
	return PASS;
}

static __always_inline void write_link(struct ethhdr *ethernet, const struct packet *packet,
				       const struct next_hop *hop)
{
	bool ipv6 = has_outer(hop) ? !is_mapped(hop->outer_destination) : packet->ipv6;
	__be16 type = ipv6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
	struct tag *tag = (void *)(ethernet + 1);

	/* own_mac follows mac, as the source follows the destination in the Ethernet header. */
	const __u32 *ends = (const void *)hop->mac;
	__u32 *words = (void *)ethernet;

	words[0] = ends[0];
	words[1] = ends[1];
	words[2] = ends[2];
	ethernet->h_proto = hop->tag ? bpf_htons(ETH_P_8021Q) : type;
	if (hop->tag)
		*tag = (struct tag){ .vlan = hop->tag, .type = type };
}

static __always_inline bool limit_hops(context_t *context, const struct packet *packet)
{
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct ipv6hdr *ipv6 = data + (packet->network & 31); /* the mask is for the verifier */
	struct iphdr *ipv4 = data + (packet->network & 31);

	if (packet->ipv6 && (void *)(ipv6 + 1) <= end)
		ipv6->hop_limit = HOPS_LEFT;
	else if (!packet->ipv6 && (void *)(ipv4 + 1) <= end)
		limit_ttl(ipv4);
	else
		return false;
	return true;
}

/* The program at tc sends the refusal. */
static __always_inline int refuse(context_t *context, const struct packet *packet, __u32 statistics)
{
	return PASS;
}

/* Rewrite the frame for the next hop. */
static __always_inline bool rewrite(context_t *context, const struct packet *packet,
				    const struct next_hop *hop)
{
	__u32 link = sizeof(struct ethhdr) + (hop->tag ? sizeof(struct tag) : 0);
	int more = link + (has_outer(hop) ? outer_length(hop) : 0) - packet->network;

	if (more && bpf_xdp_adjust_head(context, -more))
		return false;
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	if (data + sizeof(struct ethhdr) + sizeof(struct tag) > end)
		return false;
	write_link(data, packet, hop);
	if (!has_outer(hop))
		return true;
	const struct settings *config = read_settings();
	return config && write_outer(data + link, end, packet, hop, config->vxlan_port);
}

static __always_inline int send(context_t *context, const struct packet *packet,
				const struct next_hop *hop, __u32 statistics)
{
	if (!limit_hops(context, packet) || !rewrite(context, packet, hop)) {
		count_drop(statistics, NOT_SENT);
		return DROP;
	}
	return hop->lower == context->ingress_ifindex ? XDP_TX : bpf_redirect(hop->lower, 0);
}

/* Parse the frame, with at most one VLAN tag. Frames with more tags are for an interface of the
 * kernel, and the program at tc there. */
static __always_inline enum reading read_frame(context_t *context, struct packet *packet)
{
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct ethhdr *ethernet = data;
	struct tag *tag = (void *)(ethernet + 1);
	__u32 network = sizeof(*ethernet);

	if ((void *)(tag + 1) > end)
		return IGNORED;
	__be16 type = ethernet->h_proto;
	if (type == bpf_htons(ETH_P_8021Q)) {
		type = tag->type;
		network += sizeof(*tag);
	}
	enum reading reading = read_packet(data, end, type, network, packet);
	return packet->length + network <= end - data ? reading : IGNORED;
}

static __always_inline void show_choice(context_t *context, __u32 node)
{
}
