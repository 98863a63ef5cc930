"""The map of remembered clients that each Service with session affinity uses.

In: a Service; the elements in the kernel. Out: the number of the Service's map. Invariants: a
Service keeps its number while session affinity is in force for it, also across restarts, because
the elements in the kernel contain the number; two Services share a number only if no number is
free. The methods may be called from several threads, because the elements of large Services are
computed in separate threads."""

from collections.abc import Iterable, Mapping
from threading import Lock

from fairlead.drivers.nodeproxy.elements import Spec, affinity_map_of
from fairlead.drivers.nodeproxy.skeleton import AFFINITY_MAPS
from fairlead.model import ServiceKey


class AffinityMaps:
    """The numbers in use."""

    def __init__(self) -> None:
        self._numbers: dict[ServiceKey, int] = {}
        self._users = [0] * AFFINITY_MAPS
        """The number of Services that use each number."""
        self._choosing = Lock()

    def __contains__(self, service: ServiceKey) -> bool:
        return service in self._numbers

    def of(self, service: ServiceKey) -> int:
        """Return the number of this Service. A Service without one gets a number that the fewest
        Services use."""
        with self._choosing:
            if service not in self._numbers:
                self._take(service, self._users.index(min(self._users)))
            return self._numbers[service]

    def adopt(self, specs: Mapping[ServiceKey, Spec]) -> None:
        """Read the numbers from the elements in the kernel."""
        for service, spec in specs.items():
            number = affinity_map_of(spec)
            if (
                number is not None
                and number < AFFINITY_MAPS
                and self._numbers.get(service) != number
            ):
                self.release([service])
                self._take(service, number)

    def release(self, services: Iterable[ServiceKey]) -> None:
        """Release the numbers of these Services, for which session affinity is no longer in
        force."""
        for service in services:
            with self._choosing:
                if (number := self._numbers.pop(service, None)) is not None:
                    self._users[number] -= 1

    def _take(self, service: ServiceKey, number: int) -> None:
        self._numbers[service] = number
        self._users[number] += 1
