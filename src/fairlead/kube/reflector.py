"""Keep one collection of the API server reflected here, and tell what changes: list and watch that
lose nothing.

In: a client, a resource. Out: change sets, each a mapping of key to the object as it is now (None:
deleted); the first is the initial list, whole. `keep` may shrink or drop objects before they are
stored and compared. Invariants: every object given out was one the server had; once the server is
quiet, `objects` equals what it has; a deletion that fell into a gap is found, for a new list is
compared with the old state and only the difference is told; no failure ends it, and without
progress it asks ever more rarely. A server whose past has become another one (its etcd was restored
from a backup: versions go back, and a watch from one that it has not reached yet brings nothing,
and no error) is found out: after each loss its version is asked for, and after it was away there is
a new list. Follows client-go's reflector: streamed lists (KEP-3157) where the server has them, else
pages; bookmarks; resumption."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Generic

import structlog

from fairlead.backoff import Backoff
from fairlead.errors import FairleadError, Refused
from fairlead.kube.answers import (
    Expired,
    NoConnection,
    NotFound,
    RefusedByServer,
    ServerUnavailable,
    Unauthenticated,
)
from fairlead.kube.client import PAGE_SIZE, Client, decoder
from fairlead.kube.mirror import Mirror
from fairlead.kube.objects import ObjectKey, ObjectT, Resource
from fairlead.kube.watching import Bookmark, Item, Unreadable, is_older, read_line

log = structlog.get_logger()

WATCH_FROM_S, WATCH_TO_S = 240, 300
IDLE_S = 150.0
"""An open watch that brings nothing for this time is dead: kube-apiserver sends a bookmark about
once a minute."""
STREAMED_LIST_S = 60.0
"""A server that does not know streamed lists may take the request for a plain watch and never say
that it is complete."""
RELIST_CALM_S = 60.0
"""Lists are dear to the server: the back-off between two is forgotten only after so long without
one."""
STEADY_S = 5.0
"""A watch that lasted so long was a good one, even if nothing happened."""
UNKNOWN_VERSION_TRIES = 5
"""So many 504 in a row to one version: the server does not know it (it was restored from a backup),
list anew."""
NOBODY_BEHIND = (502, 503)
"""A load balancer's word that no server is behind it."""

Changes = Mapping[ObjectKey, ObjectT | None]


