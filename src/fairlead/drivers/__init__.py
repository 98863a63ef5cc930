"""What a driver is: the four methods by which the loop makes one kind of thing be as planned. What
a component is: a part of a role that has a life of its own.

A driver turns Intents (a `LoadBalancer`, a `NodeService`) into its own Specs, compares them with
what is there and applies the difference. `render` and `diff` are pure; `read` and `apply` are the
only I/O. The same shape serves a kernel, where all dirty Services go in one transaction, and a
cloud API, where each write locks one load balancer for seconds: a driver says how many Services one
`apply` may carry (`batch`), the loop (`reconcile.py`) how many `apply`s may run at once. Drivers stand in a
chain, in the order in which things must come to be; the loop takes things away in the opposite
order.

A role is a list of components, most of which are drivers too. `roles.components` opens them in the
order of the list and closes them in the opposite order."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fairlead.model import Outcome, ServiceKey

if TYPE_CHECKING:  # the processes beside a role load none of these
    from prometheus_client.registry import Collector

    from fairlead.drivers.need import Need
    from fairlead.role_state import Part

LookAgain = Callable[[Collection[ServiceKey]], None]
"""How a driver says that it has to see these Services again, although nothing in the cluster has
changed: a node came within reach, memory was released, a process has died. A role passes
`State.subscribers.mark`, and the next pass of the loop carries the Services. What is known during a
pass is an Outcome instead."""


def never_again(_: Collection[ServiceKey]) -> None:
    """The `LookAgain` of a driver without a loop."""


class Component:
    """A part of a role with a life of its own. A subclass overrides what it has of this.

    `close` and `remove` must work whatever has become of `open`: it may have failed half way, or
    have been cancelled."""

    name = ""
    """For logs and the names of tasks."""
    batch = 0
    """Of a driver: see `Driver.batch`."""

    @property
    def unread(self) -> bool:
        """Of a driver: see `Driver.unread`."""
        return False

    async def open(self) -> None:
        """Get ready, or wait until the role may go on. The components before this one are open and
        run meanwhile; the components after it are not open yet."""

    async def run(self) -> None:
        """The component's own work, from when it is open until the role ends and cancels it. It may
        return early. An error ends the role."""

    async def close(self) -> None:
        """Let go of everything; what serves packets goes on serving."""

    async def remove(self) -> Sequence[str]:
        """Take away everything of this kind that is here, whichever process left it. Returns what
        there was, in words. Needs no `open`, and leaves nothing to close."""
        return ()

    def status(self) -> "Part | None":
        """What `/state` shows of it, in the field that `role_state.PART_FIELDS` names. None:
        nothing. Called in a thread while the component is open."""
        return None

    def collectors(self) -> "Sequence[Collector]":
        """Its metrics. Asked for once, when the component is open."""
        return ()

    async def requirements(self) -> "Collection[Need]":
        """What the component needs of its host at present. Called while it is open."""
        return ()


class Key(Protocol):
    """What a loop is keyed by: a ServiceKey mostly, or the name of a pool."""

    def __hash__(self) -> int: ...

    def __lt__(self, other: Any, /) -> bool: ...


KeyT = TypeVar("KeyT", bound=Key)
KeyT_co = TypeVar("KeyT_co", bound=Key, covariant=True)


class Change(Protocol[KeyT_co]):
    """One step of a driver. `str(change)` is the command it stands for."""

    @property
    def service(self) -> KeyT_co:
        """The Service it is for, or whatever the loop is keyed by: a failure is reported there."""


IntentT = TypeVar("IntentT", contravariant=True)
SpecT = TypeVar("SpecT")
ActualT = TypeVar("ActualT")
ChangeT = TypeVar("ChangeT", bound=Change[Any])


class Driver(Protocol[KeyT, IntentT, SpecT, ActualT, ChangeT]):
    """One kind of thing that serves Services. Every method may be repeated at any time."""

    @property
    def name(self) -> str:
        """For logs and metrics."""

    @property
    def batch(self) -> int:
        """How many Services one `apply` may carry. 0: all that are dirty, in one transaction."""

    @property
    def unread(self) -> bool:
        """Whether the last whole `read` could not read everything and went on without: the loop
        reads everything again soon."""

    def render(self, intents: Mapping[KeyT, IntentT]) -> Mapping[KeyT, SpecT]:
        """What should be, in the driver's own terms. Pure. A Service that needs nothing may be left
        out."""

    def diff(
        self, desired: Mapping[KeyT, SpecT], actual: Mapping[KeyT, ActualT]
    ) -> Sequence[ChangeT]:
        """The steps from `actual` to `desired`, in order. Pure. What is in `actual` alone is to go.
        Equal: no step."""

    async def read(self, keys: Collection[KeyT] | None) -> Mapping[KeyT, ActualT]:
        """What is there now, of these Services, or (None) of all that carry our mark. None reads
        the thing itself, and refreshes what the driver knows; the loop does so at its start and at
        every audit. With keys a driver may answer from what it knows, if that is cheaper. May run
        beside `apply`."""

    async def apply(self, changes: Sequence[ChangeT]) -> Mapping[KeyT, Outcome]:
        """Carry the changes out. A Service that cannot be served gets an Outcome of its own, the
        others go on; those that are done need none. One that no Change is for may get one too, to
        be looked at again. Raises Refused or Unavailable where nothing can be said of single
        Services: the loop then halves the batch until the one at fault stands alone."""
