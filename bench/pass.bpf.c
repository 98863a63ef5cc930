/* Let everything pass: what the far end of a veth must have, for frames that XDP sends back on the near end to arrive there. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("xdp")
int pass(struct xdp_md *context)
{
	return XDP_PASS;
}

char _license[] SEC("license") = "GPL";
