/* The records of neighbors.bpf.c. `drivers/l2/records.py` is their Python side; a test compares
 * both through BTF. */
#pragma once

#include <linux/types.h>

#define ETH_P_HELLO 0x88b5 /* IEEE Std 802, local experimental EtherType 1 */

/* How often the same claim is reported at most, and how often different claims of one address. */
#define REPEATED_REPORT_NS 200000000ULL
#define REPORT_NS 5000000ULL

enum entry_state {
	SILENT,
	OWNED,
};

/* The way in which another station uses an address. */
enum claim_kind {
	GRATUITOUS, /* it announces the address */
	USED, /* it sends or answers with the address */
	PROBED, /* it asks whether the address is free */
};

enum neighbor_event {
	ARP_ANSWERED,
	NDP_ANSWERED,
	HELLO_ANSWERED,
	SILENCED, /* a request for an address that this host does not own was dropped */
	CLAIMED,
	YIELDED, /* an address became SILENT after the deadline, because of a claim */
	UNREPORTED, /* a claim did not fit into the ring buffer */
	INVALID, /* a message of neighbor discovery with a wrong checksum or options */
	NEIGHBOR_EVENTS,
};

struct entry_key {
	__u32 interface;
	__u32 address[4]; /* IPv4 as an IPv4-mapped address */
};

struct claim {
	__u64 seen_ns;
	__u64 reported_ns;
	__u8 mac[6];
	__u8 kind; /* enum claim_kind */
	__u8 unused;
};

struct report {
	__u64 seen_ns;
	__u32 interface;
	__u32 address[4];
	__u8 mac[6];
	__u8 kind; /* enum claim_kind */
	__u8 yielded; /* this claim made the address SILENT */
	__u32 unused;
};

#define HELLO_MAGIC 0x464c484c
#define HELLO_VERSION 1
#define HELLO_REQUEST 1
#define HELLO_REPLY 2
#define HELLO_NAME 256

struct host {
	__u64 deadline_ns; /* of the monotonic clock: the process was alive shortly before */
	__u64 group; /* other groups on the same link are no members */
	__u8 mac[6];
	__u8 state; /* passed on in the answer to a hello request */
	__u8 name_length;
	__u8 name[HELLO_NAME];
};

/* A hello request or reply, without the Ethernet header. A request has the size of a reply, so that
 * no one can use announcers to amplify a flood. */
struct hello_head {
	__be32 magic;
	__u8 version;
	__u8 kind;
	__u8 state;
	__u8 name_length;
	__u64 group; /* chosen by cluster and role */
	__u64 token; /* chosen by the sender of the request */
	__be32 remaining_ms; /* until the deadline; 0: it has passed */
	__u32 unused;
	__u32 address[4]; /* not 0: only the owner of the address answers */
};

#define HELLO_BYTES (ETH_HLEN + sizeof(struct hello_head) + HELLO_NAME)
