/* Layer 2 announcement: answers ARP requests and neighbor solicitations for the addresses that this
 * host owns, and the checks of other announcers whether this host is alive.
 *
 * In: frames that an interface receives. Out, for the addresses in the map `entries`:
 *
 * - OWNED: a request for the address is answered with the MAC address of the interface. This
 *   includes probes of duplicate address detection and of reachability (RFC 826, 4861, 4862, 5227).
 * - SILENT: another announcer owns the address, or none does yet. A request is dropped, so that the
 *   host's own stack does not answer if the address is assigned to the host, as kube-proxy in IPVS
 *   mode assigns it.
 * - A frame in which another station uses the address as its own is recorded in `claims`, and
 *   reported to the process through a ring buffer.
 *
 * A hello request of the same group is answered in place. So an answer shows that the kernel, the
 * interface, the link and this program work, whether the process runs or not. If the process has
 * been away for long (the deadline in `hosts` has passed), an OWNED address is still answered, but
 * becomes SILENT when another station claims it.
 *
 * Every other frame passes as if this program did not exist, and so does an invalid frame.
 *
 * Attached at tc ingress (clsact, direct action), before a gateway's own filter. */
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
#include "neighbors.h"

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

/* A neighbor solicitation or advertisement, without its options. */
struct neighbor_message {
	__u8 type;
	__u8 code;
	__u16 checksum;
	__be32 flags;
	struct in6_addr target;
};

struct link_address {
	__u8 type;
	__u8 length;
	__u8 mac[ETH_ALEN];
};

struct solicitation {
	struct ipv6hdr ip;
	struct neighbor_message message;
};

struct advertisement {
	struct ipv6hdr ip;
	struct neighbor_message message;
	struct link_address option;
};

#define VLAN_ID 0x0fff
#define TC_PRIO_CONTROL 7 /* sent before the frames that wait in a queue */
#define ARP_ETHERNET 1
#define ARP_REQUEST 1
#define ARP_REPLY 2
#define SOLICITATION 135
#define ADVERTISEMENT 136
#define SOURCE_LINK_ADDRESS 1
#define TARGET_LINK_ADDRESS 2
#define SOLICITED (1U << 30)
#define OVERRIDE (1U << 29)
#define UNFORWARDED 255 /* the hop limit of a packet that no router has forwarded (RFC 4861, 3.1) */
#define OPTION_UNIT 8
#define MAX_OPTIONS 8
/* A longer message of neighbor discovery, which no known host sends, is not handled. */
#define MAX_MESSAGE (sizeof(struct neighbor_message) + MAX_OPTIONS * OPTION_UNIT)

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct entry_key);
	__type(value, __u32); /* enum entry_state */
} entries SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct entry_key);
	__type(value, struct claim);
} claims SEC(".maps");

/* How this host presents itself, by interface. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct host);
} hosts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} reports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, NEIGHBOR_EVENTS);
	__type(key, __u32);
	__type(value, __u64);
} neighbor_events SEC(".maps");

static __always_inline void count(__u32 event)
{
	__u64 *counter = bpf_map_lookup_elem(&neighbor_events, &event);
	if (counter)
		(*counter)++;
}

static __always_inline bool same_mac(const __u8 *one, const __u8 *other)
{
	return one[0] == other[0] && one[1] == other[1] && one[2] == other[2] &&
	       one[3] == other[3] && one[4] == other[4] && one[5] == other[5];
}

/* Return whether the MAC address is that of a single station. */
static __always_inline bool is_station(const __u8 *mac)
{
	return !(mac[0] & 1) && (mac[0] | mac[1] | mac[2] | mac[3] | mac[4] | mac[5]);
}

