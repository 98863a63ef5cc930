"""The desired and the present announcements of Services, and the changes between them. Pure.

In: LoadBalancers with their announcements. Out: specs, changes, and what this gateway has to do for
all Services together: several Services may share an address."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fairlead.model import Announcement, LoadBalancer, ServiceKey

Spec = tuple[Announcement, ...]
"""The announcements of a Service, sorted by address."""


class Change(NamedTuple):
    """Replace the announcements of a Service."""

    service: ServiceKey
    wanted: Spec
    before: Spec

    def __str__(self) -> str:
        before = {each.address: each for each in self.before}
        parts = [
            f"change the heir of {each.address} to {each.heir or 'none'}"
            if _place_of(before.get(each.address)) == _place_of(each)
            else f"announce {each.address} at gateway {each.owner} on {each.interface}"
            for each in self.wanted
            if each != before.get(each.address)
        ]
        kept = {each.address for each in self.wanted}
        parts += [f"withdraw {each}" for each in before if each not in kept]
        return f"{', '.join(parts)} for {self.service}"


class Held(NamedTuple):
    """What one gateway does for all Services. `owned`: the interface on which it announces each of
    its addresses. `others`: the announcements of other gateways, by address."""

    owned: Mapping[str, str]
    others: Mapping[str, Announcement]


def render(intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Spec]:
    """Return the announcements of the Services that have any."""
    return {key: each.announcements for key, each in intents.items() if each.announcements}


def diff(desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]) -> Sequence[Change]:
    """Return the changes of the Services that differ."""
    return [
        Change(key, desired.get(key, ()), actual.get(key, ()))
        for key in dict.fromkeys((*desired, *actual))
        if desired.get(key, ()) != actual.get(key, ())
    ]


def carried_out(
    known: Mapping[ServiceKey, Spec], changes: Iterable[Change]
) -> dict[ServiceKey, Spec]:
    """Return the announcements after the changes."""
    after = {**known, **{each.service: each.wanted for each in changes}}
    return {key: each for key, each in after.items() if each}


def by_address(known: Mapping[ServiceKey, Spec]) -> Mapping[str, Announcement]:
    """Return the announcements of these Services."""
    return {each.address: each for spec in known.values() for each in spec}


def held(announcements: Mapping[str, Announcement], gateway: str) -> Held:
    """Return what the gateway does for these announcements."""
    return Held(
        {name: each.interface for name, each in announcements.items() if each.owner == gateway},
        {name: each for name, each in announcements.items() if each.owner != gateway},
    )


def _place_of(announcement: Announcement | None) -> tuple[str, str] | None:
    return (announcement.owner, announcement.interface) if announcement is not None else None
