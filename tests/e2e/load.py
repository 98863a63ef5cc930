"""A Service of the lab under steady load, and functions for events.

In: a running lab. Out: `Load`, which counts the failures of clients and open connections during an
event; `Web`, a Service with policy Local whose pods can be placed on nodes, one graceful step at a
time; the state of the kernels of gateways and nodes, as values to compare. Invariant: the module
reads Fairlead's processes only through their HTTP views and their state in the kernel."""

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import msgspec
from tests.pauses import pauses

from fairlead.errors import Unavailable
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab.objects import PODS, READY_ANNOTATION
from fairlead.lab.piped import Piped
from fairlead.lab.site import ROLE_PORTS, Site
from fairlead.net.bpf import Map
from fairlead.probe.steady import Period
from fairlead.role_state import GatewayState, decode

CLIENT, GATEWAY = "client1", "gw1"
NAME = "web"
OPEN_CONNECTIONS = 30
PATIENCE_S = 3.0
"""The time for which a pod or the whole machine may stand still: the same for new connections as
for open ones."""
DEADLINE_S = 60.0

_numbers = itertools.count(1)


async def until(
    condition: Callable[[], Awaitable[object]], what: str, *, deadline_s: float = DEADLINE_S
) -> None:
    """Wait until the condition is true. Fail with `what` and the last value after `deadline_s`."""
    end_s, waits = time.monotonic() + deadline_s, pauses()
    while not (answer := await condition()):
        if time.monotonic() > end_s:
            raise AssertionError(
                f"waited {deadline_s:g} s in vain for {what}; last result: {answer!r}"
            )
        await asyncio.sleep(next(waits))


class Load:
    """Clients and open connections on a lab's client, or another host or pod. Use as an async
    context manager; inside, all connections are open. `timeout_s`, `patience_s` and `open_pause_s`:
    see `fairlead.probe.steady`."""

    def __init__(
        self,
        site: Site,
        address: str,
        *,
        host: str = CLIENT,
        timeout_s: float = 1.0,
        patience_s: float = PATIENCE_S,
        open_connections: int = OPEN_CONNECTIONS,
        open_pause_s: float = 0.2,
    ) -> None:
        self._open = open_connections
        self._site = site
        self._host = host
        options = [f"--timeout={timeout_s}", f"--patience={max(timeout_s, patience_s)}"]
        options += [f"--open={open_connections}", f"--open-pause={open_pause_s}"]
        self._argv = (sys.executable, "-m", "fairlead.probe", "steady", address, "80", *options)

    async def __aenter__(self) -> Self:
        self._piped = Piped(self._site, self._host, self._argv)
        try:
            await until(self._all_open, "the opening of all connections")
        except BaseException:
            self._piped.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._piped.kill()

    async def take(self) -> Period:
        """Return the counts since the last call."""
        return msgspec.json.decode(await self._piped.ask(""), type=Period)

    async def counts_during(self, event: Awaitable[object], *, watch_s: float = 1.0) -> Period:
        """Return the counts during this action and for `watch_s` seconds after it."""
        await self.take()
        await event
        await asyncio.sleep(watch_s)
        return await self.take()

    async def _all_open(self) -> bool:
        period = await self.take()
        return period.open_connections == self._open and period.requests > 0 and not period.failed


class Web:
    """The Service and its pods. `addresses` are its VIPs, `address` is the first."""

    gateways: Sequence[str] = (GATEWAY,)
    """Hosts that must know a change before it counts as done."""
    annotations: Mapping[str, str] = {}
    """The annotations of the Service."""
    pod_fields: Mapping[str, Any] = {}
    """Further fields of the specs of its pods."""

    def __init__(self, site: Site, addresses: Sequence[str] = ()) -> None:
        self.site = site
        self.addresses = tuple(addresses)

    @property
    def address(self) -> str:
        return self.addresses[0]

    async def create(self, **fields: Any) -> None:
        """Create the Service with `fields` in its spec, and store its addresses."""
        spec: dict[str, Any] = {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "selector": {"app": NAME},
            "ports": [{"port": 80, "targetPort": "http"}],
        }
        metadata = {"name": NAME, "namespace": "default", "annotations": dict(self.annotations)}
        await self.site.apply(
            [{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec | fields}]
        )
        self.addresses = await addresses_of(self.site, NAME)

    async def api_server_answers(self) -> bool:
        """Return whether the API server answers the test."""
        with suppress(Unavailable):
            await self.pods()
            return True
        return False

    async def pods(self) -> dict[str, str]:
        """Return the node of each pod that is not terminating."""
        async with self.site.client() as client:
            pods = await client.list(PODS)
        return {
            pod.metadata.name: pod.spec.node_name
            for pod in pods
            if not pod.metadata.deletion_timestamp
        }

    async def start(self, nodes: Iterable[str]) -> None:
        """Create a new pod on each node. All are ready when this returns."""
        await self.site.apply(
            [_pod(f"{NAME}-{next(_numbers)}", node, self.pod_fields) for node in nodes]
        )
        await self.site.await_pods()

    async def end(self, names: Iterable[str]) -> None:
        """Delete these pods gracefully. They may still be terminating when this returns."""
        async with self.site.client() as client:
            for name in names:
                await client.delete(PODS, ObjectKey("default", name))

    async def set_ready(self, name: str, *, ready: bool) -> None:
        """Let a pod's readiness probe fail or succeed."""
        body = {"metadata": {"annotations": {READY_ANNOTATION: None if ready else "false"}}}
        async with self.site.client() as client:
            await client.patch(PODS, ObjectKey("default", name), body)

    async def place(self, nodes: Sequence[str]) -> None:
        """Place pods on these nodes, one for each time a node is named, like a rollout: first
        create the new pods, then delete the old ones."""
        there = await self.pods()
        missing = Counter(nodes) - Counter(there.values())
        surplus = Counter(there.values()) - Counter(nodes)
        await self.start(missing.elements())
        going = []
        for name, node in there.items():
            if surplus[node]:
                surplus[node] -= 1
                going.append(name)
        await self.end(going)
        await self.await_weights(nodes)

    async def await_weights(self, nodes: Collection[str]) -> None:
        """Wait until the gateways' weights match pods on these nodes, one for each time a node is
        named."""
        wanted = Counter(nodes)
        seen: dict[str, dict[str, tuple[int, str]]] = {}

        async def as_wanted() -> bool:
            for gateway in self.gateways:
                seen[gateway] = await self.members(gateway)
            active = [
                {node: weight for node, (weight, state) in each.items() if state == "active"}
                for each in seen.values()
            ]
            return all(each == wanted for each in active)

        try:
            await until(as_wanted, "the weights")
        except AssertionError as late:
            raise AssertionError(
                f"the gateways' members are {seen}, expected {dict(wanted)}"
            ) from late

    async def on_one_node(self) -> bool:
        """Return whether the gateway has only one member, draining ones included."""
        return len(await self.members()) == 1

    async def members(self, gateway: str = GATEWAY) -> dict[str, tuple[int, str]]:
        """Return (weight, state) of each node at a gateway, as last applied."""
        state = await gateway_state(self.site, gateway)
        found = state.services.get(f"default/{NAME}") if state is not None else None
        if found is None or found.plan is None:
            return {}
        return {
            member.node: (member.weight, member.state) for member in found.plan.listeners[0].members
        }