/* Note that another station uses the address, and tell the process. */
static __always_inline void record_claim(const struct entry_key *key, __u32 *state,
					 const struct host *host, const __u8 *mac, __u8 kind)
{
	__u64 now = bpf_ktime_get_ns();
	struct claim claim = { .seen_ns = now, .reported_ns = now, .kind = kind };
	struct claim *before = bpf_map_lookup_elem(&claims, key);
	bool yields = false;

	if (!is_station(mac) || same_mac(mac, host->mac))
		return;
	count(CLAIMED);
	__builtin_memcpy(claim.mac, mac, ETH_ALEN);
	if (kind == GRATUITOUS && *state == OWNED && now > host->deadline_ns) {
		*state = SILENT;
		yields = true;
		count(YIELDED);
	}
	if (before) {
		bool again = before->kind == kind && same_mac(before->mac, mac);
		__u64 pause = again ? REPEATED_REPORT_NS : REPORT_NS;
		if (!yields && now - before->reported_ns < pause)
			claim.reported_ns = before->reported_ns;
	}
	bpf_map_update_elem(&claims, key, &claim, BPF_ANY);
	if (claim.reported_ns != now)
		return;
	struct report report = {
		.seen_ns = now, .interface = key->interface, .kind = kind, .yielded = yields
	};
	__builtin_memcpy(report.address, key->address, sizeof(report.address));
	__builtin_memcpy(report.mac, mac, ETH_ALEN);
	if (bpf_ringbuf_output(&reports, &report, sizeof(report), 0))
		count(UNREPORTED);
}

/* Send the frame, whose first bytes after the Ethernet header are in place, to this station. */
static __always_inline int send_to(struct __sk_buff *skb, const __u8 *mac, const struct host *host,
				   __u32 event)
{
	/* A tag of VLAN 0 carries only a priority. */
	if (skb->vlan_present && bpf_skb_vlan_pop(skb))
		return TC_ACT_SHOT;
	if (bpf_skb_store_bytes(skb, __builtin_offsetof(struct ethhdr, h_dest), mac, ETH_ALEN, 0) ||
	    bpf_skb_store_bytes(skb, __builtin_offsetof(struct ethhdr, h_source), host->mac,
				ETH_ALEN, 0))
		return TC_ACT_SHOT;
	skb->priority = TC_PRIO_CONTROL;
	count(event);
	return bpf_redirect(skb->ifindex, 0);
}

static __always_inline int answer_arp(struct __sk_buff *skb, const struct arp *request,
				      const struct host *host)
{
	struct arp reply = *request;

	reply.operation = bpf_htons(ARP_REPLY);
	__builtin_memcpy(reply.sender_mac, host->mac, ETH_ALEN);
	__builtin_memcpy(reply.sender, request->target, 4);
	__builtin_memcpy(reply.target_mac, request->sender_mac, ETH_ALEN);
	__builtin_memcpy(reply.target, request->sender, 4);
	if (bpf_skb_store_bytes(skb, ETH_HLEN, &reply.hardware, sizeof(reply) - ETH_HLEN,
				BPF_F_RECOMPUTE_CSUM))
		return TC_ACT_SHOT;
	return send_to(skb, reply.target_mac, host, ARP_ANSWERED);
}

static __always_inline void set_key(struct entry_key *key, const struct __sk_buff *skb,
				    const __u8 *ipv4)
{
	__be32 address;

	__builtin_memcpy(&address, ipv4, 4);
	key->interface = skb->ifindex;
	key->address[0] = key->address[1] = 0;
	key->address[2] = bpf_htonl(0xffff);
	key->address[3] = address;
}

