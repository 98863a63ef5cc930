/* Messages of our own: answers to echo requests, and to packets that do not fit the way to their node.
 * Each is made of the packet that it answers, and goes back where that came from. So many a second and no more (RFC 1812,
 * 4.3.2.8; RFC 4443, 2.4), and none to what is no single host.
 * RFC 792, 1191, 4443. */
#pragma once

#include <linux/pkt_cls.h>

#include "choose.h"
#include "outer.h"
#include "packet.h"

/* How much of a packet its sender is told: all that fits into 576 (RFC 1812, 4.3.2.3) and 1280 bytes (RFC 4443, 2.4). */
#define QUOTED4 (576 - sizeof(struct iphdr) - sizeof(struct icmp))
#define QUOTED6 (1280 - sizeof(struct ipv6hdr) - sizeof(struct icmp))

#define SUMMED_AT_ONCE 512

struct message4 {
	struct iphdr ip;
	struct icmp icmp;
};

struct message6 {
	struct ipv6hdr ip;
	struct icmp icmp;
};

static __always_inline bool is_one_host(const struct packet *packet)
{
	const __u32 *source = packet->flow.source;
	__u8 first = ((const __u8 *)source)[packet->ipv6 ? 0 : 12];

	if (packet->ipv6)
		return first != 0xff && (source[0] | source[1] | source[2] | source[3]);
	return first != 0 && first != 127 && first < 224;
}

static __always_inline bool may_answer(const struct packet *packet)
{
	const struct settings *limits = read_settings();

	return limits && is_one_host(packet) && may(MESSAGES, limits->messages_per_s);
}

/* Back to the station that it came from. The buffer's first bytes are its Ethernet header. */
static __always_inline int turn_around(struct __sk_buff *skb)
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

/* Request to reply: another type, addresses exchanged, which changes no sum, and a time to live of our own. */
static __always_inline bool make_reply4(struct iphdr *ip, void *end)
{
	struct icmp *icmp = (void *)(ip + 1);

	if ((void *)(icmp + 1) > end)
		return false;
	__be32 asked = ip->daddr;
	ip->daddr = ip->saddr;
	ip->saddr = asked;
	ip->ttl = OUTER_HOPS;
	ip->check = 0;
	ip->check = header_checksum(ip);
	icmp->type = ECHO_REPLY4;
	__u16 sum = fold_checksum((__u16)~icmp->checksum + (__u16)~bpf_htons(ECHO_REQUEST4 << 8));
	icmp->checksum = sum ? sum : 0xffff; /* both are zero, but of a message that is all zeros only this one is right */
	return true;
}

static __always_inline bool make_reply6(struct ipv6hdr *ip, void *end)
{
	struct icmp *icmp = (void *)(ip + 1);

	if ((void *)(icmp + 1) > end)
		return false;
	struct in6_addr asked = ip->daddr;
	ip->daddr = ip->saddr;
	ip->saddr = asked;
	icmp->type = ECHO_REPLY6;
	__u16 more = bpf_htons((ECHO_REPLY6 - ECHO_REQUEST6) << 8);
	icmp->checksum = fold_checksum((__u16)~icmp->checksum + more);
	return true;
}

static __always_inline int answer_echo(struct __sk_buff *skb, const struct packet *packet)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u8 hops = OUTER_HOPS;

	if (!may_answer(packet))
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
	return turn_around(skb);
}

/* The sum of the first `length` bytes of the packet; `length` is a constant that four divides. Negative if it is not there. */
static __always_inline __s64 sum_of_packet(struct __sk_buff *skb, __u32 length)
{
	void *data = (void *)(long)skb->data + sizeof(struct ethhdr), *end = (void *)(long)skb->data_end;
	__s64 sum = 0;

	if (data + length > end)
		return -1;
	for (__u32 at = 0; at < length; at += SUMMED_AT_ONCE) {
		__u32 part = length - at < SUMMED_AT_ONCE ? length - at : SUMMED_AT_ONCE;
		sum = bpf_csum_diff(0, 0, data + at, part, sum);
	}
	return sum;
}