async def addresses_of(site: Site, name: str) -> tuple[str, ...]:
    """Return a Service's addresses when it has one of each family."""
    found: tuple[str, ...] = ()

    async def has_all() -> bool:
        nonlocal found
        async with site.client() as client:
            service = await client.get(SERVICES, ObjectKey("default", name))
        found = tuple(entry.ip for entry in service.status.load_balancer.ingress)
        return len(found) == max(1, len(service.spec.ip_families))

    await until(has_all, f"addresses of Service {name}")
    return found


async def gateway_state(site: Site, gateway: str = GATEWAY) -> GatewayState | None:
    """Return the state that a gateway shows; None while it does not answer."""
    if not (body := await _answer(site, gateway, "/state")):
        return None
    state = decode(body, f"GET /state of {gateway}")
    assert isinstance(state, GatewayState)
    return state


async def fetch(site: Site, host: str, path: str) -> dict[str, Any]:
    """Return a view of the role on a host, as plain JSON; empty while the role does not answer."""
    found: dict[str, Any] = json.loads(await _answer(site, host, path) or b'{"services": {}}')
    return found


async def _answer(site: Site, host: str, path: str) -> bytes:
    """Return the body of the role's answer; empty while it does not answer."""
    try:
        reader, writer = await site.connect(
            host, "127.0.0.1", ROLE_PORTS[site.topology.host(host).kind], timeout_s=1
        )
    except Unavailable:
        return b""
    try:
        async with asyncio.timeout(5):
            writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            answer = await reader.read()
    # The role has just exited.
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
    return answer.partition(b"\r\n\r\n")[2]


async def forwarding(site: Site) -> dict[str, Any]:
    """Return the objects that forward packets on the gateway: its filters, and the records of the
    slots of each listener. A change of weights, even one that is reverted, creates other records.
    """
    filters = json.loads(
        await output(site, GATEWAY, "tc", "-j", "filter", "show", "dev", "eth0", "ingress")
    )
    for each in filters:
        each.get("options", {}).get("prog", {}).pop(
            "id",
            None,
            # Each start loads the same program again, with another id.
        )
    (layout,) = site.directory.pins(GATEWAY).glob("layout-*")
    listeners = Map.open(layout / "listeners")
    try:
        return {"filters": filters, "listeners": sorted(listeners.items())}
    finally:
        listeners.close()


async def rules(site: Site, node: str) -> list[Any]:
    """Return all nftables objects of a node with their handles."""
    listed: list[Any] = json.loads(await output(site, node, "nft", "-j", "-a", "list", "ruleset"))[
        "nftables"
    ]
    return listed


async def drops(site: Site, gateway: str = GATEWAY) -> dict[str, int]:
    """Return the number of packets that the gateway's program has dropped since it was first
    loaded, by reason."""
    state = await gateway_state(site, gateway)
    assert state is not None
    assert state.traffic is not None
    return dict(state.traffic.drops)


async def messages(site: Site, gateway: str = GATEWAY) -> dict[str, int]:
    """Return the number of messages that the gateway's program has sent since it was first loaded,
    by kind."""
    state = await gateway_state(site, gateway)
    assert state is not None
    assert state.traffic is not None
    return dict(state.traffic.messages)


async def output(site: Site, host: str, *argv: str) -> str:
    """Return the output of a command on a host. Fail if the command fails."""
    code, printed, errors = await site.exec(host, argv)
    assert code == 0, f"{' '.join(argv)} on {host} ended with {code}: {errors}"
    return printed


def _pod(name: str, node: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    ports = [
        {"name": "http", "containerPort": 8080},
        {"name": "dns", "containerPort": 5353, "protocol": "UDP"},
        {"name": "quic", "containerPort": 8443, "protocol": "UDP"},
    ]
    container = {"name": "web", "image": "echo", "ports": ports}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": NAME}},
        "spec": {"nodeName": node, "containers": [container], **fields},
    }
