"""Two ways to change the backends of a load balancer of OVN, for `bench.ovn`: an EndpointSlice, of
which the controller learns, and one command of ovn-nbctl, as an operator would run it.

In: addresses of pods. Out: when the change was requested, and when every chassis has it. The second
way is a lower bound: no Kubernetes API and no watch. Its list of backends is plain, each pod
once."""

import resource
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bench.ovn_figures import FAIRLEAD, PLAIN, WRITER, Usage
from bench.ovn_stand import CLUSTER, NAMESPACE, Stand
from bench.ovn_watched import Watched, watched

from fairlead.drivers.ovn.driver import INCREMENT
from fairlead.drivers.ovn.northbound import BALANCERS, GLOBAL
from fairlead.drivers.ovn.spec import Frontend, row_name
from fairlead.lab.ovn.layout import ROUTER
from fairlead.lab.ovn.site import POD_PORT
from fairlead.model import ServiceKey
from fairlead.net.ovsdb import Rows, Table

SEQUENCE = Table(("nb_cfg", "hv_cfg"))


class Way(ABC):
    """A way to change the backends of one load balancer, which is at `address`, port 80."""

    name: str

    def __init__(self, stand: Stand, address: str) -> None:
        self.stand, self.address = stand, address

    @abstractmethod
    async def change(self, pods: Sequence[str]) -> float:
        """Change the backends to these addresses of pods. Return the time of the request."""

    @abstractmethod
    async def in_database(self) -> float | None:
        """Return when the northbound database had the last change, if that is known."""

    @abstractmethod
    async def installed(self) -> float:
        """Return when every chassis had installed the last change."""

    def usage(self) -> Usage:
        """Return the CPU seconds of each program so far."""
        return self.stand.usage()


class Controlled(Way):
    """A Service, whose EndpointSlice is written."""

    name = FAIRLEAD

    def __init__(self, stand: Stand, address: str, service: str, seen: Watched) -> None:
        super().__init__(stand, address)
        self._service, self._seen = service, seen
        self._backends: frozenset[str] = frozenset()

    async def change(self, pods: Sequence[str]) -> float:
        self._backends = frozenset(f"{each}:{POD_PORT}" for each in pods)
        return await self.stand.set_backends(self._service, pods)

    async def in_database(self) -> float | None:
        return await self._seen.until(
            lambda: self._shows(self._seen.north.rows(BALANCERS)), "a change was in the database"
        )

    async def installed(self) -> float:
        """A chassis reports only a sequence number. The driver increments it for new rows, so it is
        incremented here, in a transaction that follows the driver's own one."""
        await self.in_database()
        await self._seen.north.transact([INCREMENT])
        (row,) = self._seen.north.rows(GLOBAL).values()
        number = row.integer("nb_cfg")
        return await self._seen.until(
            lambda: all(
                row.integer("hv_cfg") >= number for row in self._seen.north.rows(GLOBAL).values()
            ),
            "every chassis had a change",
        )

    def _shows(self, rows: Rows) -> bool:
        lists = (row.map("vips").get(f"{self.address}:80", "") for row in rows.values())
        return any(frozenset(each.split(",")) == self._backends for each in lists)


class Commanded(Way):
    """A row of an operator, changed by `ovn-nbctl --wait=hv`."""

    name = PLAIN

    def __init__(self, stand: Stand, address: str) -> None:
        super().__init__(stand, address)
        self._row = f"plain-{address}"
        self._ended_s = 0.0

    async def create(self) -> None:
        """Create the row, without backends."""
        control = self.stand.site.central.control
        await control("nb", "create", "load_balancer", f"name={self._row}", "protocol=tcp")
        await control("nb", "lr-lb-add", ROUTER, self._row)

    async def change(self, pods: Sequence[str]) -> float:
        backends = ",".join(f"{each}:{POD_PORT}" for each in pods)
        value = f'vips:"{self.address}:80"="{backends}"'
        begun_s = time.monotonic()
        command = ("--wait=hv", "set", "load_balancer", self._row, value)
        await self.stand.site.central.control("nb", *command)
        self._ended_s = time.monotonic()
        return begun_s

    async def in_database(self) -> float | None:
        return None

    async def installed(self) -> float:
        return self._ended_s

    def usage(self) -> Usage:
        """The writer is ovn-nbctl instead of the controller, which has nothing to do."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {**self.stand.usage(), WRITER: used.ru_utime + used.ru_stime}


@asynccontextmanager
async def controlled(stand: Stand, service: str, pods: Sequence[str]) -> AsyncIterator[Controlled]:
    """Create a Service with these pods, and watch its row during the block."""
    address = await stand.add_service(service, pods)
    key = ServiceKey(NAMESPACE, service)
    named = (("name", "==", row_name(CLUSTER, key, Frontend(address, 80, "TCP"))),)
    vips = Table(("vips",), named)
    north = {BALANCERS: vips, GLOBAL: SEQUENCE}
    async with watched(stand.site.central, north) as seen:
        yield Controlled(stand, address, service, seen)


async def commanded(stand: Stand, address: str) -> Commanded:
    """Create a row of an operator at this address."""
    made = Commanded(stand, address)
    await made.create()
    return made
