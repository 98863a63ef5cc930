/* The hop limit (IPv4: TTL) of a packet tells whether it has passed a gateway.
 * A gateway sends every packet on with a hop limit of HOPS_LEFT. A node that does not serve the address sends the packet back to
 * its router, and so to a gateway, which sees a hop limit of HOPS_LEFT or less, and does not send the packet on a second time.
 * Packets from clients arrive with more: hosts send with 64 or more, and few paths have more than 30 hops. HOPS_LEFT is enough for
 * the way from a gateway to a pod: nodes and routers of the cluster's own network. */
#pragma once

#include <linux/ip.h>
#include <bpf/bpf_endian.h>

#define HOPS_LEFT 16 /* the same value is in drivers/direct/maps/records.py */

/* The packet's TTL is more than HOPS_LEFT. RFC 1624, for a header of which one octet at an even place has become less. */
static __always_inline void limit_ttl(struct iphdr *ip)
{
	__u32 sum = ip->check + bpf_htons((ip->ttl - HOPS_LEFT) << 8);

	ip->check = sum + (sum >= 0xffff);
	ip->ttl = HOPS_LEFT;
}
