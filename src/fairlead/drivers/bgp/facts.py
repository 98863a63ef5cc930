"""What the BGP driver needs to know about its host.

In: the interfaces and addresses of this network namespace. Out: `HostFacts`, a router id."""

import hashlib
import socket
from ipaddress import IPv4Address, ip_address

from fairlead.drivers.bgp.peers import HostFacts
from fairlead.net import interfaces


def read() -> HostFacts:
    """Return the interfaces and addresses of the host. Raise Unavailable."""
    present = interfaces.present(routes=False)
    return HostFacts(
        frozenset(each.name for each in present),
        frozenset(ip_address(address) for each in present for address in each.addresses),
    )


def router_id(host: str) -> str:
    """Return the first IPv4 address of the host that is not a loopback address. A host without one
    gets an id that is derived from its name. Raise Unavailable."""
    for each in interfaces.present(routes=False):
        for address in each.addresses:
            parsed = ip_address(address)
            if parsed.version == 4 and not (parsed.is_loopback or parsed.is_link_local):
                return address
    digest = hashlib.sha256((host or socket.gethostname()).encode()).digest()
    return str(IPv4Address(int.from_bytes(digest[:4]) | 1))
