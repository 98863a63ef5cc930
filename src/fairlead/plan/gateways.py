"""Findings about the gateways of a Service.

In: the live gateways, those that are gone, and the Services that each live gateway cannot serve.
Out: Findings. A Finding prevents the condition Ready of the Service if no live gateway forwards and
serves it. While at least one does, clients can connect, and the Finding about the others is the
reason and the message of Ready: the connections that routers send to those are lost. Pure.
Invariant: a Finding does not change while its cause lasts, so it names no time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from fairlead.kube.presence import Claimed, OnLink
from fairlead.model import Finding, ServiceKey

NO_GATEWAY = "NoGateway"
NOT_SERVED = "GatewayNotServing"
GONE = "GatewayGone"
CLAIMED = "AddressConflict"
PARTLY_SERVED = frozenset({NOT_SERVED, GONE, CLAIMED})
"""The codes of Findings that, unless they block Ready, say that some clients may not reach a
Service that others reach: some gateways do not serve it, or another station has its address."""
MAX_NAMED = 3
"""Maximum number of gateways that a message names."""
SEE_THERE = "see the Event `SyncGatewayFailed`, or `fairlead status` on that host"
"""The text for a gateway that reports no message."""


class Gateways(msgspec.Struct, frozen=True):
    """The gateways as the controller observes them. `refusals`: the Services that some live
    gateways cannot serve, with the message of each of these gateways. `problems`: why some live
    gateways do not forward now. `problem_classes`: those of them that fail only the Services of one
    class, with this class. `gone`: gateways that have stopped renewing their
    Leases. `announcers`: the live gateways that can announce addresses, with the networks on their
    links. `unproved`: the live gateways that have not renewed their Leases since this process began
    to watch: they may have been gone for long. `claimed`: the addresses that another station uses
    too, each with the gateway that announces it, or accepts it if none is announced. `leaving`: the
    live gateways that give their addresses away, each with the time since when."""

    alive: frozenset[str] = frozenset()
    refusals: Mapping[ServiceKey, Mapping[str, str]] = msgspec.field(default_factory=dict)
    problems: Mapping[str, str] = msgspec.field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    announcers: Mapping[str, tuple[OnLink, ...]] = msgspec.field(default_factory=dict)
    unproved: frozenset[str] = frozenset()
    claimed: Mapping[str, tuple[str, Claimed]] = msgspec.field(default_factory=dict)
    leaving: Mapping[str, str] = msgspec.field(default_factory=dict)
    problem_classes: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def forwarding(self) -> frozenset[str]:
        """The live gateways that forward for the Services of all classes."""
        return self.alive.difference(self.problems)

    def problems_of(self, class_name: str) -> Mapping[str, str]:
        """Return the problems that concern the Services of this class."""
        return {
            name: text
            for name, text in self.problems.items()
            if self.problem_classes.get(name, class_name) == class_name
        }

    def serving(self, key: ServiceKey, class_name: str) -> frozenset[str]:
        """Return the gateways that forward for this class and do not refuse this Service of it."""
        return self.alive.difference(self.problems_of(class_name), self.refusals.get(key, ()))


def gateway_notes(
    gateways: Gateways | None, key: ServiceKey, class_name: str
) -> tuple[Finding, ...]:
    """Return the Findings for this Service of this class. `gateways`: None while the gateways are
    unknown, or if the controller may not read their Leases."""
    if gateways is None:
        return ()
    if not gateways.alive:
        message = (
            "no gateway is alive; the address stays, but works only while the kernel of a "
            "stopped gateway still forwards packets"
        )
        remedy = (
            "start `fairlead gateway`, or label nodes for the gateways of the chart (`kubectl "
            "label nodes NODE fairlead.io/gateway=`), and check `fairlead status --cluster`"
        )
        return (Finding(NO_GATEWAY, message, severity="error", remedy=remedy, blocks="Ready"),)
    return (*_not_served(gateways, key, class_name), *_gone(gateways))


def conflict_notes(addresses: Iterable[str], gateways: Gateways) -> Sequence[Finding]:
    """Return which of these addresses of a Service, that no gateway announces, another station
    has."""
    return [
        Finding(
            CLAIMED,
            f"{address} is accepted by gateway {gateway}, and a station that is no gateway "
            f"({each.mac}) answers for it on the network of its {each.interface}",
            "error",
            remedy="give that station another address, or exclude the address from the pool",
        )
        for address in addresses
        if address in gateways.claimed
        for gateway, each in (gateways.claimed[address],)
    ]


def _gone(gateways: Gateways) -> Iterator[Finding]:
    if not gateways.gone:
        return
    gone = sorted(gateways.gone)
    more = f" and {len(gone) - MAX_NAMED} more" if len(gone) > MAX_NAMED else ""
    yield Finding(
        GONE,
        f"no longer alive: gateway {', '.join(gone[:MAX_NAMED])}{more}. The process or its host is "
        "down, and packets that routers still send there may be lost",
        remedy="start it, or remove it with `fairlead gateway --cleanup`; `fairlead status "
        "--cluster` shows since when it is gone",
    )


def _not_served(gateways: Gateways, key: ServiceKey, class_name: str) -> Iterator[Finding]:
    refusals = {**gateways.refusals.get(key, {}), **gateways.problems_of(class_name)}
    if not refusals:
        return
    reports = [
        f"gateway {name} cannot serve it: {message or SEE_THERE}"
        for name, message in sorted(refusals.items())
    ]
    more = f"; and {len(reports) - MAX_NAMED} more gateways" if len(reports) > MAX_NAMED else ""
    message = "; ".join(reports[:MAX_NAMED]) + more
    if gateways.serving(key, class_name):
        yield Finding(NOT_SERVED, message)
    else:
        yield Finding(NOT_SERVED, message, severity="error", blocks="Ready")
