"""The address pools: which addresses can be assigned, to which Services, and in which order.

In: the pools of the configuration, and AddressPool objects. Out: `Pools`, which finds an address or
the pools for a Service; and for each object that cannot be used, the reason. A pool with an invalid
range, or with a range that overlaps another pool, is not used at all; the other pools are used. Of
two pools that overlap, a pool of the configuration takes precedence, then the older one. Names and
meaning of the fields follow MetalLB: pools for certain Services (`serviceAllocation`) are tried
before pools for every Service, in the order of their priority. Invariant: pure. Finding a free
address does not scan the assigned ones."""

import heapq
import ipaddress
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from fairlead.announce_sections import LabelRequirement, LabelSelector
from fairlead.config import PoolConfig, parse_range
from fairlead.kube.crds import AddressPool
from fairlead.model import Family, Finding

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

FAMILIES: tuple[Family, ...] = ("IPv4", "IPv6")
MAX_COUNT = 2**63 - 1
"""The maximum of a count: the status has counts of type int64."""

INVALID = "InvalidAddresses"
OVERLAPS = "OverlapsAnotherPool"
DELETED = "BeingDeleted"


class ServiceLabels(msgspec.Struct, frozen=True):
    """The properties of a Service by which a pool decides whether it may get an address."""

    namespace: str
    labels: Mapping[str, str] = {}
    namespace_labels: Mapping[str, str] = {}


class Range:
    """A range of addresses that finds its lowest free one.

    It does not record which addresses are assigned: the caller passes a predicate, and calls
    `give_back` for each address that becomes free. Invariant: a free address is either in the heap
    `_returned`, or not below `_fresh`, the first address that was not examined yet."""

    def __init__(self, version: int, first: int, last: int) -> None:
        self.version = version
        self.first = first
        self.last = last
        self._fresh = first
        self._returned: list[int] = []

    def lowest_free(self, taken: Callable[[str], bool], avoid: bool) -> str | None:
        """Return the lowest address that is not `taken`; None if there is none. `avoid`: skip
        addresses for which `is_buggy` is true. The address stays free until `taken` reports it."""
        while self._returned:
            if not taken(text := str(_address(self.version, self._returned[0]))):
                return text
            heapq.heappop(self._returned)
        while self._fresh <= self.last:
            text = str(_address(self.version, self._fresh))
            if not (avoid and is_buggy(self.version, self._fresh)) and not taken(text):
                return text
            self._fresh += 1
        return None

    def give_back(self, value: int) -> None:
        """Record that an assigned address is free again."""
        if value < self._fresh:
            heapq.heappush(self._returned, value)


class Pool:
    """A pool that is in use. `assigned` counts its assigned addresses by family."""

    def __init__(self, config: PoolConfig) -> None:
        self.name = config.name
        self.auto_assign = config.auto_assign
        self.avoid = config.avoid_buggy_ips
        self.allocation = config.service_allocation
        self.ranges = [Range(*parse_range(text)) for text in config.addresses]
        self.assigned: dict[Family, int] = dict.fromkeys(FAMILIES, 0)

    def allows(self, service_labels: ServiceLabels) -> bool:
        """Return whether `serviceAllocation` of the pool selects this Service and its namespace."""
        if (rule := self.allocation) is None:
            return True
        chosen = service_labels.namespace in rule.namespaces or any(
            matches(selector, service_labels.namespace_labels)
            for selector in rule.namespace_selectors
        )
        if (rule.namespaces or rule.namespace_selectors) and not chosen:
            return False
        return not rule.service_selectors or any(
            matches(selector, service_labels.labels) for selector in rule.service_selectors
        )

    def lowest_free(self, family: Family, taken: Callable[[str], bool]) -> str | None:
        """Return the lowest free address of the first range that has one; None if no range has."""
        for range_ in self.ranges:
            if family_of_version(range_.version) == family and (
                address := range_.lowest_free(taken, self.avoid)
            ):
                return address
        return None

    def size(self, family: Family) -> int:
        """Return the number of addresses of this family that the pool can assign in total."""
        ranges = [each for each in self.ranges if family_of_version(each.version) == family]
        return sum(
            each.last - each.first + 1 - (buggy_between(each) if self.avoid else 0)
            for each in ranges
        )

    @property
    def order(self) -> tuple[bool, float]:
        """Return the sort key of the pool: pools with a `serviceAllocation` by their priority, then
        pools for every Service."""
        if self.allocation is None:
            return True, 0
        return False, self.allocation.priority or float("inf")


