"""The controller's view of the announcers: which of them are alive, and what they announce.

In: the Announcers, and the Leases of gateways and nodes. Out: `Announcers` in the state, which the
plan reads. Invariants: an announcer counts only while the Lease of its process is alive; no time
that another process wrote is compared with a clock. An address that passes from one announcer to
the next counts as announced for `HAND_OVER_S`, because the two objects are written one after the
other. Without the right to read Announcers, or without their CRD, nothing is known about them, and
no condition depends on them. The Leases of nodes are observed only once a node announces."""

import asyncio
from collections.abc import Mapping

import structlog

from fairlead.config import PresenceConfig
from fairlead.kube.announcers import ANNOUNCERS, Announcer
from fairlead.kube.client import Client
from fairlead.kube.freshness import Freshness
from fairlead.kube.objects import ObjectKey
from fairlead.kube.reflector import Reflector
from fairlead.plan.announcers import Announcers, HostAnnouncements, host_announcements
from fairlead.plan.gateways import Gateways
from fairlead.roles.gateways import LeaseWatch
from fairlead.state import State

log = structlog.get_logger()

HAND_OVER_S = 3.0
HIDDEN_S = 5.0
"""After this time without an Announcer, it is unknown what a live gateway announces. Before, it is
about to write it."""
TICK_S = 0.5
MISSING = (
    "no condition shows whether addresses are announced, because the Announcers cannot be read"
)


class KnownAnnouncers:
    """The announcers, and when each changed. It has no clock: the caller passes the time."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostAnnouncements] = {}
        self._hidden_since_s: dict[str, float] = {}
        self._shown: frozenset[str] = frozenset()
        """The addresses that live announcers announced at the last call of `value`."""
        self._handed_over: dict[str, float] = {}
        """The addresses that no announcer announces since these times."""
        self._last: tuple[frozenset[str], frozenset[str], Announcers] | None = None
        """The arguments and the result of the last call of `value`, if nothing has changed since.
        """

    @property
    def nodes(self) -> bool:
        """Whether a node announces."""
        return any(each.role == "node" for each in self._hosts.values())

    def update(self, changed: Mapping[ObjectKey, Announcer | None]) -> None:
        self._last = None
        for key, announcer in changed.items():
            if announcer is None or announcer.status is None:
                self._hosts.pop(key.name, None)
            else:
                self._hosts[key.name] = host_announcements(announcer.status)

    def value(self, now_s: float, gateways: frozenset[str], nodes: frozenset[str]) -> Announcers:
        """Return the announcers among the gateways and nodes that are alive. `now_s`: the present
        time."""
        if self._last is not None and self._last[:2] == (gateways, nodes):
            return self._last[2]
        alive = {
            name: each
            for name, each in self._hosts.items()
            if each.host in (gateways if each.role == "gateway" else nodes)
        }
        showing = {each.host for each in alive.values() if each.role == "gateway"}
        self._hidden_since_s = {
            name: self._hidden_since_s.get(name, now_s) for name in gateways - showing
        }
        shown = frozenset[str]().union(*(each.announced for each in alive.values()))
        self._handed_over = {
            address: since_s
            for address, since_s in self._handed_over.items()
            if address not in shown and now_s - since_s < HAND_OVER_S
        } | dict.fromkeys(self._shown - shown, now_s)
        self._shown = shown
        hidden = {
            name for name, since_s in self._hidden_since_s.items() if now_s - since_s >= HIDDEN_S
        }
        value = Announcers(alive, tuple(sorted(hidden)), frozenset(self._handed_over))
        if not self._handed_over and hidden == gateways - showing:
            self._last = (gateways, nodes, value)  # time alone changes nothing
        return value


class AnnouncerWatch:
    """Keeps `state.announcers` equal to the Announcers of the processes that are alive. `decided`
    is set once they are known, or cannot become known."""

    def __init__(
        self, client: Client, state: State, section: PresenceConfig, freshness: Freshness
    ) -> None:
        self.decided = asyncio.Event()
        self._client = client
        self._state = state
        self._section = section
        self._freshness = freshness
        self._known = KnownAnnouncers()
        self._nodes: frozenset[str] | None = None
        self._readable = False
        self._reported = False
        self._changed = asyncio.Event()
        self._reflector: Reflector[Announcer] = Reflector(
            client,
            ANNOUNCERS,
            on_absent=self._unreadable,
            on_forbidden=self._unreadable,
        )
        freshness.add(ANNOUNCERS.plural, self._reflector)

    async def run(self) -> None:
        """Observe, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._follow_time())
            await self._wait_for_nodes()
            nodes = LeaseWatch(
                self._client, self._section, self._freshness, self._update_nodes, "node"
            )
            group.create_task(nodes.run())
            await nodes.decided.wait()
            if self._nodes is None:  # the Leases of nodes cannot be read
                self.decided.set()

    async def _follow(self) -> None:
        async for changed in self._reflector.changes():
            self._readable, self._reported = True, False
            self._known.update(changed)
            self._changed.set()
            self._publish()

    async def _follow_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._readable:
                self._publish()

    async def _wait_for_nodes(self) -> None:
        while not self._known.nodes:
            await self._changed.wait()
            self._changed.clear()

    def _update_nodes(self, nodes: Gateways) -> None:
        self._nodes = nodes.alive
        self._publish()

    def _publish(self) -> None:
        gateways = self._state.gateways
        if not self._readable or gateways is None or (self._known.nodes and self._nodes is None):
            return
        now_s = asyncio.get_running_loop().time()
        value = self._known.value(now_s, gateways.alive, self._nodes or frozenset())
        if value is not self._state.announcers:
            self._state.update_announcers(value)
        self.decided.set()

    def _unreadable(self) -> None:
        """Continue without the Announcers. The reflector has logged a denied request."""
        if not self._reported:
            log.error(
                MISSING,
                fix="kubectl apply --server-side -f deploy/crds, and install the rights of this "
                "release",
            )
        self._readable, self._reported = False, True
        self._state.update_announcers(None)
        self.decided.set()
