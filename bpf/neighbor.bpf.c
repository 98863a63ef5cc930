/* Layer 2 announcement: answers ARP requests (RFC 826) and neighbor solicitations (RFC 4861) for the
 * load-balancer addresses that this host owns.
 *
 * In: frames that an interface receives. Out, for an address in the map `entries` whose deadline
 * has not passed:
 *
 * - The host owns the address on this interface: a request for it, also a probe (RFC 5227, 2.1.1;
 *   RFC 4862, 5.4), is answered with the MAC address of the interface. A probe by ARP, or a
 *   solicitation without the sender's MAC address, that is sent to this host alone comes from another
 *   gateway, which watches it, and counts as no request.
 * - Another host owns it, or this host on another interface: the request is dropped. Otherwise the
 *   host's own stack would answer too if it has the address, for example on lo, or on kube-ipvs0
 *   without strictARP, and the router would learn two MAC addresses.
 *
 * Past its deadline an entry has no effect. So the program goes on for some time without the
 * process, and no longer than until another host takes the address over. The deadline is in time of
 * CLOCK_BOOTTIME, which goes on during suspend: a host that wakes up does not answer for an address
 * that it has lost meanwhile.
 *
 * Every other frame passes as if this program did not exist, also one with a VLAN tag, and an
 * invalid one. Attached at tc ingress (clsact, direct action), before a gateway's own filter. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <stdbool.h>

#include "address.h"

#define ARP_ETHERNET 1
#define ARP_REQUEST 1
#define ARP_REPLY 2

#define SOLICITATION 135
#define ADVERTISEMENT 136
#define SOURCE_LINK_ADDRESS 1
#define TARGET_LINK_ADDRESS 2
#define SOLICITED (1U << 30)
#define OVERRIDE (1U << 29)
#define UNFORWARDED 255 /* the hop limit of a packet that no router has forwarded */
/* Messages with more units of options, which no known host sends, are left alone. */
#define MAX_UNITS 8

struct arp {
	struct ethhdr ethernet;
	__be16 hardware;
	__be16 protocol;
	__u8 hardware_length;
	__u8 protocol_length;
	__be16 operation;
	__u8 sender_mac[ETH_ALEN];
	__u8 sender[4];
	__u8 target_mac[ETH_ALEN];
	__u8 target[4];
} __attribute__((packed));

/* The options of a message consist of units of this size; this is one with a MAC address. */
struct option {
	__u8 type;
	__u8 units;
	__u8 mac[ETH_ALEN];
};

/* A neighbor solicitation or advertisement, without the Ethernet header. */
struct ndp {
	struct ipv6hdr ip;
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be32 flags;
	struct in6_addr target;
	struct option options[MAX_UNITS]; /* the part behind the options of the message is 0 */
};

#define NDP_HEADERS __builtin_offsetof(struct ndp, options)

struct entry {
	__u64 deadline_ns;
	__u32 interface; /* on which this host owns the address; 0: another host owns it */
	__u32 unused;
};

struct interface {
	__u64 last_request_ns; /* for an address that the host owns here; 0: none so far */
	__u8 mac[ETH_ALEN];
	__u8 unused[2];
};

/* The last use of an address that this host owns by a station with another MAC address. */
struct claim {
	__u64 seen_ns;
	__u8 mac[ETH_ALEN];
	__u8 unused[2];
};

enum outcome {
	ANSWERED,
	DROPPED,
	OUTCOMES,
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32[4]);
	__type(value, struct entry);
} entries SEC(".maps");

/* By index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct interface);
} interfaces SEC(".maps");

/* By address. Only owned addresses have one, so a flood costs no memory. Not as large as `entries`: the
 * empty table takes 16 bytes an entry, and only addresses that move at once need theirs at once. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32[4]);
	__type(value, struct claim);
} claims SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OUTCOMES);
	__type(key, enum outcome);
	__type(value, __u64);
} outcomes SEC(".maps");

static __always_inline void count(enum outcome outcome)
{
	__u64 *counter = bpf_map_lookup_elem(&outcomes, &outcome);
	if (counter)
		(*counter)++;
}

static __always_inline void set_key(__u32 *key, const __u8 *address)
{
	__be32 ipv4;

	__builtin_memcpy(&ipv4, address, 4);
	set_mapped(key, ipv4);
}

/* Return the entry of this address, unless its deadline has passed. */
static __always_inline const struct entry *find(const __u32 *key, __u64 now_ns)
{
	const struct entry *entry = bpf_map_lookup_elem(&entries, key);

	return entry && entry->deadline_ns > now_ns ? entry : NULL;
}

