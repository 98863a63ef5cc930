"""Show with packets what Fairlead is for: one lab exposes the same application through four load
balancers and sends all of them through the same events.

In: the number of connections and the observation time. Out: a `Report` of counts. Nothing is
scripted: every number counts answers that arrived, and may turn out badly.

Four Services, each with five pods placed 3/1/1/0 on four nodes, differ only in their load balancer:

  cluster          policy Cluster; every node is a member, no health checks
  local-blind      policy Local; as above (OCCM's behaviour without annotations)
  local-monitored  policy Local; as above, with an HTTP monitor on the healthCheckNodePort, with
                   OCCM's default times
  fairlead         policy Local; Fairlead, unmodified

All of them use the same gateway and the same data plane, so they differ only in what the load
balancer knows (see `lab.plain`).
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from fairlead.errors import Unavailable
from fairlead.kube.objects import PODS, SERVICES, ObjectKey
from fairlead.lab import process
from fairlead.lab.piped import Piped
from fairlead.lab.site import Site
from fairlead.probe.burst import Tally
from fairlead.probe.steady import Period

Progress = Callable[[str], None]

CLIENT, GATEWAY = "client1", "gw1"
PLACEMENT = ("node1", "node1", "node1", "node2", "node3")
FROM_NODE, TO_NODE = "node2", "node4"
"""The pod moves from a node where it is the only one to a node without pods."""
KILLED_NODE = "node3"
GRACE_S = 5
"""Longest time for which a terminating pod continues to serve while connections still arrive."""
PLAIN_CLASS = "example.com/plain"
PLAIN = {
    "cluster": "203.0.113.251",
    "local-blind": "203.0.113.252",
    "local-monitored": "203.0.113.253,monitored",
}
SETUPS = ("cluster", "local-blind", "local-monitored", "fairlead")
FAIRLEAD = "fairlead"

MONITOR_SETTLES_S = 9.0
"""Time until the monitor has found the nodes without pods: an interval of 5 s, a timeout of 3 s."""


class Event(msgspec.Struct, frozen=True):
    """What clients experienced during one event. `broken` counts the open connections that broke
    avoidably: those whose pod was not on the failed node."""

    failed: int
    broken: int
    longest_gap_ms: int


class Result(msgspec.Struct, frozen=True):
    """The counts for one load balancer. `busiest_pod_over_fair` is the busiest pod's share of the
    requests, divided by an equal share."""

    setup: str
    requests: int
    answered: int
    client_address_kept: bool
    busiest_pod_over_fair: float
    pod_moved: Event
    node_killed: Event


class Report(msgspec.Struct, frozen=True):
    """The demo's result."""

    setups: tuple[Result, ...]


def service(setup: str) -> dict[str, Any]:
    """Return a minimal load-balancer manifest for one variant. Fairlead's has no class, so the
    default class of the configuration serves it."""
    spec: dict[str, Any] = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Cluster" if setup == "cluster" else "Local",
        "selector": {"app": setup},
        "ports": [{"port": 80, "targetPort": "http"}],
    }
    if setup != FAIRLEAD:
        spec["loadBalancerClass"] = PLAIN_CLASS
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": setup, "namespace": "default"},
        "spec": spec,
    }


def pod(setup: str, number: int, node: str) -> dict[str, Any]:
    container = {"name": "web", "image": "echo", "ports": [{"name": "http", "containerPort": 8080}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{setup}-{number}", "namespace": "default", "labels": {"app": setup}},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": GRACE_S,
            "containers": [container],
        },
    }