class Reflector(Generic[ObjectT]):
    """One collection, of all namespaces or of one. Iterate `changes()` in one task; read `objects`
    at will."""

    def __init__(
        self,
        client: Client,
        resource: Resource[ObjectT],
        *,
        keep: Callable[[ObjectT], ObjectT | None] | None = None,
        namespace: str = "",
        label_selector: str = "",
        floor_s: float = 0.2,
        ceiling_s: float = 30.0,
        idle_s: float = IDLE_S,
        streamed_list_s: float = STREAMED_LIST_S,
        on_absent: Callable[[], None] | None = None,
        on_forbidden: Callable[[], None] | None = None,
    ) -> None:
        """`on_absent` is called whenever the API server says that it does not have the kind,
        `on_forbidden` whenever RBAC denies the request; in both cases the request is retried."""
        self.synced = False
        """True from the first complete list on."""
        self.undecodable = 0
        """How many objects were skipped since they could not be read."""
        self.lists = 0
        """How many complete lists were taken."""
        self.heard_s = time.monotonic()
        """When the server last sent something about this collection: an event, a bookmark, a list,
        the start of a watch; at first: when this reflector was made."""
        self.following = False
        """Whether a watch is open that goes on from what is known here, or the server says that it
        does not have a kind that it need not have (`on_absent`)."""
        self._client = client
        self._resource = resource
        self._namespace = namespace
        self._selection = {"labelSelector": label_selector} if label_selector else {}
        self._decoder = decoder(resource.type)
        self._mirror = Mirror(keep)
        self._version = ""
        self._streams_lists = True
        self._page_size = PAGE_SIZE
        self._unknown_version = 0
        self._doubtful = (
            False  # whether the server may have another past than the one that our version is of
        )
        self._idle_s = idle_s
        self._streamed_list_s = streamed_list_s
        self._on_absent = on_absent
        self._on_forbidden = on_forbidden
        self._retry = Backoff(floor_s, ceiling_s)
        self._relist = Backoff(floor_s, ceiling_s)
        self._unsteady_s = float("-inf")  # when a list was last taken or asked for
        self._failing: type[FairleadError] | None = None

    @property
    def objects(self) -> Mapping[ObjectKey, ObjectT]:
        """What the server has, as far as is known here."""
        return self._mirror.objects

    async def changes(self) -> AsyncIterator[Changes[ObjectT]]:
        """Change sets, for ever. The first comes with the first complete list and may be empty;
        later ones are not."""
        while True:
            wait_s = 0.0
            try:
                if self._version and self._doubtful:
                    await self._recognise()
                if not self._version and not self._streams_lists:
                    await self._list()
                    yield self._mirror.take()
                async with aclosing(self._watch()) as batches:
                    async for changed in batches:
                        yield changed
            except FairleadError as problem:
                wait_s = self._after_failure(problem)
            # What was taken in before the failure, in the same batch, is true as well.
            if pending := self._mirror.take():
                yield pending
            await asyncio.sleep(wait_s)

    async def _recognise(self) -> None:
        """After a failure: make sure that the server has reached the version to go on from. To
        restore its data it must be stopped: once it is seen to be away it may come back with any
        past, and its version tells nothing. One that is only slow is asked again: a list from every
        client would be the last that it can use."""
        try:
            page = await self._client.page(self._resource, namespace=self._namespace, limit=1)
        except ServerUnavailable as problem:
            if is_away(problem):
                self._version = ""
            raise
        self._doubtful = False
        if is_older(page.metadata.resource_version, self._version):
            what = (
                f"the server is at version {page.metadata.resource_version}, it was at "
                f"{self._version}"
            )
            raise Expired(what, fix="list again")

    async def _list(self) -> None:
        """Take a list in pages. A page that expired means that the whole took too long: the next
        list comes in one piece."""
        self._mirror.begin_list()
        continues = ""
        while True:
            try:
                metadata, items = await self._client.read_page(
                    self._resource,
                    namespace=self._namespace,
                    label_selector=self._selection.get("labelSelector", ""),
                    limit=self._page_size,
                    continues=continues,
                )
            except Expired:
                self._page_size = 0
                raise
            for item in items:
                self._take_in(item)
            continues = metadata.continue_
            if not continues:
                self._complete(metadata.resource_version)
                return

    async def _watch(self) -> AsyncGenerator[Changes[ObjectT], None]:
        """Follow one watch to its end. Without a version to go on from, it begins with the list,
        streamed."""
        if not self._version:
            self._mirror.begin_list()
        parameters = self._parameters()
        stream = self._client.stream(
            self._resource, parameters=parameters, namespace=self._namespace, idle_s=self._idle_s
        )
        loop = asyncio.get_running_loop()
        list_until_s = loop.time() + self._streamed_list_s
        begun_s = float("inf")
        try:
            async with aclosing(stream) as batches:
                while (batch := await self._next(batches, list_until_s)) is not None:
                    begun_s = min(begun_s, loop.time())
                    listing = self._mirror.listing
                    self._heard(following=not listing)
                    for line in batch:
                        self._take_in(read_line(self._decoder, line))
                    if (changed := self._mirror.take()) or (listing and not self._mirror.listing):
                        yield changed
        finally:
            if loop.time() - begun_s > STEADY_S:
                self._progress()
        self._ended(loop.time() - begun_s)

    async def _next(
        self, batches: AsyncGenerator[list[bytes], None], list_until_s: float
    ) -> list[bytes] | None:
        """The next lines; None at the end. While a list is streamed it has to become complete in
        time."""
        try:
            async with asyncio.timeout_at(list_until_s if self._mirror.listing else None):
                return await anext(batches, None)
        except TimeoutError:
            self._streams_lists = False
            raise ServerUnavailable(
                f"a streamed list was not complete within {self._streamed_list_s:g} s"
            ) from None

    def _parameters(self) -> dict[str, str]:
        duration_s = random.randint(WATCH_FROM_S, WATCH_TO_S)
        common = {
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(duration_s),
            **self._selection,
        }
        if self._version:
            return {**common, "resourceVersion": self._version}
        return {**common, "sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}

    def _take_in(self, told: Item[ObjectT] | Bookmark | Unreadable) -> None:
        match told:
            case Unreadable(problem):
                self.undecodable += 1
                log.warning(
                    "object without a readable name skipped",
                    kind=self._resource.kind,
                    problem=problem,
                )
                return
            case Item(key, version, object_):
                if object_ is None and not told.gone:
                    self.undecodable += 1
                    log.warning(
                        "unreadable object skipped",
                        kind=self._resource.kind,
                        object=str(key),
                        problem=told.problem,
                    )
                self._mirror.absorb(told)
            case Bookmark(version, complete):
                if complete and self._mirror.listing:
                    self._complete(version)
                    return
        # Versions of items within a list are no place to go on from: the list is not in their
        # order.
        if not self._mirror.listing:
            self._version = version
            self._progress()

    def _complete(self, version: str) -> None:
        """A list is whole. It is no progress that shortens waits: only what follows it is."""
        self._mirror.complete_list()
        self._heard(following=True)
        self._version = version
        self._doubtful = False
        self._page_size = PAGE_SIZE
        self._unsteady_s = asyncio.get_running_loop().time()
        self.lists += 1
        self.synced = True

    def _heard(self, *, following: bool) -> None:
        self.heard_s = time.monotonic()
        self.following = following

    def _progress(self) -> None:
        """The line works: forget earlier failures."""
        self._retry.reset()
        self._unknown_version = 0
        if self._failing is not None:
            log.info("watch resumed", kind=self._resource.kind)
            self._failing = None

    def _ended(self, lasted_s: float) -> None:
        """The server ended the watch. That is its right after `timeoutSeconds`; at once, and again
        and again, it is a fault."""
        if self._mirror.listing:
            # Servers of before KEP-3157 do not know the parameter; one that ends early without a
            # word may be such a one.
            self._streams_lists = False
            raise ServerUnavailable("a streamed list ended before it was complete")
        if lasted_s < STEADY_S:
            raise ServerUnavailable(f"the watch ended after {lasted_s:.1f} s", status=200)

    def _after_failure(self, problem: FairleadError) -> float:
        """Decide how to go on: from where, and after how many seconds."""
        listing = self._mirror.listing or not self._version
        self._mirror.drop_list()
        misunderstood = isinstance(problem, RefusedByServer) and problem.status in (400, 422)
        # kube-apiserver answers 500 where its etcd (before 3.4.25 and 3.5.8) cannot report
        # progress.
        incapable = isinstance(problem, ServerUnavailable) and problem.status == 500
        if (misunderstood or incapable) and listing and self._streams_lists:
            log.info(
                "no streamed lists here, listing in pages",
                kind=self._resource.kind,
                answer=str(problem),
            )
            self._streams_lists = False
            return 0.0
        self._tell(problem)
        if self.following:
            # Until now the server's answers to other requests proved the watch current
            # (`kube.freshness`): keep that proof.
            self.heard_s = max(self.heard_s, self._client.answered_s)
        self.following = False
        # Of a kind that every API server has, such an answer is not the API server's.
        if isinstance(problem, NotFound) and self._on_absent is not None:
            self._heard(following=True)
            self._on_absent()
        if (
            isinstance(problem, RefusedByServer)
            and problem.status == 403
            and self._on_forbidden is not None
        ):
            self._on_forbidden()
        status = problem.status if isinstance(problem, ServerUnavailable) else 0
        # Whatever ends a watch without a word: from the outside nobody can tell what the server
        # went through meanwhile.
        self._doubtful |= status in (0, *NOBODY_BEHIND)
        self._unknown_version += status == 504
        # A kind that was removed and installed again is a new collection: a watch from the old
        # version would bring nothing until an object changes, and this process would not learn that
        # the kind is back.
        obsolete = isinstance(problem, (Expired, NotFound))
        if obsolete or misunderstood or self._unknown_version >= UNKNOWN_VERSION_TRIES:
            return self._expired()
        return self._retry.next_s(
            problem.retry_after_s if isinstance(problem, ServerUnavailable) else 0.0
        )

    def _expired(self) -> float:
        """List anew; seldom, if the last list did not help for long."""
        self._version = ""
        self._unknown_version = 0
        now_s = asyncio.get_running_loop().time()
        if now_s - self._unsteady_s > RELIST_CALM_S:
            self._relist.reset()
        self._unsteady_s = now_s
        return self._relist.next_s()

    def _tell(self, problem: FairleadError) -> None:
        """Log a failure once, until it becomes another or goes away. Of credentials the connection
        has told, for all."""
        if isinstance(problem, Unauthenticated):
            return
        if type(problem) is not self._failing:
            self._failing = type(problem)
            level = log.error if isinstance(problem, Refused) else log.warning
            level("watch lost", kind=self._resource.kind, problem=str(problem))


def is_away(problem: ServerUnavailable) -> bool:
    """Whether it shows that no server is there, and not only that one is slow, or does not let us
    in."""
    return isinstance(problem, NoConnection) or problem.status in NOBODY_BEHIND
