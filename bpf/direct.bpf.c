#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
SEC("tc") int direct(struct __sk_buff *skb) { return -1; }
char _license[] SEC("license") = "GPL";
