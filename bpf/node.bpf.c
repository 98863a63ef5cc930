/* A node's end of an IPIP tunnel: removes the outer header of packets from gateways (RFC 2003,
 * 2473, 4213).
 *
 * In: packets that the node's interface receives. Out: a packet for a published load-balancer
 * address, which a gateway encapsulated in an IP packet to this node, continues as if it had
 * arrived without the outer header: the service proxy sees a packet of the client. The same happens
 * to a gateway's probe: a TCP segment from the gateway's own address to a health port at the node's
 * own address, with equal addresses in the outer and the inner header. The answer shows the gateway
 * that the tunnel works.
 *
 * Every other packet passes as if this program did not exist: it may belong to another tunnel, for
 * example of the cluster's own network, which another filter or the kernel's tunnel device
 * terminates. So this program admits only packets from gateways, and only packets that gateways may
 * send to these addresses without a tunnel as well.
 *
 * Attached at tc ingress (clsact, direct action), before a gateway's own filter. Its maps exist as
 * long as it is attached. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <stdbool.h>

#include "address.h"

#define VLAN_ID 0x0fff
/* The number of bytes that are read at most: both IP headers, and the ports of a probe. */
#define MAX_HEADERS (sizeof(struct ethhdr) + 2 * sizeof(struct ipv6hdr) + sizeof(__be32))

/* Since Linux 6.3: the inner packet has another address family than the outer header. Older kernels
 * return EINVAL. */
#define DECAP_L3_IPV4 (1U << 7)
#define DECAP_L3_IPV6 (1U << 8)

enum outcome {
	DECAPSULATED,
	/* Encapsulated for this node, but not by a gateway: passed unchanged. */
	UNKNOWN_SENDER,
	/* From a gateway's address, but neither to a load-balancer address nor a probe: passed
	 * unchanged. */
	NOT_PUBLISHED,
	/* Dropped: it experienced congestion, which can be signalled in no other way (RFC 6040). */
	CONGESTED,
	NOT_DECAPSULATED, /* dropped: the kernel cannot remove this outer header */
	OUTCOMES,
};

struct range {
	__u32 prefix_length;
	__u32 address[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct range);
	__type(value, __u32);
} gateways SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, __u32[4]);
	__type(value, __u32);
} own_addresses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32[4]);
	__type(value, __u32);
} published SEC(".maps");

/* The range of healthCheckNodePorts, unless kube-apiserver has another --service-node-port-range. A
 * port of the range that no process has opened yet has to answer with a reset: silence would look
 * as if the whole node were dead. */
#define FIRST_NODE_PORT 30000
#define LAST_NODE_PORT 32767

/* Other TCP ports, in host order, at which the node's own addresses answer gateways' probes. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
} health_ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OUTCOMES);
	__type(key, enum outcome);
	__type(value, __u64);
} outcomes SEC(".maps");

/* One IP header of either family. */
struct header {
	__u32 source[4];
	__u32 destination[4];
	__u8 protocol; /* the next protocol */
	__u8 ecn;
	bool ipv6;
};

/* The ECN field (RFC 3168, 5). */
#define NOT_ECT 0
#define ECT_1 1
#define ECT_0 2
#define CE 3
#define ECN_BITS 3

static __always_inline __u32 length(const struct header *header)
{
	return header->ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
}

static __always_inline int count(enum outcome outcome, int verdict)
{
	__u64 *counter = bpf_map_lookup_elem(&outcomes, &outcome);
	if (counter)
		(*counter)++;
	return verdict;
}

/* Gateways create no outer headers with options, and no fragments. */
static __always_inline bool read_ipv4(const struct iphdr *ip, const void *end,
				      struct header *header, bool is_outer)
{
	if ((void *)(ip + 1) > end || ip->version != 4)
		return false;
	if (is_outer && (ip->ihl != 5 || ip->frag_off & bpf_htons(0x3fff)))
		return false;
	set_mapped(header->source, ip->saddr);
	set_mapped(header->destination, ip->daddr);
	header->protocol = ip->protocol;
	header->ecn = ip->tos & ECN_BITS;
	header->ipv6 = false;
	return true;
}

static __always_inline bool read_ipv6(const struct ipv6hdr *ip, const void *end,
				      struct header *header)
{
	if ((void *)(ip + 1) > end || ip->version != 6)
		return false;
	set_address(header->source, &ip->saddr);
	set_address(header->destination, &ip->daddr);
	header->protocol = ip->nexthdr;
	header->ecn = ip->flow_lbl[0] >> 4 & ECN_BITS;
	header->ipv6 = true;
	return true;
}

static __always_inline bool read_outer(const struct ethhdr *ethernet, const void *end,
				       struct header *outer)
{
	if ((void *)(ethernet + 1) > end)
		return false;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP))
		return read_ipv4((void *)(ethernet + 1), end, outer, true);
	if (ethernet->h_proto == bpf_htons(ETH_P_IPV6))
		return read_ipv6((void *)(ethernet + 1), end, outer);
	return false;
}

static __always_inline bool read_inner(const void *at, const void *end, const struct header *outer,
				       struct header *inner)
{
	if (outer->protocol == IPPROTO_IPIP)
		return read_ipv4(at, end, inner, false);
	if (outer->protocol == IPPROTO_IPV6)
		return read_ipv6(at, end, inner);
	return false;
}

