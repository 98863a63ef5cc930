"""What makes the pools reachable: the decision, before it becomes the text of a router. Pure.

In: the pools, the hosts, the announcement section of the configuration, and what the operator asks
for. Out: a Reach, or Refused with what is missing. Invariant: equal input gives an equal plan, and
the order of its parts does not depend on the order of the input."""

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fairlead.announce_sections import (
    AnnounceConfig,
    BfdConfig,
    BgpConfig,
    BgpPeerConfig,
    PoolAnnounce,
)
from fairlead.config import PoolConfig, parse_range
from fairlead.errors import Refused
from fairlead.model import Family, Listener, LoadBalancer
from fairlead.net.address import canonical, family_of
from fairlead.routers import notes
from fairlead.routers.values import (
    Hop,
    Method,
    Neighbor,
    Network,
    Reach,
    Route,
    Sessions,
    Target,
)

DEFAULT_PATHS, MAX_PATHS = 16, 64
MAX_NEIGHBORS = 32
"""With more hosts, each with a neighbor of its own, a range of addresses is shorter."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator asks for."""

    method: Method | None = None
    """None: BGP if the router is named or has an AS number, if peers are configured, or if a pool
    is announced by BGP; otherwise static routes."""
    asn: int | None = None
    """The AS number of the router. None: that of the configured peer."""
    peer: str | None = None
    """The name of the configured peer that is this router. None: the only peer that fits `asn`."""
    ranges: tuple[str, ...] = ()
    """Networks from which the router accepts every host, instead of a neighbor for each host."""
    pools: tuple[str, ...] = ()
    """The pools that the plan covers. Empty: all pools that are not announced by layer 2."""
    weights: bool = True
    """Whether the router takes weights in static routes."""


def plan(
    pools: Sequence[PoolConfig],
    hops: Sequence[Hop],
    announce: AnnounceConfig,
    request: Request,
    services: Mapping[str, LoadBalancer] | None = None,
    *,
    host_routes: bool = False,
) -> Reach:
    """Return the plan. `services`: routes for these load balancers, to the hosts that have their
    ready pods, instead of routes for whole pools; None: whole pools. `host_routes`: hosts announce
    each address by a route of its own, as nodes of class fairlead.io/announce do.

    Raise Refused if there is no pool or no host to plan for, if a number is missing, or if several
    configured peers may be the router."""
    chosen = _chosen(pools, announce, request)
    networks = tuple(each for pool in chosen for each in _networks(pool))
    if not hops:
        raise Refused(
            "no host is known to which a router could send packets",
            fix="start gateways, or give their addresses with --next-hop",
        )
    sorted_hops = tuple(sorted(hops, key=lambda each: each.name))
    fitting = _fitting(announce.bgp, request)
    method = request.method or _default_method(chosen, announce, request)
    peer = _only(fitting, request) if method == "bgp" else None
    families = tuple({each.family: None for each in networks})
    routes: tuple[Route, ...] = ()
    sessions = None
    if method == "bgp":
        sessions = _sessions(sorted_hops, announce, request, peer)
    elif services is not None:
        routes = tuple(_service_routes(services, networks, sorted_hops, request.weights))
    else:
        routes = tuple(_pool_routes(networks, sorted_hops))
    reach = Reach(networks, sorted_hops, routes, sessions, host_routes=host_routes)
    skipped = tuple(
        each.name for each in pools if each not in chosen and _method(each, announce) == "l2"
    )
    return msgspec.structs.replace(
        reach,
        notes=(
            *notes.missing_families(sorted_hops, families),
            *notes.of(reach, snapshot=services is not None, skipped=skipped, peer=peer is not None),
        ),
    )


def _method(pool: PoolConfig, announce: AnnounceConfig) -> str:
    return pool.announce.method or announce.method


