"""A node's end of the tunnels that gateways send packets through where they are on no link with the
node.

driver     the driver: which addresses are published, and everything below kept in place
envelopes  IPIP: a program at the node's interfaces takes packets out of their envelopes
devices    VXLAN: the kernel's own devices do
rules      nftables: who may send into the VXLAN devices, and TCP segments that fit the tunnel
"""

from fairlead.drivers.tunnel.driver import NoTunnel, TunnelDriver, remove_tunnel

__all__ = ["NoTunnel", "TunnelDriver", "remove_tunnel"]
