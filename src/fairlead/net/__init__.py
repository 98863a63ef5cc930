"""Interfaces to the kernel and the network, without knowledge of Kubernetes or of Fairlead.

Each module can be read on its own. eBPF: `elf`, `btf`, `bpf`, `bpffs`, `program`, `ringbuf`, `xdp`,
`tc`. Netlink: `netlink` (messages), `rtnetlink` and `iproute` (requests), `netlink_events`
(events), `nfnetlink` and `nfelements` (nftables), and modules for links, routes, neighbours and
conntrack. Load balancing: `maglev`, `transition`. Sockets: `httpport` and `httpprobe` (both ends of
a health check), `listening`, `frames`. Neighbors: `arp` and `ndp` (frames), `packet_socket`,
`memberships` (multicast groups)."""
