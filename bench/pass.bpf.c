/* Pass every packet. A veth delivers frames that XDP sends from one end only if the other end has
 * an XDP program, too. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("xdp")
int pass(struct xdp_md *context)
{
	return XDP_PASS;
}

char _license[] SEC("license") = "GPL";
