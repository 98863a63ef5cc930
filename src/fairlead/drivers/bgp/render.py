"""The configuration of BIRD as text: one file for the sessions, one for the routes. Pure.

In: accepted peers; the routes. Out: `bird.conf`, which changes only with the peers, and the file
that it includes, which changes with the addresses. So a changed address does not touch a session.

Invariants: BIRD imports no route, and exports only routes of the two static protocols whose mark
selects the peer. A mark is a route attribute that BIRD never sends. The file of routes contains the
contributions of each Service as a comment, so the next process knows what is announced and why.
Follows RFC 4724 (graceful restart), RFC 9494 (long-lived graceful restart), RFC 8326 (graceful
shutdown), RFC 8950 (IPv4 routes with IPv6 next hops), RFC 10005 (link bandwidth), RFC 7911
(ADD-PATH).

A peer with `nextHops` gets each route once for each next hop, and without the weight in
communities. BIRD's protocols hold a prefix once, so each further next hop has a protocol of its
own, with a lower preference, so that other peers get the route of the first one."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from fairlead.announce_sections import BgpConfig
from fairlead.drivers.bgp import communities, spec
from fairlead.drivers.bgp.peers import (
    ALL_MARK,
    Peer,
    dynamic_prefix,
    mark_of,
    password_of,
    symbol,
)
from fairlead.drivers.bgp.spec import CACHED, Contribution, Contributions, Route
from fairlead.model import ServiceKey

STATIC_PROTOCOLS = ("fairlead4", "fairlead6")
"""The names of the protocols that hold the routes, by family."""
ONE_NEXT_HOP: Mapping[str, int] = {"ipv4": 1, "ipv6": 1}
FURTHER_PREFERENCE = 190
"""Lower than BIRD's preference of static routes, 200."""
_WEIGHTS = {2: ("fairlead_weight", "-empty-"), 3: ("fairlead_large_weight", "---empty---")}
"""The attribute with the community that contains the weight, by the numbers of the community, and
the empty list of its type."""
_WITHOUT_WEIGHT = (
    "bgp_ext_community = --empty--; "
    "if defined(fairlead_weight) then bgp_community.delete(fairlead_weight); "
    "if defined(fairlead_large_weight) then bgp_large_community.delete(fairlead_large_weight);"
)
"""The statements that remove the weight from a route."""
_OWNER = "# role: "
_RECORD = "# service: "
_HELD_BACK = "# held back: this host was cut off from the network\n"
_ROUTE, _ROUTE_HELD_BACK = "\n  route ", "\n#  route "
_LOG_BYTES = 1 << 20


class Record(msgspec.Struct, frozen=True):
    """What the file of routes contains about one Service. `since`: the time since which each
    address is announced, as text, by address."""

    service: str
    contributions: tuple[Contribution, ...]
    since: Mapping[str, str] = {}


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def configuration(
    section: BgpConfig,
    peers: Sequence[Peer],
    *,
    role: str,
    router_id: str,
    routes_file: str,
    log_file: str,
) -> str:
    """Return the text of bird.conf. `role`: the role that announces. `log_file`: empty for a BIRD
    that another program started, which logs to its standard error."""
    log = f'"{log_file}" {_LOG_BYTES} "{log_file}.1"' if log_file else "stderr"
    parts = [
        f"{_OWNER}{role}",
        "# Written by Fairlead, which replaces it.",
        f"log {log} all;",
        f"router id {router_id};",
        "graceful restart wait 5;",
        "timeformat protocol iso long;",
        # Always, because BIRD checks this text with a file of routes that may still use them.
        "attribute clist fairlead_peers;",
        "attribute clist fairlead_weight;",
        "attribute lclist fairlead_large_weight;",
        "protocol device { scan time 10; }",
    ]
    if any(peer.spec.bfd for peer in peers):
        parts.append("protocol bfd { }")
    if interfaces := sorted({each.spec.interface for each in peers if each.spec.interface}):
        parts.append(_router_advertisements(interfaces))
    parts.append(f'include "{routes_file}";')
    parts += [protocol(section, peer) for peer in peers]
    return "\n".join(parts) + "\n"


def _router_advertisements(interfaces: Iterable[str]) -> str:
    """Return the protocol by which a neighbor without a configured address learns the link-local
    address of this host. The lifetime 0 says that this host is not a default router."""
    return "\n".join(
        [
            "protocol radv {",
            *(
                f'  interface "{each}" {{ max ra interval 10; default lifetime 0; }};'
                for each in interfaces
            ),
            "}",
        ]
    )


