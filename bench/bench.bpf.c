/* The forwarder in a frame with which BPF_PROG_TEST_RUN can repeat it. Between repetitions the
 * kernel does not restore the packet, so each program here undoes the forwarder's changes. `empty`
 * and the frames alone are the baselines to compare with. Built like the forwarder, with or without
 * -DXDP; the forwarder is included unmodified. */
#include <linux/bpf.h>

#ifndef XDP
/* The kernel rejects a second encapsulation of a packet that is marked as encapsulated, and no
 * program can remove the mark. At tc the room for the outer headers is therefore made without the
 * mark: the same room, except that the offsets of the inner headers are not recorded. */
#undef BPF_F_ADJ_ROOM_ENCAP_L2
#define BPF_F_ADJ_ROOM_ENCAP_L2(length) 0
#define BPF_F_ADJ_ROOM_ENCAP_L2_ETH 0
#define BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 0
#define BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 0
#define BPF_F_ADJ_ROOM_ENCAP_L4_UDP 0
#endif

#include "../bpf/direct.bpf.c"

#ifdef XDP
#define SECTION SEC("xdp")
#define NOTHING XDP_PASS
#else
#define SECTION SEC("tc")
#define NOTHING TC_ACT_UNSPEC
#endif

#define LINE 64 /* bytes of a CPU cache line */

/* The part of a packet that a forwarder may change in place: the Ethernet header, and the IP header
 * up to the hop limit (IPv6) or the checksum (IPv4). */
struct head {
	__u64 words[3];
	__u16 rest;
};

/* The number of sources, a power of two, and of destinations that `many` cycles through, beginning
 * with the packet's own. */
struct variation {
	__u32 sources;
	__u32 destinations;
	__u32 first_source;
	__u32 first_destination;
	__u32 next;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct variation);
} variations SEC(".maps");

static __always_inline long length_of(context_t *context)
{
#ifdef XDP
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	long length = end - data;

	barrier_var(length);
	return length;
#else
	return context->len;
#endif
}

/* Add room in front of the packet, as the forwarder does for outer headers. */
static __always_inline long grow(context_t *context, long by)
{
#ifdef XDP
	return bpf_xdp_adjust_head(context, -by);
#else
	return bpf_skb_adjust_room(context, by, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO);
#endif
}

/* Remove what was added in front of the packet. At tc the kernel then moves the Ethernet header
 * back, which is slow over less than a cache line (60 ns instead of 15 where this was measured). No
 * gateway ever does this, so more room is added first and both are removed at once. */
static __always_inline long shrink(context_t *context, long by)
{
#ifdef XDP
	return bpf_xdp_adjust_head(context, by);
#else
	return grow(context, LINE) ?: bpf_skb_adjust_room(context, -(by + LINE), BPF_ADJ_ROOM_MAC, 0);
#endif
}

static __always_inline struct head *head_of(context_t *context)
{
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;

	return data + 14 + 40 <= end ? data : 0;
}

/* The program in the frame. */
enum within {
	NOTHING_WITHIN,
	UNDOING, /* nothing, but the frame removes zero bytes, as it does after a forwarder */
	MAKING_ROOM, /* only add the room for an outer header: the minimum cost of a tunnel */
	FORWARDER,
};

static __always_inline int within_frame(context_t *context, enum within within)
{
	struct head *head = head_of(context), before;
	long length = length_of(context);
	int verdict = NOTHING;

	if (!head)
		return NOTHING;
	before = *head;
	barrier_var(context); /* keeps the compiler from merging these reads with the forwarder's */
	if (within == MAKING_ROOM && grow(context, sizeof(struct iphdr)))
		return NOTHING;
	if (within == FORWARDER)
		verdict = forward(context);
	long more = length_of(context) - length;
	if ((more || within == UNDOING) && shrink(context, more))
		return NOTHING;
	head = head_of(context);
	if (!head)
		return NOTHING;
	*head = before;
	return verdict;
}

/* Set the last 32 bits of the packet's addresses to the next source and the next destination. */
static __always_inline void vary(context_t *context)
{
	struct head *head = head_of(context);
	__u32 only = 0;
	struct variation *variation = bpf_map_lookup_elem(&variations, &only);

	if (!head || !variation)
		return;
	__u32 number = variation->next++;
	__u32 source = variation->first_source + (number & (variation->sources - 1));
	__u32 at = (__u64)(number * 2654435769U) * variation->destinations >> 32;
	bool ipv6 = ((struct ethhdr *)head)->h_proto == bpf_htons(ETH_P_IPV6);
	__be32 *last = (void *)head + (ipv6 ? 14 + 20 : 14 + 12);
	last[0] = bpf_htonl(source);
	last[ipv6 ? 4 : 1] = bpf_htonl(variation->first_destination + at);
}

SECTION
int empty(context_t *context)
{
	return NOTHING;
}

SECTION
int frame(context_t *context)
{
	return within_frame(context, NOTHING_WITHIN);
}

SECTION
int undoing(context_t *context)
{
	return within_frame(context, UNDOING);
}

SECTION
int room(context_t *context)
{
	return within_frame(context, MAKING_ROOM);
}

SECTION
int one(context_t *context)
{
	return within_frame(context, FORWARDER);
}

SECTION
int many_frame(context_t *context)
{
	vary(context);
	return within_frame(context, NOTHING_WITHIN);
}

SECTION
int many_undoing(context_t *context)
{
	vary(context);
	return within_frame(context, UNDOING);
}

SECTION
int many(context_t *context)
{
	vary(context);
	return within_frame(context, FORWARDER);
}
