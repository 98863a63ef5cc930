"""Keep a copy of one collection of the API server up to date, and report changes, by list and
watch.

In: a client, a resource. Out: change sets, each a mapping from key to the present object (None:
deleted); the first is the complete initial list. `transform` may shorten or drop objects before
they are stored and compared. Invariants: every reported object existed on the server; when the
server is quiet, `objects` equals its state; a deletion during an interruption is found, because a
new list is compared with the previous state and only the difference is reported; no failure ends
the reflector, and without progress the intervals between its requests grow. The reflector also
detects a server whose history has changed because its etcd was restored from a backup:
resourceVersions go back, and a watch from a version that the server has not reached yet receives
nothing, not even an error. Therefore the reflector compares the server's version after each
interruption, and takes a new list after the server was unreachable. Follows client-go's reflector:
streamed lists (KEP-3157) where the server supports them, otherwise pages; bookmarks; resumption."""

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
from fairlead.kube.object_cache import ObjectCache
from fairlead.kube.objects import ObjectKey, ObjectT, Resource
from fairlead.kube.watch_events import Bookmark, Item, Unreadable, is_older, read_line

log = structlog.get_logger()

WATCH_FROM_S, WATCH_TO_S = 240, 300
IDLE_S = 150.0
"""An open watch that receives nothing for this time is broken: kube-apiserver sends a bookmark
about once a minute."""
STREAMED_LIST_S = 60.0
"""A server without streamed lists may treat the request as a plain watch and never mark the list as
complete. After this time the reflector lists in pages."""
RELIST_RESET_S = 60.0
"""The time without a list after which the back-off between two lists is reset: lists are expensive
for the server."""
STEADY_S = 5.0
"""A watch that lasted this long counts as successful, even without events."""
UNKNOWN_VERSION_TRIES = 5
"""After this many answers 504 in a row, the reflector assumes that the server does not know the
version (it was restored from a backup), and takes a new list."""
NO_BACKEND = (502, 503)
"""Statuses by which a load balancer reports that no server is behind it."""

Changes = Mapping[ObjectKey, ObjectT | None]