static __always_inline bool from_gateway(const struct header *outer)
{
	struct range range = { .prefix_length = 128 };

	__builtin_memcpy(range.address, outer->source, 16);
	return bpf_map_lookup_elem(&gateways, &range);
}

static __always_inline bool same(const __u32 *one, const __u32 *other)
{
	return one[0] == other[0] && one[1] == other[1] && one[2] == other[2] && one[3] == other[3];
}

/* Return whether the packet is a probe of the gateway that sent the outer packet. Probes have no
 * options, extension headers or fragments. */
static __always_inline bool is_probe(const void *at, const void *end, const struct header *outer,
				     const struct header *inner)
{
	const struct iphdr *ip = at;
	const __be16 *ports = at + length(inner);

	if (inner->protocol != IPPROTO_TCP || !same(inner->source, outer->source) ||
	    !same(inner->destination, outer->destination) || (void *)(ports + 2) > end)
		return false;
	if (!inner->ipv6 && (ip->ihl != 5 || ip->frag_off & bpf_htons(0x3fff)))
		return false;
	__u32 port = bpf_ntohs(ports[1]);
	return (port >= FIRST_NODE_PORT && port <= LAST_NODE_PORT) ||
	       bpf_map_lookup_elem(&health_ports, &port);
}

/* Copy congestion that the outer packet experienced to the inner header (RFC 6040, 4.2), before the
 * outer header is removed. */
static __always_inline bool propagate_congestion(struct __sk_buff *skb, const struct header *outer,
						 const struct header *inner)
{
	__u32 at = sizeof(struct ethhdr) + length(outer);
	__u8 ecn = outer->ecn == ECT_1 && inner->ecn == ECT_0 ? ECT_1 : inner->ecn;

	if (outer->ecn == CE) {
		if (inner->ecn == NOT_ECT)
			return false;
		ecn = CE;
	}
	if (ecn == inner->ecn)
		return true;
	if (inner->ipv6) {
		/* The second byte of IPv6: lower half of the traffic class, then flow label. */
		__u8 bits;
		if (bpf_skb_load_bytes(skb, at + 1, &bits, 1))
			return false;
		bits = (bits & ~(ECN_BITS << 4)) | ecn << 4;
		return bpf_skb_store_bytes(skb, at + 1, &bits, 1, BPF_F_RECOMPUTE_CSUM) == 0;
	}
	__be16 before, after;
	if (bpf_skb_load_bytes(skb, at, &before, 2))
		return false;
	after = (before & bpf_htons(~ECN_BITS)) | bpf_htons(ecn);
	/* The header checksum compensates for the change, so the device's checksum of the packet
	 * stays correct. */
	return bpf_l3_csum_replace(skb, at + __builtin_offsetof(struct iphdr, check), before, after,
				   2) == 0 &&
	       bpf_skb_store_bytes(skb, at, &after, 2, 0) == 0;
}

static __always_inline bool decapsulate(struct __sk_buff *skb, const struct header *outer,
					const struct header *inner)
{
	/* Segments that the kernel has merged are sent on with their size: no segment becomes
	 * longer than its sender made it. */
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;
	__be16 protocol = inner->ipv6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);

	if (outer->ipv6 == inner->ipv6)
		return bpf_skb_adjust_room(skb, -(__s32)length(outer), BPF_ADJ_ROOM_MAC, flags) ==
		       0;
	flags |= inner->ipv6 ? DECAP_L3_IPV6 : DECAP_L3_IPV4;
	return bpf_skb_adjust_room(skb, -(__s32)length(outer), BPF_ADJ_ROOM_MAC, flags) == 0 &&
	       bpf_skb_store_bytes(skb, __builtin_offsetof(struct ethhdr, h_proto), &protocol, 2,
				   0) == 0;
}

SEC("tc")
int node(struct __sk_buff *skb)
{
	struct header outer, inner;

	/* A flooded frame belongs to another host, and a frame with a VLAN tag to the interface of
	 * that VLAN. A tag of VLAN 0 means no VLAN. */
	if (skb->pkt_type != PACKET_HOST || (skb->vlan_present && skb->vlan_tci & VLAN_ID))
		return TC_ACT_UNSPEC;
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	if (end - data < MAX_HEADERS && end - data < skb->len) {
		if (bpf_skb_pull_data(skb, skb->len < MAX_HEADERS ? skb->len : MAX_HEADERS))
			return TC_ACT_UNSPEC;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	if (!read_outer(data, end, &outer) ||
	    !bpf_map_lookup_elem(&own_addresses, outer.destination))
		return TC_ACT_UNSPEC;
	void *payload = data + sizeof(struct ethhdr) + length(&outer);
	if (!read_inner(payload, end, &outer, &inner))
		return TC_ACT_UNSPEC;
	if (!from_gateway(&outer))
		return count(UNKNOWN_SENDER, TC_ACT_UNSPEC);
	if (!bpf_map_lookup_elem(&published, inner.destination) &&
	    !is_probe(payload, end, &outer, &inner))
		return count(NOT_PUBLISHED, TC_ACT_UNSPEC);
	if (!propagate_congestion(skb, &outer, &inner))
		return count(CONGESTED, TC_ACT_SHOT);
	if (!decapsulate(skb, &outer, &inner))
		return count(NOT_DECAPSULATED, TC_ACT_SHOT);
	/* TC_ACT_OK skips further filters: a gateway has chosen this node already, and a gateway on
	 * this host must not choose again. */
	return count(DECAPSULATED, TC_ACT_OK);
}

char _license[] SEC("license") = "GPL";