static __always_inline bool same(const __u8 *one, const __u8 *other, int length)
{
	for (int i = 0; i < length; i++)
		if (one[i] != other[i])
			return false;
	return true;
}

/* A station with a group address or without a MAC address cannot use an IP address. */
static __always_inline bool is_station(const __u8 *mac)
{
	return !(mac[0] & 1) && (mac[0] | mac[1] | mac[2] | mac[3] | mac[4] | mac[5]);
}

/* Record that the station with this MAC address uses the address, if this host owns it here. */
static __always_inline void record_claim(const struct __sk_buff *skb, const __u32 *key,
					 const __u8 *mac, const struct interface *interface,
					 __u64 now_ns)
{
	struct claim claim = { .seen_ns = now_ns };
	const struct entry *entry = find(key, now_ns);

	if (!entry || entry->interface != skb->ifindex || same(mac, interface->mac, ETH_ALEN))
		return;
	__builtin_memcpy(claim.mac, mac, ETH_ALEN);
	bpf_map_update_elem(&claims, key, &claim, BPF_ANY);
}

static __always_inline int answer_arp(struct __sk_buff *skb, const struct arp *request,
				      struct interface *interface, __u64 now_ns)
{
	struct arp reply = *request;
	/* A broadcast has the group bit. */
	bool watch = !(request->ethernet.h_dest[0] & 1) &&
		     !(request->sender[0] | request->sender[1] | request->sender[2] | request->sender[3]);

	__builtin_memcpy(reply.ethernet.h_dest, request->sender_mac, ETH_ALEN);
	__builtin_memcpy(reply.ethernet.h_source, interface->mac, ETH_ALEN);
	reply.operation = bpf_htons(ARP_REPLY);
	__builtin_memcpy(reply.sender_mac, interface->mac, ETH_ALEN);
	__builtin_memcpy(reply.sender, request->target, 4);
	__builtin_memcpy(reply.target_mac, request->sender_mac, ETH_ALEN);
	__builtin_memcpy(reply.target, request->sender, 4);
	if (!watch)
		interface->last_request_ns = now_ns;
	if (bpf_skb_store_bytes(skb, 0, &reply, sizeof(reply), BPF_F_RECOMPUTE_CSUM))
		return TC_ACT_SHOT;
	if (!watch)
		count(ANSWERED);
	return bpf_redirect(skb->ifindex, 0);
}

static __always_inline int handle_arp(struct __sk_buff *skb, struct interface *interface)
{
	const struct entry *entry;
	struct arp arp;
	__u32 key[4];

	if (bpf_skb_load_bytes(skb, 0, &arp, sizeof(arp)))
		return TC_ACT_UNSPEC;
	if (arp.hardware != bpf_htons(ARP_ETHERNET) || arp.protocol != bpf_htons(ETH_P_IP) ||
	    arp.hardware_length != ETH_ALEN || arp.protocol_length != 4 ||
	    !is_station(arp.sender_mac))
		return TC_ACT_UNSPEC;

	__u64 now_ns = bpf_ktime_get_boot_ns();
	set_key(key, arp.sender);
	record_claim(skb, key, arp.sender_mac, interface, now_ns);
	if (arp.operation != bpf_htons(ARP_REQUEST))
		return TC_ACT_UNSPEC;
	set_key(key, arp.target);
	entry = find(key, now_ns);
	if (!entry)
		return TC_ACT_UNSPEC;
	/* A request for the sender's own address announces it, and asks for nothing. */
	if (entry->interface == skb->ifindex && !same(arp.sender, arp.target, 4))
		return answer_arp(skb, &arp, interface, now_ns);
	count(DROPPED);
	return TC_ACT_SHOT;
}

static __always_inline bool is_unspecified(const struct in6_addr *address)
{
	const __u32 *words = address->in6_u.u6_addr32;

	return !(words[0] | words[1] | words[2] | words[3]);
}

