"""Random histories of one Service at a real Octavia. Each step has a desired state and a fault.

In: a random number generator, a Site. Out: Steps, and a class that runs them. Equal seeds give
equal steps."""

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
from tests.openstack.fault_proxy import Call, Disconnect, ErrorResponse, FaultProxy
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
"""The numbers of nodes."""

MONITOR_TYPES: tuple[tuple[tuple[Protocol, OctaviaMonitorType], ...], ...] = (
    (("TCP", "HTTP"), ("UDP", "HTTP")),
    (("TCP", "TCP"),),
    (("TCP", "TCP"), ("UDP", "UDP-CONNECT")),
)

IMMUTABLE = "Load Balancer 0f1a7c1e is immutable and cannot be updated."
RESPONSES = (
    ErrorResponse(500, "Internal error"),
    ErrorResponse(502, "Bad Gateway"),
    ErrorResponse(503, "in maintenance", {"Retry-After": "1"}),
    ErrorResponse(504, "Gateway Timeout"),
    ErrorResponse(409, IMMUTABLE),
    ErrorResponse(404, "Load Balancer 0f1a7c1e not found."),
    ErrorResponse(429, "Too many requests", {"Retry-After": "1"}),
)

FaultKind = Literal[
    "none",
    "a write is lost",
    "the driver dies",
    "an error response",
    "a read is lost",
    "a configuration fails",
    "a boot fails",
    "a change by another user",
    "a duplicate",
]
FAULT_WEIGHTS: Mapping[FaultKind, int] = {
    "none": 1,
    "a write is lost": 4,
    "the driver dies": 4,
    "an error response": 4,
    "a read is lost": 2,
    "a configuration fails": 2,
    "a boot fails": 1,
    "a change by another user": 2,
    "a duplicate": 1,
}
"""The kinds of faults, with their relative frequency."""


class Step(NamedTuple):
    """The desired state from this step on (None: no Service), and a fault at the `at`th call of the
    kind that the fault concerns. `after`: the connection breaks after the service has responded."""

    wanted: LoadBalancer | None
    fault: FaultKind
    at: int
    after: bool
    response: ErrorResponse

    def __str__(self) -> str:
        at = (
            ""
            if self.fault in ("none", "a change by another user", "a duplicate")
            else f" at {self.at}, {'after' if self.after else 'before'}"
        )
        ports = (
            [f"{each.protocol}/{each.port}" for each in self.wanted.listeners]
            if self.wanted is not None
            else []
        )
        return f"{' '.join(ports) or 'nothing'}: {self.fault}{at}" + (
            f", {self.response.status}" if self.fault == "an error response" else ""
        )


def history(rng: random.Random) -> Iterator[Step]:
    """Return a history in which the Service is created, changed and deleted."""
    wanted: LoadBalancer | None = service(*_listeners(rng))
    for number in range(EDITS + 2):
        if number:
            wanted = _edited(rng, wanted) if wanted is not None and number <= EDITS else None
        (fault,) = rng.choices(list(FAULT_WEIGHTS), list(FAULT_WEIGHTS.values()))
        yield Step(wanted, fault, rng.randint(1, 2), rng.random() < 0.5, rng.choice(RESPONSES))


def with_network(rng: random.Random, step: Step, site: CloudSite) -> Step:
    """Return the step for a cloud with Neutron: its Service needs the security group of the
    cluster, and most often a floating IP."""
    if step.wanted is None:
        return step
    octavia = step.wanted.settings
    assert isinstance(octavia, OctaviaSettings)
    floating = rng.choice((None, *[FloatingIpRequest(site.openstack.external_network)] * 3))
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
        octavia, place=OctaviaPlace(site.openstack.subnet), floating=floating, secured=True
    )
    return step._replace(
        wanted=msgspec.structs.replace(step.wanted, listeners=listeners, settings=settings)
    )


def _at_cloud(one: Member) -> str:
    """Return the address of a member's node in the cloud. The last node has no port in the
    project."""
    return NODES.get(one.node, "10.1.0.14")


def _edited(rng: random.Random, before: LoadBalancer) -> LoadBalancer:
    """Return the Service with one or two random edits."""
    octavia, monitor_types = before.settings, rng.choice(MONITOR_TYPES)
    assert isinstance(octavia, OctaviaSettings)
    edits: list[Mapping[str, object]] = [
        {"listeners": tuple(sorted(_listeners(rng)))},
        {
            "listeners": tuple(
                msgspec.structs.replace(each, members=_members(rng)) for each in before.listeners
            )
        },
        {
            "settings": msgspec.structs.replace(
                octavia, header=rng.choice(("", "v1", "v2")), forwarded_for=False
            )
        },
        {"settings": msgspec.structs.replace(octavia, header="", forwarded_for=True)},
        {
            "settings": msgspec.structs.replace(
                octavia, method=rng.choice(("ROUND_ROBIN", "LEAST_CONNECTIONS"))
            )
        },
        {
            "settings": msgspec.structs.replace(
                octavia, connection_limit=rng.choice((-1, 100)), client_ms=600_000
            )
        },
        {"settings": msgspec.structs.replace(octavia, client_ms=None)},
        {
            "settings": msgspec.structs.replace(
                octavia, checks=OctaviaChecks(fall=rng.randint(2, 4)), monitor_types=monitor_types
            )
        },
        {"settings": msgspec.structs.replace(octavia, checks=None, monitor_types=())},
        {
            "affinity_timeout_s": rng.choice((0, 600)),
            "source_ranges": rng.choice(((), ("10.0.0.0/8",))),
        },
        {"uid": "uid-again"},
    ]
    fields: dict[str, object] = {}
    for edit in rng.sample(edits, rng.randint(1, 2)):
        fields |= edit
    return msgspec.structs.replace(before, **fields)


