"""What a driver is: the four methods by which the loop makes one kind of thing be as planned.

A driver turns Intents (a `LoadBalancer`, a `NodeService`, a Service's wanted status) into its own Specs, compares them with
what is there and applies the difference. `render` and `diff` are pure; `read` and `apply` are the only I/O. The same shape
serves a kernel, where all dirty Services go in one transaction, and a cloud API, where each write locks one load balancer
for seconds: the loop (`reconcile.py`) decides by `parallel` how many Services one `apply` carries.
"""

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

    @property
    def parallel(self) -> int:
        """0: one `apply` carries every dirty Service (one transaction). n: up to n `apply`s run at once, one Service each."""

    def render(self, intents: Mapping[ServiceKey, IntentT]) -> Mapping[ServiceKey, SpecT]:
        """What should be, in the driver's own terms. Pure. A Service that needs nothing may be left out."""

    def diff(self, desired: Mapping[ServiceKey, SpecT], actual: Mapping[ServiceKey, ActualT]) -> Sequence[ChangeT]:
        """The steps from `actual` to `desired`, in order. Pure. What is in `actual` alone is to go. Equal: no step."""

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, ActualT]:
        """What is there now, of these Services, or (None) of all that carry our mark. None reads the thing itself;
        with keys a driver may answer from what it knows it wrote, if nobody else can have changed it unnoticed."""

    async def apply(self, changes: Sequence[ChangeT]) -> Mapping[ServiceKey, Outcome]:
        """Carry the changes out: all, or raise. Outcomes only for Services that have more to say than `done`.
        Raises Refused or Unavailable; the loop then tries the Services one by one, so one bad one fails alone."""
