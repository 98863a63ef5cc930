"""The addresses that Services want to have announced on layer 2, and how they differ from what is
announced. Pure.

In: intents. Out: specs, changes, and for each address the combined request of all Services that
have it. Invariant: an address that another method announces from now on is kept until that method
announces it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from fairlead.model import Announcement, ServiceKey


class Intent(Protocol):
    """A LoadBalancer or a NodeService."""

    @property
    def announcements(self) -> tuple[Announcement, ...]: ...


class Requested(NamedTuple):
    """An address of a Service, and how it is announced. `candidates`: the hosts that may own it;
    None: every host of the role. `leaving`: this host hands it over. `interfaces`: the selectors of
    its pool; empty: the default. `moving`: another method announces it from now on."""

    address: str
    candidates: tuple[str, ...] | None = None
    leaving: bool = False
    interfaces: tuple[str, ...] = ()
    moving: bool = False


Spec = tuple[Requested, ...]
"""The addresses of one Service, sorted."""


class Actual(NamedTuple):
    """What is announced for a Service. `unsettled`: there is something to report about it. `moved`:
    the addresses that this host does not own, or that another method announces now."""

    spec: Spec
    unsettled: bool = False
    moved: frozenset[str] = frozenset()


class Change(NamedTuple):
    """Announce or withdraw an address of a Service, keep it until another method announces it, or
    report on the Service."""

    service: ServiceKey
    verb: Literal["announce", "withdraw", "keep", "report"]
    requested: Requested | None = None

    def __str__(self) -> str:
        if self.requested is None:
            return f"l2: report the state of the addresses of {self.service}"
        return f"l2: {self.verb} {self.requested.address} for {self.service}"


def render(intents: Mapping[ServiceKey, Intent]) -> dict[ServiceKey, Spec]:
    """Return the spec of each Service that has addresses to announce on layer 2, or by another
    method, which may have been announced on layer 2 before."""
    specs = {key: _spec(intent.announcements) for key, intent in intents.items()}
    return {key: spec for key, spec in specs.items() if spec}


def diff(
    desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Actual]
) -> Sequence[Change]:
    """Return the addresses to announce or to announce differently, then those to withdraw, those to
    keep for now, and the Services about which there is only something to report."""
    announced, withdrawn, reported = [], [], []
    for key, spec in desired.items():
        before = actual.get(key, Actual(()))
        wanted = {each.address: each for each in spec if not each.moving}
        moving = {each.address for each in spec if each.moving and not each.leaving} - before.moved
        new = [Change(key, "announce", each) for each in wanted.values() if each not in before.spec]
        announced += new
        kept = [Change(key, "keep", each) for each in before.spec if each.address in moving]
        old = [
            Change(key, "withdraw", each)
            for each in before.spec
            if each.address not in wanted and each.address not in moving
        ]
        withdrawn += old
        reported += kept
        if before.unsettled and not new and not old and not kept:
            reported.append(Change(key, "report"))
    for key in actual.keys() - desired.keys():
        withdrawn += [Change(key, "withdraw", each) for each in actual[key].spec]
    return [*announced, *sorted(withdrawn), *reported]


def withdrawals(
    intents: Mapping[ServiceKey, Intent], actual: Mapping[ServiceKey, Actual]
) -> Sequence[Change]:
    """Return the withdrawals of addresses that these Services no longer announce by any method. An
    address that another method announces from now on is left to `diff`."""
    changes = []
    for key, intent in intents.items():
        announced = {address for each in intent.announcements for address in each.addresses}
        before = actual.get(key, Actual(())).spec
        changes += [
            Change(key, "withdraw", each) for each in before if each.address not in announced
        ]
    return changes


def carried_out(
    known: Mapping[ServiceKey, Spec], changes: Iterable[Change]
) -> dict[ServiceKey, Spec]:
    """Return the specs after the changes."""
    after = dict(known)
    for change in changes:
        if change.requested is None or change.verb == "keep":
            continue
        left = [
            each
            for each in after.get(change.service, ())
            if each.address != change.requested.address
        ]
        if change.verb == "announce":
            left.append(change.requested)
        after[change.service] = tuple(sorted(left, key=lambda each: each.address))
    return {key: spec for key, spec in after.items() if spec}


def combined(requests: Collection[Requested]) -> Requested:
    """Return the request for an address that several Services have: only hosts that may own it for
    each of them may own it."""
    first, *others = requests
    for other in others:
        candidates = first.candidates
        if candidates is None or other.candidates is None:
            candidates = candidates if other.candidates is None else other.candidates
        else:
            candidates = tuple(name for name in candidates if name in other.candidates)
        first = Requested(
            first.address,
            candidates,
            first.leaving or other.leaving,
            tuple(dict.fromkeys(first.interfaces + other.interfaces)),
        )
    return first


def by_address(specs: Mapping[ServiceKey, Spec]) -> dict[str, dict[ServiceKey, Requested]]:
    """Return the requests for each address, by Service."""
    found: dict[str, dict[ServiceKey, Requested]] = {}
    for key, spec in specs.items():
        for each in spec:
            found.setdefault(each.address, {})[key] = each
    return found


def _spec(announcements: Iterable[Announcement]) -> Spec:
    found = {
        address: Requested(address, each.candidates, each.leaving, each.interfaces)
        if each.method == "l2"
        else Requested(address, leaving=each.leaving, moving=True)
        for each in announcements
        for address in each.addresses
    }
    return tuple(found[address] for address in sorted(found))