def protocol(section: BgpConfig, peer: Peer) -> str:
    """Return the part of bird.conf about one peer."""
    spec = peer.spec
    asn = spec.local_asn or section.asn or 0
    neighbor_asn = spec.asn if isinstance(spec.asn, str) else f"as {spec.asn}"
    source = f"{spec.source_address} " if spec.source_address else ""
    port = f"port {section.local_port} " if section.local_port != 179 else ""
    lines = [f"local {source}{port}as {asn};"]
    if spec.interface:
        lines += [
            f"neighbor range fe80::/10 {neighbor_asn};",
            f'interface "{spec.interface}";',
            f'dynamic name "{dynamic_prefix(peer)}";',
        ]
    else:
        address, _, zone = spec.address.partition("%")
        scoped = f"{address}%'{zone}'" if zone else address
        remote = f"port {spec.port} " if spec.port != 179 else ""
        lines.append(f"neighbor {scoped} {remote}{neighbor_asn};")
    lines.append(f"multihop {spec.multihop};" if spec.multihop else "direct;")
    lines += _session_options(peer)
    lines += [_channel(peer, name) for name in peer.families]
    body = "\n".join(f"  {line}" for line in lines)
    return f"protocol bgp '{symbol(peer)}' {{\n{body}\n}}"


def _session_options(peer: Peer) -> list[str]:
    spec = peer.spec
    lines = [
        f"hold time {spec.hold_time_s};",
        f"keepalive time {spec.keepalive_time_s};",
        "connect delay time 1;",
        f"connect retry time {spec.connect_time_s};",
        # BIRD's default refuses a neighbor for a minute or more after one error at the start.
        "error wait time 1,5;",
    ]
    if spec.ttl_security:
        lines.append("ttl security on;")
    if password := password_of(peer):
        lines.append(f'password "{password}";')
    if spec.bfd is not None:
        passive = "passive yes; " if spec.bfd.passive else ""
        lines.append(
            f"bfd {{ interval {spec.bfd.interval_ms} ms; multiplier {spec.bfd.multiplier}; "
            f"{passive}}};"
        )
    if peer.restarts_gracefully:
        lines.append("graceful restart on;")
        lines.append(f"graceful restart time {spec.graceful_restart_time_s};")
        if spec.long_lived_stale_time_s:
            lines.append("long lived graceful restart on;")
            lines.append(f"long lived stale time {spec.long_lived_stale_time_s};")
    else:
        lines.append("graceful restart off;")
        lines.append("long lived graceful restart off;")
    return lines


def _channel(peer: Peer, name: str) -> str:
    marks = ", ".join(_pair(mark) for mark in (ALL_MARK, mark_of(peer.name)))
    extended = "extended next hop on; " if name == "ipv4" and peer.ipv6_transport else ""
    if peer.spec.next_hops:
        paths, accept = "add paths tx; ", _accept_each_next_hop(peer, name)
    else:
        ours = " || ".join(f'proto = "{each}"' for each in STATIC_PROTOCOLS)
        paths, accept = "next hop self; ", f"if {ours} then accept;"
    return (
        f"{name} {{ import none; {extended}{paths}export filter {{ "
        f"if ! (fairlead_peers ~ [ {marks} ]) then reject; {accept} reject; }}; }};"
    )


def _accept_each_next_hop(peer: Peer, name: str) -> str:
    """Return the statements that accept a route once for each of its next hops."""
    first = STATIC_PROTOCOLS[name == "ipv6"]
    own, *others = peer.next_hops_in(name) or ("",)
    chosen = f"bgp_next_hop = {own}; " if own else ""
    statements = [f'if proto = "{first}" then {{ {_WITHOUT_WEIGHT} {chosen}accept; }}']
    statements += [
        f'if proto = "{_further(first, position)}" then {{ bgp_next_hop = {each}; accept; }}'
        for position, each in enumerate(others, 2)
    ]
    return " ".join(statements)


def _further(protocol_name: str, position: int) -> str:
    """Return the name of the protocol that holds the routes of a further next hop."""
    return f"{protocol_name}_{position}"


