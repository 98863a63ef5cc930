"""The address pools: which addresses can be assigned, to which Services, and in which order.

In: the pools of the configuration, and AddressPool objects. Out: `Pools`, which finds an address or
the pools for a Service; and for each object that cannot be used, the reason. A pool with an invalid
range, or with a range that overlaps another pool, is not used at all; the other pools are used. Of
two pools that overlap, a pool of the configuration takes precedence, then the older one. Names and
meaning of the fields follow MetalLB: pools for certain Services (`serviceAllocation`) are tried
before pools for every Service, in the order of their priority. No Service gets an address that the
cluster itself uses (`plan.exclusions`). Invariant: pure. Finding a free address does not scan the
assigned or excluded ones."""

import heapq
import ipaddress
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

import msgspec

from fairlead.config import LabelRequirement, LabelSelector, PoolConfig, parse_range
from fairlead.kube.crds import AddressPool
from fairlead.model import Family, Finding
from fairlead.plan.exclusions import Exclusions, Span, Use

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
        self.excluded: list[Span] = []
        """The parts of the range that no Service gets, sorted and disjoint."""
        self._fresh = first
        self._returned: list[int] = []

    def exclude(self, spans: Iterable[Span]) -> None:
        """Set the excluded networks, all of which overlap this range."""
        self.excluded = []
        for _, first, last in sorted(spans):
            first, last = max(first, self.first), min(last, self.last)
            if self.excluded and first <= self.excluded[-1].last + 1:
                before = self.excluded.pop()
                first, last = before.first, max(last, before.last)
            self.excluded.append(Span(self.version, first, last))

    def exclusion_at(self, value: int) -> Span | None:
        """Return the excluded part of the range that has this address; None if there is none."""
        at = bisect_right(self.excluded, value, key=lambda span: span.first) - 1
        return self.excluded[at] if at >= 0 and value <= self.excluded[at].last else None

    def lowest_free(self, taken: Callable[[str], bool], avoid: bool) -> str | None:
        """Return the lowest address that is neither `taken` nor excluded; None if there is none.
        `avoid`: skip addresses for which `is_buggy` is true. The address stays free until `taken`
        reports it."""
        while self._returned:
            if not taken(text := str(_address(self.version, self._returned[0]))):
                return text
            heapq.heappop(self._returned)
        while self._fresh <= self.last:
            if (excluded := self.exclusion_at(self._fresh)) is not None:
                self._fresh = excluded.last + 1
                continue
            text = str(_address(self.version, self._fresh))
            if not (avoid and is_buggy(self.version, self._fresh)) and not taken(text):
                return text
            self._fresh += 1
        return None

    def give_back(self, value: int) -> None:
        """Record that an assigned address is free again."""
        if value < self._fresh and self.exclusion_at(value) is None:
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
        return sum(self._count(each) - sum(map(self._count, each.excluded)) for each in ranges)

    def _count(self, part: Range | Span) -> int:
        return part.last - part.first + 1 - (buggy_between(part) if self.avoid else 0)

    @property
    def order(self) -> tuple[bool, float]:
        """Return the sort key of the pool: pools with a `serviceAllocation` by their priority, then
        pools for every Service."""
        if self.allocation is None:
            return True, 0
        return False, self.allocation.priority or float("inf")


