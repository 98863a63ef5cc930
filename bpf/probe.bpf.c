/* Sends a gateway's own probes on the path of clients' packets, so that a probe tests the tunnel as
 * well as the node.
 *
 * In: packets that an interface sends. Out: a marked packet to a node behind a tunnel is
 * encapsulated for that node, by the same code and the same kind of record as clients' packets
 * (send_tc.h, `struct next_hop`). Every other packet passes as if this program did not exist. The
 * node removes the outer header, and its own stack answers directly.
 *
 * Attached at tc egress (clsact, direct action). Its maps exist as long as it is attached. Similar
 * to Katran's healthchecking_ipip. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "send_tc.h"

/* `fairlead.net.httpprobe` marks its sockets with PROBE_MARK; docs/gateway.md lists the marks of
 * other programs that it avoids. */
#define PROBE_MARK 0x1071
#define PROBE_MASK 0x30ff

#define PROBED (2 * NODES)

/* The next hops by the node's address. Nodes that are reached without a tunnel are not in the map.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, PROBED);
	__type(key, __u32[4]);
	__type(value, struct next_hop);
} probe_paths SEC(".maps");

SEC("tc")
int probe(struct __sk_buff *skb)
{
	struct packet packet;

	if ((skb->mark & PROBE_MASK) != PROBE_MARK || read_frame(skb, &packet) != FLOW)
		return TC_ACT_UNSPEC;
	const struct next_hop *hop = bpf_map_lookup_elem(&probe_paths, packet.flow.destination);
	if (!hop || !has_outer(hop))
		return TC_ACT_UNSPEC;
	packet.hash = hash_flow(&packet.flow, false);
	/* The outer packet passes this hook again, and must not be taken for a probe. */
	skb->mark = 0;
	return encapsulate(skb, &packet, hop) ? redirect(hop) : TC_ACT_SHOT;
}

char _license[] SEC("license") = "GPL";
