/* Parse a packet: Ethernet, IPv4 or IPv6 with options and extension headers, and TCP, UDP, SCTP, or
 * an ICMP error about such a flow. In: the bytes. Out: the flow in the direction from its client,
 * and the properties of the packet that forwarding needs. RFC 791, 8200, 4302, 9293, 768, 9260;
 * ICMP errors quote the packet that caused them: RFC 792, 4443. */
#pragma once

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <stdbool.h>

#include "address.h"
#include "maps.h"

#define FRAGMENT_OFFSET 0x1fff
#define MORE_FRAGMENTS 0x2000
#define IPV6_FRAGMENT_OFFSET 0xfff8
#define IPV6_MORE_FRAGMENTS 1

/* The greatest number of extension headers that hosts send: RFC 8200 (4.1) lists each of the six
 * headers once, and destination options twice. */
#define MAX_EXTENSIONS 7
#define FARTHEST_HEADER 0x3fff /* a mask */

#define QUIC_PORT 443
#define QUIC_VERSION_2 0x6b3343cf /* RFC 9369 */
#define SCTP_INIT 1
#define SCTP_ABORT 6
#define SCTP_SHUTDOWN 7
#define SCTP_SHUTDOWN_ACK 8
#define SCTP_SHUTDOWN_COMPLETE 14

/* Types and codes of ICMP and ICMPv6. */
#define ECHO_REPLY4 0
#define UNREACHABLE4 3
#define TOO_LONG4 4 /* a code, like NO_PORT4 */
#define NO_PORT4 3
#define ECHO_REQUEST4 8
#define TIME_EXCEEDED4 11
#define PARAMETER_PROBLEM4 12
#define UNREACHABLE6 1
#define NO_PORT6 4 /* a code */
#define TOO_BIG6 2
#define PARAMETER_PROBLEM6 4
#define ECHO_REQUEST6 128
#define ECHO_REPLY6 129

enum reading {
	IGNORED,        /* for no listener: the kernel handles the packet */
	TRUNCATED,      /* ends, or cannot be read further, before the flow is known */
	FLOW,           /* the flow is known */
	LATER_FRAGMENT, /* a later fragment, without ports */
	ECHO_REQUEST,   /* an echo request without options or extension headers */
};

struct packet {
	struct flow_key flow;
	__u32 hash;     /* hash of the flow, set by `choose` */
	__u32 length;   /* bytes of the IP packet, according to its header */
	__u32 sequence; /* sequence number of a TCP segment */
	__be32 fragment_id;
	__u16 transport; /* bytes from the IP header to the transport header */
	__u16 headers;   /* bytes from the IP header to the end of the transport header */
	__u8 network;    /* offset of the IP header in the frame */
	__u8 hop_limit;
	__u8 traffic_class; /* including the ECN bits */
	bool ipv6;
	bool closing;    /* a FIN or RST, or an SCTP chunk that ends an association */
	bool opening;    /* a SYN without ACK, or an SCTP INIT */
	bool refusing;   /* a RST without ACK: the answer to a segment that the client rejects */
	bool continuing; /* a QUIC datagram that cannot open a connection */
	bool error;      /* an ICMP error about the flow */
	bool fragment;   /* a fragment */
	bool later;      /* a later fragment, without ports */
};

struct ports {
	__be16 source;
	__be16 destination;
};

struct sctp {
	struct ports ports;
	__be32 tag;
	__be32 checksum;
	__u8 chunk;
};

struct quic {
	struct udphdr udp;
	__u8 first;
	__u8 version[4];
};

struct icmp {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be32 rest;
};

struct extension {
	__u8 next;
	/* In units of 8 octets, without the first 8; for an authentication header in units of 4,
	 * without the first 8. */
	__u8 length;
	__be16 fragment;
	__be32 fragment_id;
};

static __always_inline bool ends_association(__u8 chunk)
{
	return chunk == SCTP_ABORT || chunk == SCTP_SHUTDOWN || chunk == SCTP_SHUTDOWN_ACK ||
	       chunk == SCTP_SHUTDOWN_COMPLETE;
}

static __always_inline enum reading read_tcp(struct tcphdr *tcp, void *end, struct packet *packet)
{
	if ((void *)(tcp + 1) > end)
		return packet->fragment ? FLOW : TRUNCATED;
	packet->opening = tcp->syn && !tcp->ack;
	packet->closing = tcp->fin || tcp->rst;
	packet->refusing = tcp->rst && !tcp->ack;
	packet->sequence = bpf_ntohl(tcp->seq);
	packet->headers += tcp->doff * 4;
	return FLOW;
}

/* Return whether a datagram cannot open a QUIC connection: it has a short header, or a long header
 * that is neither Initial nor 0-RTT (RFC 9000, 17.2 and 17.3). Other protocols, and unknown
 * versions of QUIC, may open a connection. */
