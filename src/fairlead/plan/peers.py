"""The BGP peers of one host.

In: the section `announce.bgp`, the BGPPeer objects, the labels of the host's Node. Out: the peers
of the host, each with the reason why it cannot be used, if there is one. Their order is their
precedence: first the peers of the configuration by name, then the objects by age. So a new object
never takes the name or the neighbor of a peer that is in use. Pure. Invariant: a peer that cannot
be used does not affect the others."""

from collections.abc import Mapping

import msgspec

from fairlead.announce_checks import peer_problems, read_peer_spec
from fairlead.announce_sections import BgpConfig, BgpPeerSpec
from fairlead.kube.crds import BGPPeer
from fairlead.model import Finding
from fairlead.plan.pools import matches
from fairlead.role_state import PEER_REFUSED, PEER_SUBJECT

UNREADABLE = BgpPeerSpec(asn="external")
"""The spec of a peer whose own spec cannot be read."""


class HostPeer(msgspec.Struct, frozen=True):
    """A BGP peer of a host, before its password is read. `problem`: why it cannot be used."""

    name: str
    spec: BgpPeerSpec
    problem: Finding | None = None


def host_peers(
    section: BgpConfig, objects: Mapping[str, BGPPeer], labels: Mapping[str, str] | None
) -> tuple[HostPeer, ...]:
    """Return the peers of a host with these labels, in the order of their precedence; None: the
    host has no Node, so it has only the peers without node selectors."""
    return tuple(each for each in all_peers(section, objects) if _selected(each.spec, labels))


def all_peers(section: BgpConfig, objects: Mapping[str, BGPPeer]) -> tuple[HostPeer, ...]:
    """Return the peers of all hosts, in the order of their precedence."""
    configured = {each.name for each in section.peers}
    peers = [HostPeer(each.name, each) for each in sorted(section.peers, key=lambda one: one.name)]
    by_age = sorted(
        objects.items(), key=lambda one: (one[1].metadata.creation_timestamp or "", one[0])
    )
    for name, each in by_age:
        if name in configured:
            problem = refusal(
                name,
                "a peer of this name is in the configuration file, which takes precedence",
                "rename the BGPPeer, or remove the peer from announce.bgp.peers",
            )
            peers.append(HostPeer(name, UNREADABLE, problem))
        else:
            peers.append(_read(name, each, section.asn))
    return tuple(peers)


def refusal(name: str, message: str, remedy: str) -> Finding:
    """Return the Finding about a peer that is not used."""
    return Finding(
        PEER_REFUSED,
        f"BGP peer {name} is not used: {message}",
        severity="error",
        subject=f"{PEER_SUBJECT}{name}",
        remedy=remedy,
    )


def _read(name: str, peer: BGPPeer, own_asn: int | None) -> HostPeer:
    spec = read_peer_spec(peer.spec)
    if isinstance(spec, str):
        return HostPeer(name, UNREADABLE, refusal(name, spec, "correct the BGPPeer"))
    for each in peer_problems(spec, own_asn):
        message = f"spec.{each.path}: {each.message}"
        return HostPeer(name, spec, refusal(name, message, each.fix or "correct the BGPPeer"))
    return HostPeer(name, spec)


def _selected(spec: BgpPeerSpec, labels: Mapping[str, str] | None) -> bool:
    selectors = spec.node_selectors
    return not selectors or (
        labels is not None and any(matches(each, labels) for each in selectors)
    )
