"""Random histories of one Service at a real Octavia: what is desired at each step, and what fails
then.

In: a source of randomness, a Site. Out: Steps, and functions to run them. Equal seeds give equal
steps."""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Literal, NamedTuple

import msgspec
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import Site, listener, member, service
from tests.openstack import clients
from tests.openstack.cloud import NODES
from tests.openstack.front import Answer, Call, Cut, Front
from tests.openstack.octavia import Octavia

from fairlead.errors import FairleadError
from fairlead.model import (
    FloatingIpRequest,
    Listener,
    LoadBalancer,
    Member,
    OctaviaChecks,
    OctaviaMonitorType,
    OctaviaPlace,
    OctaviaSettings,
    Protocol,
)

EDITS = 2
"""The number of changes between creation and deletion."""
NUMBERS = range(1, 5)
"""The addresses of nodes."""

MONITOR_TYPES: tuple[tuple[tuple[Protocol, OctaviaMonitorType], ...], ...] = (
    (("TCP", "HTTP"), ("UDP", "HTTP")),
    (("TCP", "TCP"),),
    (("TCP", "TCP"), ("UDP", "UDP-CONNECT")),
)

IMMUTABLE = "Load Balancer 0f1a7c1e is immutable and cannot be updated."
ANSWERS = (
    Answer(500, "Internal error"),
    Answer(502, "Bad Gateway"),
    Answer(503, "in maintenance", {"Retry-After": "1"}),
    Answer(504, "Gateway Timeout"),
    Answer(409, IMMUTABLE),
    Answer(404, "Load Balancer 0f1a7c1e not found."),
    Answer(429, "Too many requests", {"Retry-After": "1"}),
)

Trouble = Literal[
    "none",
    "a write is lost",
    "it dies",
    "an answer",
    "a look is lost",
    "orders fail",
    "no machine",
    "meddling",
    "twin",
]
TROUBLES: Mapping[Trouble, int] = {
    "none": 1,
    "a write is lost": 4,
    "it dies": 4,
    "an answer": 4,
    "a look is lost": 2,
    "orders fail": 2,
    "no machine": 1,
    "meddling": 2,
    "twin": 1,
}
"""Return members with random weights."""


class Step(NamedTuple):
    """The desired state from this step on (None: no Service), and the fault at the `at`th call of
    the kind that the fault concerns."""

    wanted: LoadBalancer | None
    trouble: Trouble
    at: int
    after: bool
    answer: Answer

    def __str__(self) -> str:
        at = (
            ""
            if self.trouble in ("none", "meddling", "twin")
            else f" at {self.at}, {'after' if self.after else 'before'}"
        )
        ports = (
            [f"{each.protocol}/{each.port}" for each in self.wanted.listeners]
            if self.wanted is not None
            else []
        )
        return f"{' '.join(ports) or 'nothing'}: {self.trouble}{at}" + (
            f", {self.answer.status}" if self.trouble == "an answer" else ""
        )


def history(chance: random.Random) -> Iterator[Step]:
    """Return a history in which the Service is created, changed and deleted."""
    wanted: LoadBalancer | None = service(*_listeners(chance))
    for number in range(EDITS + 2):
        if number:
            wanted = _edited(chance, wanted) if wanted is not None and number <= EDITS else None
        (trouble,) = chance.choices(list(TROUBLES), list(TROUBLES.values()))
        yield Step(
            wanted, trouble, chance.randint(1, 2), chance.random() < 0.5, chance.choice(ANSWERS)
        )


def with_network(chance: random.Random, step: Step, site: CloudSite) -> Step:
    """Return a history at a cloud with Neutron: with the cluster's security group, and most often
    with a floating IP."""
    if step.wanted is None:
        return step
    octavia = step.wanted.settings
    assert isinstance(octavia, OctaviaSettings)
    floating = chance.choice((None, *[FloatingIpRequest(site.at.external_network)] * 3))
    listeners = tuple(
        msgspec.structs.replace(
            each,
            members=tuple(
                msgspec.structs.replace(one, address=_at_cloud(one)) for one in each.members
            ),
        )
        for each in step.wanted.listeners
    )
    settings = msgspec.structs.replace(
        octavia, place=OctaviaPlace(site.at.subnet), floating=floating, secured=True
    )
    return step._replace(
        wanted=msgspec.structs.replace(step.wanted, listeners=listeners, settings=settings)
    )


def _at_cloud(one: Member) -> str:
    """Return the Service with the cloud's nodes as members. The last node has no port in the
    project."""
    return NODES.get(one.node, "10.1.0.14")


def _edited(chance: random.Random, before: LoadBalancer) -> LoadBalancer:
    """Return the Service with one or two random edits."""
    octavia, monitor_types = before.settings, chance.choice(MONITOR_TYPES)
    assert isinstance(octavia, OctaviaSettings)
    edits: list[Mapping[str, object]] = [
        {"listeners": tuple(sorted(_listeners(chance)))},
        {
            "listeners": tuple(
                msgspec.structs.replace(each, members=_members(chance)) for each in before.listeners
            )
        },
        {
            "settings": msgspec.structs.replace(
                octavia, header=chance.choice(("", "v1", "v2")), forwarded_for=False
            )
        },
        {"settings": msgspec.structs.replace(octavia, header="", forwarded_for=True)},
        {
            "settings": msgspec.structs.replace(
                octavia, method=chance.choice(("ROUND_ROBIN", "LEAST_CONNECTIONS"))
            )
        },
        {
            "settings": msgspec.structs.replace(
                octavia, connection_limit=chance.choice((-1, 100)), client_ms=600_000
            )
        },
        {"settings": msgspec.structs.replace(octavia, client_ms=None)},
        {
            "settings": msgspec.structs.replace(
                octavia,
                checks=OctaviaChecks(fall=chance.randint(2, 4)),
                monitor_types=monitor_types,
            )
        },
        {"settings": msgspec.structs.replace(octavia, checks=None, monitor_types=())},
        {
            "affinity_timeout_s": chance.choice((0, 600)),
            "source_ranges": chance.choice(((), ("10.0.0.0/8",))),
        },
        {"uid": "uid-again"},
    ]
    fields: dict[str, object] = {}
    for edit in chance.sample(edits, chance.randint(1, 2)):
        fields |= edit
    return msgspec.structs.replace(before, **fields)