static __always_inline int handle_arp(struct __sk_buff *skb, const struct host *host)
{
	struct entry_key key;
	struct arp arp;
	__u32 *state;

	if (bpf_skb_load_bytes(skb, 0, &arp, sizeof(arp)))
		return TC_ACT_UNSPEC;
	if (arp.hardware != bpf_htons(ARP_ETHERNET) || arp.protocol != bpf_htons(ETH_P_IP) ||
	    arp.hardware_length != ETH_ALEN || arp.protocol_length != 4 ||
	    !is_station(arp.sender_mac))
		return TC_ACT_UNSPEC;
	bool request = arp.operation == bpf_htons(ARP_REQUEST);
	if (!request && arp.operation != bpf_htons(ARP_REPLY))
		return TC_ACT_UNSPEC;
	bool probe = !(arp.sender[0] | arp.sender[1] | arp.sender[2] | arp.sender[3]);
	bool gratuitous = arp.sender[0] == arp.target[0] && arp.sender[1] == arp.target[1] &&
			  arp.sender[2] == arp.target[2] && arp.sender[3] == arp.target[3];

	if (!probe) {
		set_key(&key, skb, arp.sender);
		state = bpf_map_lookup_elem(&entries, &key);
		if (state)
			record_claim(&key, state, host, arp.sender_mac,
				     gratuitous ? GRATUITOUS : USED);
	}
	if (!request)
		return TC_ACT_UNSPEC;
	set_key(&key, skb, arp.target);
	state = bpf_map_lookup_elem(&entries, &key);
	if (!state)
		return TC_ACT_UNSPEC;
	/* The host's stack would answer an announcement too, if the address is its own. */
	if (gratuitous)
		return TC_ACT_SHOT;
	if (*state == OWNED)
		return answer_arp(skb, &arp, host);
	if (probe)
		record_claim(&key, state, host, arp.sender_mac, PROBED);
	count(SILENCED);
	return TC_ACT_SHOT;
}

static __always_inline bool is_unspecified(const struct in6_addr *address)
{
	const __u32 *words = (const __u32 *)address;

	return !(words[0] | words[1] | words[2] | words[3]);
}

static __always_inline __u16 fold(__s64 sum)
{
	__u64 folded = (__u32)sum;

	folded = (folded & 0xffff) + (folded >> 16);
	folded = (folded & 0xffff) + (folded >> 16);
	return folded;
}

/* Return the sum of the pseudo header (RFC 8200, 8.1) and of the message behind it. */
static __always_inline __s64 sum_message(void *addresses, void *message, __u32 size, __u32 length)
{
	__be32 rest[] = { bpf_htonl(length), bpf_htonl(IPPROTO_ICMPV6) };
	__s64 sum = bpf_csum_diff(0, 0, rest, sizeof(rest), 0);

	sum = bpf_csum_diff(0, 0, addresses, 2 * sizeof(struct in6_addr), sum);
	return bpf_csum_diff(0, 0, message, size, sum);
}

static __always_inline int advertise(struct __sk_buff *skb, const struct solicitation *request,
				     const struct host *host, const __u8 *sender)
{
	struct advertisement reply = {
		.ip = { .version = 6,
			.nexthdr = IPPROTO_ICMPV6,
			.hop_limit = UNFORWARDED,
			.payload_len = bpf_htons(sizeof(reply) - sizeof(reply.ip)) },
		.message = { .type = ADVERTISEMENT, .flags = bpf_htonl(OVERRIDE) },
		.option = { .type = TARGET_LINK_ADDRESS, .length = 1 },
	};
	bool probe = is_unspecified(&request->ip.saddr);
	__u8 receiver[ETH_ALEN];

	reply.ip.saddr = reply.message.target = request->message.target;
	__builtin_memcpy(reply.option.mac, host->mac, ETH_ALEN);
	if (probe) { /* RFC 4861, 7.2.4: to all nodes, and unsolicited */
		reply.ip.daddr.in6_u.u6_addr32[0] = bpf_htonl(0xff020000);
		reply.ip.daddr.in6_u.u6_addr32[3] = bpf_htonl(1);
		receiver[0] = receiver[1] = 0x33;
		receiver[2] = receiver[3] = receiver[4] = 0;
		receiver[5] = 1;
	} else {
		reply.ip.daddr = request->ip.saddr;
		reply.message.flags |= bpf_htonl(SOLICITED);
		__builtin_memcpy(receiver, sender, ETH_ALEN);
	}
	reply.message.checksum =
		~fold(sum_message(&reply.ip.saddr, &reply.message,
				  sizeof(reply) - sizeof(reply.ip), sizeof(reply) - sizeof(reply.ip)));
	if (bpf_skb_change_tail(skb, ETH_HLEN + sizeof(reply), 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &reply, sizeof(reply), BPF_F_RECOMPUTE_CSUM))
		return TC_ACT_SHOT;
	return send_to(skb, receiver, host, NDP_ANSWERED);
}