def routes_text(
    routes: Mapping[str, Route],
    services: Mapping[ServiceKey, Contributions],
    since: Mapping[str, str],
    *,
    asn: int,
    peers: Collection[str] | None = None,
    next_hops: Mapping[str, int] = ONE_NEXT_HOP,
) -> str:
    """Return the file of routes. `since`: the time since which each address is announced. `asn`:
    the AS number of this host in communities. `peers`: the names of the peers of this host, to
    which the marks of routes are limited; None: not limited. BIRD cannot read a route with
    thousands of marks, and an annotation may contain as many names. `next_hops`: the maximum number
    of next hops of a route, by channel."""
    used = frozenset(peers) if peers is not None else None
    records = [
        _record(key, contributions, tuple(since.get(each.address, "") for each in contributions))
        for key, contributions in sorted(services.items())
        if contributions
    ]
    weighed = max(next_hops.values()) > 1
    protocols = []
    for name, channel in zip(STATIC_PROTOCOLS, ("ipv4", "ipv6"), strict=True):
        limit = next_hops[channel]
        of_channel = [
            route for prefix, route in routes.items() if (":" in prefix) == (channel == "ipv6")
        ]
        lines = [_route(route, asn, used, weighed) for route in of_channel]
        protocols.append("\n".join([f"protocol static {name} {{", f"  {channel};", *lines, "}"]))
        for position in range(2, limit + 1):
            lines = [
                _route(msgspec.structs.replace(route, weight=0), asn, used, False)
                for route in of_channel
                if spec.next_hops_of(route, limit) >= position
            ]
            head = [
                f"protocol static {_further(name, position)} {{",
                f"  {channel} {{ preference {FURTHER_PREFERENCE}; }};",
            ]
            protocols.append("\n".join([*head, *lines, "}"]))
    return "\n".join([*records, *protocols]) + "\n"


def hold_back(text: str) -> str:
    """Return this file of routes for a host that is cut off: the routes are comments, so a process
    that does not know the peers of the host can have them announced again (`release`)."""
    return text if is_held_back(text) else _HELD_BACK + text.replace(_ROUTE, _ROUTE_HELD_BACK)


def release(text: str) -> str:
    """Return the file of routes that was held back."""
    return text.removeprefix(_HELD_BACK).replace(_ROUTE_HELD_BACK, _ROUTE)


def is_held_back(text: str) -> bool:
    """Return whether the routes in this file are held back because the host was cut off."""
    return text.startswith(_HELD_BACK)


def owner_of(configuration: str) -> str | None:
    """Return the role that wrote this bird.conf; None if it is not a bird.conf of Fairlead."""
    first = configuration.partition("\n")[0]
    return first.removeprefix(_OWNER) if first.startswith(_OWNER) else None


def router_id_of(configuration: str) -> str:
    """Return the router id in this bird.conf; empty if there is none."""
    found = re.search(r"^router id ([\d.]+);", configuration, re.MULTILINE)
    return found[1] if found else ""


def records_of(text: str) -> dict[ServiceKey, Record]:
    """Return what a file of routes contains about each Service. Lines that are not valid are left
    out: the Service is announced again."""
    found = {}
    for line in text.split("\n"):  # other line separators are part of a name
        if line.startswith(_RECORD):
            try:
                record = _decoder.decode(line.removeprefix(_RECORD))
            except msgspec.DecodeError:
                continue
            found[ServiceKey.parse(record.service)] = record
    return found


@lru_cache(CACHED)
def _record(key: ServiceKey, contributions: Contributions, since: tuple[str, ...]) -> str:
    """Return the line about a Service. `since`: the times of its contributions."""
    times = {each.address: time for each, time in zip(contributions, since, strict=True)}
    return _RECORD + _encoder.encode(Record(str(key), contributions, times)).decode()


@lru_cache(CACHED)
def _route(route: Route, asn: int, peers: frozenset[str] | None, weighed: bool) -> str:
    """Return the line of a route. `weighed`: BIRD has to know the weight, because it removes it for
    some peers."""
    names = [each for each in route.peers or () if peers is None or each in peers]
    marks = [ALL_MARK] if route.peers is None else sorted({mark_of(each) for each in names})
    marked = "-empty-"
    for mark in marks:
        marked = f"add({marked}, {_pair(mark)})"
    statements = [f"fairlead_peers = {marked};"]
    found = communities.collected(
        route.communities, weight=route.weight, asn=asn, leaving=route.leaving
    )
    statements += [f"bgp_community.add({_pair(each)});" for each in found.standard]
    statements += [f"bgp_large_community.add(({a}, {b}, {c}));" for a, b, c in found.large]
    if route.weight:
        first, second = communities.link_bandwidth(route.weight, asn)
        statements.append(f"bgp_ext_community.add((generic, {first:#x}, {second:#x}));")
    if route.weight and weighed:
        weight = communities.weight_community(asn, route.weight)
        name, empty = _WEIGHTS[len(weight)]
        statements.append(f"{name} = add({empty}, ({','.join(map(str, weight))}));")
    # BIRD sends the local preference to internal peers only.
    preference = 0 if route.leaving else route.local_preference
    if preference is not None:
        statements.append(f"bgp_local_pref = {preference};")
    return f"  route {route.prefix} unreachable {{ {' '.join(statements)} }};"


def _pair(mark: tuple[int, int]) -> str:
    return f"({mark[0]},{mark[1]})"
