/* The outer headers of a packet in a tunnel. IP in IP: RFC 2003, 2473, 4213. VXLAN: RFC 7348. The
 * outer header has the DSCP and ECN bits of the inner header: RFC 2983, 6040. */
#pragma once

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>

#include "packet.h"
#include "structs.h"

#define OUTER_HOPS 64
#define DONT_FRAGMENT 0x4000
#define VNI_PRESENT 0x08000000

struct vxlan {
	struct udphdr udp;
	__be32 flags;
	__be32 vni;
	struct ethhdr ethernet;
} __attribute__((packed));

#define MAX_OUTER (sizeof(struct ipv6hdr) + sizeof(struct vxlan))

static __always_inline bool has_outer(const struct next_hop *hop)
{
	return hop->kind == IPIP || hop->kind == VXLAN;
}

static __always_inline __u32 outer_length(const struct next_hop *hop)
{
	__u32 ip =
		is_mapped(hop->outer_destination) ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);

	return hop->kind == VXLAN ? ip + sizeof(struct vxlan) : ip;
}

static __always_inline __u16 fold_checksum(__u64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return ~((sum & 0xffff) + (sum >> 16));
}

/* Return the checksum of a header without options, whose `check` is 0 (RFC 791). */
static __always_inline __u16 header_checksum(const struct iphdr *ip)
{
	const __u16 *words = (const void *)ip;
	__u32 sum = 0;

	for (int i = 0; i < 10; i++)
		sum += words[i];
	return fold_checksum(sum);
}

/* Write the header in words, and compute the checksum from registers: a processor stalls when it
 * reads a word that was just written byte by byte. */
static __always_inline void write_ipv4(struct iphdr *ip, const struct packet *packet,
				       const struct next_hop *hop, __u8 protocol, __u32 length)
{
	__be32 first =
		bpf_htonl(0x45 << 24 | packet->traffic_class << 16 | (__u16)(sizeof(*ip) + length));
	__be32 second = bpf_htonl(DONT_FRAGMENT),
	       third = bpf_htonl(OUTER_HOPS << 24 | protocol << 16);
	__u64 sum =
		(__u64)first + second + third + hop->outer_source[3] + hop->outer_destination[3];
	__be32 *words = (void *)ip;

	words[0] = first;
	words[1] = second;
	words[2] = third;
	ip->check = fold_checksum((sum & 0xffffffff) + (sum >> 32));
	ip->saddr = hop->outer_source[3];
	ip->daddr = hop->outer_destination[3];
}

/* The flow label lets routers spread flows over equal paths (RFC 6438). */
static __always_inline void write_ipv6(struct ipv6hdr *ip, const struct packet *packet,
				       const struct next_hop *hop, __u8 protocol, __u32 length)
{
	__be32 *first = (void *)ip;

	*first =
		bpf_htonl(6U << 28 | (__u32)packet->traffic_class << 20 | (packet->hash & 0xfffff));
	ip->payload_len = bpf_htons(length);
	ip->nexthdr = protocol;
	ip->hop_limit = OUTER_HOPS;
	__builtin_memcpy(&ip->saddr, hop->outer_source, 16);
	__builtin_memcpy(&ip->daddr, hop->outer_destination, 16);
}

/* Write the headers of VXLAN. The VXLAN devices of all nodes have the same MAC address, so none
 * needs to be resolved. */
static __always_inline void write_vxlan(struct vxlan *vxlan, const struct packet *packet,
					const struct next_hop *hop, __be16 port, __u32 length)
{
	/* Different for each flow: RFC 7348, 5. */
	vxlan->udp.source = bpf_htons(0x8000 | (packet->hash & 0x7fff));
	vxlan->udp.dest = port;
	vxlan->udp.len = bpf_htons(sizeof(*vxlan) + length);
	vxlan->udp.check = 0; /* the inner packet has its own checksum: RFC 7348, RFC 6935 */
	vxlan->flags = bpf_htonl(VNI_PRESENT);
	vxlan->vni = bpf_htonl(hop->vni << 8);
	vxlan->ethernet = (struct ethhdr){
		.h_dest = { 0x02, 0x66, 0x6c, 0, 0, 1 },
		.h_source = { 0x02, 0x66, 0x6c, 0, 0, 2 },
		.h_proto = packet->ipv6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP),
	};
}

/* Write the outer headers, of `outer_length` bytes. Return false if they do not fit before `end`.
 */
static __always_inline bool write_outer(void *at, void *end, const struct packet *packet,
					const struct next_hop *hop, __be16 port)
{
	__u32 length = packet->length,
	      inside = hop->kind == VXLAN ? length + sizeof(struct vxlan) : length;
	__u8 protocol = hop->kind == VXLAN ? IPPROTO_UDP
			: packet->ipv6     ? IPPROTO_IPV6
					   : IPPROTO_IPIP;

	if (is_mapped(hop->outer_destination)) {
		if (at + sizeof(struct iphdr) > end)
			return false;
		write_ipv4(at, packet, hop, protocol, inside);
		at += sizeof(struct iphdr);
	} else {
		if (at + sizeof(struct ipv6hdr) > end)
			return false;
		write_ipv6(at, packet, hop, protocol, inside);
		at += sizeof(struct ipv6hdr);
	}
	if (hop->kind != VXLAN)
		return true;
	if (at + sizeof(struct vxlan) > end)
		return false;
	write_vxlan(at, packet, hop, port, length);
	return true;
}
