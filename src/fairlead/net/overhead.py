"""How much longer a packet becomes in a tunnel: gateways and nodes must agree on it.

In: the tunnel's kind and the family of its outer packets. Out: bytes. Follows RFC 2003 and 2473
(IPIP), RFC 7348 (VXLAN)."""

IP_HEADER = {False: 20, True: 40}
"""By whether it is IPv6."""
_INSIDE_VXLAN = 8 + 8 + 14  # UDP, VXLAN, the inner Ethernet header


def overhead(*, vxlan: bool, outer_ipv6: bool) -> int:
    """How many bytes the tunnel, VXLAN or else IPIP, adds to an IP packet."""
    return IP_HEADER[outer_ipv6] + _INSIDE_VXLAN * vxlan
