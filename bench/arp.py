"""Ask for many addresses by ARP, as a router does that has packets for all of them. A part of
`bench.announce`.

In: a lab, a prefix that is on the link of the router, the number of its addresses that have to
answer. Out: whether all of them have answered. Each address is asked for until it answers. Follows
RFC 826.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from itertools import islice

from bench.paths import must

from fairlead.lab import namespace
from fairlead.lab.site import Site
from fairlead.lab.topology import LAN, ROUTER
from fairlead.net import arp

DEVICE = "lan"
LISTEN_S = 0.2
"""How long answers are collected before the addresses that have not answered are asked again."""
BUFFER_BYTES = 1 << 22


class Asked:
    """The first addresses of a network, which are asked for."""

    def __init__(self, sock: socket.socket, mac: bytes, prefix: str, count: int) -> None:
        self._sock, self._mac = sock, mac
        network = ip_network(prefix)
        self.missing = {str(each) for each in islice(iter(network), count)}

    async def all_answered(self) -> bool:
        """Ask for all addresses that have not answered yet, and return whether none is left."""
        loop = asyncio.get_running_loop()
        for address in self.missing:
            await loop.sock_sendall(self._sock, arp.request(self._mac, str(LAN[0][1]), address))
        try:
            async with asyncio.timeout(LISTEN_S):
                while self.missing:
                    found = arp.parse(await loop.sock_recv(self._sock, 2000))
                    if found is not None and found.operation == arp.REPLY:
                        self.missing.discard(found.sender)
        except TimeoutError:
            pass
        return not self.missing


@asynccontextmanager
async def asked(site: Site, prefix: str, count: int) -> AsyncIterator[Asked]:
    """Ask from the router, on the link of the nodes."""
    text = await must(site, ROUTER, f"ip -json link show {DEVICE}")
    mac = bytes.fromhex(json.loads(text)[0]["address"].replace(":", ""))
    kind, protocol = socket.SOCK_RAW, socket.htons(arp.ETHERTYPE)
    with namespace.make_socket(site.namespace(ROUTER), socket.AF_PACKET, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        sock.bind((DEVICE, arp.ETHERTYPE))
        sock.setblocking(False)
        yield Asked(sock, mac, prefix, count)
