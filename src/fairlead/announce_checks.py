"""Checks of the values in `announce_sections` that their types cannot express. Pure.

In: a section of the configuration file, or of an AddressPool or BGPPeer object. Out: `Problem`s
with the path inside the section, so that the configuration and the objects are held to the same
rules and the messages have the same words. Invariant: a section without a problem can be written
into the configuration of a routing daemon as it is. Communities follow RFC 1997, RFC 8092 and the
registry of well-known communities of IANA."""

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fairlead.announce_sections import (
    BgpConfig,
    BgpPeerConfig,
    BgpPeerSpec,
    L2Config,
    LabelSelector,
    PoolAnnounce,
)
from fairlead.net import selection

WELL_KNOWN_COMMUNITIES = frozenset(
    {
        "accept-own",
        "blackhole",
        "graceful-shutdown",
        "llgr-stale",
        "no-advertise",
        "no-export",
        "no-export-subconfed",
        "no-llgr",
        "no-peer",
    }
)
_STANDARD = re.compile(r"(\d{1,5}):(\d{1,5})", re.ASCII)
_LARGE = re.compile(r"(\d{1,10}):(\d{1,10}):(\d{1,10})", re.ASCII)
_PEER_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", re.ASCII)
_INTERFACE = re.compile(r"[^\s/\"*?\[]{1,15}", re.ASCII)
_LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", re.ASCII)

MULTIHOP_FIX = "remove ttlSecurity, or multihop"


class Problem(NamedTuple):
    """A value that cannot be used. `path`: where it is inside the section, such as
    `communities[0]`."""

    path: str
    message: str
    fix: str = ""


def community_problem(text: str) -> str:
    """Return why the text is not a community; empty if it is one."""
    if text in WELL_KNOWN_COMMUNITIES:
        return ""
    for pattern, highest in ((_STANDARD, 65_535), (_LARGE, 4_294_967_295)):
        if found := pattern.fullmatch(text):
            if max(map(int, found.groups())) <= highest:
                return ""
            return f"{text!r} has a number above {highest}"
    return f"{text!r} is not a community"


def community_fix() -> str:
    """Return which communities are valid."""
    known = ", ".join(sorted(WELL_KNOWN_COMMUNITIES))
    return f"write 64512:100, a large community such as 64512:1:2, or one of {known}"


def selector_problems(selectors: Sequence[LabelSelector], path: str) -> Iterator[Problem]:
    """Yield the problems of label selectors."""
    for at, selector in enumerate(selectors):
        for key in selector.match_labels:
            if _LABEL_KEY.fullmatch(key) is None:
                yield Problem(f"{path}[{at}].matchLabels", f"{key!r} is not a label")
        for number, each in enumerate(selector.match_expressions):
            where = f"{path}[{at}].matchExpressions[{number}]"
            if _LABEL_KEY.fullmatch(each.key) is None:
                yield Problem(f"{where}.key", f"{each.key!r} is not a label")
            if each.operator in ("In", "NotIn") and not each.values:
                yield Problem(f"{where}.values", f"operator {each.operator} needs values")
            if each.operator in ("Exists", "DoesNotExist") and each.values:
                yield Problem(f"{where}.values", f"operator {each.operator} takes no values")


def interface_problems(selectors: Sequence[str], path: str) -> Iterator[Problem]:
    """Yield the problems of selectors of interfaces."""
    for at, selector in enumerate(selectors):
        try:
            selection.check(selector)
        except ValueError as error:
            fix = "give the name of an interface, a pattern (eth*), a CIDR, or default-route"
            yield Problem(f"{path}[{at}]", str(error), fix)


def pool_problems(section: PoolAnnounce) -> Iterator[Problem]:
    """Yield the problems of the section `announce` of a pool."""
    yield from interface_problems(section.interfaces, "interfaces")
    yield from selector_problems(section.node_selectors, "nodeSelectors")
    for at, text in enumerate(section.communities):
        if problem := community_problem(text):
            yield Problem(f"communities[{at}]", problem, community_fix())


def peer_problems(peer: BgpPeerSpec, own_asn: int | None) -> Iterator[Problem]:
    """Yield the problems of one BGP peer. `own_asn`: `announce.bgp.asn`."""
    if bool(peer.address) == bool(peer.interface):
        both = "both address and interface are set" if peer.address else "address is missing"
        yield Problem("address", both, "set exactly one of address and interface")
    yield from _address_problems(peer)
    if peer.local_asn is None and own_asn is None:
        yield Problem(
            "localASN", "our AS number is missing", "set announce.bgp.asn, or localASN of the peer"
        )
    internal = peer.asn == "internal" or peer.asn == (peer.local_asn or own_asn)
    if peer.interface and peer.multihop:
        yield Problem("multihop", "the neighbor at an interface is directly connected")
    if peer.ttl_security and peer.multihop:
        message = "ttlSecurity accepts only a neighbor that is directly connected"
        yield Problem("ttlSecurity", message, MULTIHOP_FIX)
    if internal and peer.ttl_security:
        yield Problem("ttlSecurity", "an internal neighbor need not be directly connected")
    if peer.keepalive_time_s * 3 > peer.hold_time_s:
        message = f"keepaliveTimeS {peer.keepalive_time_s} is more than a third of holdTimeS"
        yield Problem("keepaliveTimeS", message, f"set it to at most {peer.hold_time_s // 3}")
    if peer.graceful_restart and peer.bfd is None:
        message = (
            "graceful restart without BFD: the neighbor keeps the routes of a dead host until its "
            "restart time is over"
        )
        yield Problem("gracefulRestart", message, "add bfd, or remove gracefulRestart")
    yield from _next_hop_problems(peer)
    if peer.password_file and peer.password_secret is not None:
        message = "both passwordFile and passwordSecret are set"
        yield Problem("passwordSecret", message, "set one of the two")
    yield from selector_problems(peer.node_selectors, "nodeSelectors")


