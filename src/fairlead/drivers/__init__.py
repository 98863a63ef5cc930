"""What a driver is: the four methods by which the loop makes one kind of thing be as planned.

A driver turns Intents (a `LoadBalancer`, a `NodeService`) into its own Specs, compares them with
what is there and applies the difference. `render` and `diff` are pure; `read` and `apply` are the
only I/O. The same shape serves a kernel, where all dirty Services go in one transaction, and a
cloud API, where each write locks one load balancer for seconds: the loop (`reconcile.py`) is told
how many Services one `apply` may carry, and how many `apply`s may run at once. Drivers stand in a
chain, in the order in which things must come to be; the loop takes things away in the opposite
order."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from fairlead.model import Outcome, ServiceKey


class Change(Protocol):
    """One step of a driver. `str(change)` is the command it stands for."""

    @property
    def service(self) -> ServiceKey:
        """The Service it is for: a failure is reported there."""


IntentT = TypeVar("IntentT", contravariant=True)
SpecT = TypeVar("SpecT")
ActualT = TypeVar("ActualT")
ChangeT = TypeVar("ChangeT", bound=Change)


class Driver(Protocol[IntentT, SpecT, ActualT, ChangeT]):
    """One kind of thing that serves Services. Every method may be repeated at any time."""

    @property
    def name(self) -> str:
        """For logs and metrics."""

    def render(self, intents: Mapping[ServiceKey, IntentT]) -> Mapping[ServiceKey, SpecT]:
        """What should be, in the driver's own terms. Pure. A Service that needs nothing may be left
        out."""

    def diff(
        self, desired: Mapping[ServiceKey, SpecT], actual: Mapping[ServiceKey, ActualT]
    ) -> Sequence[ChangeT]:
        """The steps from `actual` to `desired`, in order. Pure. What is in `actual` alone is to go.
        Equal: no step."""

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, ActualT]:
        """What is there now, of these Services, or (None) of all that carry our mark. None reads
        the thing itself, and refreshes what the driver knows; the loop does so at its start and at
        every audit. With keys a driver may answer from what it knows, if that is cheaper. May run
        beside `apply`."""

    async def apply(self, changes: Sequence[ChangeT]) -> Mapping[ServiceKey, Outcome]:
        """Carry the changes out. A Service that cannot be served gets an Outcome of its own, the
        others go on; those that are done need none. One that no Change is for may get one too, to
        be looked at again. Raises Refused or Unavailable where nothing can be said of single
        Services: the loop then halves the batch until the one at fault stands alone."""
