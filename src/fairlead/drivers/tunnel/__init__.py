"""The node's end of the tunnels through which gateways send packets to nodes that share no link
with them.

- `driver`: publishes addresses, and keeps everything below in place.
- `decapsulator`: IPIP: a program at the node's interfaces removes the outer headers.
- `devices`: VXLAN: devices of the kernel do this.
- `rules`: nftables: which hosts may send into the VXLAN devices, and the TCP segment size that fits
  the tunnel.
- `requirements`: kernel settings that would drop or divert clients' packets."""

from fairlead.drivers.tunnel.driver import NoTunnel, TunnelDriver, remove_tunnel

__all__ = ["NoTunnel", "TunnelDriver", "remove_tunnel"]