class Pools:
    """All pools in use, in the order in which they are tried. `problems`: why other AddressPools
    are not used, by name."""

    def __init__(self, pools: Sequence[Pool], problems: Mapping[str, Finding]) -> None:
        self.in_order = sorted(pools, key=lambda pool: pool.order)
        self.by_name = {pool.name: pool for pool in pools}
        self.problems = problems
        self._sorted = sorted(
            (((each.version, each.first), each, pool) for pool in pools for each in pool.ranges),
            key=lambda item: item[0],
        )
        self._firsts = [first for first, _, _ in self._sorted]

    def find(self, address: str) -> tuple[Pool, Range] | None:
        """Return the pool and the range that can assign this address; None if no pool can."""
        value = ipaddress.ip_address(address)
        index = bisect_right(self._firsts, (value.version, int(value))) - 1
        if index < 0:
            return None
        _, range_, pool = self._sorted[index]
        if (
            range_.version != value.version
            or int(value) > range_.last
            or (pool.avoid and is_buggy(value.version, int(value)))
        ):
            return None
        return pool, range_


def read_pools(configured: Iterable[PoolConfig], objects: Iterable[AddressPool]) -> Pools:
    """Return the pools that can be used, and the problems of the others."""
    used: list[PoolConfig] = list(configured)
    seen = [(range_, pool.name) for pool in used for range_ in map(parse_range, pool.addresses)]
    names = {pool.name for pool in used}
    problems: dict[str, Finding] = {}
    for each in sorted(
        objects, key=lambda each: (each.metadata.creation_timestamp or "", each.metadata.name)
    ):
        name, spec = each.metadata.name, each.spec
        if (problem := _problem(each, names, seen)) is not None:
            problems[name] = problem
            continue
        names.add(name)
        seen += [(parse_range(text), name) for text in spec.addresses]
        used.append(
            PoolConfig(
                name,
                spec.addresses,
                spec.auto_assign,
                spec.avoid_buggy_ips,
                spec.service_allocation,
            )
        )
    return Pools([Pool(config) for config in used], problems)


def _problem(
    pool: AddressPool, names: set[str], seen: Sequence[tuple[tuple[int, int, int], str]]
) -> Finding | None:
    """Return why an AddressPool is not used; None if it is used. `names` and `seen` are the names
    and ranges of the pools that take precedence."""
    subject = f"AddressPool {pool.metadata.name}"
    if pool.metadata.deletion_timestamp is not None:
        return Finding(
            DELETED,
            "the pool is being deleted: it assigns no addresses, and is removed once no Service "
            "holds one of them",
            subject=subject,
        )
    if pool.metadata.name in names:
        return Finding(
            OVERLAPS,
            "a pool of this name is in the configuration file",
            severity="error",
            subject=subject,
            remedy="rename this AddressPool",
        )
    own: list[tuple[int, int, int]] = []
    for text in pool.spec.addresses:
        try:
            version, first, last = parse_range(text)
        except ValueError as error:
            return Finding(
                INVALID,
                str(error),
                severity="error",
                subject=subject,
                remedy="write addresses, CIDRs or FIRST-LAST in spec.addresses",
            )
        for (other_version, other_first, other_last), other in (
            *seen,
            *((each, "itself") for each in own),
        ):
            if version == other_version and first <= other_last and other_first <= last:
                whose = "another entry of this pool" if other == "itself" else f"pool {other}"
                return Finding(
                    OVERLAPS,
                    f"{text} overlaps {whose}; the pool is not used until the overlap is removed",
                    severity="error",
                    subject=subject,
                )
        own.append((version, first, last))
    if own:
        return None
    return Finding(
        INVALID,
        "the pool has no addresses",
        severity="error",
        subject=subject,
        remedy="add addresses to spec.addresses",
    )


def matches(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """Return whether the selector matches these labels."""
    return all(labels.get(key) == value for key, value in selector.match_labels.items()) and all(
        _holds(each, labels) for each in selector.match_expressions
    )


def _holds(requirement: LabelRequirement, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return value is not None and value in requirement.values
        case "NotIn":
            return value is None or value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None


def is_buggy(version: int, value: int) -> bool:
    """Return whether some devices mistake the address for a network or broadcast address: an IPv4
    address that ends in .0 or .255."""
    return version == 4 and value & 0xFF in (0x00, 0xFF)


def buggy_between(range_: Range) -> int:
    """Return the number of addresses of the range that are to be avoided."""
    if range_.version == 6:
        return 0

    def below(value: int, ending: int) -> int:
        # The number of addresses below `value` whose last octet is `ending`.
        return (value + 0x100 - ending - 1) // 0x100 if value > ending else 0

    return sum(
        below(range_.last + 1, ending) - below(range_.first, ending) for ending in (0x00, 0xFF)
    )


def family_of_version(version: int) -> Family:
    return "IPv6" if version == 6 else "IPv4"


def _address(version: int, value: int) -> IPAddress:
    return ipaddress.IPv4Address(value) if version == 4 else ipaddress.IPv6Address(value)