def _chosen(
    pools: Sequence[PoolConfig], announce: AnnounceConfig, request: Request
) -> list[PoolConfig]:
    if unknown := sorted(set(request.pools) - {each.name for each in pools}):
        known = ", ".join(sorted(each.name for each in pools)) or "none"
        raise Refused(f"there is no pool {unknown[0]}", fix=f"name one of the pools: {known}")
    if request.pools:
        return [each for each in pools if each.name in request.pools]
    chosen = [each for each in pools if _method(each, announce) != "l2"]
    if chosen:
        return chosen
    if pools:
        raise Refused(
            "all pools are announced by layer 2, so hosts and routers on their links need no route",
            fix="name a pool with --pool for a router that is not on the link",
        )
    raise Refused("there is no pool", fix="create an AddressPool, or give --config with pools")


def _default_method(
    chosen: Iterable[PoolConfig], announce: AnnounceConfig, request: Request
) -> Method:
    """Return `bgp` also if a number is missing for it. Static routes instead would contradict the
    configuration, and nothing would show this to the operator."""
    if request.asn or request.peer or announce.bgp.peers:
        return "bgp"
    return "bgp" if any(_method(each, announce) == "bgp" for each in chosen) else "static"


def _networks(pool: PoolConfig) -> list[Network]:
    """Return the parts of a pool, as prefixes."""
    found: list[Network] = []
    for text in pool.addresses:
        version, first, last = parse_range(text)
        family: Family = "IPv4" if version == 4 else "IPv6"
        kind = ipaddress.IPv4Address if version == 4 else ipaddress.IPv6Address
        ends = kind(first), kind(last)
        found += [
            Network(pool.name, str(each), family, _shortest(pool.announce, family))
            for each in ipaddress.summarize_address_range(*ends)
        ]
    return found


def _shortest(announce: PoolAnnounce, family: Family) -> int:
    return announce.aggregation_length if family == "IPv4" else announce.aggregation_length_v6


def _fitting(bgp: BgpConfig, request: Request) -> list[BgpPeerConfig]:
    """Return the configured peers that this router may be."""
    if request.peer is None:
        return [each for each in bgp.peers if _fits(each, bgp, request.asn)]
    for each in bgp.peers:
        if each.name == request.peer:
            return [each]
    known = ", ".join(each.name for each in bgp.peers) or "none"
    raise Refused(f"there is no BGP peer {request.peer}", fix=f"name one of the peers: {known}")


def _fits(peer: BgpPeerConfig, bgp: BgpConfig, asn: int | None) -> bool:
    """Return whether a router with this AS number may be the peer; None: any number."""
    if asn is None or isinstance(peer.asn, int):
        return asn is None or peer.asn == asn
    return (peer.asn == "internal") == (asn == _hosts_asn(peer, bgp))


def _only(fitting: Sequence[BgpPeerConfig], request: Request) -> BgpPeerConfig | None:
    """Return the configured peer that is this router; None if none is configured. Raise Refused if
    there are several: each has an address and options of its own."""
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    names = ", ".join(sorted(each.name for each in fitting))
    number = "" if request.asn is None else f" with AS number {request.asn}"
    raise Refused(
        f"the router{number} may be any of {len(fitting)} BGP peers in the configuration",
        fix=f"name the router with --peer: {names}{_or_static(request)}",
    )


def _or_static(request: Request) -> str:
    """Return the other remedy for an operator who has not asked for sessions."""
    return "" if request.method or request.asn else ", or use --method static"


def _number(peer: BgpPeerConfig) -> int | None:
    return peer.asn if isinstance(peer.asn, int) else None


def _hosts_asn(peer: BgpPeerConfig | None, bgp: BgpConfig) -> int | None:
    """Return the AS number of the hosts in the session."""
    return (peer.local_asn if peer is not None else None) or bgp.asn


