"""BGP peers of one host: which of them can be configured, and how BIRD names them. Pure.

In: peers as the configuration and BGPPeer objects specify them, facts about the host. Out: accepted
peers, and a Finding for each refused peer. Invariant: a peer that cannot be configured is refused
alone; the other peers are not affected. Follows RFC 4271, RFC 5082 (GTSM), RFC 2385 (passwords)."""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import msgspec

from fairlead.announce_sections import BgpConfig, BgpPeerSpec
from fairlead.model import Finding
from fairlead.role_state import PEER_REFUSED, PEER_SUBJECT

ALL_MARK = (0, 0)
"""The mark of routes for every peer."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,50}")
_MAX_PASSWORD_BYTES = 80
"""TCP_MD5SIG_MAXKEYLEN of the kernel."""


class Peer(msgspec.Struct, frozen=True):
    """A BGP neighbor of this host. `name`: its name in the configuration file, or the name of its
    BGPPeer. `password`: the text of the password; empty: none. `problem`: why the peer cannot be
    configured, if that is known already, such as a missing Secret."""

    name: str
    spec: BgpPeerSpec
    password: str = ""
    problem: Finding | None = None
    next_hops: tuple[str, ...] = ()
    """The addresses of the host that are next hops, sorted by number. None of a family: the address
    in the session is the next hop."""

    def __repr__(self) -> str:
        return f"Peer({self.name})"  # without the password, because values appear in logs

    @property
    def target(self) -> str:
        """The address of the neighbor, or the interface of an unnumbered session."""
        return self.spec.address or self.spec.interface

    @property
    def ipv6_transport(self) -> bool:
        """Whether the session uses IPv6."""
        return not self.spec.address or ":" in self.spec.address

    @property
    def families(self) -> tuple[str, ...]:
        """The families of the routes of the session, as BIRD names its channels."""
        wanted = self.spec.families or ("IPv4", "IPv6")
        return tuple(channel for family, channel in CHANNELS.items() if family in wanted)

    @property
    def restarts_gracefully(self) -> bool:
        """Whether the neighbor keeps the routes while BIRD restarts. Only with BFD by default."""
        wanted = self.spec.graceful_restart
        return self.spec.bfd is not None if wanted is None else wanted

    def next_hops_in(self, channel: str) -> tuple[str, ...]:
        """Return the next hops of the routes of a channel."""
        return tuple(each for each in self.next_hops if (":" in each) == (channel == "ipv6"))


CHANNELS: Mapping[str, str] = {"IPv4": "ipv4", "IPv6": "ipv6"}


class HostFacts(msgspec.Struct, frozen=True):
    """What the check of peers needs to know about the host: the names of its interfaces, and the
    addresses of all of them."""

    interfaces: frozenset[str] = frozenset()
    addresses: frozenset[IPv4Address | IPv6Address] = frozenset()


class CheckedPeers(msgspec.Struct, frozen=True):
    """The peers that can be configured, sorted by name, and a Finding for each other peer."""

    accepted: tuple[Peer, ...] = ()
    refused: tuple[Finding, ...] = ()

    @property
    def refused_names(self) -> frozenset[str]:
        """The names of the refused peers, except names that an accepted peer has too."""
        names = {each.subject.removeprefix(PEER_SUBJECT) for each in self.refused}
        return frozenset(names.difference(each.name for each in self.accepted))


def check(
    section: BgpConfig, peers: Iterable[Peer], facts: HostFacts, configured: Collection[str] = ()
) -> CheckedPeers:
    """Return which peers can be configured on this host. Of two peers with the same name or the
    same neighbor, the first one in the order of `peers` is accepted. `configured`: the names of the
    peers that BIRD has already, unchanged: they stay while an interface or an address of the host
    is absent, because BIRD waits for it, and removing the peer would reset its session."""
    accepted: list[Peer] = []
    refused: list[Finding] = []
    names: set[str] = set()
    for peer in peers:
        finding = peer.problem
        known = None if peer.name in configured else facts
        if finding is None and (problem := _problem(section, peer, known)) is not None:
            finding = refusal(peer, *problem)
        elif peer.name in names:
            finding = refusal(
                peer, "another peer has the same name", "rename the BGPPeer or the peer in the file"
            )
        elif finding is None and (
            first := next((each for each in accepted if same_neighbor(each, peer)), None)
        ):
            finding = refusal(
                peer,
                f"peer {first.name} has the same neighbor {first.target}, and two hosts have at "
                "most one session",
                "delete one of the two",
            )
        if finding is not None:
            refused.append(finding)
            continue
        names.add(peer.name)
        accepted.append(peer)
    return CheckedPeers(tuple(sorted(accepted, key=lambda each: each.name)), tuple(refused))


def same_neighbor(one: Peer, other: Peer) -> bool:
    """Return whether two peers may be the same router, however their addresses are written. The
    neighbor at an interface is not known before the session, so it may be any link-local address
    there."""
    (address, interface), (address2, interface2) = _neighbor(one), _neighbor(other)
    if address and address2:
        return (address, interface) == (address2, interface2)
    return interface == interface2


def _neighbor(peer: Peer) -> tuple[str, str]:
    """Return the address of the neighbor and the interface; one of them may be empty."""
    if not peer.spec.address:
        return "", peer.spec.interface
    address, _, zone = str(ip_address(peer.spec.address)).partition("%")
    return address, zone


def with_next_hops(peer: Peer, facts: HostFacts) -> Peer:
    """Return the peer with the next hops that the host has now."""
    if not peer.spec.next_hops or peer.problem is not None:
        return peer
    networks = [ip_network(each) for each in peer.spec.next_hops]
    found = [each for each in facts.addresses if any(each in network for network in networks)]
    found.sort(key=lambda each: (each.version, int(each)))
    return msgspec.structs.replace(peer, next_hops=tuple(map(str, found)))


def next_hop_limits(peers: Iterable[Peer]) -> Mapping[str, int]:
    """Return by channel how many next hops a route can have at each of the peers that take several.
    Without such a peer: 1."""
    several = [each for each in peers if each.spec.next_hops]
    return {
        channel: min(
            (len(each.next_hops_in(channel)) or 1 for each in several if channel in each.families),
            default=1,
        )
        for channel in CHANNELS.values()
    }


def refusal(peer: Peer, message: str, remedy: str) -> Finding:
    """Return the Finding about a peer that is not configured."""
    return Finding(
        PEER_REFUSED,
        f"BGP peer {peer.name} is not used: {message}",
        "error",
        f"{PEER_SUBJECT}{peer.name}",
        remedy=remedy,
    )


def _problem(section: BgpConfig, peer: Peer, facts: HostFacts | None) -> tuple[str, str] | None:
    """Return what is wrong with the peer and the remedy; None if nothing is. `facts`: None if the
    host is not considered."""
    spec = peer.spec
    if bool(spec.address) == bool(spec.interface):
        return (
            "it needs either an address or an interface",
            "set exactly one of address and interface",
        )
    if (asn := spec.local_asn or section.asn) is None:
        return "the AS number of this host is unknown", "set announce.bgp.asn, or localASN"
    if asn == spec.asn and spec.address and spec.address == spec.source_address:
        return "its address is also its sourceAddress", "correct one of them"
    return (
        _address_problem(peer, facts)
        or _source_problem(peer, facts)
        or _timer_problem(spec)
        or _option_problem(peer)
    )


def _address_problem(peer: Peer, facts: HostFacts | None) -> tuple[str, str] | None:
    spec = peer.spec
    if spec.interface:
        if facts is not None and spec.interface not in facts.interfaces:
            return f"this host has no interface {spec.interface}", "correct interface"
        return None
    text, _, zone = spec.address.partition("%")
    try:
        address = ip_address(text)
    except ValueError:
        return f"address '{spec.address}' is not an IP address", "correct address"
    if address.is_unspecified or address.is_multicast or address.is_loopback:
        return f"address {address} cannot be the address of a router", "correct address"
    if facts is not None and address in facts.addresses:
        return f"address {address} is an address of this host itself", "correct address"
    if bool(zone) != address.is_link_local and address.version == 6:
        return (
            f"address {spec.address} needs an interface exactly if it is link-local",
            "write a link-local address as fe80::1%eth0, or set interface instead of address",
        )
    if facts is not None and zone and zone not in facts.interfaces:
        return f"this host has no interface {zone}", "correct address"
    return None


def _source_problem(peer: Peer, facts: HostFacts | None) -> tuple[str, str] | None:
    spec = peer.spec
    if not spec.source_address:
        return None
    try:
        source = ip_address(spec.source_address)
    except ValueError:
        return f"sourceAddress '{spec.source_address}' is not an IP address", "correct it"
    if (source.version == 6) != peer.ipv6_transport:
        return (
            f"sourceAddress {source} and the address of the neighbor are of different families",
            "use two addresses of the same family",
        )
    if facts is not None and source not in facts.addresses:
        return f"no interface of this host has sourceAddress {source}", "correct sourceAddress"
    return None


def _timer_problem(spec: BgpPeerSpec) -> tuple[str, str] | None:
    if spec.keepalive_time_s >= spec.hold_time_s:
        return (
            f"keepaliveTimeS {spec.keepalive_time_s} is not less than holdTimeS {spec.hold_time_s}",
            "use a third of holdTimeS",
        )
    return None


def _option_problem(peer: Peer) -> tuple[str, str] | None:
    spec, password = peer.spec, password_of(peer)
    if spec.ttl_security and spec.multihop:
        return (
            "ttlSecurity accepts only a directly connected neighbor, and multihop is set",
            "remove one of the two",
        )
    if spec.interface and spec.multihop:
        return (
            "an unnumbered neighbor is directly connected, and multihop is set",
            "remove multihop",
        )
    if spec.graceful_restart and spec.bfd is None:
        return (
            "gracefulRestart without bfd keeps the routes of a dead host for minutes",
            "set bfd, or remove gracefulRestart",
        )
    if any(not each.isprintable() or each == '"' for each in password):
        return (
            "its password contains a quotation mark or a character that is not printable",
            "change the password",
        )
    if len(password.encode()) > _MAX_PASSWORD_BYTES:
        return f"its password has more than {_MAX_PASSWORD_BYTES} bytes", "change the password"
    return None


def password_of(peer: Peer) -> str:
    """Return the password without the end of its line, which editors add to files."""
    return peer.password.rstrip("\r\n")


def symbol(peer: Peer) -> str:
    """Return the name of the peer's protocol in BIRD, which does not depend on other peers."""
    plain = _PLAIN_NAME.fullmatch(peer.name) is not None
    name = peer.name if plain else hashlib.sha256(peer.name.encode()).hexdigest()[:16]
    return f"{'p' if plain else 'h'}.{name}"


def dynamic_prefix(peer: Peer) -> str:
    """Return the start of the names of the sessions of an unnumbered peer. A number follows."""
    return f"{symbol(peer)}.session"


def is_session_of(peer: Peer, protocol: str) -> bool:
    """Return whether a protocol of BIRD is the peer's session."""
    if not peer.spec.interface:
        return protocol == symbol(peer)
    number = protocol.removeprefix(dynamic_prefix(peer))
    return number != protocol and number.isdecimal()


def mark_of(name: str) -> tuple[int, int]:
    """Return the mark of routes for this peer: 32 bits of a hash of its name, so that a new peer
    does not change the marks of the others."""
    digest = hashlib.sha256(name.encode()).digest()
    mark = (int.from_bytes(digest[:2]), int.from_bytes(digest[2:4]))
    return mark if mark != ALL_MARK else (0, 1)


def local_asn(section: BgpConfig, peers: Sequence[Peer]) -> int:
    """Return the AS number that identifies this host in communities; 0 if it has no session."""
    return section.asn or min((each.spec.local_asn or 0 for each in peers), default=0)
