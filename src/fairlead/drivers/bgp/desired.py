"""The routes that BIRD has to announce, and what is held back or withdrawn of them.

In: changes of Services, a file of routes of an earlier process, whether the host is cut off or
withdraws everything, and the time. Out: the routes, as values and as the text of their file. No
I/O. Invariants: the file contains everything that a later process has to know. A route that was
held back is exported again only after its Service has been applied again, or RESTORE_S later: a
Service that is refused, or cannot be served at this moment, is announced as before."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from fairlead.drivers.bgp import render, sessions, spec
from fairlead.drivers.bgp.peers import Peer, next_hop_limits
from fairlead.drivers.bgp.removal import GRACE_S
from fairlead.drivers.bgp.sessions import Tracked
from fairlead.drivers.bgp.spec import Change, Contributions, Report, Route, SetRoutes, Withdraw
from fairlead.model import Finding, ServiceKey
from fairlead.role_state import AnnouncedAddress

RESTORE_S = 10.0
"""How long after the release the routes of a Service that is not applied again stay withheld. A
pass over all Services takes less."""
CUT_OFF = Finding(
    "CutOff",
    "no address is announced by BGP: this host is cut off from the network, or catches up",
    remedy="check its link and its switch port",
)


class Desired:
    """The desired routes of one host. Times in seconds are those of one monotonic clock."""

    def __init__(self) -> None:
        self.services: dict[ServiceKey, Contributions] = {}
        self.leaving_until_s: dict[ServiceKey, float] = {}
        """Until when the routes of a Service stay although it leaves this host."""
        self.held_back = False
        """Whether nothing is exported because this host is cut off from the network, or catches
        up."""
        self.withheld: set[ServiceKey] = set()
        """The Services whose routes are not exported since the release, because they have not been
        applied again."""
        self._restore_s = 0.0
        """When the withheld routes are exported in any case."""
        self.withdrawn: Literal["no", "leaving", "yes"] = "no"
        """Whether all routes are withdrawn, or about to be."""
        self._since: dict[str, str] = {}
        """The time since which each address is announced."""

    def adopt(self, text: str, now_s: float) -> None:
        """Take over the file of routes of an earlier process."""
        for key, record in render.records_of(text).items():
            self.services[key] = record.contributions
            self._since |= record.since
            if any(each.leaving for each in record.contributions):
                self.leaving_until_s[key] = now_s + GRACE_S
        self.held_back = render.is_held_back(text)

    def hold_back(self) -> None:
        """Export nothing."""
        self.held_back, self.withheld = True, set()

    def release(self, now_s: float) -> None:
        """End `hold_back`. The routes of the present Services stay withheld until these are applied
        again."""
        self.held_back, self.withheld = False, set(self.services)
        self._restore_s = now_s + RESTORE_S

    def restore(self, now_s: float) -> bool:
        """Export the routes of Services that were not applied again in time as they were before.
        Return whether there are any."""
        due = bool(self.withheld) and now_s >= self._restore_s
        if due:
            self.withheld = set()
        return due

    def release_at_once(self) -> None:
        """End `hold_back`, and export everything as before."""
        self.held_back = False

    def apply(self, changes: Sequence[Change], now_s: float, now: str) -> bool:
        """Apply the changes. Return whether routes may have changed. `now`: RFC 3339."""
        for change in changes:
            match change:
                case SetRoutes(service, contributions) if contributions:
                    self.services[service] = contributions
                    if any(each.leaving for each in contributions):
                        self.leaving_until_s.setdefault(service, now_s + GRACE_S)
                    else:
                        self.leaving_until_s.pop(service, None)
                case SetRoutes(service) | Withdraw(service):
                    self.services.pop(service, None)
                    self.leaving_until_s.pop(service, None)
        changed = {change.service for change in changes if isinstance(change, SetRoutes)}
        self.withheld = (self.withheld - changed) & self.services.keys()
        if all(isinstance(change, Report) for change in changes):
            return False
        present = {each.address for some in self.services.values() for each in some}
        self._since = {address: self._since.get(address) or now for address in present}
        return True

    def routes(self) -> Mapping[str, Route]:
        """Return the routes that BIRD has to announce now, by prefix."""
        return {} if self.held_back else self._routes()

    def _routes(self) -> Mapping[str, Route]:
        """Return the routes that BIRD would announce now if they were not held back."""
        routes = spec.routes_of(self._due())
        if self.withdrawn == "no":
            return routes
        return {key: msgspec.structs.replace(route, leaving=True) for key, route in routes.items()}

    def text(self, asn: int, peers: Sequence[Peer]) -> str:
        """Return the file of routes, see `render.routes_text`."""
        text = render.routes_text(
            self._routes(),
            self.services,
            self._since,
            asn=asn,
            peers={each.name for each in peers},
            next_hops=next_hop_limits(peers),
        )
        return render.hold_back(text) if self.held_back else text

    def addresses(self, tracked: Mapping[str, Tracked]) -> tuple[AnnouncedAddress, ...]:
        """Return each address with the peers that get its route now. May be called from any
        thread."""
        exported, since = self._exported(), dict(self._since)
        services: dict[str, set[str]] = {}
        prefixes: dict[str, str] = {}
        for key, contributions in exported.items():
            for each in contributions:
                services.setdefault(each.address, set()).add(str(key))
                prefixes[each.address] = each.prefix
        routes = spec.routes_of(exported)
        return tuple(
            AnnouncedAddress(
                address,
                tuple(sorted(services[address])),
                since.get(address, ""),
                peers=sessions.receivers(routes[prefixes[address]], tracked),
            )
            for address in sorted(services)
        )

    def _exported(self) -> Mapping[ServiceKey, Contributions]:
        return {} if self.held_back else self._due()

    def _due(self) -> Mapping[ServiceKey, Contributions]:
        if self.withdrawn == "yes":
            return {}
        services, withheld = self.services.copy(), self.withheld
        return {key: each for key, each in services.items() if key not in withheld}
