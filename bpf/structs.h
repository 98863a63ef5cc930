/* The records that the program shares with fairlead.drivers.direct. Its layout.py packs and unpacks them; a test compares
 * sizes and offsets with this object's BTF. All multi-byte fields are in host order, but for __be16 and addresses.
 * An IPv4 address is kept as IPv4-mapped IPv6 (RFC 4291, 2.5.5.2), so that one table serves both families. */
#pragma once

#include <linux/types.h>

#define SLOTS_PER_CHUNK 32

/* Values of a slot that are no node. */
#define NONE 0xffff    /* current table: nobody takes new connections; previous table: no connection of this slot needs looking up */
#define TRACKED 0xfffe /* previous table only: connections of this slot may have entries, and those without are the current node's */

#define BY_SOURCE 1          /* the current table is indexed by the client's address alone (sessionAffinity: ClientIP) */
#define PREVIOUS_BY_SOURCE 2 /* so is the previous one */

enum event {
	NO_MEMBER,     /* dropped: the listener has no node for this packet */
	NO_NEXT_HOP,   /* dropped: the node has no address of the packet's family, or no route to it */
	HOP_LIMIT,     /* dropped: TTL or hop limit used up */
	FRAGMENT,      /* dropped: first fragment of a datagram whose other fragments cannot be told apart */
	TRACK_REFUSED, /* passed on without a connection entry: the insert limit or the table's size was reached */
	EVENTS,
};

struct listener_key {
	__u32 address[4];
	__be16 port;
	__u8 protocol;
	__u8 pad;
};

/* Where the tables of a listener lie in the arena; one update of this record makes new tables live. Offsets count chunks. */
struct listener {
	__u32 current_offset;
	__u32 current_size;
	__u32 previous_offset;
	__u32 previous_size;
	__u32 flags;
	__u32 statistics;
};

struct chunk {
	__u16 node[SLOTS_PER_CHUNK];
};

enum mode {
	LINK, /* handed over on the link that both are on */
	HERE, /* the node is this host: its own service proxy takes the packet */
};

/* Where to send what a node gets. An interface index of 0: the node cannot be reached over that family. */
struct node {
	__u32 ipv6[4];
	__be32 ipv4;
	__u32 interface4;
	__u32 interface6;
	__u32 mode;
};

/* A flow as its client sends it. */
struct flow_key {
	__u32 source[4];
	__u32 destination[4];
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 pad[3];
};

struct flow {
	__u32 node;
};

struct traffic {
	__u64 packets;
	__u64 bytes;
	__u64 flows;
};

/* Not read by the program: they make the pinned maps tell whose they are. */
struct owner {
	char namespace[64];
	char name[64];
	char uid[40];
};

struct node_name {
	char name[256];
};

struct settings {
	__u32 inserts_per_s; /* per CPU and per kind of flow */
	__u32 pad;
};

struct allowance {
	__u64 since_ns;
	__u64 used;
};
