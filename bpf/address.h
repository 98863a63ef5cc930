/* Addresses of both families as one type of key: an IPv4 address is stored as an IPv4-mapped IPv6
 * address (RFC 4291, 2.5.5.2). */
#pragma once

#include <linux/in6.h>
#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include <stdbool.h>

/* Written as two words of 8 bytes, as it is read later: a processor stalls when it reads a word
 * that was written in several parts. */
static __always_inline void set_mapped(__u32 *address, __be32 ipv4)
{
	__u64 high = 0, low = (__u64)ipv4 << 32 | bpf_htonl(0xffff);

	__builtin_memcpy(address, &high, 8);
	__builtin_memcpy(address + 2, &low, 8);
}

static __always_inline void set_address(__u32 *address, const struct in6_addr *from)
{
	__builtin_memcpy(address, from, 16);
}

static __always_inline bool is_mapped(const __u32 *address)
{
	return !address[0] && !address[1] && address[2] == bpf_htonl(0xffff);
}