def _listeners(chance: random.Random) -> list[Listener]:
    ports: list[tuple[int, Protocol]] = [(80, "TCP"), (443, "TCP"), (53, "UDP")]
    some = sorted(chance.sample(ports, chance.choice((1, 1, 2))))
    return [listener(port, *_members(chance), protocol=protocol) for port, protocol in some]


def _members(chance: random.Random) -> tuple[Member, ...]:
    nodes = sorted(chance.sample(NUMBERS, chance.randint(1, 2)))
    return tuple(member(node, chance.randint(0, 3)) for node in nodes)


class Going:
    """Runs a history step by step. After each step exactly the desired state exists, and whenever a
    load balancer is created, there was none before."""

    def __init__(self, site: Site, octavia: Octavia, chance: random.Random) -> None:
        self._site = site
        self._octavia = octavia
        self._chance = chance
        self._shown: tuple[str, ...] = ()
        self._pass_now: asyncio.Task[object] | None = None
        self._fronts: list[Front] = [
            each for each in (site.front, site.neutron) if each is not None
        ]
        self._client = clients.without_auth(octavia=site.front.url)
        """Objects of other users in the project."""
        self._direct = clients.without_auth(octavia=octavia.url)
        self._in_the_way: list[str] = []
        """Load balancers that existed when another one was created."""
        site.front.before = self._watch

    async def through(self, step: Step) -> None:
        """Run the history. Raise AssertionError if a step ends in another state."""
        site = self._site
        wanted = (
            [msgspec.structs.replace(step.wanted, addresses=self._shown)]
            if step.wanted is not None
            else []
        )
        if step.trouble in ("meddling", "twin") and await self._meddle(twin=step.trouble == "twin"):
            await site.driver.read(None)  # as an audit does, now and then
        with self._trouble(step):
            await self._pass(*wanted)
        await site.bring(*wanted)
        assert (len(site.everything()), self._in_the_way) == (len(wanted), []), step
        # A driver without memory reads everything, and finds nothing to do.
        site.forget()
        site.anew()
        await site.driver.read(None)
        assert (
            await site.bring(*wanted),
            [call for front in self._fronts for call in front.writes],
        ) == ([], []), step
        self._shown = site.planned(wanted[0]).addresses if wanted else ()

    async def _pass(self, *wanted: LoadBalancer) -> None:
        """Make one or two passes: the next driver inherits the state that a crash or a failure
        leaves."""
        for _ in range(2):
            self._pass_now = asyncio.create_task(self._site.once(*wanted))
            try:
                await self._pass_now
            except FairleadError:
                continue
            except asyncio.CancelledError:
                self._site.anew()

    def _watch(self, call: Call) -> None:
        """Check that there is never a second load balancer, not even briefly, except for a twin
        that another user creates."""
        if (
            call.method == "POST"
            and call.path.endswith("/loadbalancers")
            and not call.agent.startswith(clients.AGENT)
        ):
            found = self._direct.load_balancer.load_balancers(project_id=self._site.front.project)
            self._in_the_way += [each.id for each in found]

    def _die(self) -> None:
        if self._pass_now is not None:
            self._pass_now.cancel()

    @contextmanager
    def _trouble(self, step: Step) -> Iterator[None]:
        front, octavia = self._chance.choice(self._fronts), self._octavia
        match step.trouble:
            case "a write is lost":
                front.at(step.at, Cut(step.after))
            case "it dies":
                loop = asyncio.get_running_loop()
                front.at(step.at, Cut(step.after, first=partial(_call_soon, loop, self._die)))
            case "an answer":
                front.at(step.at, step.answer)
            case "a look is lost":
                front.at(step.at, Cut(step.after), counts=_reads)
        fails = {"orders fail": "configure", "no machine": "boot"}.get(step.trouble)
        with octavia.failing(fails) if fails else nullcontext():  # type: ignore[arg-type]
            yield
        front.pass_on()

    async def _meddle(self, *, twin: bool) -> bool:
        """As another user, delete or change a part, or create a load balancer with the Service's
        marks. Return False if there is nothing to change."""
        trees = (await self._site.found()).balancers
        if not trees:
            return False
        tree, client = trees[0], self._client
        clients.settled(client, tree.id)
        lb = client.load_balancer
        if twin:
            made = lb.create_load_balancer(
                name="twin", vip_subnet_id=tree.subnet_id, tags=list(tree.tags)
            )
            clients.settled(client, made.id)
            return True
        acts: list[Callable[[], object]] = [
            partial(lb.delete_load_balancer, tree.id, cascade=True),
            *(partial(lb.delete_listener, each.id) for each in tree.listeners),
            *(partial(lb.delete_pool, each.id) for each in tree.pools),
            *(partial(lb.update_listener, each.id, connection_limit=7) for each in tree.listeners),
            *(
                partial(lb.put, f"/lbaas/pools/{each.id}/members", json={"members": []})
                for each in tree.pools
            ),
        ]
        self._chance.choice(acts)()
        clients.settled(client, tree.id)
        return True


def _reads(call: Call) -> bool:
    return not call.writes


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    loop.call_soon_threadsafe(call)
