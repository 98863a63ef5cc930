"""How often it was tried in vain to have each Service's load balancer, so that a broken cloud is
left alone at last.

In: what was tried, and what came of it. Out: how often, as `Found` tells it; or the refusal that a
creation has met before. A load balancer that Octavia could not make or heal may leave things behind
which count against a project's quota. Invariant: in memory only; after a restart it is tried as if
for the first time."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from fairlead.drivers.octavia.balancers import Found
from fairlead.drivers.octavia.blocked import GIVEN_UP_RETRY_S
from fairlead.drivers.octavia.changes import Call
from fairlead.drivers.octavia.diff import MAX_ATTEMPTS
from fairlead.errors import Refused
from fairlead.model import ServiceKey


class _Made(NamedTuple):
    times: int
    last_s: float


class _Refusal(NamedTuple):
    """A load balancer that Octavia refused to make."""

    body: object
    said: Refused
    at_s: float


class Attempts:
    """`clock`: seconds, that only go on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._made: dict[ServiceKey, _Made] = {}
        """Repairs, and creations that have failed, since it last was as wanted."""
        self._refusals: dict[ServiceKey, _Refusal] = {}

    def with_number(self, key: ServiceKey, found: Found) -> Found:
        """What was found, with the number of attempts."""
        made = self._made.get(key)
        if made is None:
            return found
        rested = self._clock() - made.last_s >= GIVEN_UP_RETRY_S
        return msgspec.structs.replace(
            found, attempts=min(made.times, MAX_ATTEMPTS - 1) if rested else made.times
        )

    def count(self, key: ServiceKey) -> None:
        so_far = self._made.get(key, _Made(0, 0.0)).times
        self._made[key] = _Made(so_far + 1, self._clock())

    def forget(self, key: ServiceKey) -> None:
        """It is as wanted, or gone."""
        self._made.pop(key, None)

    def refused(self, creation: Call, said: Refused) -> None:
        self._refusals[creation.service] = _Refusal(creation.body, said, self._clock())

    def stop_if_refused(self, creation: Call) -> None:
        """The same is not asked for again and again: each time provider ovn leaves a port behind.
        Raises Refused."""
        no = self._refusals.pop(creation.service, None)
        if (
            no is not None
            and no.body == creation.body
            and self._clock() - no.at_s < GIVEN_UP_RETRY_S
        ):
            self._refusals[creation.service] = no
            raise no.said
