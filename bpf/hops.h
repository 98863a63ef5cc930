/* What forwarding takes from a packet: one of its time to live. */
#pragma once

#include <linux/ip.h>
#include <bpf/bpf_endian.h>

/* RFC 1624, for a header of which one octet at an even place is one less. */
static __always_inline void spend_ttl(struct iphdr *ip)
{
	__u32 sum = ip->check + bpf_htons(0x0100);

	ip->check = sum + (sum >= 0xffff);
	ip->ttl--;
}
