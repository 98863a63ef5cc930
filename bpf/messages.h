/* Messages that the gateway itself sends: answers to echo requests, to packets that are too big for
 * the path to their node, and to packets for Services without endpoints.
 *
 * Each message is made from the packet that it answers, and is sent back to the station from which
 * the packet came. The rate of each type is limited (RFC 1812, 4.3.2.8; RFC 4443, 2.4), and no
 * message is sent to an address that is not a single host. RFC 792, 1191, 4443, 9293. */
#pragma once

#include <linux/pkt_cls.h>

#include "choose.h"
#include "outer.h"
#include "packet.h"

/* The number of bytes of a packet that a message quotes at most: the message has to fit into 576
 * bytes (RFC 1812, 4.3.2.3) or 1280 bytes (RFC 4443, 2.4). */
#define QUOTED4 (576 - sizeof(struct iphdr) - sizeof(struct icmp))
#define QUOTED6 (1280 - sizeof(struct ipv6hdr) - sizeof(struct icmp))

#define SUMMED_AT_ONCE 512 /* the limit of bpf_csum_diff */

#define HEADER_WORDS 5 /* of a TCP header without options */

struct message4 {
	struct iphdr ip;
	struct icmp icmp;
};

struct message6 {
	struct ipv6hdr ip;
	struct icmp icmp;
};

struct reset4 {
	struct iphdr ip;
	struct tcphdr tcp;
};

struct reset6 {
	struct ipv6hdr ip;
	struct tcphdr tcp;
};

static __always_inline bool is_one_host(const struct packet *packet)
{
	const __u32 *source = packet->flow.source;
	__u8 first = ((const __u8 *)source)[packet->ipv6 ? 0 : 12];

	if (packet->ipv6)
		return first != 0xff && (source[0] | source[1] | source[2] | source[3]);
	return first != 0 && first != 127 && first < 224;
}

static __always_inline bool may_answer(const struct packet *packet, enum limit limit)
{
	const struct settings *config = read_settings();

	return config && is_one_host(packet) && within_limit(limit, config->messages_per_s);
}

/* Send the frame back to the station from which it came. The buffer begins with the Ethernet
 * header. */
static __always_inline int send_back(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *ethernet = data;
	__u8 sender[ETH_ALEN];

	if ((void *)(ethernet + 1) > end)
		return TC_ACT_SHOT;
	__builtin_memcpy(sender, ethernet->h_source, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, ethernet->h_dest, ETH_ALEN);
	__builtin_memcpy(ethernet->h_dest, sender, ETH_ALEN);
	return bpf_redirect(skb->ifindex, 0);
}

/* Turn a request into a reply: change the type, exchange the addresses, which changes no checksum,
 * and set a new time to live. */
static __always_inline bool make_reply4(struct iphdr *ip, void *end)
{
	struct icmp *icmp = (void *)(ip + 1);

	if ((void *)(icmp + 1) > end)
		return false;
	__be32 destination = ip->daddr;
	ip->daddr = ip->saddr;
	ip->saddr = destination;
	ip->ttl = OUTER_HOPS;
	ip->check = 0;
	ip->check = header_checksum(ip);
	icmp->type = ECHO_REPLY4;
	__u16 sum = fold_checksum((__u16)~icmp->checksum + (__u16)~bpf_htons(ECHO_REQUEST4 << 8));
	/* 0 and 0xffff are the same value in ones' complement, but only 0xffff is right for a
	 * message of zeros. */
	icmp->checksum = sum ? sum : 0xffff;
	return true;
}

static __always_inline bool make_reply6(struct ipv6hdr *ip, void *end)
{
	struct icmp *icmp = (void *)(ip + 1);

	if ((void *)(icmp + 1) > end)
		return false;
	struct in6_addr destination = ip->daddr;
	ip->daddr = ip->saddr;
	ip->saddr = destination;
	icmp->type = ECHO_REPLY6;
	__u16 more = bpf_htons((ECHO_REPLY6 - ECHO_REQUEST6) << 8);
	icmp->checksum = fold_checksum((__u16)~icmp->checksum + more);
	return true;
}

static __always_inline int answer_echo(struct __sk_buff *skb, const struct packet *packet)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u8 hops = OUTER_HOPS;

	if (!may_answer(packet, ECHO_REPLIES))
		return TC_ACT_SHOT;
	if (!packet->ipv6 && !make_reply4(data + sizeof(struct ethhdr), end))
		return TC_ACT_SHOT;
	if (packet->ipv6) {
		__u32 at = sizeof(struct ethhdr) + __builtin_offsetof(struct ipv6hdr, hop_limit);
		if (!make_reply6(data + sizeof(struct ethhdr), end))
			return TC_ACT_SHOT;
		if (bpf_skb_store_bytes(skb, at, &hops, 1, BPF_F_RECOMPUTE_CSUM))
			return TC_ACT_SHOT;
	}
	count(ECHO_ANSWERED);
	return send_back(skb);
}

