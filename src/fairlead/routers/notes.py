"""What an operator has to check on the network. Pure.

In: a Reach. Out: notes, each about one property of the network that breaks traffic silently."""

from collections.abc import Iterator, Sequence

from fairlead.model import Family
from fairlead.routers.values import Hop, Note, Reach, Sessions

MANY_PATHS = 16
MANY_PREFIXES = 32
FAST_BFD_MS = 300
"""Many routers run BFD with shorter intervals only in hardware."""


def missing_families(hops: Sequence[Hop], families: Sequence[Family]) -> Iterator[Note]:
    """Yield a note for each family of the pools in which hosts have no address."""
    for family in families:
        without = [each.name for each in hops if each.address(family) is None]
        if without:
            yield Note(
                "addresses",
                f"{', '.join(without)} have no {family} address, so they get no {family} traffic",
            )


def of(reach: Reach, *, snapshot: bool, skipped: Sequence[str], peer: bool) -> Iterator[Note]:
    """Yield the other notes. `snapshot`: the routes depend on where pods are now. `skipped`: pools
    that are announced by layer 2. `peer`: the router is configured as a peer of the hosts."""
    for name in skipped:
        yield Note(
            "layer 2",
            f"pool {name} is announced by ARP and neighbor discovery: hosts and routers on its "
            "link need no route; a router needs the network of the pool on that interface",
        )
    if reach.sessions is None:
        yield from _static(reach, snapshot)
    else:
        yield from _bgp(reach, reach.sessions, peer)
    yield from _paths(reach, snapshot)
    yield Note(
        "reverse path filter",
        "replies come directly from the nodes, with the load-balancer address as source; strict "
        "uRPF or rp_filter=1 drops them where the route back leads to another interface: use the "
        "loose mode there",
    )
    yield Note(
        "port security",
        "switches, hypervisors and clouds that check source addresses (port security, "
        "anti-spoofing, allowed address pairs) must allow the pools on the ports of all nodes",
    )
    if len(reach.networks) > MANY_PREFIXES:
        yield Note(
            "pools",
            f"the pools have {len(reach.networks)} prefixes; pools that are CIDRs need fewer",
        )


def _static(reach: Reach, snapshot: bool) -> Iterator[Note]:
    if snapshot:
        yield Note(
            "snapshot",
            "the routes lead to nodes that have ready pods now; they are wrong as soon as a pod "
            "moves: send the addresses to gateways, or announce them by BGP",
        )
    yield Note(
        "dead hosts",
        "a static route does not notice a dead host unless its link goes down: the share of "
        "packets that is sent to this host is lost until the route changes; BGP with BFD, or "
        "announcement by layer 2, has no such gap",
    )
    if any(not each.interfaces for each in reach.hops) and not snapshot:
        yield Note(
            "loops",
            "an address of a pool that no Service has is sent to a host, which routes it back; "
            "discard it on the hosts: see `--router linux` for the rule",
        )


def _bgp(reach: Reach, sessions: Sessions, peer: bool) -> Iterator[Note]:
    if not peer:
        yield Note(
            "peers",
            "this router is no peer in announce.bgp.peers, so the hosts do not open a session: add "
            f"{{name: ROUTER, address: ITS-ADDRESS, asn: {sessions.router_asn}, bfd: {{}}}}",
        )
    if sessions.add_path:
        yield Note(
            "ADD-PATH",
            "hosts tell their shares by several next hops for an address: the router must accept "
            "several paths of a neighbor; FRR does so by default, and the text for BIRD asks for "
            "them; add the option of other routers",
        )
    if sessions.interfaces:
        yield Note(
            "unnumbered sessions",
            "replace INTERFACE with the router's interfaces to the hosts; the router must send "
            "router advertisements there",
        )
    if sessions.bfd is None:
        yield Note(
            "BFD",
            f"without BFD a dead host is noticed after the hold time of {sessions.hold_time_s} s; "
            "set `bfd` of the peer in fairlead.yaml and plan again",
        )
    elif sessions.bfd.interval_ms < FAST_BFD_MS:
        yield Note(
            "BFD",
            f"an interval of {sessions.bfd.interval_ms} ms needs a router that supports it; "
            "otherwise both sides use the longer interval of the router",
        )
    if sessions.password:
        yield Note("password", "put the password of the session in place of the commented line")
    yield Note(
        "prefix limit",
        "the limit is the size of the pools: raise it on the router before pools grow, because "
        "many routers close the session above it",
    )
    yield Note(
        "graceful restart",
        "the router has to be a helper (the default of most routers), so that routes stay while "
        "the routing daemon of a host restarts; a BIRD router with `bfd graceful` keeps the routes "
        "of a dead host for minutes",
    )
    yield Note(
        "weights",
        "hosts of class fairlead.io/announce tell their share as link bandwidth (extended "
        "community, transitive); FRR uses it by default if all paths have it, other routers need "
        "to be configured for it; without it all hosts get equal shares",
    )


def _paths(reach: Reach, snapshot: bool) -> Iterator[Note]:
    hops = len(reach.hops)
    if hops > MANY_PATHS:
        yield Note(
            "ECMP limit",
            f"there are {hops} next hops; many routers use at most 8 to 64 and ignore the others "
            "silently: check the limit, and the installed routes",
        )
    if hops < 2:
        return
    if snapshot:
        yield Note(
            "resilient hashing",
            "when next hops change, a router without resilient hashing sends a part of the open "
            "connections to other nodes, where they break; gateways do not have this problem",
        )
    else:
        yield Note(
            "resilient hashing",
            "not needed for gateways: all of them send a connection to the same node; only "
            "connections in a slot in transition need `gateway.peers`",
        )
    yield Note(
        "hash",
        "the router has to choose the next hop by addresses and ports: by addresses alone, clients "
        "behind one address translation all go to one host",
    )
