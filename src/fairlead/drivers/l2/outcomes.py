"""What Services and users learn about announced addresses. Pure.

In: the spec of a Service, where its addresses are placed, and what the announcing process reports.
Out: an outcome, and findings."""

from collections.abc import Callable, Mapping, Sequence

from fairlead.drivers.l2.engine import RETRY_S
from fairlead.drivers.l2.messages import PlaceStatus
from fairlead.drivers.l2.ownership import Standing
from fairlead.drivers.l2.placing import NOT_ON_INTERFACE, Placement
from fairlead.drivers.l2.spec import Requested, Spec
from fairlead.model import DONE, Finding, Outcome
from fairlead.role_state import MemberState

ADDRESS_ANNOUNCED = "AddressAnnounced"
ADDRESS_CONFLICT = "AddressConflict"
WAIT_S = 0.5
"""The interval at which a Service is looked at again while its addresses are probed. The process
also reports when they are."""


def announced(host: str, interface: str, status: PlaceStatus) -> Finding:
    """Return the finding that this host has begun to announce an address."""
    cause = f"because {status.cause}" if status.cause else "no other host announced it before"
    return Finding(
        ADDRESS_ANNOUNCED,
        f"{host} announces {status.place.address} on {interface} now",
        severity="info",
        evidence=cause,
    )


def conflict(interface: str, status: PlaceStatus) -> Finding:
    """Return the finding that a station outside of Fairlead uses an address."""
    what = (
        "this host goes on announcing the address"
        if status.phase == "owned"
        else "the address is not announced"
    )
    return Finding(
        ADDRESS_CONFLICT,
        f"the host with the MAC address {status.foreign} on {interface} uses the address "
        f"{status.place.address} too: {what}",
        severity="error",
        remedy="remove the address from that host, or take it out of the pool; if that host "
        "announces addresses of this cluster, give each host a name of its own (--node-name)",
    )


def member_state(standing: Standing | None) -> MemberState:
    """Return the state of a member as `/state` shows it."""
    match standing:
        case None:
            return "gone"
        case "starting" | "leaving":
            return "leaving"  # neither takes over an address
        case "returned":
            return "ready"
        case _:
            return standing


def outcome(
    host: str,
    spec: Spec,
    placements: Mapping[str, Placement],
    names: Mapping[int, str],
    *,
    by_address: Callable[[str], Sequence[PlaceStatus]],
) -> Outcome:
    """Return the outcome of a Service. `names`: of interfaces, by index. `by_address`: the states
    of an address on all interfaces."""
    found = [
        _of_address(host, each, placements.get(each.address), by_address(each.address), names)
        for each in spec
    ]
    if not (wrong := [each for each in found if each.state != "done"]):
        return DONE
    worst = min(wrong, key=lambda each: _ORDER.index(each.state))
    messages = dict.fromkeys(each.message for each in wrong if each.state == worst.state)
    return Outcome(
        worst.state,
        "; ".join(messages),
        worst.reason,
        worst.again_s,
        in_part=len(wrong) < len(found),
    )


_ORDER = ("refused", "unavailable", "waiting")


def _of_address(
    host: str,
    requested: Requested,
    placement: Placement | None,
    statuses: Sequence[PlaceStatus],
    names: Mapping[int, str],
) -> Outcome:
    address = requested.address
    if placement is not None and placement.problem is not None and not placement.interfaces:
        return Outcome("refused", str(placement.problem), NOT_ON_INTERFACE)
    for status in statuses:
        interface = names.get(status.place.interface, "")
        if status.phase == "conflict":
            return Outcome(
                "unavailable",
                str(conflict(interface, status)),
                ADDRESS_CONFLICT,
                again_s=RETRY_S,
            )
        if status.phase == "learning":
            return Outcome(
                "waiting",
                f"asking whether another host on {interface} uses {address}",
                again_s=WAIT_S,
            )
    if statuses and all(status.phase == "down" for status in statuses):
        down = ", ".join(sorted(names.get(status.place.interface, "") for status in statuses))
        return Outcome("waiting", f"the link of {down} is down", again_s=RETRY_S)
    candidate = requested.candidates is None or host in requested.candidates
    if candidate and not requested.leaving and any(_is_unowned(status) for status in statuses):
        return Outcome("waiting", f"no host has begun to announce {address} yet", again_s=WAIT_S)
    return DONE


def _is_unowned(status: PlaceStatus) -> bool:
    return status.phase == "silent" and not status.holder
