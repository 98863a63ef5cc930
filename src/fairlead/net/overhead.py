"""The size of tunnel headers, on which gateways and nodes must agree.

In: the kind of the tunnel and the IP family of its outer packets. Out: bytes. Follows RFC 2003 and
2473 (IPIP), RFC 7348 (VXLAN)."""

IP_HEADER = {False: 20, True: 40}
"""Bytes of the outer IP header; the key is whether it is IPv6."""
_INSIDE_VXLAN = 8 + 8 + 14  # UDP, VXLAN, the inner Ethernet header


def overhead(*, vxlan: bool, outer_ipv6: bool) -> int:
    """Return the bytes that the tunnel, VXLAN or otherwise IPIP, adds to an IP packet."""
    return IP_HEADER[outer_ipv6] + _INSIDE_VXLAN * vxlan