/* Write the IP header of a message from the packet's destination to its sender. */
static __always_inline void write_header4(struct iphdr *ip, const struct packet *packet,
					  __u8 protocol, __u32 length)
{
	*ip = (struct iphdr){
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(length),
		.ttl = OUTER_HOPS,
		.protocol = protocol,
		.saddr = packet->flow.destination[3],
		.daddr = packet->flow.source[3],
	};
	ip->check = header_checksum(ip);
}

static __always_inline void write_header6(struct ipv6hdr *ip, const struct packet *packet,
					  __u8 protocol, __u32 payload)
{
	*ip = (struct ipv6hdr){
		.version = 6,
		.payload_len = bpf_htons(payload),
		.nexthdr = protocol,
		.hop_limit = OUTER_HOPS,
	};
	__builtin_memcpy(&ip->saddr, packet->flow.destination, 16);
	__builtin_memcpy(&ip->daddr, packet->flow.source, 16);
}

/* Add a pseudo header to a checksum (RFC 9293, 3.1; RFC 8200, 8.1): both addresses, the length and
 * the protocol. */
static __always_inline __s64 add_pseudo_header(__s64 sum, void *addresses, __u32 size,
					       __u8 protocol, __u32 payload)
{
	__be32 rest[] = { bpf_htonl(payload), bpf_htonl(protocol) };

	return bpf_csum_diff(0, 0, addresses, size, bpf_csum_diff(0, 0, rest, sizeof(rest), sum));
}

/* Read the part of the packet that is quoted. Return its checksum, or less than 0 if it cannot be
 * read. */
static __always_inline __s64 quote_packet(struct __sk_buff *skb, __u32 length)
{
	__u32 only = 0;
	struct quote *quote = bpf_map_lookup_elem(&quotes, &only);
	__s64 sum = 0;

	if (!quote || length < 1 || length > QUOTED6)
		return -1;
	quote->words[(length - 1) / 4] = 0; /* the last word may not be full */
	if (bpf_skb_load_bytes(skb, sizeof(struct ethhdr), quote, length))
		return -1;
	for (__u32 at = 0; at < QUOTED6; at += SUMMED_AT_ONCE) {
		__u32 left = length > at ? (length - at + 3) & ~3 : 0;
		sum = bpf_csum_diff(0, 0, quote->words + at / 4,
				    left < SUMMED_AT_ONCE ? left : SUMMED_AT_ONCE, sum);
	}
	return sum;
}

/* Write the message, with its checksum, in front of the rest of the packet. `sum`: the checksum of
 * the rest and, for IPv6, of the pseudo header. */
static __always_inline int prepend_message(struct __sk_buff *skb, void *message, struct icmp *icmp,
					   __u32 length, __s64 sum, enum event event)
{
	icmp->checksum = fold_checksum(bpf_csum_diff(0, 0, (void *)icmp, sizeof(*icmp), sum));
	if (bpf_skb_adjust_room(skb, length, BPF_ADJ_ROOM_MAC, 0))
		return TC_ACT_SHOT;
	if (bpf_skb_store_bytes(skb, sizeof(struct ethhdr), message, length, BPF_F_RECOMPUTE_CSUM))
		return TC_ACT_SHOT;
	count(event);
	return send_back(skb);
}

/* Drop the packet, and send its sender an ICMP error with as much of the packet as may be quoted.
 *
 * If the packet came from this host without a transport checksum, the device fills it in within the
 * quoted part. The message's own checksum is then wrong, which does no harm, because the checksum
 * of a packet that stays on the host is not verified. */
static __always_inline int send_error(struct __sk_buff *skb, const struct packet *packet,
				      struct icmp icmp, enum event event)
{
	__u32 most = packet->ipv6 ? QUOTED6 : QUOTED4,
	      quoted = packet->length < most ? packet->length : most;
	struct message4 message4 = { .icmp = icmp };
	struct message6 message6 = { .icmp = icmp };

	if (bpf_skb_change_tail(skb, sizeof(struct ethhdr) + quoted, 0))
		return TC_ACT_SHOT;
	__s64 sum = quote_packet(skb, quoted);
	if (sum < 0)
		return TC_ACT_SHOT;
	if (!packet->ipv6) {
		write_header4(&message4.ip, packet, IPPROTO_ICMP, sizeof(message4) + quoted);
		return prepend_message(skb, &message4, &message4.icmp, sizeof(message4), sum,
				       event);
	}
	write_header6(&message6.ip, packet, IPPROTO_ICMPV6, sizeof(struct icmp) + quoted);
	sum = add_pseudo_header(sum, &message6.ip.saddr, 32, IPPROTO_ICMPV6,
				sizeof(struct icmp) + quoted);
	return prepend_message(skb, &message6, &message6.icmp, sizeof(message6), sum, event);
}