/* Return whether the options of the message are valid (RFC 4861, 7.1): each has a length, and they
 * fill the message. Read the link-layer address of this type, if there is one, to `mac`, and set
 * `found`. */
static __always_inline bool read_options(const __u8 *options, __u32 length, __u8 type, __u8 *mac,
					 bool *found)
{
	__u32 at = 0;

	for (int i = 0; i < MAX_OPTIONS; i++) {
		if (at == length)
			return true;
		if (at > (MAX_OPTIONS - 1) * OPTION_UNIT)
			return false;
		const __u8 *option = options + at;
		if (!option[1])
			return false;
		if (option[0] == type && option[1] == 1) {
			__builtin_memcpy(mac, option + 2, ETH_ALEN);
			*found = true;
		}
		at += option[1] * OPTION_UNIT;
	}
	return at == length;
}

static __always_inline int handle_solicitation(struct __sk_buff *skb,
					       const struct solicitation *request,
					       const struct host *host, const __u8 *link_address,
					       bool has_link_address, const __u8 *sender)
{
	bool probe = is_unspecified(&request->ip.saddr);
	struct entry_key key = { .interface = skb->ifindex };
	__u32 *state;

	/* RFC 4861, 7.1.1: a probe has no link-layer address, and is sent to the multicast group. */
	if (probe && (has_link_address || request->ip.daddr.in6_u.u6_addr8[0] != 0xff))
		return TC_ACT_UNSPEC;
	if (!probe && has_link_address) {
		set_address(key.address, &request->ip.saddr);
		state = bpf_map_lookup_elem(&entries, &key);
		if (state)
			record_claim(&key, state, host, link_address, USED);
	}
	set_address(key.address, &request->message.target);
	state = bpf_map_lookup_elem(&entries, &key);
	if (!state)
		return TC_ACT_UNSPEC;
	if (*state == OWNED)
		return advertise(skb, request, host, has_link_address ? link_address : sender);
	if (probe)
		record_claim(&key, state, host, sender, PROBED);
	count(SILENCED);
	return TC_ACT_SHOT;
}

static __always_inline int handle_ipv6(struct __sk_buff *skb, const struct host *host)
{
	__u8 text[sizeof(struct neighbor_message) + MAX_OPTIONS * OPTION_UNIT] = {};
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u8 link_address[ETH_ALEN] = {}, sender[ETH_ALEN];
	struct solicitation request;
	bool found = false;

	/* Most packets are no neighbor discovery, so they are not copied. */
	struct ipv6hdr *ip = data + ETH_HLEN;
	if ((void *)(ip + 1) <= end &&
	    (ip->nexthdr != IPPROTO_ICMPV6 || ip->hop_limit != UNFORWARDED))
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &request, sizeof(request)))
		return TC_ACT_UNSPEC;
	__u8 type = request.message.type;
	__u32 length = bpf_ntohs(request.ip.payload_len);
	if (request.ip.version != 6 || request.ip.nexthdr != IPPROTO_ICMPV6 ||
	    request.ip.hop_limit != UNFORWARDED || request.message.code ||
	    (type != SOLICITATION && type != ADVERTISEMENT) ||
	    is_mapped((const __u32 *)&request.message.target))
		return TC_ACT_UNSPEC;
	if (length < sizeof(struct neighbor_message) || length > sizeof(text) ||
	    length % OPTION_UNIT)
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct ipv6hdr), text, length))
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, ETH_ALEN, sender, ETH_ALEN))
		return TC_ACT_UNSPEC;
	if (fold(sum_message(&request.ip.saddr, text, sizeof(text), length)) != 0xffff ||
	    !read_options(text + sizeof(struct neighbor_message),
			  length - sizeof(struct neighbor_message),
			  type == SOLICITATION ? SOURCE_LINK_ADDRESS : TARGET_LINK_ADDRESS,
			  link_address, &found)) {
		count(INVALID);
		return TC_ACT_UNSPEC;
	}
	if (type == SOLICITATION)
		return handle_solicitation(skb, &request, host, link_address, found, sender);
	struct entry_key key = { .interface = skb->ifindex };
	set_address(key.address, &request.message.target);
	__u32 *state = bpf_map_lookup_elem(&entries, &key);
	if (state) {
		bool unsolicited = !(request.message.flags & bpf_htonl(SOLICITED)) &&
				   request.message.flags & bpf_htonl(OVERRIDE);
		record_claim(&key, state, host, found ? link_address : sender,
			     unsolicited ? GRATUITOUS : USED);
	}
	return TC_ACT_UNSPEC;
}

