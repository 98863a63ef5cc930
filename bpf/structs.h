/* The records that the programs share with fairlead.drivers.direct. Its maps/records.py packs and
 * unpacks them; a test compares sizes and offsets with the BTF of the object file. All multi-byte
 * fields are in host byte order, except for __be16 and addresses. IPv4 addresses are stored as
 * IPv4-mapped IPv6 addresses (RFC 4291, 2.5.5.2), so that one table serves both families. */
#pragma once

#include <linux/types.h>

#define SLOTS_PER_CHUNK 32

/* Values of a slot that are not a node number. */
/* In the current table: the slot has no node. In the previous table: the slot is not in
 * transition, and its connections need no lookup. */
#define NONE 0xffff
/* Only in the previous table: connections of the slot may have flow entries. Connections without
 * an entry belong to the current node. */
#define TRACKED 0xfffe

/* The current table is indexed by the client's address alone (sessionAffinity: ClientIP). */
#define BY_SOURCE 1
/* The previous table is indexed by the client's address alone. */
#define PREVIOUS_BY_SOURCE 2
/* Only sources in the set `ranges` may connect. The set may be empty. */
#define RANGES 4
/* The Service has no endpoints: a packet without a node is refused. */
#define REFUSES 16
/* Other gateways may not have the same tables yet: slots that are NONE count as TRACKED. */
#define CONVERGING 8

/* Counted events, for all listeners together. The events before DROPS are drops, and are also
 * counted for each listener. */
enum event {
	NO_MEMBER,   /* the listener has no node for this packet */
	NO_NEXT_HOP, /* the node has no address of the packet's family, or cannot be reached */
	HOP_LIMIT,   /* the packet arrived with a hop limit of 1 or 0 */
	FRAGMENT,    /* a later fragment whose first fragment has not been seen here */
	FORBIDDEN,   /* the source is in none of the Service's source ranges */
	/* The packet is too big for the path to its node. A message tells the sender, at a
	 * limited rate. */
	TOO_BIG,
	NOT_SENT, /* the kernel rejected a change of the packet, or its transmission */
	/* The packet has passed a gateway already, and its node has sent it back: see hops.h. */
	RETURNED,
	/* The Service has no endpoints; the sender gets a message, at a limited rate. */
	NO_ENDPOINTS,
	/* The flow entry of the packet may not be copied yet from the maps of an older version. The
	 * sender sends the packet again. */
	UPGRADING,
	/* Like RETURNED, but the packet begins no connection: perhaps the node serves the Service,
	 * and knows no connection to which the packet belongs. */
	STRAY,
	DROPS,
	TRACK_REFUSED = DROPS, /* a new flow has no entry, because the insert limit was reached */
	ECHO_ANSWERED,         /* echo requests to a load-balancer address */
	SIZE_MESSAGES_SENT,    /* ICMP messages sent about the size that fits */
	/* TCP resets and ICMP messages sent because a Service has no endpoints */
	REFUSALS_SENT,
	/* Reports of entries that were lost because user space reads too slowly. */
	REPORTS_LOST,
	EVENTS,
};

/* Three words of 8 bytes, which is the fastest size to compare. */
struct listener_key {
	__u32 address[4];
	__be16 port;
	__u8 protocol;
	__u8 pad[5];
};

/* Where the tables of a listener are in the arena. Offsets count chunks. One update of this record
 * puts both new tables into effect, as soon as `generation` is changed. */
struct listener {
	__u32 current_offset;
	__u32 current_size;
	__u32 previous_offset;
	__u32 previous_size;
	__u32 flags;
	__u32 statistics;
	__u32 ranges; /* the set of source ranges, if the flag RANGES is set */
	__u32 share;  /* the index of its namespace in `shares`; 0: it has none */
};

/* A listener in the cache of a CPU, and the generation in which it was read. It has the size of a
 * cache line. */
struct cached_listener {
	struct listener_key key;
	__u64 generation;
	struct listener listener;
};

struct chunk {
	__u16 node[SLOTS_PER_CHUNK];
};

enum forwarding {
	UNREACHABLE, /* the node cannot be reached over this address family */
	LINK,        /* the frame is addressed to the node, which is on the same link */
	LOCAL,       /* the node is this host: its service proxy handles the packet */
	/* In an IP packet to the node, which removes the outer header (RFC 2003, 2473, 4213). */
	IPIP,
	VXLAN, /* in a UDP packet to the node's vxlan device (RFC 7348) */
};

/* How packets of one address family get to a node. The record of node n is at index 2n for IPv4,
 * and at 2n + 1 for IPv6. The fields that a packet without a tunnel needs come first, in one or two
 * cache lines. */
struct next_hop {
	enum forwarding kind;
	__u32 interface; /* the interface through which packets leave */
	/* The interface through which XDP sends: the parent of a VLAN interface, otherwise the
	 * same. */
	__u32 lower;
	/* The VLAN (802.1Q) of `interface`, if it is a VLAN interface, otherwise 0. */
	__be16 tag;
	__u16 mtu;       /* bytes of the longest packet that fits, without tunnel headers; 0: any */
	__u8 mac[6];     /* of the next hop, from the neighbour table; zeros: ask the kernel */
	__u8 own_mac[6]; /* MAC address of `interface` */
	__u32 vni;
	/* The address whose MAC address is used: of the node or, for tunnels, of the router before
	 * the node. */
	__u32 next_hop[4];
	__u32 outer_source[4];
	__u32 outer_destination[4];
};

