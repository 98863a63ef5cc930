"""How the gateways of a cluster find each other (`gateway.peers: auto`).

In: the interfaces where packets arrive, the Leases of gateways. Out: the address at which the
others connect to this gateway, which its own Lease passes on; and the addresses of the others, for
the exchange of flow entries (`drivers.direct.peers`). Invariants: while the API server does not
answer, the last known peers stay; before its first answer there are none, and nobody is answered. A
gateway passes on an address only when it has one, so that it is never known by a wrong one.

Whoever may write the Leases of gateways can name any host as a gateway. With `gateway.peerTLS` its
certificate decides; without, only gateways on a link with this one are peers, and no packet from
behind a router is accepted (`net.own_link`)."""

import asyncio
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address

import structlog

from fairlead.drivers import Component
from fairlead.drivers.direct import Peers
from fairlead.errors import FairleadError
from fairlead.net import interfaces
from fairlead.net.address import family_of, join_host_port, split_host_port
from fairlead.net.selection import DEFAULT_ROUTE, Present, Selection, select
from fairlead.roles.gateways import FoundPeers

log = structlog.get_logger()

INTERVAL_S = 5.0
"""The interval at which the addresses of the host are read."""


class PeerSearch(Component):
    """The component that finds the address of this gateway, and passes those of the others to the
    exchange. `listen`: where this gateway listens. `selectors`: the interfaces where packets
    arrive; see `net.selection`. `own_link`: only gateways on a link with this one are peers."""

    name = "peer search"

    def __init__(
        self, peers: Peers, listen: str, selectors: Sequence[str], *, own_link: bool
    ) -> None:
        self._peers = peers
        self._listen = listen
        self._selectors = tuple(selectors)
        self._selection: Selection | None = None
        self._own_link = own_link
        self._networks: tuple[IPv4Network | IPv6Network, ...] = ()
        """The networks on the links of this host."""
        self._known: FoundPeers | None = None
        self._found: FoundPeers | None = None
        self.own = ""
        """`address:port` at which other gateways connect to this one; empty: not known yet."""

    async def open(self) -> None:
        await self._refresh()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self._refresh()

    def update(self, found: FoundPeers) -> None:
        """Pass the other gateways on if they have changed."""
        self._known = found
        if self._own_link:
            found = FoundPeers(*(frozenset(filter(self._is_near, each)) for each in found))
        if found == self._found:
            return
        if self._found is None or found.live != self._found.live:
            log.info("other gateways", peers=sorted(found.live))
        self._found = found
        self._peers.found(found.live, found.known)

    async def _refresh(self) -> None:
        host, port = split_host_port(self._listen)
        try:
            present = await asyncio.to_thread(
                interfaces.present, routes=DEFAULT_ROUTE in self._selectors
            )
            networks = await asyncio.to_thread(interfaces.networks)
        except FairleadError as problem:
            log.warning("cannot read the addresses of this host", problem=str(problem))
            return
        self._selection = select(self._selectors, present, self._selection)
        # Pods of this host are behind other interfaces, and no router is between.
        chosen = self._selection.names
        self._networks = tuple(
            dict.fromkeys(each.network for each in networks if each.interface in chosen)
        )
        if host == "*":
            host = first_address(self._selection)
        if host and join_host_port(host, port) != self.own:
            self.own, self._peers.source = join_host_port(host, port), host
            log.info("other gateways can connect", address=self.own)
        if self._known is not None:
            self.update(self._known)

    def _is_near(self, peer: str) -> bool:
        address = ip_address(split_host_port(peer)[0])
        return any(address in network for network in self._networks)


def first_address(selection: Selection) -> str:
    """Return the first IPv4 address of the chosen interfaces, or otherwise the first IPv6 address;
    empty if they have none that other hosts can use."""
    by_name = {each.name: each for each in selection.present}
    addresses = [
        text
        for name in selection.names
        for text in by_name.get(name, Present(name)).addresses
        if not (ip_address(text).is_link_local or ip_address(text).is_loopback)
    ]
    return min(addresses, key=family_of, default="")