def _next_hop_problems(peer: BgpPeerSpec) -> Iterator[Problem]:
    for at, text in enumerate(peer.next_hops):
        try:
            ipaddress.ip_network(text)
        except ValueError:
            message = f"{text!r} is not a network"
            yield Problem(f"nextHops[{at}]", message, "write a network such as 192.0.2.128/25")
    if peer.next_hops and peer.interface:
        message = "the next hops of a session at an interface are link-local addresses"
        yield Problem("nextHops", message, "set address instead of interface")


def _address_problems(peer: BgpPeerSpec) -> Iterator[Problem]:
    versions = {}
    for path, text in (("address", peer.address), ("sourceAddress", peer.source_address)):
        if not text:
            continue
        try:
            parsed = ipaddress.ip_address(text)
        except ValueError:
            yield Problem(path, f"{text!r} is not an IP address", "a host name is not possible")
            continue
        versions[path] = parsed.version
        if parsed.is_multicast or parsed.is_unspecified:
            yield Problem(path, f"{text} is not the address of a host")
        if path == "sourceAddress" and parsed.version == 6 and parsed.is_link_local:
            fix = "leave it out: a session with a link-local neighbor uses that of its interface"
            yield Problem(path, f"{text} is a link-local address", fix)
        elif parsed.version == 6 and parsed.is_link_local != ("%" in text):
            fix = "write a link-local address as fe80::1%eth0, or set interface instead of address"
            yield Problem(path, f"{text} needs an interface exactly if it is link-local", fix)
    if len(set(versions.values())) > 1:
        yield Problem("sourceAddress", "address and sourceAddress are of different families")
    if peer.interface and _INTERFACE.fullmatch(peer.interface) is None:
        yield Problem("interface", f"{peer.interface!r} is not the name of an interface")


def bgp_problems(section: BgpConfig) -> Iterator[Problem]:
    """Yield the problems of the section `announce.bgp`, whose paths begin inside of it."""
    if section.router_id:
        try:
            if not int(ipaddress.IPv4Address(section.router_id)):
                yield Problem("routerId", "0.0.0.0 is reserved")
        except ValueError:
            yield Problem("routerId", f"{section.router_id!r} is not an IPv4 address")
    if section.route_table in (253, 255):
        yield Problem("routeTable", f"the kernel reserves table {section.route_table}")
    names: set[str] = set()
    for at, peer in enumerate(section.peers):
        where = f"peers[{at}]"
        if peer.name in names:
            yield Problem(f"{where}.name", f"two peers are named {peer.name!r}")
        elif _PEER_NAME.fullmatch(peer.name) is None:
            fix = "use lowercase letters, digits, - and ."
            yield Problem(f"{where}.name", f"{peer.name!r} is not the name of an object", fix)
        names.add(peer.name)
        for each in peer_problems(peer, section.asn):
            yield each._replace(path=f"{where}.{each.path}")


def l2_problems(section: L2Config) -> Iterator[Problem]:
    """Yield the problems of the section `announce.l2`, whose paths begin inside of it."""
    yield from interface_problems(section.interfaces, "interfaces")
    for host, selectors in section.interfaces_by_node.items():
        yield from interface_problems(selectors, f"interfacesByNode.{host}")


def read_pool_section(raw: Mapping[str, Any]) -> tuple[PoolAnnounce | None, str]:
    """Return the section `announce` of an AddressPool, and why it is not used as it is; empty if it
    is. None: the section cannot be used at all, because a restriction must not be ignored. Invalid
    communities alone are left out."""
    try:
        section = msgspec.convert(raw, PoolAnnounce)
    except msgspec.ValidationError as error:
        return None, f"spec.announce: {error}"
    problems = list(pool_problems(section))
    if not problems:
        return section, ""
    text = "; ".join(f"spec.announce.{each.path}: {each.message}" for each in problems)
    if any(not each.path.startswith("communities") for each in problems):
        return None, text
    valid = tuple(each for each in section.communities if not community_problem(each))
    return msgspec.structs.replace(section, communities=valid), text


def read_peer_spec(raw: Mapping[str, Any]) -> BgpPeerSpec | str:
    """Return the spec of a BGPPeer, or why it cannot be read."""
    try:
        return msgspec.convert(raw, BgpPeerSpec)
    except msgspec.ValidationError as error:
        return f"spec: {error}"


def named(name: str, spec: BgpPeerSpec) -> BgpPeerConfig:
    """Return a peer with this name and these fields."""
    return BgpPeerConfig(name=name, **msgspec.structs.asdict(spec))
