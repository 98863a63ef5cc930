"""The Events about what one host announces, from the difference of two states.

In: the state of the announcements of one host before and after a change. Out: what happened. Pure.
Invariants: equal states give nothing, so a state may be read at any time and as often as needed;
a change that was undone between two states gives nothing. The driver of layer 2 itself reports
moves and conflicts, because it also sees moves and conflicts that last only a moment. There is one
Event for each BGP session and host, and not for each Service, because thousands of Services may use
the session. For the same reason, many addresses that a host announces at the same time are one
Event: every host announces them, so each Service would get as many Events as there are hosts. A
BGP peer that is refused is an Event of the Announcer too: the Services may have other peers."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from fairlead.model import Finding, Value
from fairlead.role_state import AnnouncedAddress, BgpSession, BgpState, L2State

ADDRESS_ANNOUNCED = "AddressAnnounced"
SESSION_DOWN = "BgpSessionDown"
SESSION_UP = "BgpSessionUp"
RECOVERED = "Recovered"
MAX_EVENTS = 20
"""The maximum number of addresses that are reported one by one at the same time."""
MAX_NAMED = 3
"""The maximum number of addresses that a message names."""


class Announced(Value, frozen=True):
    """What one host announces."""

    l2: L2State = L2State()
    bgp: BgpState = BgpState()


class Notice(Value, frozen=True):
    """One Event. `services`: the Services that it is about; without any, it is about the Announcer
    of the host. `subject`: the address, the session or the finding; a later Event with the same
    subject makes this one obsolete."""

    services: tuple[str, ...]
    kind: Literal["Normal", "Warning"]
    reason: str
    message: str
    subject: str = ""


def notices(who: str, before: Announced, after: Announced) -> list[Notice]:
    """Return what happened from one state to the next. `who`: the role and the host, such as
    `gateway gw-1`."""
    known = {each.address for each in before.bgp.addresses if _is_exported(before.bgp, each)}
    announced = [
        each
        for each in after.bgp.addresses
        if each.address not in known and _is_exported(after.bgp, each)
    ]
    return [
        *_bgp_addresses(who, announced),
        *_sessions(who, before.bgp, after.bgp),
        *_findings(who, before.bgp.findings, after.bgp.findings),
    ]


def lasting(who: str, state: Announced) -> list[Notice]:
    """Return the Warnings about the problems of this state, to report them again."""
    without = msgspec.structs.replace(state.bgp, sessions=(), findings=())
    found = notices(who, Announced(bgp=without), state)
    return [each for each in found if each.kind == "Warning"]


def _bgp_addresses(who: str, announced: Sequence[AnnouncedAddress]) -> Iterable[Notice]:
    if len(announced) > MAX_EVENTS:
        named = ", ".join(each.address for each in announced[:MAX_NAMED])
        message = f"{who} announces {len(announced)} addresses: {named} and others"
        yield Notice((), "Normal", ADDRESS_ANNOUNCED, message, "addresses")
        return
    for each in announced:
        to = ", ".join(each.peers) or "the routing daemon of the host"
        cause = f", {each.cause}" if each.cause else ""
        message = f"{who} announces {each.address} to {to}{cause}"
        yield Notice(each.services, "Normal", ADDRESS_ANNOUNCED, message, each.address)


def _is_exported(state: BgpState, address: AnnouncedAddress) -> bool:
    return bool(address.peers) or state.speaker == "routes"


def _sessions(who: str, before: BgpState, after: BgpState) -> Iterable[Notice]:
    known = {(each.peer, each.address): each for each in before.sessions}
    for each in after.sessions:
        old = known.get((each.peer, each.address))
        was_up = old is not None and old.state == "established"
        # A session that has never been established is reported once it has an error: it takes a
        # moment to connect. A session without any answer has an error after a while too.
        failed = each.last_error and (old is None or old.last_error != each.last_error)
        if each.state != "established" and (was_up or failed):
            why = each.last_error or "the reason is not known"
            message = f"{who}: the BGP session with {_named(each)} is down: {why}"
            yield Notice((), "Warning", SESSION_DOWN, message, _named(each))
        elif old is not None and not was_up and each.state == "established":
            message = f"{who}: the BGP session with {_named(each)} is established"
            yield Notice((), "Normal", SESSION_UP, message, _named(each))


def _findings(who: str, before: Iterable[Finding], after: Iterable[Finding]) -> Iterable[Notice]:
    known, now = ({(each.code, each.subject): each for each in some} for some in (before, after))
    for key, each in now.items():
        if each != known.get(key):
            yield Notice((), "Warning", each.code, f"{who}: {each}", " ".join(key))
    for code, subject in sorted(known.keys() - now.keys()):
        message = f"{who}: {code} of {subject} no longer holds"
        yield Notice((), "Normal", RECOVERED, message, f"{code} {subject}")


def _named(session: BgpSession) -> str:
    return f"{session.peer} ({session.address})"
