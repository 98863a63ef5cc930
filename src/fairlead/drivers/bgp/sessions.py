"""What a gateway knows about its BIRD and its sessions: as findings, and as a part of `/state`.
Pure.

In: the configuration, and what BIRD has answered last. Out: findings. If no router has a session
with this gateway, or BIRD does not answer, no router learns its addresses from it, so the gateway
is not ready; a router without a session, while others have one, is only reported."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from fairlead.drivers.bgp.render import symbol
from fairlead.model import Finding
from fairlead.net.address import family_of
from fairlead.net.bird_replies import BfdSession, Protocol
from fairlead.role_state import BgpSessionState
from fairlead.sections import BgpConfig, BgpPeerConfig

NOT_ANSWERING = "BirdNotAnswering"
REFUSED = "BirdConfigurationRefused"
SESSION_DOWN = "BgpSessionDown"
NO_ROUTER = "NoRouterOfFamily"


class Look(NamedTuple):
    """What BIRD has answered. `problem`: why it has not; `refused`: it does not accept the
    configuration, or runs with another one."""

    protocols: tuple[Protocol, ...] = ()
    bfd: tuple[BfdSession, ...] = ()
    problem: str = ""
    refused: bool = False


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
    """Return whether BIRD runs with the sessions of this configuration."""
    return {symbol(each) for each in section.routers} <= {each.name for each in look.protocols}


def findings_of(section: BgpConfig, look: Look, addresses: Collection[str]) -> Iterator[Finding]:
    """Yield what is wrong with the announcement of these addresses."""
    conf, ctl = f"{section.directory}/bird.conf", f"{section.directory}/bird.ctl"
    if look.problem:
        yield Finding(
            REFUSED if look.refused else NOT_ANSWERING,
            f"no router learns the addresses of this gateway: {look.problem}",
            "error",
            remedy=f"start it on this host: bird -R -c {conf} -s {ctl}",
            blocks="Ready",
        )
        return
    sessions = sessions_of(section, look)
    down = [each for each in sessions if each.state != "Established"]
    none = len(down) == len(sessions)
    for each in down:
        yield Finding(
            SESSION_DOWN,
            f"router {each.router} ({each.address}, AS {each.asn}) has no session with this "
            f"gateway: {each.state}{f', {each.last_error}' if each.last_error else ''}",
            "error" if none else "warning",
            remedy="compare the AS numbers, the password and the addresses of both sides, and the "
            "log of BIRD",
            blocks="Ready" if none else "",
        )
    families = {family_of(each) for each in addresses}
    for family in sorted(families - {family_of(each.address) for each in section.routers}):
        yield Finding(
            NO_ROUTER,
            f"{family} addresses are announced to no router, because no router in "
            f"announce.bgp.routers has an {family} address",
            "warning",
            remedy=f"add the {family} address of each router to announce.bgp.routers",
        )
