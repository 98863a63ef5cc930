"""Findings about the announcement of the addresses of a Service, for the controller to report.

In: the announcements of all hosts (`plan.announce`), the pools, the BGP peers that exist. Out:
Findings about requests that cannot be followed, each with the pool or annotation that it is about
and what to change. Pure. Invariant: a Finding does not change while its cause lasts. What only a
host can know, such as a session that is down, is reported by that host."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from fairlead.announce_sections import AnnounceConfig
from fairlead.config import Config
from fairlead.kube.crds import BGPPeer
from fairlead.kube.objects import Service
from fairlead.model import Announcement, Finding
from fairlead.plan.annotations import (
    ANNOUNCE,
    BGP_PEERS,
    NOT_UNDERSTOOD,
    WITHOUT_EFFECT,
    announce_method,
    bgp_peers,
    found,
)
from fairlead.plan.announce import Announced, AnnouncePlan
from fairlead.plan.pool_terms import PoolTerms

NOT_ANNOUNCED = "NotAnnounced"
"""Code of a Finding: no host announces an address that is to be announced."""
PEER_UNKNOWN = "BgpPeerUnknown"
"""Code of a Finding: a pool names a BGP peer that does not exist."""
ANNOUNCE_INVALID = "PoolAnnounceInvalid"
"""Code of a Finding: the section `announce` of an AddressPool has a value that cannot be used."""
AGGREGATION_NARROWED = "AggregationNarrowed"
"""Code of a Finding: a route of the length that a pool requests would leave the pool."""
NO_SECTION = "no host announces addresses, because the configuration has no section announce"


class AnnouncedToPeers(Announced, Protocol):
    """`bgp_peers`: the BGPPeer objects; None if they cannot be read."""

    @property
    def bgp_peers(self) -> Mapping[str, BGPPeer] | None: ...


def announce_notes(
    cluster: AnnouncedToPeers,
    config: Config,
    plan: AnnouncePlan,
    service: Service,
    addresses: Sequence[str],
    announcements: Sequence[Announcement],
) -> list[Finding]:
    """Return the Findings about the announcement of these addresses of the Service.
    `announcements`: the result of `plan` for them."""
    terms = {each.name: each for each in (plan.terms_of(cluster, text) for text in addresses)}
    if config.announce is None:
        return list(_without_section(service, terms.values()))
    terms_of = {text: plan.terms_of(cluster, text) for text in addresses}
    notes = list(_invalid(terms_of))
    notes += _without_bgp(config.announce, service, announcements)
    for each in announcements:
        pool = terms_of[each.addresses[0]]
        if each.candidates == ():
            notes.append(
                _not_announced(
                    each,
                    f"no Node has the labels that nodeSelectors of pool {pool.name} require",
                    "label the Nodes of the hosts that shall announce, or change nodeSelectors",
                )
            )
        if each.method == "bgp" and config.announce.bgp.speaker == "bird":
            notes += _peer_notes(cluster, config.announce, service, each, pool)
    return list(dict.fromkeys(notes))


def narrowed(terms: PoolTerms, announcement: Announcement) -> Iterator[Finding]:
    """Yield the Findings about routes that are longer than the pool requests. `announcement`: one
    of addresses that are announced by gateways."""
    section = terms.section
    for field, requested, length in (
        ("aggregationLength", section.aggregation_length, announcement.aggregation_length),
        ("aggregationLengthV6", section.aggregation_length_v6, announcement.aggregation_length_v6),
    ):
        if announcement.method == "bgp" and length > requested:
            yield Finding(
                AGGREGATION_NARROWED,
                f"{field} {requested} of pool {terms.name} covers addresses outside of the pool: "
                f"{', '.join(announcement.addresses)} is announced by a prefix of length {length}",
                remedy=f"set {field} to at least {length}, or add the other addresses to the pool",
            )


def _without_section(service: Service, terms: Collection[PoolTerms]) -> Iterator[Finding]:
    remedy = "add the section announce to the configuration of all roles"
    name, _ = found(service.metadata.annotations, ANNOUNCE)
    if announce_method(service.metadata.annotations) in ("l2", "bgp"):
        yield Finding(WITHOUT_EFFECT, f"{name} has no effect: {NO_SECTION}", remedy=remedy)
    for each in terms:
        if each.section.method in ("l2", "bgp"):
            message = f"pool {each.name} requests {each.section.method}, but {NO_SECTION}"
            yield Finding(NOT_ANNOUNCED, message, remedy=remedy)


def _invalid(terms_of: Mapping[str, PoolTerms]) -> Iterator[Finding]:
    """Yield the Findings about pools with invalid values. `terms_of`: by address."""
    for address, each in terms_of.items():
        if each.problem:
            stopped = not each.announces(address)
            follows = (
                "this value is left out"
                if each.kept is None
                else f"{address} is not announced"
                if stopped
                else f"{address} stays announced by the last valid spec.announce"
            )
            yield Finding(
                ANNOUNCE_INVALID,
                f"AddressPool {each.name} has a value that cannot be used: {each.problem}; "
                + follows,
                severity="error" if stopped else "warning",
                remedy="correct spec.announce of the pool",
                blocks="Ready" if stopped else "",
            )


def _without_bgp(
    section: AnnounceConfig, service: Service, announcements: Sequence[Announcement]
) -> Iterator[Finding]:
    """Yield the Finding about a list of peers that has no effect."""
    name, text = found(service.metadata.annotations, BGP_PEERS)
    if not text:
        return
    if not any(each.method == "bgp" for each in announcements):
        yield Finding(WITHOUT_EFFECT, f"{name} has no effect: no address is announced by BGP")
    elif section.bgp.speaker == "routes":
        message = f"{name} has no effect: the routing daemon of each host selects its neighbors"
        yield Finding(WITHOUT_EFFECT, message)


def _peer_notes(
    cluster: AnnouncedToPeers,
    section: AnnounceConfig,
    service: Service,
    announcement: Announcement,
    pool: PoolTerms,
) -> Iterator[Finding]:
    """Yield the Findings about the peers of one announcement."""
    if cluster.bgp_peers is None:
        return
    known = {each.name for each in section.bgp.peers} | cluster.bgp_peers.keys()
    listed = f"known peers: {', '.join(sorted(known))}" if known else "there are no peers yet"
    create = "create BGPPeer objects, or add peers to announce.bgp.peers"
    if announcement.peers is None:
        if not known:
            yield _not_announced(announcement, "there are no BGP peers", create)
        return
    requested = bgp_peers(service.metadata.annotations)
    if requested is not None and pool.section.peers:
        permitted = sorted(set(pool.section.peers))
        if outside := sorted(set(requested).difference(permitted)):
            what = f"pool {pool.name} does not permit {', '.join(outside)}"
            remedy = f"name peers of the pool: {', '.join(permitted)}"
            yield Finding(NOT_UNDERSTOOD, f"{BGP_PEERS[0]}: {what}", remedy=remedy)
        if not announcement.peers:
            why = f"pool {pool.name} permits none of the peers that {BGP_PEERS[0]} names"
            remedy = f"name peers of the pool, or remove {BGP_PEERS[0]}"
            yield _not_announced(announcement, why, remedy)
            return
    unknown = [each for each in announcement.peers if each not in known]
    if unknown:
        what = f"there is no BGP peer {', '.join(unknown)}; {listed}"
        remedy = "correct the name, or create the BGPPeer"
        if requested is None:
            yield Finding(PEER_UNKNOWN, f"peers of pool {pool.name}: {what}", remedy=remedy)
        else:
            yield Finding(NOT_UNDERSTOOD, f"{BGP_PEERS[0]}: {what}", remedy=remedy)
    if len(unknown) == len(announcement.peers):
        yield _not_announced(announcement, "none of its BGP peers exists", create)


def _not_announced(announcement: Announcement, why: str, remedy: str) -> Finding:
    addresses = ", ".join(announcement.addresses)
    are = "are" if len(announcement.addresses) > 1 else "is"
    return Finding(
        NOT_ANNOUNCED,
        f"{addresses} {are} not announced: {why}",
        severity="error",
        remedy=remedy,
        blocks="Ready",
    )