/* Return whether this is the group of all stations whose addresses end in the same 24 bits. */
static __always_inline bool is_solicited_node(const struct in6_addr *address)
{
	const __u32 *words = address->in6_u.u6_addr32;

	return words[0] == bpf_htonl(0xff020000) && !words[1] && words[2] == bpf_htonl(1) &&
	       address->in6_u.u6_addr8[12] == 0xff;
}

static __always_inline bool is_multicast(const struct in6_addr *address)
{
	return address->in6_u.u6_addr8[0] == 0xff;
}

/* Return the sum of the message and of its pseudo header (RFC 8200, 8.1), in 16 bits. It is 0xffff
 * if the checksum is right, and the complement of the checksum if that is 0. */
static __always_inline __u16 sum_of(struct ndp *ndp)
{
	__be32 rest[] = { bpf_htonl(bpf_ntohs(ndp->ip.payload_len)), bpf_htonl(IPPROTO_ICMPV6) };
	__u32 sum = bpf_csum_diff(0, 0, rest, sizeof(rest), 0);

	sum = bpf_csum_diff(0, 0, (void *)&ndp->ip.saddr,
			    sizeof(*ndp) - __builtin_offsetof(struct ndp, ip.saddr), sum);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* Read a message of neighbor discovery that is valid (RFC 4861, 7.1.1 and 7.1.2), and the MAC
 * address of its sender: that of its options, or of the frame. `watch`: whether it was sent to this
 * host alone, without that option. Return whether it is one. */
static __always_inline bool read_ndp(struct __sk_buff *skb, struct ndp *ndp, __u8 *mac, bool *watch)
{
	__u32 length, skipped = 0;
	bool has_mac = false;
	__u8 first;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, ndp, NDP_HEADERS) ||
	    bpf_skb_load_bytes(skb, 0, &first, sizeof(first)) ||
	    bpf_skb_load_bytes(skb, ETH_ALEN, mac, ETH_ALEN))
		return false;
	length = bpf_ntohs(ndp->ip.payload_len) + sizeof(ndp->ip) - NDP_HEADERS;
	if (ndp->ip.version != 6 || ndp->ip.nexthdr != IPPROTO_ICMPV6 ||
	    ndp->ip.hop_limit != UNFORWARDED || ndp->code ||
	    (ndp->type != SOLICITATION && ndp->type != ADVERTISEMENT) ||
	    length > sizeof(ndp->options) || length % sizeof(struct option))
		return false;
	__u8 wanted = ndp->type == SOLICITATION ? SOURCE_LINK_ADDRESS : TARGET_LINK_ADDRESS;

#pragma clang loop unroll(full)
	for (__u32 at = 0; at < MAX_UNITS; at++) {
		struct option *option = &ndp->options[at];

		if (at * sizeof(*option) >= length)
			break;
		if (bpf_skb_load_bytes(skb, ETH_HLEN + NDP_HEADERS + at * sizeof(*option), option,
				       sizeof(*option)))
			return false;
		if (skipped) {
			skipped--;
			continue;
		}
		if (!option->units)
			return false;
		if (option->type == wanted && option->units == 1) {
			__builtin_memcpy(mac, option->mac, ETH_ALEN);
			has_mac = true;
		}
		skipped = option->units - 1;
	}
	if (skipped || sum_of(ndp) != 0xffff || !is_station(mac))
		return false;
	*watch = !has_mac && !(first & 1);
	if (ndp->type == ADVERTISEMENT)
		return !(ndp->flags & bpf_htonl(SOLICITED)) || !is_multicast(&ndp->ip.daddr);
	return !is_unspecified(&ndp->ip.saddr) || (is_solicited_node(&ndp->ip.daddr) && !has_mac);
}

/* Answer the solicitation, whose sender has this MAC address. A sender without an IP address probes
 * whether the address is free: the answer goes to all nodes (RFC 4861, 7.2.4). */
static __always_inline int advertise(struct __sk_buff *skb, struct ndp *ndp, __u8 *mac, bool watch,
				     struct interface *interface, __u64 now_ns)
{
	struct ethhdr ethernet;
	struct in6_addr asker = ndp->ip.saddr;
	struct in6_addr address = ndp->target;
	bool probe = is_unspecified(&asker);

