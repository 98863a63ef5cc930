"""Which of the maps of remembered clients each Service with session affinity uses.

In: a Service; what the kernel holds. Out: a number. Invariants: a Service keeps its number while it has session affinity in
force, over restarts too, because the elements in the kernel tell the number; two Services have the same number only if none is
free. It may be asked in threads: large Services are rendered beside the others.
"""

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
        """How many Services have each number."""
        self._choosing = Lock()

    def __contains__(self, service: ServiceKey) -> bool:
        return service in self._numbers

    def of(self, service: ServiceKey) -> int:
        """The number of this Service: the one that it has, else one that the fewest Services have."""
        with self._choosing:
            if service not in self._numbers:
                self._take(service, self._users.index(min(self._users)))
            return self._numbers[service]

    def adopt(self, specs: Mapping[ServiceKey, Spec]) -> None:
        """Take the numbers from what the kernel holds."""
        for service, spec in specs.items():
            number = affinity_map_of(spec)
            if number is not None and number < AFFINITY_MAPS and self._numbers.get(service) != number:
                self.release([service])
                self._take(service, number)

    def release(self, services: Iterable[ServiceKey]) -> None:
        """These have no session affinity in force any more."""
        for service in services:
            with self._choosing:
                if (number := self._numbers.pop(service, None)) is not None:
                    self._users[number] -= 1

    def _take(self, service: ServiceKey, number: int) -> None:
        self._numbers[service] = number
        self._users[number] += 1