/* The message and its checksum in front of what is left of the packet. `sum`: of that and, in IPv6, of the pseudo header. */
static __always_inline int put_in_front(struct __sk_buff *skb, void *message, struct icmp *icmp, __u32 length, __s64 sum)
{
	icmp->checksum = fold_checksum(bpf_csum_diff(0, 0, (void *)icmp, sizeof(*icmp), sum));
	if (bpf_skb_adjust_room(skb, length, BPF_ADJ_ROOM_MAC, 0))
		return TC_ACT_SHOT;
	if (bpf_skb_store_bytes(skb, sizeof(struct ethhdr), message, length, BPF_F_RECOMPUTE_CSUM))
		return TC_ACT_SHOT;
	count(TOLD_TOO_BIG);
	return turn_around(skb);
}

static __always_inline int tell_too_big4(struct __sk_buff *skb, const struct packet *packet, __u32 mtu)
{
	__s64 sum = sum_of_packet(skb, QUOTED4);
	struct message4 message = {
		.ip = {
			.version = 4,
			.ihl = 5,
			.tot_len = bpf_htons(sizeof(message) + QUOTED4),
			.ttl = OUTER_HOPS,
			.protocol = IPPROTO_ICMP,
			.saddr = packet->flow.destination[3],
			.daddr = packet->flow.source[3],
		},
		.icmp = { .type = UNREACHABLE4, .code = TOO_LONG4, .rest = bpf_htonl(mtu) },
	};

	if (sum < 0)
		return TC_ACT_SHOT;
	message.ip.check = header_checksum(&message.ip);
	return put_in_front(skb, &message, &message.icmp, sizeof(message), sum);
}

static __always_inline int tell_too_big6(struct __sk_buff *skb, const struct packet *packet, __u32 mtu)
{
	__s64 sum = sum_of_packet(skb, QUOTED6);
	struct message6 message = {
		.ip = {
			.version = 6,
			.payload_len = bpf_htons(sizeof(struct icmp) + QUOTED6),
			.nexthdr = IPPROTO_ICMPV6,
			.hop_limit = OUTER_HOPS,
		},
		.icmp = { .type = TOO_BIG6, .rest = bpf_htonl(mtu) },
	};

	if (sum < 0)
		return TC_ACT_SHOT;
	__builtin_memcpy(&message.ip.saddr, packet->flow.destination, 16);
	__builtin_memcpy(&message.ip.daddr, packet->flow.source, 16);
	__be32 rest_of_pseudo_header[] = { bpf_htonl(sizeof(struct icmp) + QUOTED6), bpf_htonl(IPPROTO_ICMPV6) };
	sum = bpf_csum_diff(0, 0, rest_of_pseudo_header, sizeof(rest_of_pseudo_header), sum);
	sum = bpf_csum_diff(0, 0, (void *)&message.ip.saddr, 32, sum);
	return put_in_front(skb, &message, &message.icmp, sizeof(message), sum);
}

/* Tell the sender how long a packet may be, and drop this one. Also where IPv4 would let us cut it up: fragments cost the node
 * more than they are worth, and senders that look for the size at all heed the message with and without the DF bit.
 * What is left of the packet has its transport checksum filled in by the device if it came from this host without one; that the
 * message's own checksum is then wrong does no harm, as such a packet is not checked where it stays on the host. */
static __always_inline int tell_too_big(struct __sk_buff *skb, const struct packet *packet, __u32 mtu)
{
	__u32 quoted = packet->ipv6 ? QUOTED6 : QUOTED4, left = sizeof(struct ethhdr) + quoted;

	/* No errors about errors, nor about later fragments (RFC 1122, 3.2.2). */
	if (packet->error || packet->later || packet->length < quoted || !may_answer(packet))
		return TC_ACT_SHOT;
	if (bpf_skb_change_tail(skb, left, 0) || bpf_skb_pull_data(skb, left))
		return TC_ACT_SHOT;
	return packet->ipv6 ? tell_too_big6(skb, packet, mtu) : tell_too_big4(skb, packet, mtu);
}
