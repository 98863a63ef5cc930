/* A node's end of an IPIP tunnel: take what a gateway sent out of its envelope (RFC 2003, 2473, 4213).
 * In: what the node's interface receives. Out: a packet for a published load-balancer address, which a gateway put into an IP
 * packet to this node, goes up the stack as if it had been received plainly: the service proxy sees a client's packet.
 * So does a gateway's probe: a TCP segment from the gateway's own address to a health port at the node's own address, the
 * addresses of the envelope and of the packet being the same. It shows the gateway that the tunnel works.
 * Every other packet passes as if this program did not exist: it may belong to another tunnel, for example of the cluster's own
 * network, which another filter or the kernel's tunnel device terminates. So only packets from gateways come in through this
 * program, and only packets that gateways may send to these addresses without a tunnel as well.
 * Attached at tc ingress (clsact, direct action), before a gateway's own filter. Its maps live as long as it is attached. */
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
#define LONGEST_HEADERS (sizeof(struct ethhdr) + 2 * sizeof(struct ipv6hdr) + sizeof(__be32)) /* the most that is read */

/* Since Linux 6.3: what is inside is of another family than its envelope. Older kernels answer EINVAL. */
#define DECAP_L3_IPV4 (1U << 7)
#define DECAP_L3_IPV6 (1U << 8)

enum outcome {
	DECAPSULATED,
	NOT_FROM_GATEWAY, /* in an envelope to this node that no gateway has sent: left alone */
	NOT_PUBLISHED,    /* from a gateway's address, neither to a load-balancer address nor a probe: left alone */
	CONGESTED,        /* dropped: it met congestion, of which its ends could not be told otherwise (RFC 6040) */
	UNSUPPORTED,      /* dropped: this kernel cannot open this envelope */
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

/* The range of healthCheckNodePorts, unless kube-apiserver has another --service-node-port-range. A port of the range that no
 * process has opened yet has to answer with a reset: silence would look as if the whole node were dead. */
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
	__u8 inside; /* which protocol comes next */
	__u8 ecn;
	bool ipv6;
};

#define NOT_CAPABLE 0
#define CAPABLE_1 1
#define CAPABLE_0 2
#define EXPERIENCED 3
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

/* Headers with options, and fragments, are none that a gateway makes. */
static __always_inline bool read_ipv4(const struct iphdr *ip, const void *end, struct header *header, bool outer)
{
	if ((void *)(ip + 1) > end || ip->version != 4)
		return false;
	if (outer && (ip->ihl != 5 || ip->frag_off & bpf_htons(0x3fff)))
		return false;
	set_mapped(header->source, ip->saddr);
	set_mapped(header->destination, ip->daddr);
	header->inside = ip->protocol;
	header->ecn = ip->tos & ECN_BITS;
	header->ipv6 = false;
	return true;
}

static __always_inline bool read_ipv6(const struct ipv6hdr *ip, const void *end, struct header *header)
{
	if ((void *)(ip + 1) > end || ip->version != 6)
		return false;
	set_address(header->source, &ip->saddr);
	set_address(header->destination, &ip->daddr);
	header->inside = ip->nexthdr;
	header->ecn = ip->flow_lbl[0] >> 4 & ECN_BITS;
	header->ipv6 = true;
	return true;
}

static __always_inline bool read_envelope(const struct ethhdr *ethernet, const void *end, struct header *envelope)
{
	if ((void *)(ethernet + 1) > end)
		return false;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP))
		return read_ipv4((void *)(ethernet + 1), end, envelope, true);
	if (ethernet->h_proto == bpf_htons(ETH_P_IPV6))
		return read_ipv6((void *)(ethernet + 1), end, envelope);
	return false;
}

static __always_inline bool read_content(const void *at, const void *end, const struct header *envelope, struct header *content)
{
	if (envelope->inside == IPPROTO_IPIP)
		return read_ipv4(at, end, content, false);
	if (envelope->inside == IPPROTO_IPV6)
		return read_ipv6(at, end, content);
	return false;
}

static __always_inline bool from_gateway(const struct header *envelope)
{
	struct range range = { .prefix_length = 128 };

	__builtin_memcpy(range.address, envelope->source, 16);
	return bpf_map_lookup_elem(&gateways, &range);
}

static __always_inline bool same(const __u32 *one, const __u32 *other)
{
	return one[0] == other[0] && one[1] == other[1] && one[2] == other[2] && one[3] == other[3];
}

