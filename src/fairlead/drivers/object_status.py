"""What the drivers of the status of an object of group `fairlead.io` have in common.

In: the desired state of each object by its name. Out: the writes that make objects equal to it; an
object that is gone needs none. Invariant: an object that cannot be written does not delay the
others."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from fairlead.drivers import Component
from fairlead.drivers.mutation_cache import MutationCache
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.kube.objects import ObjectT
from fairlead.model import Outcome
from fairlead.state import State

DesiredT = TypeVar("DesiredT")


class ShowStatus(NamedTuple, Generic[DesiredT]):
    """Write the status of an object. `service` is the name of the object, which is the key in its
    loop. `kind`: of the object."""

    service: str
    wanted: DesiredT
    kind: str

    def __str__(self) -> str:
        return f"update the status of {self.kind} {self.service}"


class ObjectStatusDriver(Component, Generic[ObjectT, DesiredT]):
    """A driver of the status of all objects of one kind. `fence`: raises an error unless this
    process may write."""

    kind = ""

    def __init__(
        self, client: Client, state: State, recorder: EventRecorder, fence: Callable[[], None]
    ) -> None:
        self.answers = MutationCache[str, ObjectT]()
        self._client = client
        self._state = state
        self._recorder = recorder
        self._fence = fence

    @abstractmethod
    def watched(self) -> Mapping[str, ObjectT]:
        """Return the objects as the watch shows them, by name."""

    @abstractmethod
    def differs(self, found: ObjectT, wanted: DesiredT) -> bool:
        """Return whether the object has to be written. Pure."""

    @abstractmethod
    def writes(self) -> Sequence[Callable[[ObjectT, DesiredT], Awaitable[None]]]:
        """Return the functions that write parts of an object. Each gets the answer to the previous
        write, and does nothing where its part is as desired."""

    def render(self, intents: Mapping[str, DesiredT]) -> Mapping[str, DesiredT]:
        return intents

    def diff(
        self, desired: Mapping[str, DesiredT], actual: Mapping[str, ObjectT]
    ) -> Sequence[ShowStatus[DesiredT]]:
        """Return a step for each object that exists and differs."""
        return [
            ShowStatus(name, wanted, self.kind)
            for name, wanted in desired.items()
            if (found := actual.get(name)) is not None and self.differs(found, wanted)
        ]

    async def read(self, keys: Collection[str] | None) -> Mapping[str, ObjectT]:
        """Return the objects as the watch or the last write of this process shows them."""
        watched = self.watched()
        if keys is None:
            self.answers.forget_all()
            return dict(watched)
        for gone in set(keys) - watched.keys():
            self.answers.forget(gone)
        return {name: self.answers.of(name, watched[name]) for name in keys if name in watched}

    async def apply(self, changes: Sequence[ShowStatus[DesiredT]]) -> Mapping[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for name, wanted, _ in changes:
            try:
                for write in self.writes():
                    if (found := (await self.read([name])).get(name)) is not None:
                        await write(found, wanted)
            except NotFound:
                self.answers.forget(name)  # the object was deleted in the meantime
            except Conflict as problem:
                outcomes[name] = Outcome("waiting", str(problem))  # the watch will show it
            except FairleadError as problem:
                # Refused counts as unavailable too: the permission to write may be granted later.
                again_s = problem.retry_after_s if isinstance(problem, Unavailable) else 0.0
                outcomes[name] = Outcome("unavailable", str(problem), again_s=again_s)
        return outcomes