class Pools:
    """All pools in use, in the order in which they are tried. `problems`: why other AddressPools
    are not used, by name. `exclusions`: the addresses that no Service gets, as they are now."""

    def __init__(
        self,
        pools: Sequence[Pool],
        problems: Mapping[str, Finding],
        exclusions: Exclusions | None = None,
    ) -> None:
        self.in_order = sorted(pools, key=lambda pool: pool.order)
        self.by_name = {pool.name: pool for pool in pools}
        self.problems = problems
        self._sorted = sorted(
            (((each.version, each.first), each, pool) for pool in pools for each in pool.ranges),
            key=lambda item: item[0],
        )
        self._firsts = [first for first, _, _ in self._sorted]
        self.exclusions = exclusions if exclusions is not None else Exclusions()
        self._exclude()

    def _exclude(self) -> None:
        """Leave the excluded addresses out of the ranges. Each network is looked up once, so the
        cost does not depend on the sizes of the ranges, nor on their number."""
        by_range: dict[int, list[Span]] = {}
        overlapping = sorted(
            (span for span in self.exclusions if self.overlaps(span)),
            key=lambda span: (span.version, span.first, -span.last),
        )
        self.overlapping = [(span, self.exclusions.use_of(span)) for span in overlapping]
        """The excluded networks that have addresses of a pool, and their uses: as they were when
        the pools were read, like the ranges. Later `exclusions` may no longer have them."""
        for span, _ in self.overlapping:
            for at in self._overlapped(span):
                by_range.setdefault(at, []).append(span)
        for at, spans in by_range.items():
            self._sorted[at][1].exclude(spans)

    def _overlapped(self, span: Span) -> Iterator[int]:
        """Yield the positions of the ranges that have an address of this network."""
        at = bisect_right(self._firsts, (span.version, span.last)) - 1
        while at >= 0:
            _, range_, _ = self._sorted[at]
            if range_.version != span.version or range_.last < span.first:
                return
            yield at
            at -= 1

    def overlaps(self, span: Span) -> bool:
        """Return whether a pool has an address of this network."""
        return any(True for _ in self._overlapped(span))

    def of_pool(self, pool: Pool) -> Iterator[tuple[Span, Use]]:
        """Yield the excluded networks that have addresses of this pool, and their uses."""
        for span, use in self.overlapping:
            if any(self._sorted[at][2] is pool for at in self._overlapped(span)):
                yield span, use

    def excluded(self, address: str) -> Use | None:
        """Return what the cluster uses an address of a pool for; None if it does not use the
        address, or if no pool has it."""
        return self.exclusions.find(address) if self._range_with(address) else None

    def find(self, address: str) -> tuple[Pool, Range] | None:
        """Return the pool and the range that can assign this address; None if no pool can."""
        if (found := self._range_with(address)) is None:
            return None
        pool, range_ = found
        value = int(ipaddress.ip_address(address))
        if (pool.avoid and is_buggy(range_.version, value)) or range_.exclusion_at(value):
            return None
        return found

    def _range_with(self, address: str) -> tuple[Pool, Range] | None:
        value = ipaddress.ip_address(address)
        index = bisect_right(self._firsts, (value.version, int(value))) - 1
        if index < 0:
            return None
        _, range_, pool = self._sorted[index]
        if range_.version != value.version or int(value) > range_.last:
            return None
        return pool, range_


def read_pools(
    configured: Iterable[PoolConfig],
    objects: Iterable[AddressPool],
    exclusions: Exclusions | None = None,
) -> Pools:
    """Return the pools that can be used, and the problems of the others. `exclusions`: the
    addresses that no Service gets."""
    used: list[PoolConfig] = list(configured)
    seen = sorted((*parse_range(text), pool.name) for pool in used for text in pool.addresses)
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
        seen = sorted([*seen, *((*parse_range(text), name) for text in spec.addresses)])
        used.append(
            PoolConfig(
                name,
                spec.addresses,
                spec.auto_assign,
                spec.avoid_buggy_ips,
                spec.service_allocation,
            )
        )
    return Pools([Pool(config) for config in used], problems, exclusions)


def _problem(
    pool: AddressPool, names: set[str], seen: Sequence[tuple[int, int, int, str]]
) -> Finding | None:
    """Return why an AddressPool is not used; None if it is used. `names` and `seen` are the names
    and the sorted ranges of the pools that take precedence."""
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
    own: list[tuple[int, int, int, str]] = []
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
        for others in (seen, own):
            # These ranges do not overlap each other, so only the last one that begins before the
            # end of this range can overlap it.
            at = bisect_right(others, (version, last), key=itemgetter(0, 1)) - 1
            if at >= 0 and others[at][0] == version and others[at][2] >= first:
                whose = f"pool {others[at][3]}" if others is seen else "another entry of this pool"
                return Finding(
                    OVERLAPS,
                    f"{text} overlaps {whose}; the pool is not used until the overlap is removed",
                    severity="error",
                    subject=subject,
                )
        insort(own, (version, first, last, ""))
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


def buggy_between(range_: Range | Span) -> int:
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