/* Drop the packet, and report to its sender the size that fits. The gateway does not fragment, not
 * even where IPv4 allows it: fragments cost the node more than they are worth, and senders with
 * path MTU discovery follow the message with and without the DF bit. */
static __always_inline int report_too_big(struct __sk_buff *skb, const struct packet *packet,
					  __u32 mtu)
{
	struct icmp size4 = { .type = UNREACHABLE4, .code = TOO_LONG4, .rest = bpf_htonl(mtu) };
	struct icmp size6 = { .type = TOO_BIG6, .rest = bpf_htonl(mtu) };

	/* No ICMP errors about ICMP errors or later fragments (RFC 1122, 3.2.2). */
	if (packet->error || packet->later || !may_answer(packet, SIZE_MESSAGES))
		return TC_ACT_SHOT;
	return send_error(skb, packet, packet->ipv6 ? size6 : size4, SIZE_MESSAGES_SENT);
}

/* Return the reset with which a host without a listening socket answers this segment (RFC 9293,
 * 3.10.7.1). */
static __always_inline struct tcphdr reset_of(const struct tcphdr *segment, __u32 length)
{
	struct tcphdr reset = {
		.source = segment->dest, .dest = segment->source, .doff = HEADER_WORDS, .rst = 1
	};

	if (segment->ack) {
		reset.seq = segment->ack_seq;
	} else {
		reset.ack = 1;
		reset.ack_seq =
			bpf_htonl(bpf_ntohl(segment->seq) + length + segment->syn + segment->fin);
	}
	return reset;
}

static __always_inline int send_reset(struct __sk_buff *skb, const struct packet *packet,
				      const struct tcphdr *segment)
{
	struct reset4 reset4 = { .tcp = reset_of(segment, packet->length - packet->headers) };
	struct reset6 reset6 = { .tcp = reset4.tcp };
	__u32 length = packet->ipv6 ? sizeof(reset6) : sizeof(reset4);
	__s64 sum;

	if (bpf_skb_change_tail(skb, sizeof(struct ethhdr) + length, 0))
		return TC_ACT_SHOT;
	if (packet->ipv6) {
		write_header6(&reset6.ip, packet, IPPROTO_TCP, sizeof(reset6.tcp));
		sum = add_pseudo_header(0, &reset6.ip.saddr, 32, IPPROTO_TCP, sizeof(reset6.tcp));
		reset6.tcp.check = fold_checksum(
			bpf_csum_diff(0, 0, (void *)&reset6.tcp, sizeof(reset6.tcp), sum));
		if (bpf_skb_store_bytes(skb, sizeof(struct ethhdr), &reset6, sizeof(reset6),
					BPF_F_RECOMPUTE_CSUM))
			return TC_ACT_SHOT;
	} else {
		write_header4(&reset4.ip, packet, IPPROTO_TCP, sizeof(reset4));
		sum = add_pseudo_header(0, &reset4.ip.saddr, 8, IPPROTO_TCP, sizeof(reset4.tcp));
		reset4.tcp.check = fold_checksum(
			bpf_csum_diff(0, 0, (void *)&reset4.tcp, sizeof(reset4.tcp), sum));
		if (bpf_skb_store_bytes(skb, sizeof(struct ethhdr), &reset4, sizeof(reset4),
					BPF_F_RECOMPUTE_CSUM))
			return TC_ACT_SHOT;
	}
	count(REFUSALS_SENT);
	return send_back(skb);
}

/* The Service has no endpoints: answer like a host on which no process listens, and drop the
 * packet. */
static __always_inline int refuse(struct __sk_buff *skb, const struct packet *packet,
				  __u32 statistics)
{
	struct icmp port4 = { .type = UNREACHABLE4, .code = NO_PORT4 },
		    port6 = { .type = UNREACHABLE6, .code = NO_PORT6 };
	struct tcphdr segment;

	count_drop(statistics, NO_ENDPOINTS);
	if (packet->error || packet->fragment)
		return TC_ACT_SHOT;
	if (packet->flow.protocol != IPPROTO_TCP)
		return may_answer(packet, REFUSALS)
			       ? send_error(skb, packet, packet->ipv6 ? port6 : port4,
					    REFUSALS_SENT)
			       : TC_ACT_SHOT;
	if (bpf_skb_load_bytes(skb, sizeof(struct ethhdr) + packet->transport, &segment,
			       sizeof(segment)))
		return TC_ACT_SHOT;
	if (segment.rst || !may_answer(packet, REFUSALS))
		return TC_ACT_SHOT;
	return send_reset(skb, packet, &segment);
}