/* A flow, in the direction from the client. */
struct flow_key {
	__u32 source[4];
	__u32 destination[4];
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 pad[3];
};

/* The node of a flow. Entries in `new_connections` and `new_datagrams` are tentative: see choose.h.
 *
 *  sequence    in `new_connections`: sequence number of the TCP segment that created or last
 *              confirmed the entry; in `closing_connections`: of the segment that closed the
 *              connection, 0 if it is unknown
 *  challenged  in `connections`: after the entry was created, a SYN with the same ports arrived
 *  seen        in the tables of datagrams: the `tick` of the client's last packet; 0 if the entry
 *              was received from another gateway */
struct flow {
	__u32 node;
	union {
		__u32 sequence;
		__u32 challenged;
		__u32 seen;
	};
};

/* The tables of established and closing flows: those in which namespaces have shares, and the one for
 * the entries beyond them. New tables are added at the end: an upgrade copies the counts. */
enum shared_table { CONNECTIONS, DATAGRAMS, EXCESS, CLOSING_CONNECTIONS, SHARED_TABLES };

/* How many entries of each shared table belong to a namespace; at index TOTAL, to all of them. The
 * programs change `counted`, user space changes `corrected`, and the sum of both is the number: so
 * no change is lost, although user space cannot change a number atomically. The sum is approximate
 * (the kernel may evict an entry, or a listener may get another owner) until user space counts the
 * entries again. EXCESS is counted only at TOTAL, and never too low: it counts only up. */
struct share {
	__s64 counted[SHARED_TABLES];
	__s64 corrected[SHARED_TABLES];
};

#define TOTAL 0

/* A key that is present if the node may keep flows of the listener. `statistics` is the index of
 * the listener's counters. */
struct retained_node {
	__u32 statistics;
	__u32 node;
};

#define CLOSING 0x10000 /* added to the node of a reported entry whose connection is closing */

/* The report of a flow entry that was created or got another node, or that was removed (node NONE).
 * User space reads the report, and gateways send it to each other. */
struct entry {
	struct flow_key key;
	__u32 node;
};

struct fragment_key {
	__u32 source[4];
	__u32 destination[4];
	__u32 id;
	__u8 protocol;
	__u8 pad[3];
};

struct fragment {
	__u64 since_ns;
	__u32 node;
	__u32 statistics; /* counter index of the listener */
};

struct range_key {
	/* The number of bits of the next fields that must match: 32 bits of `set`, then the prefix
	 * of `address`, which is 96 bits longer for IPv4. */
	__u32 prefix_length;
	__u32 set;
	__u32 address[4];
};

/* An address with listeners. */
struct address {
	__u32 listeners;
};

struct tag_key {
	__u32 interface;
	__u32 vlan; /* 0: no tag */
};

struct mac {
	__u8 octets[6];
	__u8 pad[2];
};

/* How far the extension headers of a packet have been read, and the next protocol. */
struct walk {
	__u32 at;
	__u32 protocol;
};

/* The part of a packet that an ICMP error quotes. */
struct quote {
	__be32 words[384];
};

struct traffic {
	__u64 packets;
	__u64 bytes;
	__u64 flows;
	__u64 drops[DROPS];
};

struct node_traffic {
	__u64 packets;
	__u64 bytes;
	__u64 flows;
	__u64 returned; /* dropped as RETURNED, of flows of this node */
};

/* The owner of a listener. The program does not read it: it identifies the owner in the pinned
 * maps. */
struct owner {
	char namespace[64];
	char name[64];
	char uid[40];
};

struct node_name {
	char name[256];
};

/* This host is a node of the cluster: packets that have passed a gateway are meant for it, and
 * stay here. */
#define IS_NODE 1
#define REPORT_ENTRIES 2 /* User space reads the reports in `flow_reports`. */

struct settings {
	__u32 inserts_per_s; /* for each CPU and each table of open or closing flows */
	/* Tentative entries, for each CPU and table. */
	__u32 tentative_per_s;
	/* Messages that the gateway itself sends, for each CPU and type: echo replies, "too big",
	 * refusals. */
	__u32 messages_per_s;
	__u32 flags;
	__be16 vxlan_port; /* UDP port of the nodes' VXLAN devices */
	__u16 pad;
	/* Until this `tick`, flow entries may still be copied from the maps of an older version; 0:
	 * no copy is under way. */
	__u32 copying_until;
	/* The numbers of entries of which namespaces may have shares; 0: no limits. */
	__u32 usable_connections;
	__u32 usable_datagrams;
	__u32 usable_closing;
	/* The fraction that one namespace may have of what the others leave, in parts of 2^16. */
	__u32 namespace_share;
};

/* The separate rate limits. A flood of one type must not use up the limit of another. The first ones
 * are those of flow entries, in which namespaces have shares. */
enum limit {
	NEW_CONNECTIONS,
	NEW_DATAGRAMS,
	ESTABLISHED_CONNECTIONS,
	ESTABLISHED_DATAGRAMS,
	CLOSED_CONNECTIONS,
	INSERT_LIMITS,
	ECHO_REPLIES = INSERT_LIMITS,
	SIZE_MESSAGES, /* "too big" */
	REFUSALS,
	LIMITS,
};

/* How much has been used of a limit. `since`: when its second began, in ns; for limits of flow
 * entries, the number of the second since the system started. */
struct allowance {
	__u64 since;
	__u64 used;
};

/* How much a namespace has used of each limit of flow entries in this second since the system
 * started. */
struct namespace_allowance {
	__u32 second;
	__u32 used[INSERT_LIMITS];
};
