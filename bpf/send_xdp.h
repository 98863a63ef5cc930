/* Send a packet from where the network driver hands it over (XDP), as fast as can be and never by the kernel's help: the
 * hardware address stands in the way. What cannot be done so is passed on, unchanged, to the program at tc. */
#pragma once

#include <linux/if_ether.h>

typedef struct xdp_md context_t;

#define HOOK "xdp"
#define GO_ON XDP_PASS
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
	return *(const __u16 *)one == *(const __u16 *)other && *(const __u32 *)(one + 2) == *(const __u32 *)(other + 2);
}

/* Whether the frame is addressed to this host, without a VLAN tag or with one that is ours: XDP sees all others as well. */
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

/* The common case of it, known without a look into a map: it came to where it leaves. */
static __always_inline bool returns_by(context_t *context, const struct packet *packet, const struct way *way)
{
	struct ethhdr *ethernet = (void *)(long)context->data;

	if ((void *)(ethernet + 1) > (void *)(long)context->data_end)
		return false;
	return packet->network == sizeof(*ethernet) && way->lower == context->ingress_ifindex && !way->tag &&
	       same_mac(way->own_mac, ethernet->h_dest);
}

static __always_inline bool can_send(context_t *context, const struct packet *packet, const struct way *way)
{
	if (packet->fragment || way->kind == HERE || is_unknown(way->mac))
		return false;
	if (way->mtu && packet->length > way->mtu)
		return false;
	return returns_by(context, packet, way) || is_ours(context, packet);
}

/* What does not fit has been left to the program at tc. */
static __always_inline bool fits(context_t *context, const struct packet *packet, const struct way *way)
{
	return true;
}

static __always_inline int tell_too_big(context_t *context, const struct packet *packet, __u32 mtu)
{
	return GO_ON;
}

static __always_inline void write_link(struct ethhdr *ethernet, const struct packet *packet, const struct way *way)
{
	bool ipv6 = has_outer(way) ? !is_mapped(way->outer_destination) : packet->ipv6;
	__be16 type = ipv6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
	struct tag *tag = (void *)(ethernet + 1);

	const __u32 *ends = (const void *)way->mac; /* own_mac follows, as the source does */
	__u32 *words = (void *)ethernet;

	words[0] = ends[0];
	words[1] = ends[1];
	words[2] = ends[2];
	ethernet->h_proto = way->tag ? bpf_htons(ETH_P_8021Q) : type;
	if (way->tag)
		*tag = (struct tag){ .vlan = way->tag, .type = type };
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

/* The program at tc answers. */
static __always_inline int refuse(context_t *context, const struct packet *packet, __u32 statistics)
{
	return GO_ON;
}

/* Make the frame what goes out. */
static __always_inline bool rewrite(context_t *context, const struct packet *packet, const struct way *way)
{
	__u32 link = sizeof(struct ethhdr) + (way->tag ? sizeof(struct tag) : 0);
	int more = link + (has_outer(way) ? outer_length(way) : 0) - packet->network;

	if (more && bpf_xdp_adjust_head(context, -more))
		return false;
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	if (data + sizeof(struct ethhdr) + sizeof(struct tag) > end)
		return false;
	write_link(data, packet, way);
	if (!has_outer(way))
		return true;
	const struct settings *wishes = read_settings();
	return wishes && write_outer(data + link, end, packet, way, wishes->vxlan_port);
}

static __always_inline int send(context_t *context, const struct packet *packet, const struct way *way, __u32 statistics)
{
	if (!limit_hops(context, packet) || !rewrite(context, packet, way)) {
		count_drop(statistics, NOT_SENT);
		return DROP;
	}
	return way->lower == context->ingress_ifindex ? XDP_TX : bpf_redirect(way->lower, 0);
}

/* One VLAN tag at most: frames with more are for an interface of the kernel's, and the program at tc there. */
static __always_inline enum reading read_frame(context_t *context, struct packet *packet)
{
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct ethhdr *ethernet = data;
	struct tag *tag = (void *)(ethernet + 1);
	__u32 network = sizeof(*ethernet);

	if ((void *)(tag + 1) > end)
		return FOREIGN;
	__be16 type = ethernet->h_proto;
	if (type == bpf_htons(ETH_P_8021Q)) {
		type = tag->type;
		network += sizeof(*tag);
	}
	enum reading reading = read_packet(data, end, type, network, packet);
	return packet->length + network <= end - data ? reading : FOREIGN;
}

static __always_inline void show_choice(context_t *context, __u32 node)
{
}