static __always_inline bool continues_quic(struct quic *quic, void *end)
{
	if ((void *)(quic + 1) > end)
		return false;
	if (!(quic->first & 0x80))
		return quic->first & 0x40;
	__u32 version = quic->version[0] << 24 | quic->version[1] << 16 | quic->version[2] << 8 |
			quic->version[3];
	__u8 type = quic->first >> 4 & 3;
	if (version == 1)
		return type >= 2;
	return version == QUIC_VERSION_2 && type != 1 && type != 2;
}

/* Read the ports of the packet, and whether it opens or closes a connection. */
static __always_inline enum reading read_transport(void *at, void *end, struct packet *packet)
{
	struct ports *ports = at;
	struct sctp *sctp = at;

	if (packet->flow.protocol != IPPROTO_TCP && packet->flow.protocol != IPPROTO_UDP &&
	    packet->flow.protocol != IPPROTO_SCTP)
		return IGNORED;
	if ((void *)(ports + 1) > end)
		return TRUNCATED;
	packet->flow.source_port = ports->source;
	packet->flow.destination_port = ports->destination;
	packet->transport = packet->headers;
	if (packet->flow.protocol == IPPROTO_TCP)
		return read_tcp(at, end, packet);
	packet->headers += sizeof(struct udphdr);
	if (packet->flow.protocol == IPPROTO_UDP)
		packet->continuing =
			ports->destination == bpf_htons(QUIC_PORT) && continues_quic(at, end);
	else if ((void *)(sctp + 1) <= end) {
		packet->opening = !sctp->tag && sctp->chunk == SCTP_INIT;
		packet->closing = ends_association(sctp->chunk);
	}
	return FLOW;
}

/* Read the ports of the quoted packet, which was sent from the listener to the client. */
static __always_inline enum reading read_quoted_ports(void *at, void *end, struct packet *packet)
{
	struct ports *ports = at;

	if (packet->flow.protocol != IPPROTO_TCP && packet->flow.protocol != IPPROTO_UDP &&
	    packet->flow.protocol != IPPROTO_SCTP)
		return IGNORED;
	if ((void *)(ports + 1) > end)
		return TRUNCATED;
	packet->flow.source_port = ports->destination;
	packet->flow.destination_port = ports->source;
	packet->error = true;
	return FLOW;
}

static __always_inline enum reading read_icmp4(struct iphdr *ip, void *at, void *end,
					       struct packet *packet)
{
	struct icmp *icmp = at;
	struct iphdr *quoted = (void *)(icmp + 1);

	if (packet->fragment)
		return IGNORED;
	if ((void *)quoted > end)
		return TRUNCATED;
	if (icmp->type == ECHO_REQUEST4)
		return ip->ihl == 5 ? ECHO_REQUEST : IGNORED;
	if (icmp->type != UNREACHABLE4 && icmp->type != TIME_EXCEEDED4 &&
	    icmp->type != PARAMETER_PROBLEM4)
		return IGNORED;
	if ((void *)(quoted + 1) > end)
		return TRUNCATED;
	if (quoted->ihl < 5 || quoted->saddr != ip->daddr ||
	    quoted->frag_off & bpf_htons(FRAGMENT_OFFSET))
		return IGNORED;
	set_mapped(packet->flow.source, quoted->daddr);
	packet->flow.protocol = quoted->protocol;
	return read_quoted_ports((void *)quoted + quoted->ihl * 4, end, packet);
}

static __always_inline enum reading read_ipv4(struct iphdr *ip, void *end, struct packet *packet)
{
	if ((void *)(ip + 1) > end)
		return TRUNCATED;
	if (ip->version != 4 || ip->ihl < 5)
		return IGNORED;
	packet->hop_limit = ip->ttl;
	packet->traffic_class = ip->tos;
	packet->length = bpf_ntohs(ip->tot_len);
	packet->headers = ip->ihl * 4;
	packet->flow.protocol = ip->protocol;
	set_mapped(packet->flow.source, ip->saddr);
	set_mapped(packet->flow.destination, ip->daddr);
	if (ip->frag_off & bpf_htons(FRAGMENT_OFFSET | MORE_FRAGMENTS)) {
		packet->fragment = true;
		packet->fragment_id = ip->id;
		packet->later = ip->frag_off & bpf_htons(FRAGMENT_OFFSET);
		if (packet->later)
			return LATER_FRAGMENT;
	}
	void *transport = (void *)ip + ip->ihl * 4;
	if (ip->protocol == IPPROTO_ICMP)
		return read_icmp4(ip, transport, end, packet);
	return read_transport(transport, end, packet);
}

static __always_inline bool is_extension(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING ||
	       protocol == IPPROTO_DSTOPTS || protocol == IPPROTO_AH ||
	       protocol == IPPROTO_FRAGMENT;
}

/* Skip the extension headers after `ip`. Set the protocol of the following header in `flow`, and
 * return the offset of this header from `ip`; 0 if it cannot be read, 1 for a later fragment.
 *
 * The position is stored in a map, because the verifier does not track the content of maps. All
 * iterations look equal to the verifier, so it does not have to follow every combination of
 * headers. */