class Demo:
    """One run of the demo in a lab that is up."""

    def __init__(self, site: Site, *, connections: int, watch_s: float, progress: Progress) -> None:
        self._site = site
        self._connections = connections
        self._watch_s = watch_s
        self._progress = progress

    async def run(self) -> Report:
        addresses = await self._deploy()
        tallies = await self._bursts(addresses)
        loads = {
            setup: Piped(self._site, CLIENT, self._load("steady", addresses[setup]))
            for setup in SETUPS
        }
        try:
            await asyncio.sleep(1)
            moved = await self._measure_event(
                loads, "a pod moves to another node, gracefully", self._move_pods
            )
            killed = await self._measure_event(loads, f"{KILLED_NODE} is killed", self._kill_node)
        finally:
            for load in loads.values():
                load.kill()
        return Report(
            tuple(result_of(setup, tallies[setup], moved[setup], killed[setup]) for setup in SETUPS)
        )

    async def _deploy(self) -> Mapping[str, str]:
        self._progress("applying four Services with five pods each, placed 3/1/1/0")
        manifests = [service(setup) for setup in SETUPS]
        manifests += [
            pod(setup, number, node)
            for setup in SETUPS
            for number, node in enumerate(PLACEMENT, start=1)
        ]
        await self._site.apply(manifests)
        await self._site.await_pods()
        arguments = ["--kubeconfig", str(self._site.directory.kubeconfig_inside)]
        arguments += ["--pin-path", str(self._site.directory.pins(f"{GATEWAY}-plain"))]
        arguments += [f"default/{setup}={address}" for setup, address in PLAIN.items()]
        self._site.spawn(
            GATEWAY, process.python("fairlead.lab.plain", *arguments), label=f"{GATEWAY}/plain"
        )
        return {setup: await self._address_of(setup) for setup in SETUPS}

    async def _address_of(self, setup: str) -> str:
        async with self._site.client() as client, asyncio.timeout(15):
            while not (
                ingress := (
                    await client.get(SERVICES, ObjectKey("default", setup))
                ).status.load_balancer.ingress
            ):
                await asyncio.sleep(0.05)
        await self._await_answer(ingress[0].ip)
        return ingress[0].ip

    async def _await_answer(self, address: str) -> None:
        """Wait until the address answers: nodes see it in the Service's status at the same time as
        this process, and may still be applying it. Raise Unavailable if it does not answer."""
        for _ in range(50):
            try:
                _, writer = await self._site.connect(CLIENT, address, 80, timeout_s=0.3)
            except Unavailable:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return
        raise Unavailable(
            f"nothing answered at {address} from {CLIENT}", fix="see `fairlead lab logs`"
        )

    async def _bursts(self, addresses: Mapping[str, str]) -> Mapping[str, Tally]:
        loop = asyncio.get_running_loop()
        settled_at = loop.time() + MONITOR_SETTLES_S
        tallies = {}
        for setup in (FAIRLEAD, "cluster", "local-blind", "local-monitored"):
            if setup == "local-monitored":
                await asyncio.sleep(settled_at - loop.time())
            self._progress(f"{setup}: {self._connections} connections")
            options = ("--connections", str(self._connections), "--concurrency", "512")
            code, output, errors = await self._site.exec(
                CLIENT, self._load("burst", addresses[setup], *options), timeout_s=120
            )
            if code:
                raise Unavailable(f"the load on {setup} ended with {code}: {errors.strip()}")
            tallies[setup] = msgspec.json.decode(output, type=Tally)
            for failure, count in sorted(tallies[setup].failures.items()):
                self._progress(f"{setup}: {count} connections failed: {failure}")
        return tallies

    def _load(self, kind: str, address: str, *options: str) -> Sequence[str]:
        return (sys.executable, "-m", "fairlead.probe", kind, address, "80", *options)

    async def _measure_event(
        self, loads: Mapping[str, Piped], what: str, event: Callable[[], Any]
    ) -> Mapping[str, Period]:
        """Return what the clients of each load balancer experience during `event` and the
        observation time after it."""
        await asyncio.gather(*(load.ask("") for load in loads.values()))
        self._progress(f"under steady load: {what}; watching for {self._watch_s:.0f} s")
        async with asyncio.TaskGroup() as group:
            group.create_task(event())
            group.create_task(asyncio.sleep(self._watch_s))
        answers = await asyncio.gather(*(load.ask("") for load in loads.values()))
        return {
            setup: msgspec.json.decode(answer, type=Period)
            for setup, answer in zip(loads, answers, strict=True)
        }

    async def _move_pods(self) -> None:
        """Move a pod as a rollout does: delete the old pod only when the new one is ready."""
        await self._site.apply([pod(setup, 6, TO_NODE) for setup in SETUPS])
        await self._site.await_pods()
        async with self._site.client() as client:
            for setup in SETUPS:
                await client.delete(
                    PODS, ObjectKey("default", f"{setup}-{PLACEMENT.index(FROM_NODE) + 1}")
                )

    async def _kill_node(self) -> None:
        await self._site.kill_node(KILLED_NODE)


def result_of(setup: str, tally: Tally, moved: Period, killed: Period) -> Result:
    """Combine the counts of one load balancer."""
    busiest = (
        max(tally.by_pod.values(), default=0) * len(PLACEMENT) / tally.answered
        if tally.answered
        else 0.0
    )
    return Result(
        setup=setup,
        requests=tally.requests,
        answered=tally.answered,
        client_address_kept=0 < tally.answered == tally.address_kept,
        busiest_pod_over_fair=round(busiest, 3),
        pod_moved=event_of(moved, ""),
        node_killed=event_of(killed, KILLED_NODE),
    )


def event_of(period: Period, dead_node: str) -> Event:
    """Return the counts of one event. A connection to a pod on `dead_node` had to break and is not
    counted as broken."""
    broken = sum(1 for each in period.broken if each.node != dead_node)
    return Event(period.failed, broken, period.longest_gap_ms)