class Reflector(Generic[ObjectT]):
    """A copy of one collection, of all namespaces or of one.

    Iterate `changes()` in one task; `objects` may be read at any time."""

    def __init__(
        self,
        client: Client,
        resource: Resource[ObjectT],
        *,
        transform: Callable[[ObjectT], ObjectT | None] | None = None,
        namespace: str = "",
        label_selector: str = "",
        floor_s: float = 0.2,
        ceiling_s: float = 30.0,
        idle_s: float = IDLE_S,
        streamed_list_s: float = STREAMED_LIST_S,
        on_absent: Callable[[], None] | None = None,
        on_forbidden: Callable[[], None] | None = None,
    ) -> None:
        """`on_absent` is called whenever the API server reports that the kind does not exist,
        `on_forbidden` whenever RBAC denies the request; in both cases the request is retried."""
        self.synced = False
        """Whether a complete list has been received."""
        self.undecodable = 0
        """The number of objects that were skipped because they could not be decoded."""
        self.lists = 0
        """The number of complete lists."""
        self.last_contact_s = time.monotonic()
        """When the server last sent an event, a bookmark, a list or the start of a watch of this
        collection; initially the time of construction."""
        self.watching = False
        """Whether a watch is open that continues from the state of `objects`. Also true while the
        server reports that it does not serve an optional resource type (`on_absent`)."""
        self._client = client
        self._resource = resource
        self._namespace = namespace
        self._selection = {"labelSelector": label_selector} if label_selector else {}
        self._decoder = decoder(resource.type)
        self._cache = ObjectCache(transform)
        self._version = ""
        self._streams_lists = True
        self._page_size = PAGE_SIZE
        self._unknown_version = 0
        self._history_uncertain = False
        """Whether the server's history may differ from the one that `_version` belongs to."""
        self._idle_s = idle_s
        self._streamed_list_s = streamed_list_s
        self._on_absent = on_absent
        self._on_forbidden = on_forbidden
        self._retry = Backoff(floor_s, ceiling_s)
        self._relist = Backoff(floor_s, ceiling_s)
        self._last_list_s = float("-inf")
        """When a list was last completed or requested."""
        self._failing: type[FairleadError] | None = None

    @property
    def objects(self) -> Mapping[ObjectKey, ObjectT]:
        """The objects of the server, as of the last event received."""
        return self._cache.objects

    async def changes(self) -> AsyncIterator[Changes[ObjectT]]:
        """Yield change sets without end. The first comes with the first complete list and may be
        empty; later ones are not empty."""
        while True:
            wait_s = 0.0
            try:
                if self._version and self._history_uncertain:
                    await self._check_history()
                if not self._version and not self._streams_lists:
                    await self._list()
                    yield self._cache.take()
                async with aclosing(self._watch()) as batches:
                    async for changed in batches:
                        yield changed
            except FairleadError as problem:
                wait_s = self._after_failure(problem)
            # Events that arrived before the failure, in the same batch, are valid.
            if pending := self._cache.take():
                yield pending
            await asyncio.sleep(wait_s)

    async def _check_history(self) -> None:
        """After a failure, verify that the server has reached `_version`. Raise Expired if it has
        not.

        A server must be stopped to restore its data. Therefore, after the server was unreachable,
        its history may have changed in any way and its version proves nothing: take a new list. A
        server that is only slow gets the same request again, because a list for
        every client would overload it."""
        try:
            page = await self._client.page(self._resource, namespace=self._namespace, limit=1)
        except ServerUnavailable as problem:
            if is_unreachable(problem):
                self._version = ""
            raise
        self._history_uncertain = False
        if is_older(page.metadata.resource_version, self._version):
            what = (
                f"the server is at version {page.metadata.resource_version}, it was at "
                f"{self._version}"
            )
            raise Expired(what, fix="list again")

    async def _list(self) -> None:
        """Take a list in pages. If a page has expired, the list took too long, and the next attempt
        requests it in one piece."""
        self._cache.begin_list()
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
                self._process(item)
            continues = metadata.continue_
            if not continues:
                self._complete(metadata.resource_version)
                return

    async def _watch(self) -> AsyncGenerator[Changes[ObjectT], None]:
        """Follow one watch to its end. Without a version to continue from, the watch begins with a
        streamed list."""
        if not self._version:
            self._cache.begin_list()
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
                    listing = self._cache.listing
                    self._contact(watching=not listing)
                    for line in batch:
                        self._process(read_line(self._decoder, line))
                    if (changed := self._cache.take()) or (listing and not self._cache.listing):
                        yield changed
        finally:
            if loop.time() - begun_s > STEADY_S:
                self._progress()
        self._ended(loop.time() - begun_s)

    async def _next(
        self, batches: AsyncGenerator[list[bytes], None], list_until_s: float
    ) -> list[bytes] | None:
        """Return the next lines; None at the end. A streamed list has to be complete before
        `list_until_s`."""
        try:
            async with asyncio.timeout_at(list_until_s if self._cache.listing else None):
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

    def _process(self, item: Item[ObjectT] | Bookmark | Unreadable) -> None:
        match item:
            case Unreadable(problem):
                self.undecodable += 1
                log.warning(
                    "object without a readable name skipped",
                    kind=self._resource.kind,
                    problem=problem,
                )
                return
            case Item(key, version, object_):
                if object_ is None and not item.gone:
                    self.undecodable += 1
                    log.warning(
                        "unreadable object skipped",
                        kind=self._resource.kind,
                        object=str(key),
                        problem=item.problem,
                    )
                self._cache.process(item)
            case Bookmark(version, complete):
                if complete and self._cache.listing:
                    self._complete(version)
                    return
        # The version of an item within a list is no position to continue from, because lists are
        # not ordered by version.
        if not self._cache.listing:
            self._version = version
            self._progress()

    def _complete(self, version: str) -> None:
        """Complete the list. This does not reset the back-off: only events that follow the list
        do."""
        self._cache.complete_list()
        self._contact(watching=True)
        self._version = version
        self._history_uncertain = False
        self._page_size = PAGE_SIZE
        self._last_list_s = asyncio.get_running_loop().time()
        self.lists += 1
        self.synced = True

    def _contact(self, *, watching: bool) -> None:
        self.last_contact_s = time.monotonic()
        self.watching = watching

    def _progress(self) -> None:
        """The watch works: reset the back-off."""
        self._retry.reset()
        self._unknown_version = 0
        if self._failing is not None:
            log.info("watch resumed", kind=self._resource.kind)
            self._failing = None

    def _ended(self, lasted_s: float) -> None:
        """The server ended the watch. It may do so after `timeoutSeconds`; an immediate end is a
        failure."""
        if self._cache.listing:
            # A server without KEP-3157 ignores the parameter, and may end the watch early without
            # an error.
            self._streams_lists = False
            raise ServerUnavailable("a streamed list ended before it was complete")
        if lasted_s < STEADY_S:
            raise ServerUnavailable(f"the watch ended after {lasted_s:.1f} s", status=200)

    def _after_failure(self, problem: FairleadError) -> float:
        """Decide how to continue after a failure. Return the number of seconds to wait."""
        listing = self._cache.listing or not self._version
        self._cache.drop_list()
        rejected = isinstance(problem, RefusedByServer) and problem.status in (400, 422)
        # kube-apiserver answers 500 if its etcd (before 3.4.25 and 3.5.8) cannot report progress.
        unsupported = isinstance(problem, ServerUnavailable) and problem.status == 500
        if (rejected or unsupported) and listing and self._streams_lists:
            log.info(
                "server without streamed lists, listing in pages",
                kind=self._resource.kind,
                answer=str(problem),
            )
            self._streams_lists = False
            return 0.0
        self._log_once(problem)
        if self.watching:
            # Until now the server's responses to other requests proved that the watch is current
            # (`kube.freshness`): retain that proof.
            self.last_contact_s = max(self.last_contact_s, self._client.answered_s)
        self.watching = False
        # Only optional kinds have `on_absent`. For any other kind a 404 does not come from an API
        # server.
        if isinstance(problem, NotFound) and self._on_absent is not None:
            self._contact(watching=True)
            self._on_absent()
        if (
            isinstance(problem, RefusedByServer)
            and problem.status == 403
            and self._on_forbidden is not None
        ):
            self._on_forbidden()
        status = problem.status if isinstance(problem, ServerUnavailable) else 0
        # A watch that ended without a response, or with an error of a load balancer, gives no
        # information about what has happened to the server since.
        self._history_uncertain |= status in (0, *NO_BACKEND)
        # kube-apiserver answers 504 while its cache has not reached the requested version.
        self._unknown_version += status == 504
        # A kind that was removed and installed again is a new collection: a watch from the old
        # version would receive nothing until an object changes, and this process would not notice
        # that the kind is back.
        obsolete = isinstance(problem, (Expired, NotFound))
        if obsolete or rejected or self._unknown_version >= UNKNOWN_VERSION_TRIES:
            return self._expired()
        return self._retry.next_s(
            problem.retry_after_s if isinstance(problem, ServerUnavailable) else 0.0
        )

    def _expired(self) -> float:
        """Require a new list. Return the wait before it. The wait grows while each list is soon
        followed by another one."""
        self._version = ""
        self._unknown_version = 0
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_list_s > RELIST_RESET_S:
            self._relist.reset()
        self._last_list_s = now_s
        return self._relist.next_s()

    def _log_once(self, problem: FairleadError) -> None:
        """Log a failure once, until another kind of failure follows or the watch resumes.

        The connection already logs rejected credentials, once for all callers."""
        if isinstance(problem, Unauthenticated):
            return
        if type(problem) is not self._failing:
            self._failing = type(problem)
            level = log.error if isinstance(problem, Refused) else log.warning
            level("watch lost", kind=self._resource.kind, problem=str(problem))


def is_unreachable(problem: ServerUnavailable) -> bool:
    """Return whether the error shows that no server is reachable, as opposed to a slow server or
    rejected credentials."""
    return isinstance(problem, NoConnection) or problem.status in NO_BACKEND