static __always_inline __u32 skip_extensions(struct ipv6hdr *ip, void *end, struct packet *packet)
{
	__u32 only = 0;
	volatile struct walk *walk = bpf_map_lookup_elem(&walks, &only);

	if (!walk)
		return 0;
	walk->at = sizeof(*ip);
	walk->protocol = packet->flow.protocol;
	for (int i = 0; i < MAX_EXTENSIONS; i++) {
		__u32 at = walk->at & FARTHEST_HEADER;
		__u8 protocol = walk->protocol;
		struct extension *extension = (void *)ip + at;
		if (!is_extension(protocol)) {
			packet->flow.protocol = protocol;
			return at;
		}
		if ((void *)(extension + 1) > end)
			return 0;
		walk->protocol = extension->next;
		if (protocol == IPPROTO_FRAGMENT) {
			walk->at = at + sizeof(*extension);
			packet->fragment = extension->fragment &
					   bpf_htons(IPV6_FRAGMENT_OFFSET | IPV6_MORE_FRAGMENTS);
			packet->later = extension->fragment & bpf_htons(IPV6_FRAGMENT_OFFSET);
			packet->fragment_id = extension->fragment_id;
			if (packet->later)
				return 1;
		} else {
			walk->at = at + (protocol == IPPROTO_AH ? (extension->length + 2) * 4
								: (extension->length + 1) * 8);
		}
	}
	return 0;
}

/* Return the offset of the transport header, like `skip_extensions`. Most packets have no extension
 * headers. */
static __always_inline __u32 find_transport(struct ipv6hdr *ip, void *end, struct packet *packet)
{
	return is_extension(packet->flow.protocol) ? skip_extensions(ip, end, packet) : sizeof(*ip);
}

static __always_inline bool same_address(const struct in6_addr *one, const struct in6_addr *other)
{
	return one->in6_u.u6_addr32[0] == other->in6_u.u6_addr32[0] &&
	       one->in6_u.u6_addr32[1] == other->in6_u.u6_addr32[1] &&
	       one->in6_u.u6_addr32[2] == other->in6_u.u6_addr32[2] &&
	       one->in6_u.u6_addr32[3] == other->in6_u.u6_addr32[3];
}

static __always_inline enum reading read_icmp6(struct ipv6hdr *ip, void *at, void *end,
					       struct packet *packet)
{
	struct icmp *icmp = at;
	struct ipv6hdr *quoted = (void *)(icmp + 1);

	if (packet->fragment)
		return IGNORED;
	if ((void *)quoted > end)
		return TRUNCATED;
	if (icmp->type == ECHO_REQUEST6)
		return ip->nexthdr == IPPROTO_ICMPV6 ? ECHO_REQUEST : IGNORED;
	/* The types between these two are "packet too big" and "time exceeded". */
	if (icmp->type < UNREACHABLE6 || icmp->type > PARAMETER_PROBLEM6)
		return IGNORED;
	if ((void *)(quoted + 1) > end)
		return TRUNCATED;
	if (!same_address(&quoted->saddr, &ip->daddr))
		return IGNORED;
	set_address(packet->flow.source, &quoted->daddr);
	packet->flow.protocol = quoted->nexthdr;
	__u32 transport = find_transport(quoted, end, packet);
	packet->fragment = packet->later = false; /* the quoted packet may have been a fragment */
	if (transport <= 1)
		return transport ? IGNORED : TRUNCATED;
	return read_quoted_ports((void *)quoted + transport, end, packet);
}

static __always_inline enum reading read_ipv6(struct ipv6hdr *ip, void *end, struct packet *packet)
{
	if ((void *)(ip + 1) > end)
		return TRUNCATED;
	if (ip->version != 6)
		return IGNORED;
	packet->ipv6 = true;
	packet->hop_limit = ip->hop_limit;
	packet->traffic_class = ip->priority << 4 | ip->flow_lbl[0] >> 4;
	packet->length = sizeof(*ip) + bpf_ntohs(ip->payload_len);
	packet->flow.protocol = ip->nexthdr;
	set_address(packet->flow.source, &ip->saddr);
	set_address(packet->flow.destination, &ip->daddr);
	__u32 transport = find_transport(ip, end, packet);
	if (transport <= 1)
		return transport ? LATER_FRAGMENT : TRUNCATED;
	packet->headers = transport;
	if (packet->flow.protocol == IPPROTO_ICMPV6)
		return read_icmp6(ip, (void *)ip + transport, end, packet);
	return read_transport((void *)ip + transport, end, packet);
}

/* Parse the packet. `type`: the protocol after the Ethernet header and its tags. `network`: the
 * offset of the IP header. */
static __always_inline enum reading read_packet(void *data, void *end, __be16 type, __u32 network,
						struct packet *packet)
{
	packet->network = network;
	if (type == bpf_htons(ETH_P_IP))
		return read_ipv4(data + network, end, packet);
	if (type == bpf_htons(ETH_P_IPV6))
		return read_ipv6(data + network, end, packet);
	return IGNORED;
}