def _sessions(
    hops: Sequence[Hop], announce: AnnounceConfig, request: Request, peer: BgpPeerConfig | None
) -> Sessions:
    hosts_asn = _hosts_asn(peer, announce.bgp)
    if hosts_asn is None:
        raise Refused(
            "the AS number of the hosts is not configured",
            fix="set announce.bgp.asn in fairlead.yaml, or use --method static",
        )
    router_asn = request.asn or (_number(peer) if peer is not None else None)
    if router_asn is None and peer is not None and peer.asn == "internal":
        router_asn = hosts_asn
    if router_asn is None:
        raise Refused(
            "the AS number of the router is not known: the configuration has "
            + ("no BGP peer" if peer is None else f"none for BGP peer {peer.name}"),
            fix=f"give it with --asn{_or_static(request)}",
        )
    interfaces = ("INTERFACE",) if peer is not None and peer.interface else ()
    ranges = tuple(str(ipaddress.ip_network(each)) for each in request.ranges)
    neighbors = () if ranges or interfaces else tuple(_neighbors(hops, peer))
    given = peer if peer is not None else BgpPeerConfig(name="", asn=router_asn, bfd=BfdConfig())
    return Sessions(
        router_asn=router_asn,
        hosts_asn=hosts_asn,
        router_address=given.address,
        neighbors=neighbors,
        ranges=ranges,
        interfaces=interfaces,
        bfd=given.bfd,
        hold_time_s=given.hold_time_s,
        keepalive_time_s=given.keepalive_time_s,
        multihop=given.multihop,
        ttl_security=given.ttl_security,
        password=bool(given.password_file or given.password_secret),
        families=given.families or ("IPv4", "IPv6"),
        paths=MAX_PATHS if given.next_hops else max(DEFAULT_PATHS, len(hops)),
        add_path=bool(given.next_hops),
    )


def _neighbors(hops: Iterable[Hop], peer: BgpPeerConfig | None) -> Iterable[Neighbor]:
    """Yield the hosts, by the address of the family of the session."""
    family = family_of(peer.address) if peer is not None and peer.address else None
    for hop in hops:
        address = hop.address(family) if family is not None else hop.addresses[0]
        if address is not None:
            yield Neighbor(hop.name, canonical(address))


def _pool_routes(networks: Iterable[Network], hops: Sequence[Hop]) -> Iterable[Route]:
    for network in networks:
        targets = tuple(
            Target(address) for hop in hops if (address := hop.address(network.family)) is not None
        )
        if targets:
            yield Route(network.prefix, network.family, targets, f"pool {network.pool}")


def _weights(listener: Listener) -> Mapping[str, int]:
    """Return the nodes that serve a listener, with the number of their ready pods. Where a router
    on the node sends to pods itself, they are the pods of the node that it sends to."""
    if listener.pods:
        return Counter(pod.node for pod in listener.pods if pod.state == "active")
    return {each.node: each.weight for each in listener.members if each.state == "active"}


def _service_routes(
    services: Mapping[str, LoadBalancer],
    networks: Sequence[Network],
    hops: Sequence[Hop],
    weights: bool,
) -> Iterable[Route]:
    """Yield a route for each address of the pools that a Service has, to the nodes with ready pods.

    A node gets the lowest weight of its listeners: it must be able to serve every port. Several
    Services with one address share its route, likewise."""
    parts = [ipaddress.ip_network(each.prefix) for each in networks]
    shares: dict[str, Mapping[str, int]] = {}
    owners: dict[str, list[str]] = {}
    for name, balancer in sorted(services.items()):
        for listener in balancer.listeners:
            own = _weights(listener)
            for address in balancer.listening(listener):
                if not any(ipaddress.ip_address(address) in part for part in parts):
                    continue
                old = shares.get(address)
                shares[address] = (
                    own
                    if old is None
                    else {node: min(old[node], own[node]) for node in old.keys() & own.keys()}
                )
                if name not in owners.setdefault(address, []):
                    owners[address].append(name)
    for address, nodes in sorted(shares.items()):
        family = family_of(address)
        targets = tuple(
            Target(via, max(1, nodes[hop.name]) if weights else 1)
            for hop in hops
            if nodes.get(hop.name) and (via := hop.address(family)) is not None
        )
        if targets:
            bits = 32 if family == "IPv4" else 128
            about = f"Service {', '.join(owners[address])}"
            yield Route(f"{address}/{bits}", family, targets, about)
