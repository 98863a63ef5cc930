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
#define RANGES 4             /* only sources in the set `ranges` may pass; the set may be empty */
#define REFUSES 16 /* the Service has no endpoints: a packet for which there is no node is answered with a refusal */
#define YOUNG 8              /* other gateways may not have the same tables yet: slots that are NONE count as TRACKED */

/* What is counted, for all listeners together; those before DROPS are packets that were dropped, also counted per listener. */
enum event {
	NO_MEMBER,    /* the listener has no node for this packet */
	NO_WAY,       /* the node has no address of the packet's family, or cannot be reached */
	HOP_LIMIT,    /* it arrived with a hop limit of 1 or 0 */
	FRAGMENT,     /* a fragment whose first one has not been seen here */
	FORBIDDEN,    /* its source is in none of the Service's source ranges */
	TOO_BIG,      /* it does not fit the way to its node; its sender is told so, within a rate */
	NOT_SENT,     /* the kernel refused to change or to send it */
	RETURNED,     /* it has passed a gateway already, and the node that it was sent to has sent it back: see hops.h */
	NO_ENDPOINTS, /* the Service has no endpoints; the sender gets a message, at a limited rate */
	UPGRADING,    /* its flow entry may not be copied yet from an older version's maps: the sender sends again */
	DROPS,
	TRACK_REFUSED = DROPS, /* a new flow without an entry: the insert limit was reached */
	ECHO_ANSWERED,         /* echo requests to a load-balancer address */
	TOLD_TOO_BIG,          /* ICMP messages sent that name the size that fits */
	TOLD_REFUSED,          /* TCP resets and ICMP messages sent because a Service has no endpoints */
	NEWS_LOST,             /* entries that user space was not told of: it reads too slowly */
	EVENTS,
};

/* Three words of eight bytes: so many are compared the fastest. */
struct listener_key {
	__u32 address[4];
	__be16 port;
	__u8 protocol;
	__u8 pad[5];
};

/* Where the tables of a listener lie in the arena; one update of this record makes new tables live, as soon as
 * `generation` says that there was one. Offsets count chunks. */
struct listener {
	__u32 current_offset;
	__u32 current_size;
	__u32 previous_offset;
	__u32 previous_size;
	__u32 flags;
	__u32 statistics;
	__u32 ranges; /* which set of source ranges; read with the flag RANGES */
	__u32 pad;
};

/* A listener as a CPU has found it, and in which generation of them. As long as a line of a processor's cache. */
struct cached_listener {
	struct listener_key key;
	__u64 generation;
	struct listener listener;
};

struct chunk {
	__u16 node[SLOTS_PER_CHUNK];
};

enum kind {
	NOWHERE, /* the node cannot be reached over this family */
	LINK,    /* handed over on the link that both are on */
	HERE,    /* the node is this host: its own service proxy takes the packet */
	IPIP,    /* in an IP packet to the node, which takes it out again (RFC 2003, 2473, 4213) */
	VXLAN,   /* in a UDP packet to the node's vxlan device (RFC 7348) */
};

/* How packets of one family get to a node. Two for each node: at twice its number for IPv4, at the next place for IPv6.
 * What a packet on the link needs comes first, in one cache line or two. */
struct way {
	enum kind kind;
	__u32 interface; /* where they leave */
	__u32 lower;     /* the interface below it that XDP sends from: the parent of a VLAN's, else the same */
	__be16 tag;      /* the VLAN (802.1Q) that `interface` stands for, if it is not `lower`; 0: none */
	__u16 mtu;       /* bytes of the longest packet that fits, not counting what a tunnel adds; 0: any */
	__u8 mac[6];     /* of the next hop, as the neighbour table last said; zeros: ask the kernel */
	__u8 own_mac[6]; /* of the interface */
	__u32 vni;
	__u32 next_hop[4]; /* to whose hardware address: the node's own, or for tunnels that of the router before it */
	__u32 outer_source[4];
	__u32 outer_destination[4];
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

/* Where a flow is. `sequence`: of the TCP segment that made or last confirmed the note, in `new_connections`; of the one that ended
 * the connection, in `closing_connections`, 0 if it is not known. `challenged`: a SYN with the same ports has come since, in
 * `connections`. `seen`: when the client's last packet came, as a `tick`, in the tables of datagrams; 0 if a peer told of the flow. */
struct flow {
	__u32 node;
	union {
		__u32 sequence;
		__u32 challenged;
		__u32 seen;
	};
};

/* That a node may keep flows of a listener, which is known by the index at which it counts. */
struct keeper {
	__u32 statistics;
	__u32 node;
};

#define CLOSING 0x10000 /* with the node of an entry that is told: its connection ends */

/* An entry that has just come to be or has another node, or with NONE has gone, told to user space: gateways tell it to each
 * other. */
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
	__u32 statistics; /* of the listener */
};

struct range_key {
	__u32 prefix_length; /* of what follows: 32 for the set, then 96 more for IPv4 */
	__u32 set;
	__u32 address[4];
};

/* An address that listeners are at. */
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

/* How far the extension headers of a packet have been read, and what comes next. */
struct walk {
	__u32 at;
	__u32 protocol;
};

/* What an ICMP error quotes of a packet. */
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
	__u64 returned; /* packets dropped as RETURNED whose flow belongs to this node */
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

#define AMONG_NODES 1 /* this host is a node: packets that have passed a gateway are meant for it, and stay here */
#define TELL 2        /* user space reads `news` */

struct settings {
	__u32 inserts_per_s;  /* into each table of flows that are open or end; per CPU */
	__u32 notes_per_s;    /* into each table of flows of which one packet was seen; per CPU */
	__u32 messages_per_s; /* messages of our own, of each kind: echo replies, "too big", refusals; per CPU */
	__u32 flags;
	__be16 vxlan_port; /* where nodes' vxlan devices listen */
	__u16 pad;
	__u32 copying_until; /* the last `tick` of a copy of flow entries from the maps of an older version; 0: there is none */
};

/* What is limited, each on its own: a flood of one kind must not use up what another may. */
enum limited {
	NEW_CONNECTIONS,
	NEW_DATAGRAMS,
	KEPT_CONNECTIONS,
	KEPT_DATAGRAMS,
	CLOSED_CONNECTIONS,
	ECHO_REPLIES,
	SIZE_MESSAGES, /* "too big" */
	REFUSALS,
	LIMITED,
};

struct allowance {
	__u64 since_ns;
	__u64 used;
};
