/* The hop limit (IPv4: TTL) of a packet shows whether the packet has passed a gateway.
 *
 * A gateway forwards every packet with a hop limit of HOPS_LEFT. A node that does not serve the
 * address sends the packet back to its router, and so to a gateway. The gateway sees a hop limit of
 * HOPS_LEFT or less, and does not forward the packet a second time. Packets from clients arrive
 * with more: hosts send with 64 or more, and few paths have more than 30 hops. HOPS_LEFT is enough
 * for the path from a gateway to a pod, through nodes and routers of the cluster's own network. */
#pragma once

#include <linux/ip.h>
#include <bpf/bpf_endian.h>

#define HOPS_LEFT 16 /* the same value is in drivers/direct/maps/records.py */

/* Set the TTL, which is more than HOPS_LEFT. The checksum is updated incrementally (RFC 1624): one
 * octet at an even offset of the header has decreased. */
static __always_inline void limit_ttl(struct iphdr *ip)
{
	__u32 sum = ip->check + bpf_htons((ip->ttl - HOPS_LEFT) << 8);

	ip->check = sum + (sum >= 0xffff);
	ip->ttl = HOPS_LEFT;
}
