"""Counts failed attempts to create or repair the load balancer of each Service, so that Fairlead
does not retry forever in a broken cloud.

In: attempts and their results. Out: the number of attempts, as a field of `Found`; or the error
with which Octavia rejected the same creation before. The limit exists because a load balancer that
Octavia could not create or repair may leave objects that count against a project's quota.
Invariant: the counts are in memory only; after a restart the first attempt counts as the first."""

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
    """A rejected creation of a load balancer."""

    body: object
    error: Refused
    at_s: float


class Attempts:
    """The attempts for all Services. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._made: dict[ServiceKey, _Made] = {}
        """Repairs and failed creations since the load balancer was last as planned."""
        self._refusals: dict[ServiceKey, _Refusal] = {}

    def with_number(self, key: ServiceKey, found: Found) -> Found:
        """Return `found` with the number of attempts. After a rest of GIVEN_UP_RETRY_S the number
        allows one more attempt."""
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
        """Reset the count: the load balancer is as planned, or deleted."""
        self._made.pop(key, None)

    def refused(self, creation: Call, error: Refused) -> None:
        self._refusals[creation.service] = _Refusal(creation.body, error, self._clock())

    def stop_if_refused(self, creation: Call) -> None:
        """Raise the earlier Refused if Octavia has rejected the same creation within
        GIVEN_UP_RETRY_S. Each rejected creation leaves a Neutron port behind with provider ovn."""
        no = self._refusals.pop(creation.service, None)
        if (
            no is not None
            and no.body == creation.body
            and self._clock() - no.at_s < GIVEN_UP_RETRY_S
        ):
            self._refusals[creation.service] = no
            raise no.error