/* Whether the packet is a probe of the gateway that sent the envelope. Probes have no options, extension headers or fragments. */
static __always_inline bool is_probe(const void *at, const void *end, const struct header *envelope, const struct header *content)
{
	const struct iphdr *ip = at;
	const __be16 *ports = at + length(content);

	if (content->inside != IPPROTO_TCP || !same(content->source, envelope->source) ||
	    !same(content->destination, envelope->destination) || (void *)(ports + 2) > end)
		return false;
	if (!content->ipv6 && (ip->ihl != 5 || ip->frag_off & bpf_htons(0x3fff)))
		return false;
	__u32 port = bpf_ntohs(ports[1]);
	return (port >= FIRST_NODE_PORT && port <= LAST_NODE_PORT) || bpf_map_lookup_elem(&health_ports, &port);
}

/* Congestion that the envelope met is the content's (RFC 6040, 4.2), also before it is taken out. */
static __always_inline bool carry_congestion(struct __sk_buff *skb, const struct header *envelope, const struct header *content)
{
	__u32 at = sizeof(struct ethhdr) + length(envelope);
	__u8 ecn = envelope->ecn == CAPABLE_1 && content->ecn == CAPABLE_0 ? CAPABLE_1 : content->ecn;

	if (envelope->ecn == EXPERIENCED) {
		if (content->ecn == NOT_CAPABLE)
			return false;
		ecn = EXPERIENCED;
	}
	if (ecn == content->ecn)
		return true;
	if (content->ipv6) {
		__u8 bits; /* the second byte of IPv6: the lower half of the traffic class, then flow label */
		if (bpf_skb_load_bytes(skb, at + 1, &bits, 1))
			return false;
		bits = (bits & ~(ECN_BITS << 4)) | ecn << 4;
		return bpf_skb_store_bytes(skb, at + 1, &bits, 1, BPF_F_RECOMPUTE_CSUM) == 0;
	}
	__be16 before, after;
	if (bpf_skb_load_bytes(skb, at, &before, 2))
		return false;
	after = (before & bpf_htons(~ECN_BITS)) | bpf_htons(ecn);
	/* The header's checksum makes up for the change, so the device's checksum of the packet stays true. */
	return bpf_l3_csum_replace(skb, at + __builtin_offsetof(struct iphdr, check), before, after, 2) == 0 &&
	       bpf_skb_store_bytes(skb, at, &after, 2, 0) == 0;
}

static __always_inline bool take_out(struct __sk_buff *skb, const struct header *envelope, const struct header *content)
{
	/* What the kernel merged out of segments goes on as these segments: none is longer now than its sender wished. */
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;
	__be16 protocol = content->ipv6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);

	if (envelope->ipv6 == content->ipv6)
		return bpf_skb_adjust_room(skb, -(__s32)length(envelope), BPF_ADJ_ROOM_MAC, flags) == 0;
	flags |= content->ipv6 ? DECAP_L3_IPV6 : DECAP_L3_IPV4;
	return bpf_skb_adjust_room(skb, -(__s32)length(envelope), BPF_ADJ_ROOM_MAC, flags) == 0 &&
	       bpf_skb_store_bytes(skb, __builtin_offsetof(struct ethhdr, h_proto), &protocol, 2, 0) == 0;
}

SEC("tc")
int node(struct __sk_buff *skb)
{
	struct header envelope, content;

	/* A frame that was flooded to us belongs to another host; one with a VLAN tag to the interface of that VLAN. A tag for VLAN 0
	 * stands for none. */
	if (skb->pkt_type != PACKET_HOST || (skb->vlan_present && skb->vlan_tci & VLAN_ID))
		return TC_ACT_UNSPEC;
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	if (end - data < LONGEST_HEADERS && end - data < skb->len) {
		if (bpf_skb_pull_data(skb, skb->len < LONGEST_HEADERS ? skb->len : LONGEST_HEADERS))
			return TC_ACT_UNSPEC;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	if (!read_envelope(data, end, &envelope) || !bpf_map_lookup_elem(&own_addresses, envelope.destination))
		return TC_ACT_UNSPEC;
	void *inside = data + sizeof(struct ethhdr) + length(&envelope);
	if (!read_content(inside, end, &envelope, &content))
		return TC_ACT_UNSPEC;
	if (!from_gateway(&envelope))
		return count(NOT_FROM_GATEWAY, TC_ACT_UNSPEC);
	if (!bpf_map_lookup_elem(&published, content.destination) && !is_probe(inside, end, &envelope, &content))
		return count(NOT_PUBLISHED, TC_ACT_UNSPEC);
	if (!carry_congestion(skb, &envelope, &content))
		return count(CONGESTED, TC_ACT_SHOT);
	if (!take_out(skb, &envelope, &content))
		return count(UNSUPPORTED, TC_ACT_SHOT);
	/* No further filter: a gateway has chosen this node already, and one that runs here is not to choose again. */
	return count(DECAPSULATED, TC_ACT_OK);
}

char _license[] SEC("license") = "GPL";
