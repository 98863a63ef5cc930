/* The forwarder with a frame around it in which BPF_PROG_TEST_RUN can repeat it: repeating does not give the packet back as it
 * was, so each program here undoes what the forwarder did. `empty` and the frames alone are the floors to compare with.
 * Built like the forwarder, with -DXDP or without; that is in it by inclusion, as it is. */
#include <linux/bpf.h>

#ifndef XDP
/* The kernel refuses to put a packet that is marked as tunnelled into another tunnel, and no program can take that mark off. So at
 * tc the room for the outer headers is made without it: the same room, but for the notes of where the inner headers begin. */
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

#define LINE 64 /* bytes of a line of the processor's cache */

/* What a forwarder may change in place: Ethernet, and of the IP header all up to the hop limit or the checksum. */
struct head {
	__u64 words[3];
	__u16 rest;
};

/* So many sources, a power of two, and destinations are gone through by `many`, in order, from the packet's own on. */
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

/* Make room before the packet, as the forwarder does for outer headers. */
static __always_inline long grow(context_t *context, long by)
{
#ifdef XDP
	return bpf_xdp_adjust_head(context, -by);
#else
	return bpf_skb_adjust_room(context, by, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO);
#endif
}

/* Take off what was put before the packet. At tc the kernel copies the Ethernet header back behind it, which processors are slow
 * at over a distance of less than a cache line (60 ns instead of 15 where that was seen). No gateway ever does this, so more room
 * is made first, to take away both at once. */
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

/* What the program is that stands in the frame. */
enum within {
	NOBODY,
	UNDOING, /* nobody, but that the frame takes away what is not there, as it does after a forwarder */
	MAKING_ROOM, /* only what a tunnel costs whoever writes what into it */
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
	barrier_var(context); /* so that the compiler does not mix up what is read before and in the forwarder */
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

/* Give the packet the next source, and the next destination: the last words of the addresses. */
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
	return within_frame(context, NOBODY);
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
	return within_frame(context, NOBODY);
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
