"""Choose network interfaces of a host by name, by pattern, by subnet or by default route. Pure.

In: the selectors of a configuration, and the interfaces that are present. Out: the interfaces that
each selector chooses, and a message about what is missing. A selector is one of

- a name: `eth0`;
- a pattern of names, as in a shell: `eth*`, `bond0.*`;
- a CIDR: every interface that has an address in it;
- `default-route`: every interface through which a default route leaves, of either IP family.

Only a name chooses the loopback interface. An interface that is selected by name must be present.
One list may serve hosts that differ, so the other selectors may choose nothing as long as the list
as a whole chooses something. Invariant: when a CIDR or `default-route` suddenly chooses nothing, it
keeps its former interfaces that still exist: an address or a route that is absent for a moment
interrupts no traffic."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from ipaddress import ip_address, ip_network
from typing import NamedTuple, TypeVar

from fairlead.net.address import cidr_problem

DEFAULT_ROUTE = "default-route"
MAX_NAME_LENGTH = 15
"""IFNAMSIZ of Linux, without the terminating zero byte."""
_WILDCARDS = frozenset("*?[")
_SHOWN = 20
"""The number of interfaces that an error message lists: a node has one for each of its pods."""

T = TypeVar("T")


class Present(NamedTuple):
    """An interface of the host. `default_route`: an IPv4 or IPv6 default route uses it."""

    name: str
    addresses: tuple[str, ...] = ()
    default_route: bool = False

    def __str__(self) -> str:
        known = [*self.addresses, *(["default route"] if self.default_route else [])]
        return f"{self.name} ({', '.join(known) or 'no address'})"


class Selection(NamedTuple):
    """The result of a selection.

    `chosen`: the interfaces of each selector, in the configuration's order. `present`: the
    interfaces of the host."""

    chosen: Mapping[str, tuple[str, ...]]
    present: tuple[Present, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The chosen interfaces, without duplicates."""
        return tuple(dict.fromkeys(name for names in self.chosen.values() for name in names))

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The selectors that choose nothing."""
        return tuple(selector for selector, names in self.chosen.items() if not names)

    @property
    def problem(self) -> str:
        """A message about what is missing and which interfaces are present; empty if nothing is
        missing."""
        missing = [each for each in self.unmatched if is_name(each)]
        if not missing and (self.names or not self.chosen):
            return ""
        what = (
            f"there is no interface {', '.join(missing)}"
            if missing
            else f"no interface matches {', '.join(self.chosen)}"
        )
        more = len(self.present) - _SHOWN
        shown = ", ".join(map(str, self.present[:_SHOWN])) + (
            f" and {more} more" if more > 0 else ""
        )
        return f"{what}; this host has {shown or 'no interface'}"


def is_name(selector: str) -> bool:
    """Return whether a selector is the name of one interface."""
    return selector != DEFAULT_ROUTE and "/" not in selector and _WILDCARDS.isdisjoint(selector)


def is_pattern(selector: str) -> bool:
    """Return whether a selector is a pattern of names."""
    return not is_name(selector) and selector != DEFAULT_ROUTE and "/" not in selector


def check(selector: str) -> None:
    """Raise ValueError for a selector that cannot choose any interface."""
    if not selector:
        raise ValueError("the text is empty")
    if "/" in selector:
        if problem := cidr_problem(selector):
            message, fix = problem
            raise ValueError(f"{message} ({fix})")
    elif is_name(selector) and (len(selector) > MAX_NAME_LENGTH or any(map(str.isspace, selector))):
        raise ValueError(
            f"{selector!r} is not an interface name: a name has at most {MAX_NAME_LENGTH} "
            "characters and no space"
        )
    elif _is_address(selector):
        raise ValueError(
            f"{selector!r} is an address; to choose the interface that has it, write it as a CIDR"
        )


def select(
    selectors: Iterable[str], present: Sequence[Present], before: Selection | None = None
) -> Selection:
    """Apply the selectors to the interfaces that are present. `before`: the previous selection."""
    former = before.chosen if before is not None else {}
    existing = {each.name for each in present}
    chosen = {}
    for selector in selectors:
        found = tuple(each.name for each in present if _matches(selector, each))
        if not found and (selector == DEFAULT_ROUTE or "/" in selector):
            found = tuple(name for name in former.get(selector, ()) if name in existing)
        chosen[selector] = found
    return Selection(chosen, tuple(present))


def of_host(host: str, everywhere: T, by_host: Mapping[str, T]) -> T:
    """Return the value for one host: the value of its name in `by_host`, otherwise the value of the
    longest pattern that matches its name, otherwise `everywhere`."""
    if host in by_host:
        return by_host[host]
    matching = [pattern for pattern in by_host if fnmatchcase(host, pattern)]
    return (
        by_host[max(matching, key=lambda pattern: (len(pattern), pattern))]
        if matching
        else everywhere
    )


def _matches(selector: str, interface: Present) -> bool:
    if is_name(selector):
        return interface.name == selector
    if interface.name == "lo":
        return False
    if selector == DEFAULT_ROUTE:
        return interface.default_route
    if "/" in selector:
        network = ip_network(selector)
        return any(ip_address(address) in network for address in interface.addresses)
    return fnmatchcase(interface.name, selector)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
