"""What a node needs of its host, so that packets of clients get in.

In: where packets from gateways arrive, and by which interfaces clients would be answered. Out:
`Need`s. A gateway hands over a client's packet as it is. With strict reverse path filtering (RFC
3704, rp_filter 1) the kernel drops it unless the way back to the client leads out of the interface
that it came in by; it says nothing. IPv6 has no such setting. kube-proxy in IPVS mode gives the
node the load-balancer addresses themselves, at its interface `kube-ipvs0`. Linux answers ARP for an
address of any interface at all of them, and names any as its own when it asks (ip-sysctl,
arp_ignore and arp_announce): the router then sends clients' packets to that node, past the
gateways. kube-proxy's own `ipvs.strictARP` sets the same. Our own VXLAN devices are seen to where
they are made (`devices`): they are nobody else's."""

from collections.abc import Collection, Sequence
from functools import partial

from fairlead.drivers.need import Need
from fairlead.net import sysctl
from fairlead.net.interfaces import default_devices, holders, links, present
from fairlead.net.selection import DEFAULT_ROUTE, select

STRICT, LOOSE = "1", "2"
IPVS = "kube-ipvs0"
"""Where kube-proxy in IPVS mode puts the addresses of Services."""
OWN_ONLY, BEST_OWN = "1", "2"


async def needs(node_addresses: Sequence[str], selectors: Sequence[str]) -> tuple[Need, ...]:
    """The needs of this host, with its present interfaces and routes. `selectors`: of the
    interfaces where packets of gateways arrive, as in the configuration; none: the interfaces with
    the node's addresses."""
    if selectors:
        arrivals: Sequence[str] = select(
            selectors, present(routes=DEFAULT_ROUTE in selectors)
        ).names
    else:
        arrivals = [link.name for link in holders(node_addresses)]
    answers = default_devices()
    strict = needs_of(
        arrivals, answers, everywhere=sysctl.read("net/ipv4/conf/all/rp_filter") or "0"
    )
    return (*strict, *(_arp_needs(arrivals) if IPVS in links() else ()))


def _arp_needs(arrivals: Collection[str]) -> tuple[Need, ...]:
    """Where load-balancer addresses are the node's own. Here too the greater of both values
    counts."""
    why = (
        f"load-balancer addresses are at {IPVS}: this node {{}} for them, and takes clients' "
        "packets away from the gateways"
    )
    made = []
    for name in arrivals:
        for setting, should, what in (
            ("arp_ignore", OWN_ONLY, "answers ARP"),
            ("arp_announce", BEST_OWN, "asks by ARP"),
        ):
            enough = (sysctl.read(f"net/ipv4/conf/all/{setting}") or "0") >= should
            harmful = partial(_less, than=should, enough=enough)
            made.append(Need(f"net/ipv4/conf/{name}/{setting}", harmful, should, why.format(what)))
    return tuple(made)


def _less(own: str, *, than: str, enough: bool) -> bool:
    return not enough and own < than


def needs_of(
    arrivals: Collection[str], answers: Collection[str], *, everywhere: str
) -> tuple[Need, ...]:
    """What follows. Pure. The kernel takes the greater of the interface's own value and that of
    `all`, so a loose one of its own helps an interface whatever the others have."""

    def is_strict(own: str) -> bool:
        return max(own, everywhere) == STRICT

    why = (
        "clients' packets arrive here, but are answered by another interface: strict reverse "
        "path filtering drops them"
    )
    lonely = [name for name in arrivals if answers and name not in answers]
    return tuple(Need(f"net/ipv4/conf/{name}/rp_filter", is_strict, LOOSE, why) for name in lonely)
