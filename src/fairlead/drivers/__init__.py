"""The interfaces `Driver` and `Component`.

A driver makes one kind of thing equal to the plan. It renders intents (a `LoadBalancer`, a
`NodeService`) into its own specs, compares the specs with what exists, and applies the difference.
`render` and `diff` are pure; `read` and `apply` are the only I/O. The interface suits a kernel,
where all dirty Services are changed in one transaction, and a cloud API, where each write locks one
load balancer for seconds: the driver limits how many Services one `apply` carries (`batch`), and
the loop (`reconcile.py`) how many calls of `apply` run at once. Drivers form a chain, in the order
in which things must be created; the loop deletes in the reverse order.

A component is a part of a role with its own lifecycle. A role is a list of components, and most of
them are drivers. `roles.components` opens them in the order of the list and closes them in the
reverse order."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fairlead.model import Finding, Outcome, ServiceKey

if TYPE_CHECKING:  # the helper processes of a role need none of these imports
    from prometheus_client.registry import Collector

    from fairlead.drivers.sysctl_requirement import SysctlRequirement
    from fairlead.role_state import Part

Requeue = Callable[[Collection[ServiceKey]], None]
"""Called by a driver to have these Services reconciled again although nothing in the cluster has
changed: a node became reachable, memory was released, or a process ended. A role passes
`State.subscribers.mark`, so that the next pass of the loop includes the Services. During a pass, a
driver returns an Outcome instead."""


def no_requeue(_: Collection[ServiceKey]) -> None:
    """The `Requeue` of a driver without a loop."""


class Component:
    """A part of a role with its own lifecycle. A subclass overrides the methods that it needs.

    `close` and `remove` must work whatever happened in `open`, which may have failed half way or
    been cancelled."""

    name = ""
    """Name in logs, and of the component's task."""
    problem_class = ""
    """The class of Services that a finding which blocks Ready concerns; empty: all Services."""
    batch = 0
    """Drivers only: see `Driver.batch`."""

    @property
    def read_incomplete(self) -> bool:
        """Drivers only: see `Driver.read_incomplete`."""
        return False

    async def open(self) -> None:
        """Prepare the component, or wait until the role may continue. The components before it in
        the list are open and running; the components after it are not open yet."""

    async def run(self) -> None:
        """Do the component's own work from the end of `open` until the role ends and cancels it.
        The method may return early. An error ends the role."""

    async def close(self) -> None:
        """Release all resources of the process. The data plane stays in place."""

    async def remove(self) -> Sequence[str]:
        """Remove everything that components of this type have created on the host, including what
        other processes left. Return descriptions of what was removed. Needs no `open`, and leaves
        nothing to close."""
        return ()

    def status(self) -> "Part | None":
        """Return the part of `/state` that describes the component, which appears in the field that
        `role_state.PART_FIELDS` names; None adds nothing. Called in a thread while the component is
        open."""
        return None

    def findings(self) -> Sequence[Finding]:
        """Return what is wrong with the component's part of the host now, for `/state`. A finding
        that blocks Ready means that the role does not do its work now, so it is not ready. Called
        often, and from any thread, while the component is open."""
        return ()

    def collectors(self) -> "Sequence[Collector]":
        """Return the collectors of its metrics. Called once, when the component is open."""
        return ()

    async def requirements(self) -> "Collection[SysctlRequirement]":
        """Return what the component currently requires of its host. Called while it is open."""
        return ()


class Key(Protocol):
    """The key of a loop: mostly a ServiceKey; in the loop of pools, the name of a pool."""

    def __hash__(self) -> int: ...

    def __lt__(self, other: Any, /) -> bool: ...


KeyT = TypeVar("KeyT", bound=Key)
KeyT_co = TypeVar("KeyT_co", bound=Key, covariant=True)


class Change(Protocol[KeyT_co]):
    """One step of a driver. `str(change)` is the command that it stands for."""

    @property
    def service(self) -> KeyT_co:
        """The key in the loop, mostly a Service, to which a failure of the change is attributed."""


IntentT = TypeVar("IntentT", contravariant=True)
SpecT = TypeVar("SpecT")
ActualT = TypeVar("ActualT")
ChangeT = TypeVar("ChangeT", bound=Change[Any])


class Driver(Protocol[KeyT, IntentT, SpecT, ActualT, ChangeT]):
    """A driver makes one kind of thing equal to the plan. Every method may be repeated at any
    time."""

    @property
    def name(self) -> str:
        """Name in logs and metrics."""

    @property
    def batch(self) -> int:
        """Maximum number of Services in one `apply`. 0: all dirty Services, in one transaction."""

    @property
    def read_incomplete(self) -> bool:
        """Whether the last full `read` was incomplete, because a part could not be read. The loop
        then soon reads everything again."""

    def render(self, intents: Mapping[KeyT, IntentT]) -> Mapping[KeyT, SpecT]:
        """Return the desired state in the driver's own terms. Pure. A Service that needs nothing
        may be left out."""

    def diff(
        self, desired: Mapping[KeyT, SpecT], actual: Mapping[KeyT, ActualT]
    ) -> Sequence[ChangeT]:
        """Return the ordered steps from `actual` to `desired`. Pure. A key that is only in `actual`
        is to be removed. There is no step where both are equal."""

    async def read(self, keys: Collection[KeyT] | None) -> Mapping[KeyT, ActualT]:
        """Return what exists for these keys; with None, everything that carries the mark of
        Fairlead.

        With None, `read` queries the real state and refreshes the memory of the driver; the loop
        does so at its start and at every audit. With keys, the driver may answer from memory, if
        that is cheaper. `read` may run concurrently with `apply`.

        Raise Unavailable or Refused only if nothing can be read: with keys, all Services of the
        pass have failed then, also Services of other drivers in the chain; with None, the loop
        starts or audits later. What exists without a Service has a key that no Service has, such
        as `ServiceKey("", "")`."""

    async def apply(self, changes: Sequence[ChangeT]) -> Mapping[KeyT, Outcome]:
        """Carry out the changes. Return the Outcomes of Services that are not done, or about which
        there is more to report: a Service that cannot be served does not hold up the others. A
        Service without a change may get an Outcome too, to be reconciled again.

        Raise Refused or Unavailable where a failure cannot be attributed to single Services. The
        loop then halves the batch until the failing Service is alone in it."""
