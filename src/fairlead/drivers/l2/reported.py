"""What the announcing process has reported: the state of each address on each interface, the other
announcers, and foreign hosts.

In: reports of the process, the Services that request each address, the names of the interfaces.
Out: news for Services, the part of `/state`, metrics. No I/O but the log; the time is an argument.
Invariant: a state keeps the time at which it began, however often it is reported."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import structlog

from fairlead.drivers.l2 import outcomes
from fairlead.drivers.l2.messages import Interface, MemberStatus, PlaceStatus, Report
from fairlead.drivers.l2.records import Place
from fairlead.model import Finding, ServiceKey
from fairlead.role_state import AddressConflict, AnnouncedAddress, AnnouncerMember

log = structlog.get_logger()

Requests = Mapping[str, Collection[ServiceKey]]
"""The Services that request each address."""


class _Known(NamedTuple):
    """The state of an address on an interface, and since when it has this phase."""

    status: PlaceStatus
    since: str


class Reported:
    """Takes the reports. `host`: the name of this host."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._statuses: dict[Place, _Known] = {}
        self._members: dict[tuple[str, str], tuple[MemberStatus, str]] = {}
        """By the name of the interface and that of the announcer, with the time since which it has
        its standing."""
        self._conflicts: dict[Place, AddressConflict] = {}
        self.takes = 0
        """How often this host took an address over."""
        self.announcements = 0
        """How many announcements it has sent."""

    def take(
        self, report: Report, names: Mapping[int, str], requests: Requests, now: str
    ) -> list[tuple[ServiceKey, Finding]]:
        """Take a report over. Return what has happened to Services. `names`: of the interfaces, by
        index. `now`: RFC 3339."""
        news: list[tuple[ServiceKey, Finding]] = []
        for status in report.places:
            interface = names.get(status.place.interface, "")
            keys = requests.get(status.place.address, ())
            found = self._place(status, interface, keys, now)
            news += [(key, finding) for finding in found for key in keys]
        if report.members is not None:
            members = {(names.get(each.interface, ""), each.name): each for each in report.members}
            self._members = {
                key: (each, self._member_since(key, each, now)) for key, each in members.items()
            }
        self.takes, self.announcements = report.takes, report.announcements
        return news

    def _place(
        self, status: PlaceStatus, interface: str, keys: Iterable[ServiceKey], now: str
    ) -> list[Finding]:
        before = self._statuses.get(status.place)
        if status.phase == "gone":
            self._statuses.pop(status.place, None)
            self._conflicts.pop(status.place, None)
            return []
        news = []
        same = before is not None and before.status.phase == status.phase
        self._statuses[status.place] = _Known(status, before.since if same and before else now)
        if status.phase == "owned" and status.taken and not same:
            news.append(outcomes.announced(self._host, interface, status))
        return news + self._conflict(status, interface, keys, now)

    def _conflict(
        self, status: PlaceStatus, interface: str, keys: Iterable[ServiceKey], now: str
    ) -> list[Finding]:
        if not status.foreign:
            self._conflicts.pop(status.place, None)
            return []
        news = []
        known = self._conflicts.get(status.place)
        if known is None or known.mac != status.foreign:
            finding = outcomes.conflict(interface, status)
            log.warning("another host uses an announced address", problem=str(finding))
            if status.phase == "owned":
                news.append(finding)
        since = known.since if known is not None and known.mac == status.foreign else now
        self._conflicts[status.place] = AddressConflict(
            status.place.address,
            interface,
            status.foreign,
            tuple(sorted(map(str, keys))),
            since,
            now,
        )
        return news

    def _member_since(self, key: tuple[str, str], status: MemberStatus, now: str) -> str:
        before = self._members.get(key)
        return before[1] if before and before[0].standing == status.standing else now

    @property
    def owns_any(self) -> bool:
        """Whether this host owns an address."""
        return any(each.status.phase == "owned" for each in self._statuses.values())

    def of_address(self, address: str, interfaces: Iterable[Interface]) -> Sequence[PlaceStatus]:
        """Return the state of the address on these interfaces."""
        places = (Place(each.index, address) for each in interfaces)
        return [self._statuses[each].status for each in places if each in self._statuses]

    # For display. May be called from any thread.

    def addresses(
        self, names: Mapping[int, str], requests: Requests
    ) -> tuple[AnnouncedAddress, ...]:
        """Return the addresses that this host owns, sorted."""
        owned: dict[str, list[_Known]] = {}
        for at, known in list(self._statuses.items()):
            if known.status.phase == "owned":
                owned.setdefault(at.address, []).append(known)
        return tuple(
            AnnouncedAddress(
                address,
                tuple(sorted(map(str, requests.get(address, ())))),
                min(each.since for each in found),
                tuple(sorted(names.get(each.status.place.interface, "") for each in found)),
                cause=f"because {found[0].status.cause}" if found[0].status.cause else "",
            )
            for address, found in sorted(owned.items())
        )

    def members(self) -> tuple[AnnouncerMember, ...]:
        """Return the other announcers, sorted by interface."""
        return tuple(
            AnnouncerMember(name, interface, outcomes.member_state(each.standing), since)
            for (interface, name), (each, since) in sorted(self._members.items())
        )

    def conflicts(self) -> tuple[AddressConflict, ...]:
        """Return the addresses that foreign hosts use, sorted."""
        return tuple(sorted(self._conflicts.values()))

    def owned_by_interface(self, names: Mapping[int, str]) -> dict[str, int]:
        """Return the number of owned addresses on each of the interfaces."""
        statuses = [each.status for each in list(self._statuses.values())]
        owned = Counter(
            names.get(each.place.interface, "") for each in statuses if each.phase == "owned"
        )
        return dict.fromkeys(names.values(), 0) | dict(owned)
