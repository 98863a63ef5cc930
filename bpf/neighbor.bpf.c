/* Layer 2 announcement: answers ARP requests for the load-balancer addresses that this host owns
 * (RFC 826).
 *
 * In: frames that an interface receives. Out, for an address in the map `entries` whose deadline
 * has not passed:
 *
 * - The host owns the address on this interface: a request for it, also a probe (RFC 5227, 2.1.1),
 *   is answered with the MAC address of the interface. A probe that is sent to this host alone comes
 *   from another gateway, which watches it, and counts as no request.
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
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <stdbool.h>

#include "address.h"

#define ARP_ETHERNET 1
#define ARP_REQUEST 1
#define ARP_REPLY 2

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

/* By address. Only owned addresses have one, and a later claim replaces an earlier one, so a flood
 * costs no memory. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
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

/* Record that another station uses the sender's address, if this host owns it here. */
static __always_inline void record_claim(const struct __sk_buff *skb, const struct arp *arp,
					 const struct interface *interface, __u64 now_ns)
{
	struct claim claim = { .seen_ns = now_ns };
	const struct entry *entry;
	__u32 key[4];

	set_key(key, arp->sender);
	entry = find(key, now_ns);
	if (!entry || entry->interface != skb->ifindex ||
	    same(arp->sender_mac, interface->mac, ETH_ALEN))
		return;
	__builtin_memcpy(claim.mac, arp->sender_mac, ETH_ALEN);
	bpf_map_update_elem(&claims, key, &claim, BPF_ANY);
}

static __always_inline int answer(struct __sk_buff *skb, const struct arp *request,
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

SEC("tc")
int neighbor(struct __sk_buff *skb)
{
	__u32 index = skb->ifindex, key[4];
	struct interface *interface;
	const struct entry *entry;
	struct arp arp;

	if (skb->protocol != bpf_htons(ETH_P_ARP) || skb->vlan_present ||
	    skb->pkt_type == PACKET_OTHERHOST)
		return TC_ACT_UNSPEC;
	interface = bpf_map_lookup_elem(&interfaces, &index);
	if (!interface || bpf_skb_load_bytes(skb, 0, &arp, sizeof(arp)))
		return TC_ACT_UNSPEC;
	if (arp.hardware != bpf_htons(ARP_ETHERNET) || arp.protocol != bpf_htons(ETH_P_IP) ||
	    arp.hardware_length != ETH_ALEN || arp.protocol_length != 4 ||
	    !is_station(arp.sender_mac))
		return TC_ACT_UNSPEC;

	__u64 now_ns = bpf_ktime_get_boot_ns();
	record_claim(skb, &arp, interface, now_ns);
	if (arp.operation != bpf_htons(ARP_REQUEST))
		return TC_ACT_UNSPEC;
	set_key(key, arp.target);
	entry = find(key, now_ns);
	if (!entry)
		return TC_ACT_UNSPEC;
	/* A request for the sender's own address announces it, and asks for nothing. */
	if (entry->interface == skb->ifindex && !same(arp.sender, arp.target, 4))
		return answer(skb, &arp, interface, now_ns);
	count(DROPPED);
	return TC_ACT_SHOT;
}

char _license[] SEC("license") = "GPL";
