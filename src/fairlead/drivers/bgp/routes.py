"""The driver that hands addresses to the routing daemon that the operator runs on the host.

In: intents with announcements. Out: kernel routes in one table, with a protocol number of their
own, which the daemon redistributes. The sessions, and the attributes of the routes, are those of
the daemon. Invariants: the routes have no metric, so that all hosts have equal ones: FRR copies a
metric into the MED, and routers would use only the hosts with the lowest. Weights are therefore not
announced. Routes of other programs are not touched. A route that the kernel rejects, such as an
IPv6 route on a host without IPv6, affects only the Services that need it. Everything stays when
this process ends, and the next full `read` repairs differences."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import ip_address, ip_network

from fairlead.announce_sections import BgpConfig
from fairlead.drivers import Component, Requeue, Undecided, all_decided, method_change, no_requeue
from fairlead.drivers.bgp import spec
from fairlead.drivers.bgp.removal import PROTOCOLS, remove_bird, remove_routes
from fairlead.drivers.bgp.spec import (
    Actual,
    Announced,
    BgpSpec,
    Change,
    Contributions,
    Report,
    SetRoutes,
    Withdraw,
)
from fairlead.drivers.method_change import AnnouncedElsewhere
from fairlead.errors import FairleadError, Refused
from fairlead.model import Outcome, ServiceKey
from fairlead.net.tableroutes import TableRoute, TableRoutes
from fairlead.role_state import AnnouncedAddress, BgpState, timestamp

SCAN_S = 3.0
"""How long a routing daemon may take to find a route. BIRD reads kernel tables every two seconds
with the documented configuration."""
_SHOWN = 3
"""How many rejected routes the state shows at most."""


class RoutesDriver(Component):
    """Driver of the kernel routes for announced addresses. Call `open` first, in the network
    namespace of the host, and `close` last. `role`: the role that announces; each role has its own
    protocol number. `undecided`: the routes of an earlier process to these addresses stay."""

    name = "bgp"

    def __init__(
        self,
        section: BgpConfig,
        *,
        requeue: Requeue = no_requeue,
        role: str = "gateway",
        undecided: Undecided = all_decided,
    ) -> None:
        self._section = section
        self._requeue = requeue
        self._role = role
        self._undecided = undecided
        self._kernel: TableRoutes | None = None
        self._services: dict[ServiceKey, Contributions] = {}
        self._since: dict[str, str] = {}
        self._adopted: set[TableRoute] = set()
        """The routes of an earlier process that no Service has requested yet."""
        self._withdrawn = False
        self._failed: dict[str, FairleadError] = {}
        """Why the kernel rejected a route, by its prefix."""
        self._problem = ""
        self._installed_s: dict[str, float] = {}
        """Since when each address has a route."""
        self.announced_elsewhere: AnnouncedElsewhere | None = None
        """None: an address that another method announces from now on is withdrawn at once."""
        self._status_changed: Callable[[], None] = lambda: None
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        """Connect to the kernel, adopt its routes, and remove the BIRD of an earlier
        configuration."""
        self._kernel = TableRoutes(PROTOCOLS[self._role])
        self._adopted = set(await asyncio.to_thread(self._kernel.routes))
        await remove_bird(self._section, self._role)

    async def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
        self._kernel = None

    def render(self, intents: Mapping[ServiceKey, Announced]) -> Mapping[ServiceKey, BgpSpec]:
        """See `spec.specs_of`."""
        return spec.specs_of(intents)

    def diff(
        self, desired: Mapping[ServiceKey, BgpSpec], actual: Mapping[ServiceKey, Actual]
    ) -> Sequence[Change]:
        """See `spec.diff`."""
        return spec.diff(desired, actual)

    withdraws_first = True

    def withdrawals(
        self, intents: Mapping[ServiceKey, Announced], actual: Mapping[ServiceKey, Actual]
    ) -> Sequence[Change]:
        """See `spec.withdrawals`."""
        return spec.withdrawals(intents, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Actual]:
        """Return what this process has announced. With None, also repair the kernel's routes."""
        if keys is None:
            await self.withdraw_leftovers()
        known = self._services.keys() if keys is None else self._services.keys() & set(keys)
        # A route has no grace time: the attributes of the announcement are those of the daemon.
        return {
            key: Actual(
                self._services[key],
                grace_ended=True,
                to_report=self._failure(key) is not None,
                moved=spec.moved(self._services[key], self.announced_elsewhere),
            )
            for key in known
        }

    async def withdraw_leftovers(self) -> None:
        """Make the kernel's routes equal to the desired ones, except those of an earlier process
        about whose Services nothing is decided."""
        async with self._changing:
            await self._install()

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Carry out the changes. The outcome of a Service contains the error of its route, if the
        kernel rejects it."""
        async with self._changing:
            outcomes: dict[ServiceKey, Outcome] = {}
            before = dict(self._services)
            for change in changes:
                match change:
                    case SetRoutes(service, contributions) if contributions:
                        self._services[service] = contributions
                    case SetRoutes(service) | Withdraw(service):
                        self._services.pop(service, None)
                    case Report(service, problem) if problem:
                        present = service in self._services
                        outcomes[service] = Outcome(
                            "refused", problem, in_part=present, coarse=True
                        )
            addresses = {each.address for some in self._services.values() for each in some}
            now = timestamp(datetime.now(UTC))
            self._since = {each: self._since.get(each, now) for each in addresses}
            try:
                await self._install()
            except FairleadError:
                self._services = before  # the next attempt has to find the same changes
                raise
            self._status_changed()
            now_s = asyncio.get_running_loop().time()
            self._installed_s = {each: self._installed_s.get(each, now_s) for each in addresses}
            for change in changes:
                if not isinstance(change, Withdraw) and change.kept:
                    waiting = method_change.waiting(change.kept, "BGP", "layer 2")
                    outcomes[change.service] = waiting
            failures = {each.service: self._failure(each.service) for each in changes}
            return outcomes | {
                key: Outcome(
                    "refused" if isinstance(error, Refused) else "unavailable",
                    str(error),
                    in_part=True,
                    coarse=True,
                )
                for key, error in failures.items()
                if error is not None and key not in outcomes
            }

    def announces(self, address: str) -> bool:
        """Return whether the routing daemon has had the time to announce a route to this
        address."""
        installed_s = self._installed_s.get(address)
        if self._withdrawn or installed_s is None:
            return False
        if asyncio.get_running_loop().time() - installed_s < SCAN_S:
            return False
        return not self._failed or not any(
            each.address == address and each.prefix in self._failed
            for some in self._services.values()
            for each in some
        )

    def _failure(self, key: ServiceKey) -> FairleadError | None:
        """Return why a route of the Service is not in the kernel; None if all are."""
        prefixes = (each.prefix for each in self._services.get(key, ()))
        return next((self._failed[each] for each in prefixes if each in self._failed), None)

    async def _install(self) -> None:
        """Make the kernel's routes equal to the desired ones: first add, then delete."""
        kernel = self._kernel
        if kernel is None:
            return
        wanted = {
            TableRoute(prefix, self._section.route_table)
            for prefix in spec.routes_of({} if self._withdrawn else self._services)
        }
        try:
            present = await asyncio.to_thread(kernel.routes)
            self._failed = await asyncio.to_thread(_add, kernel, wanted - present)
            prefixes = {each.prefix for each in wanted}
            left = {each for each in self._adopted & present if each.prefix not in prefixes}
            if self._withdrawn:
                left = set()
            self._adopted = _undecided(left, self._undecided())
            await asyncio.to_thread(kernel.delete, present - wanted - self._adopted)
        except FairleadError as error:
            self._problem = str(error)
            raise
        self._problem = "; ".join(sorted({str(each) for each in self._failed.values()})[:_SHOWN])

    async def withdraw(self) -> None:
        """Withdraw all routes."""
        self._withdrawn = True
        await self.withdraw_leftovers()
        self._status_changed()

    async def stay(self) -> None:
        """Undo `withdraw`."""
        self._withdrawn = False
        await self.withdraw_leftovers()
        self._status_changed()

    async def remove(self) -> Sequence[str]:
        """Delete all routes of this role, also those of other processes."""
        async with self._changing:
            self._services = {}
            return await remove_routes(self._role)

    def watch_status(self, changed: Callable[[], None]) -> None:
        self._status_changed = changed

    def status(self) -> BgpState:
        """For `/state`. May be called from any thread."""
        services: dict[str, set[str]] = {}
        with suppress(RuntimeError):  # the dictionary changed meanwhile
            for key, contributions in () if self._withdrawn else self._services.items():
                for each in contributions:
                    services.setdefault(each.address, set()).add(str(key))
        return BgpState(
            "routes",
            tuple(
                AnnouncedAddress(
                    address, tuple(sorted(services[address])), self._since.get(address, "")
                )
                for address in sorted(services)
            ),
            problem=self._problem,
        )


def _undecided(
    routes: Collection[TableRoute], undecided: Collection[str] | None
) -> set[TableRoute]:
    """Return the routes that may be those of Services about which nothing is decided."""
    if undecided is None:
        return set(routes)
    addresses = [ip_address(each) for each in undecided]
    return {
        route for route in routes if any(each in ip_network(route.prefix) for each in addresses)
    }


def _add(kernel: TableRoutes, routes: Collection[TableRoute]) -> dict[str, FairleadError]:
    """Add each route. Return why the kernel rejected a route, by its prefix."""
    failed: dict[str, FairleadError] = {}
    for route in routes:
        try:
            kernel.add([route])
        except FairleadError as error:
            failed[route.prefix] = error
    return failed
