"""What a gateway knows about its BIRD and its sessions: as findings, and as a part of `/state`.
Pure.

In: the configuration, and what BIRD has answered last. Out: findings. If no router of a family of
its addresses has a session with this gateway that carries routes, or BIRD does not answer, no
router learns these addresses from it, so the gateway is not ready; a router without a session,
while others of its family have one, is only reported."""

from collections.abc import Iterator
from typing import NamedTuple

from fairlead.drivers.bgp.render import PREFIX, symbol
from fairlead.model import Family, Finding
from fairlead.net.address import family_of
from fairlead.net.bird_replies import BfdSession, Protocol
from fairlead.role_state import BgpSessionState
from fairlead.sections import BgpConfig, BgpPeerConfig

NOT_ANSWERING = "BirdNotAnswering"
REFUSED = "BirdConfigurationRefused"
SESSION_DOWN = "BgpSessionDown"
NO_ROUTER = "NoRouterOfFamily"
ESTABLISHED = "Established"


class Look(NamedTuple):
    """What BIRD has answered. `problem`: why it has not; `refused`: it has no usable configuration,
    does not accept it, or runs with another one. `families`: those of the addresses that BIRD must
    have announced before it answered."""

    protocols: tuple[Protocol, ...] = ()
    bfd: tuple[BfdSession, ...] = ()
    problem: str = ""
    refused: bool = False
    families: frozenset[Family] = frozenset()


def sessions_of(section: BgpConfig, look: Look) -> tuple[BgpSessionState, ...]:
    """Return the session with each router, in the order of the configuration."""
    protocols = {each.name: each for each in look.protocols}
    bfd = {each.address: each.state for each in look.bfd}
    return tuple(
        _session(each, protocols.get(symbol(each)), bfd.get(each.address, ""))
        for each in section.routers
    )


def _session(router: BgpPeerConfig, found: Protocol | None, bfd: str) -> BgpSessionState:
    with_bfd = (bfd or "unknown") if router.bfd is not None else ""
    if found is None:
        return BgpSessionState(router.name, router.address, router.asn, "unknown", with_bfd)
    return BgpSessionState(
        router.name,
        router.address,
        router.asn,
        found.bgp_state or found.state,
        with_bfd,
        sum(each.exported for each in found.channels),
        found.last_error,
    )


def is_configured(section: BgpConfig, look: Look) -> bool:
    """Return whether BIRD runs with the sessions of this configuration and no other ones."""
    running = {each.name for each in look.protocols if each.name.startswith(PREFIX)}
    return running == {symbol(each) for each in section.routers}


def findings_of(section: BgpConfig, look: Look) -> Iterator[Finding]:
    """Yield what is wrong with the announcement of the addresses."""
    conf, ctl = f"{section.directory}/bird.conf", f"{section.directory}/bird.ctl"
    sessions = sessions_of(section, look)
    some_up = any(each.state == ESTABLISHED for each in sessions)
    if look.problem:
        yield Finding(
            REFUSED if look.refused else NOT_ANSWERING,
            f"routers learn addresses by another configuration: {look.problem}"
            if some_up
            else f"no router learns the addresses of this gateway: {look.problem}",
            "error",
            remedy=f"{'if it runs with another file, ' if look.refused else ''}start it on this "
            f"host: bird -R -c {conf} -s {ctl}",
            blocks="" if some_up else "Ready",
        )
        if not some_up:
            return
    carrying = {each.router for each in sessions if _carries(each, look.families)}
    reached = {family_of(each.address) for each in sessions if each.router in carrying}
    for each in sessions:
        if each.router in carrying:
            continue
        family = family_of(each.address)
        none = not some_up or (family in look.families and family not in reached)
        error = f", {each.last_error}" if each.last_error else ""
        problem = (
            "learns no address from this gateway: the session has no routes"
            if each.state == ESTABLISHED
            else f"has no session with this gateway: {each.state}{error}"
        )
        yield Finding(
            SESSION_DOWN,
            f"router {each.router} ({each.address}, AS {each.asn}) {problem}",
            "error" if none else "warning",
            remedy="compare the AS numbers, the password and the addresses of both sides, and the "
            "log of BIRD",
            blocks="Ready" if none else "",
        )
    for family in sorted(look.families - {family_of(each.address) for each in section.routers}):
        yield Finding(
            NO_ROUTER,
            f"{family} addresses are announced to no router, because no router in "
            f"announce.bgp.routers has an {family} address",
            "error",
            remedy=f"add the {family} address of each router to announce.bgp.routers, or remove "
            f"the {family} pools",
            blocks="Ready",
        )


def _carries(session: BgpSessionState, families: frozenset[Family]) -> bool:
    """Return whether the session is up, and has routes if there are addresses of its family."""
    needs_routes = family_of(session.address) in families
    return session.state == ESTABLISHED and (session.announced > 0 or not needs_routes)
