"""The addresses that a gateway announces by BGP for each Service, and the changes between them.
Pure.

In: LoadBalancers. Out: specs, changes, and what the changes mean for all Services together: several
Services may share an address."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from fairlead.model import LoadBalancer, ServiceKey
from fairlead.net.address import family_of

Spec = tuple[str, ...]
"""The addresses of a Service at which it takes traffic, sorted."""
NO_SERVICE = ServiceKey("", "")
"""The key of the addresses that an earlier process announced and that no Service has."""


class Change(NamedTuple):
    """Replace the announced addresses of a Service."""

    service: ServiceKey
    wanted: Spec
    before: Spec

    def __str__(self) -> str:
        parts = [f"announce {each}" for each in self.wanted if each not in self.before]
        parts += [f"withdraw {each}" for each in self.before if each not in self.wanted]
        return f"{', '.join(parts)} by BGP for {self.service}"


def render(intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Spec]:
    """Return the addresses of the Services that have any."""
    specs = {key: _spec(each) for key, each in intents.items()}
    return {key: each for key, each in specs.items() if each}


def _spec(balancer: LoadBalancer) -> Spec:
    families = {each.family for each in balancer.listeners}
    return tuple(sorted(each for each in balancer.addresses if family_of(each) in families))


def diff(desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]) -> Sequence[Change]:
    """Return the changes of the Services that differ."""
    return [
        Change(key, desired.get(key, ()), actual.get(key, ()))
        for key in dict.fromkeys((*desired, *actual))
        if desired.get(key, ()) != actual.get(key, ())
    ]


def withdrawn(
    desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]
) -> Sequence[Change]:
    """Return the changes that only withdraw what is not desired any more."""
    kept = {
        key: tuple(each for each in spec if each in desired.get(key, ()))
        for key, spec in actual.items()
    }
    return [Change(key, each, actual[key]) for key, each in kept.items() if each != actual[key]]


def carried_out(
    known: Mapping[ServiceKey, Spec], changes: Iterable[Change]
) -> dict[ServiceKey, Spec]:
    """Return the addresses of each Service after the changes."""
    after = {**known, **{each.service: each.wanted for each in changes}}
    return {key: each for key, each in after.items() if each}


def addresses_of(known: Mapping[ServiceKey, Spec]) -> set[str]:
    """Return the addresses of these Services."""
    return {each for spec in known.values() for each in spec}


def present(
    known: Mapping[ServiceKey, Spec], announced: Set[str], shown: Set[str]
) -> dict[ServiceKey, Spec]:
    """Return what is announced for each Service, and for none of them, of the `announced`
    addresses. `shown`: the addresses in the status of the Services whose plan is refused. These
    are served in their previous form, so their addresses are nobody's leftovers."""
    found = {
        key: tuple(each for each in spec if each in announced)
        for key, spec in known.items()
        if key != NO_SERVICE
    }
    if left := announced - addresses_of(found) - shown:
        found[NO_SERVICE] = tuple(sorted(left))
    return {key: spec for key, spec in found.items() if spec}
