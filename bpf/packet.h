/* Read a packet: Ethernet, IPv4 or IPv6, TCP or UDP, or an ICMP error about such a flow.
 * In: the bytes. Out: the flow as its client sends it. False: not for us, or cut short; the kernel is to deal with it.
 * RFC 791, 8200, 9293, 768; ICMP errors quote the packet that caused them: RFC 792, 4443. */
#pragma once

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <stdbool.h>

#include "structs.h"

/* Ethernet, the longest IPv4 header, ICMP, the longest quoted header, the quoted ports: all that is ever read. */
#define LONGEST_HEADERS (14 + 60 + 8 + 60 + 8)

#define FRAGMENT_OFFSET 0x1fff
#define MORE_FRAGMENTS 0x2000

struct packet {
	struct flow_key flow;
	bool ipv6;
	bool opening;  /* a SYN without ACK */
	bool error;    /* an ICMP error about the flow */
	bool fragment; /* the first of several */
	__u8 hop_limit;
};

struct ports {
	__be16 source;
	__be16 destination;
};

struct icmp {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__u32 rest;
};

static __always_inline void set_mapped(__u32 *address, __be32 ipv4)
{
	address[0] = 0;
	address[1] = 0;
	address[2] = bpf_htonl(0xffff);
	address[3] = ipv4;
}

static __always_inline void set_address(__u32 *address, const struct in6_addr *from)
{
	__builtin_memcpy(address, from, 16);
}

/* Ports, and whether a connection opens, of the packet itself. */
static __always_inline bool read_transport(void *transport, void *end, struct packet *packet)
{
	struct ports *ports = transport;

	if ((void *)(ports + 1) > end)
		return false;
	packet->flow.source_port = ports->source;
	packet->flow.destination_port = ports->destination;
	if (packet->flow.protocol == IPPROTO_UDP)
		return true;
	if (packet->flow.protocol != IPPROTO_TCP)
		return false;
	struct tcphdr *tcp = transport;
	if ((void *)(tcp + 1) > end)
		return packet->fragment;
	packet->opening = tcp->syn && !tcp->ack;
	return true;
}

/* Ports of the quoted packet, which went the other way: from the listener to the client. */
static __always_inline bool read_quoted_ports(void *transport, void *end, struct packet *packet)
{
	struct ports *ports = transport;

	if ((void *)(ports + 1) > end)
		return false;
	packet->flow.source_port = ports->destination;
	packet->flow.destination_port = ports->source;
	packet->error = true;
	return packet->flow.protocol == IPPROTO_TCP || packet->flow.protocol == IPPROTO_UDP;
}

static __always_inline bool read_icmp4(struct icmp *icmp, __be32 to, void *end, struct packet *packet)
{
	if ((void *)(icmp + 1) > end)
		return false;
	if (icmp->type != 3 && icmp->type != 11 && icmp->type != 12) /* unreachable, time exceeded, parameter problem */
		return false;
	struct iphdr *quoted = (void *)(icmp + 1);
	if ((void *)(quoted + 1) > end || quoted->ihl < 5 || quoted->saddr != to)
		return false;
	if (quoted->frag_off & bpf_htons(FRAGMENT_OFFSET))
		return false;
	set_mapped(packet->flow.source, quoted->daddr);
	packet->flow.protocol = quoted->protocol;
	return read_quoted_ports((void *)quoted + quoted->ihl * 4, end, packet);
}

static __always_inline bool read_ipv4(struct iphdr *ip, void *end, struct packet *packet)
{
	if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl < 5)
		return false;
	if (ip->frag_off & bpf_htons(FRAGMENT_OFFSET))
		return false; /* has no ports */
	packet->fragment = ip->frag_off & bpf_htons(MORE_FRAGMENTS);
	packet->hop_limit = ip->ttl;
	packet->flow.protocol = ip->protocol;
	set_mapped(packet->flow.source, ip->saddr);
	set_mapped(packet->flow.destination, ip->daddr);
	void *transport = (void *)ip + ip->ihl * 4;
	if (ip->protocol == IPPROTO_ICMP)
		return read_icmp4(transport, ip->daddr, end, packet);
	return read_transport(transport, end, packet);
}

static __always_inline bool same_address(const struct in6_addr *one, const struct in6_addr *other)
{
	return one->in6_u.u6_addr32[0] == other->in6_u.u6_addr32[0] && one->in6_u.u6_addr32[1] == other->in6_u.u6_addr32[1] &&
	       one->in6_u.u6_addr32[2] == other->in6_u.u6_addr32[2] && one->in6_u.u6_addr32[3] == other->in6_u.u6_addr32[3];
}

static __always_inline bool read_icmp6(struct icmp *icmp, const struct in6_addr *to, void *end, struct packet *packet)
{
	if ((void *)(icmp + 1) > end)
		return false;
	if (icmp->type < 1 || icmp->type > 4) /* unreachable, packet too big, time exceeded, parameter problem */
		return false;
	struct ipv6hdr *quoted = (void *)(icmp + 1);
	if ((void *)(quoted + 1) > end || !same_address(&quoted->saddr, to))
		return false;
	set_address(packet->flow.source, &quoted->daddr);
	packet->flow.protocol = quoted->nexthdr;
	return read_quoted_ports(quoted + 1, end, packet);
}

/* Extension headers, fragments among them, are not followed: such a packet is left to the kernel. */
static __always_inline bool read_ipv6(struct ipv6hdr *ip, void *end, struct packet *packet)
{
	if ((void *)(ip + 1) > end || ip->version != 6)
		return false;
	packet->ipv6 = true;
	packet->hop_limit = ip->hop_limit;
	packet->flow.protocol = ip->nexthdr;
	set_address(packet->flow.source, &ip->saddr);
	set_address(packet->flow.destination, &ip->daddr);
	if (ip->nexthdr == IPPROTO_ICMPV6)
		return read_icmp6((void *)(ip + 1), &ip->daddr, end, packet);
	return read_transport(ip + 1, end, packet);
}

static __always_inline bool read_packet(void *data, void *end, struct packet *packet)
{
	struct ethhdr *ethernet = data;

	if ((void *)(ethernet + 1) > end)
		return false;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP))
		return read_ipv4((void *)(ethernet + 1), end, packet);
	if (ethernet->h_proto == bpf_htons(ETH_P_IPV6))
		return read_ipv6((void *)(ethernet + 1), end, packet);
	return false;
}