def _listeners(rng: random.Random) -> list[Listener]:
    ports: list[tuple[int, Protocol]] = [(80, "TCP"), (443, "TCP"), (53, "UDP")]
    some = sorted(rng.sample(ports, rng.choice((1, 1, 2))))
    return [listener(port, *_members(rng), protocol=protocol) for port, protocol in some]


def _members(rng: random.Random) -> tuple[Member, ...]:
    nodes = sorted(rng.sample(NUMBERS, rng.randint(1, 2)))
    return tuple(member(node, rng.randint(0, 3)) for node in nodes)


class HistoryRunner:
    """Runs a history step by step, and checks two invariants: after each step exactly the desired
    state exists, and a load balancer is created only while none exists."""

    def __init__(self, site: Site, octavia: Octavia, rng: random.Random) -> None:
        self._site = site
        self._octavia = octavia
        self._chance = rng
        self._published: tuple[str, ...] = ()
        self._running_pass: asyncio.Task[object] | None = None
        self._proxies: list[FaultProxy] = [
            each for each in (site.proxy, site.neutron) if each is not None
        ]
        self._client = clients.without_auth(octavia=site.proxy.url)
        """The client of another user in the project."""
        self._direct = clients.without_auth(octavia=octavia.url)
        self._existing: list[str] = []
        """Load balancers that existed when the driver created another one."""
        site.proxy.before = self._watch

    async def run_step(self, step: Step) -> None:
        """Run one step. Raise AssertionError if it does not end in the desired state."""
        site = self._site
        wanted = (
            [msgspec.structs.replace(step.wanted, addresses=self._published)]
            if step.wanted is not None
            else []
        )
        if step.fault in ("a change by another user", "a duplicate") and await self._interfere(
            duplicate=step.fault == "a duplicate"
        ):
            await site.driver.read(None)  # as an audit does from time to time
        with self._inject(step):
            await self._pass(*wanted)
        await site.reconcile(*wanted)
        assert (len(site.balancer_ids()), self._existing) == (len(wanted), []), step
        # A driver without memory reads everything, and finds nothing to do.
        site.clear_calls()
        site.restart()
        await site.driver.read(None)
        assert (
            await site.reconcile(*wanted),
            [call for proxy in self._proxies for call in proxy.writes],
        ) == ([], []), step
        self._published = site.planned(wanted[0]).addresses if wanted else ()

    async def _pass(self, *wanted: LoadBalancer) -> None:
        """Make one or two passes. The second one starts in the state that a crash or a failure
        leaves."""
        for _ in range(2):
            self._running_pass = asyncio.create_task(self._site.run_pass(*wanted))
            try:
                await self._running_pass
            except FairleadError:
                continue
            except asyncio.CancelledError:
                self._site.restart()

    def _watch(self, call: Call) -> None:
        """Record the load balancers that exist when the driver creates another one."""
        if (
            call.method == "POST"
            and call.path.endswith("/loadbalancers")
            and not call.agent.startswith(clients.AGENT)
        ):
            found = self._direct.load_balancer.load_balancers(project_id=self._site.proxy.project)
            self._existing += [each.id for each in found]

    def _die(self) -> None:
        if self._running_pass is not None:
            self._running_pass.cancel()

    @contextmanager
    def _inject(self, step: Step) -> Iterator[None]:
        proxy, octavia = self._chance.choice(self._proxies), self._octavia
        match step.fault:
            case "a write is lost":
                proxy.inject_at(step.at, Disconnect(step.after))
            case "the driver dies":
                loop = asyncio.get_running_loop()
                proxy.inject_at(
                    step.at, Disconnect(step.after, first=partial(_call_soon, loop, self._die))
                )
            case "an error response":
                proxy.inject_at(step.at, step.response)
            case "a read is lost":
                proxy.inject_at(step.at, Disconnect(step.after), counts=_reads)
        fails = {"a configuration fails": "configure", "a boot fails": "boot"}.get(step.fault)
        with octavia.failing(fails) if fails else nullcontext():  # type: ignore[arg-type]
            yield
        proxy.forward_all()

    async def _interfere(self, *, duplicate: bool) -> bool:
        """As another user, delete or change a part of the load balancer, or create a duplicate:
        another load balancer with the marks of the Service. Return False if there is nothing to
        change."""
        trees = (await self._site.found()).balancers
        if not trees:
            return False
        tree, client = trees[0], self._client
        clients.wait_settled(client, tree.id)
        lb = client.load_balancer
        if duplicate:
            made = lb.create_load_balancer(
                name="a duplicate", vip_subnet_id=tree.subnet_id, tags=list(tree.tags)
            )
            clients.wait_settled(client, made.id)
            return True
        actions: list[Callable[[], object]] = [
            partial(lb.delete_load_balancer, tree.id, cascade=True),
            *(partial(lb.delete_listener, each.id) for each in tree.listeners),
            *(partial(lb.delete_pool, each.id) for each in tree.pools),
            *(partial(lb.update_listener, each.id, connection_limit=7) for each in tree.listeners),
            *(
                partial(lb.put, f"/lbaas/pools/{each.id}/members", json={"members": []})
                for each in tree.pools
            ),
        ]
        self._chance.choice(actions)()
        clients.wait_settled(client, tree.id)
        return True


def _reads(call: Call) -> bool:
    return not call.writes


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    loop.call_soon_threadsafe(call)