	if (probe) {
		asker.in6_u.u6_addr32[0] = bpf_htonl(0xff020000);
		asker.in6_u.u6_addr32[3] = bpf_htonl(1);
		mac[0] = mac[1] = 0x33;
		mac[2] = mac[3] = mac[4] = 0;
		mac[5] = 1;
	}
	__builtin_memcpy(ethernet.h_dest, mac, ETH_ALEN);
	__builtin_memcpy(ethernet.h_source, interface->mac, ETH_ALEN);
	ethernet.h_proto = bpf_htons(ETH_P_IPV6);
	__builtin_memset(ndp, 0, sizeof(*ndp));
	ndp->ip.version = 6;
	ndp->ip.payload_len = bpf_htons(NDP_HEADERS + sizeof(struct option) - sizeof(ndp->ip));
	ndp->ip.nexthdr = IPPROTO_ICMPV6;
	ndp->ip.hop_limit = UNFORWARDED;
	ndp->ip.saddr = ndp->target = address;
	ndp->ip.daddr = asker;
	ndp->type = ADVERTISEMENT;
	ndp->flags = bpf_htonl(probe ? OVERRIDE : SOLICITED | OVERRIDE);
	ndp->options[0].type = TARGET_LINK_ADDRESS;
	ndp->options[0].units = 1;
	__builtin_memcpy(ndp->options[0].mac, interface->mac, ETH_ALEN);
	ndp->checksum = ~sum_of(ndp);
	if (!watch)
		interface->last_request_ns = now_ns;
	if (bpf_skb_change_tail(skb, ETH_HLEN + NDP_HEADERS + sizeof(struct option), 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, ndp, NDP_HEADERS + sizeof(struct option),
				BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, 0, &ethernet, sizeof(ethernet), 0))
		return TC_ACT_SHOT;
	if (!watch)
		count(ANSWERED);
	return bpf_redirect(skb->ifindex, 0);
}

static __always_inline int handle_ndp(struct __sk_buff *skb, struct interface *interface)
{
	const struct entry *entry;
	struct ndp ndp = {};
	__u8 mac[ETH_ALEN];
	bool watch = false;
	__u32 key[4];

	if (!read_ndp(skb, &ndp, mac, &watch))
		return TC_ACT_UNSPEC;
	/* Who solicits uses its source address, and who advertises the target. */
	__u64 now_ns = bpf_ktime_get_boot_ns();
	bool solicits = ndp.type == SOLICITATION;
	set_address(key, solicits ? &ndp.ip.saddr : &ndp.target);
	if (!is_mapped(key))
		record_claim(skb, key, mac, interface, now_ns);
	if (!solicits)
		return TC_ACT_UNSPEC;
	set_address(key, &ndp.target);
	entry = is_mapped(key) ? NULL : find(key, now_ns);
	if (!entry)
		return TC_ACT_UNSPEC;
	if (entry->interface == skb->ifindex)
		return advertise(skb, &ndp, mac, watch, interface, now_ns);
	count(DROPPED);
	return TC_ACT_SHOT;
}

/* Return whether the packet may be one of neighbor discovery. Most are not, and are not copied. */
static __always_inline bool may_be_ndp(const struct __sk_buff *skb)
{
	const struct ipv6hdr *ip = (void *)(long)skb->data + ETH_HLEN;

	return (void *)(ip + 1) > (void *)(long)skb->data_end ||
	       (ip->nexthdr == IPPROTO_ICMPV6 && ip->hop_limit == UNFORWARDED);
}

SEC("tc")
int neighbor(struct __sk_buff *skb)
{
	bool arp = skb->protocol == bpf_htons(ETH_P_ARP);
	struct interface *interface;
	__u32 index = skb->ifindex;

	if (!arp && (skb->protocol != bpf_htons(ETH_P_IPV6) || !may_be_ndp(skb)))
		return TC_ACT_UNSPEC;
	if (skb->vlan_present || skb->pkt_type == PACKET_OTHERHOST)
		return TC_ACT_UNSPEC;
	interface = bpf_map_lookup_elem(&interfaces, &index);
	if (!interface)
		return TC_ACT_UNSPEC;
	return arp ? handle_arp(skb, interface) : handle_ndp(skb, interface);
}

char _license[] SEC("license") = "GPL";