static __always_inline int answer_hello(struct __sk_buff *skb, const struct host *host)
{
	struct hello_head head;
	__u8 sender[ETH_ALEN];

	if (skb->len < HELLO_BYTES || bpf_skb_load_bytes(skb, ETH_HLEN, &head, sizeof(head)) ||
	    bpf_skb_load_bytes(skb, ETH_ALEN, sender, ETH_ALEN))
		return TC_ACT_UNSPEC;
	if (head.magic != bpf_htonl(HELLO_MAGIC) || head.version != HELLO_VERSION ||
	    head.kind != HELLO_REQUEST || !is_station(sender) ||
	    head.group != host->group)
		return TC_ACT_UNSPEC;
	if (head.address[0] | head.address[1] | head.address[2] | head.address[3]) {
		struct entry_key key = { .interface = skb->ifindex };

		__builtin_memcpy(key.address, head.address, sizeof(key.address));
		__u32 *state = bpf_map_lookup_elem(&entries, &key);
		if (!state || *state != OWNED)
			return TC_ACT_SHOT;
	}
	__u64 now = bpf_ktime_get_ns();
	__u64 left_ms = now < host->deadline_ns ? (host->deadline_ns - now) / 1000000 : 0;
	head.kind = HELLO_REPLY;
	head.state = host->state;
	head.name_length = host->name_length;
	head.remaining_ms = bpf_htonl(left_ms < 0xffffffff ? left_ms : 0xffffffff);
	if (bpf_skb_store_bytes(skb, ETH_HLEN, &head, sizeof(head), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN + sizeof(head), host->name, HELLO_NAME,
				BPF_F_RECOMPUTE_CSUM))
		return TC_ACT_SHOT;
	return send_to(skb, sender, host, HELLO_ANSWERED);
}

SEC("tc")
int neighbors(struct __sk_buff *skb)
{
	__u32 interface = skb->ifindex;
	__be16 protocol = skb->protocol;

	if (protocol != bpf_htons(ETH_P_ARP) && protocol != bpf_htons(ETH_P_IPV6) &&
	    protocol != bpf_htons(ETH_P_HELLO))
		return TC_ACT_UNSPEC;
	/* A flooded frame belongs to another host, and a frame with a VLAN tag to the interface of
	 * that VLAN. A tag of VLAN 0 means no VLAN. */
	if (skb->pkt_type > PACKET_MULTICAST || (skb->vlan_present && skb->vlan_tci & VLAN_ID))
		return TC_ACT_UNSPEC;
	const struct host *host = bpf_map_lookup_elem(&hosts, &interface);
	if (!host)
		return TC_ACT_UNSPEC;
	if (protocol == bpf_htons(ETH_P_ARP))
		return handle_arp(skb, host);
	if (protocol == bpf_htons(ETH_P_IPV6))
		return handle_ipv6(skb, host);
	return answer_hello(skb, host);
}

char _license[] SEC("license") = "GPL";
