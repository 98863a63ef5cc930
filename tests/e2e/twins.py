"""Two labs that differ only in the service proxy of their nodes, and the results of equal packets
in each.

In: scenes. Out: `Twins`, which creates the same objects in both labs; `differences`, which reports
where they differ. A difference counts when it lasts, because both are asynchronous; a broken
connection never counts as agreement. If several pods may answer, more packets are sent until both
labs have shown the same set. Pods are identified by name, because their addresses may differ."""

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests import sctp
from tests.e2e.changes import pod
from tests.e2e.oracle import Answer, Source, Target
from tests.e2e.packets import associate, call, get_health
from tests.e2e.scenes import CALLERS, NODES, PODS, ZONE_LABEL, Manifest, Scene

from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, SERVICES
from fairlead.kube.objects import NODES as NODE_OBJECTS
from fairlead.kube.objects import PODS as POD_OBJECTS
from fairlead.lab import manifests, namespace
from fairlead.lab.site import Site

AT_ONCE = 48
WRITES_AT_ONCE = 6
PACKETS = (6, 12, 24, 48, 48, 48, 48)
"""The numbers of packets from each source to each target in successive attempts. The last attempts
are for slow labs."""
PATIENCE_S = (0.3, 0.3, 0.6, 1.2, 1.5, 1.5, 1.5)
PAUSE_S = 0.5

Results = frozenset[tuple[str, str]]
"""The answering pod and the client address that it saw, or the result without an answer."""


class Probe(NamedTuple):
    """Packets from one source to one target of a scene. `one_pod`: a single pod answers all of
    them, but any pod may be that pod."""

    scene: str
    source: str
    target: Target
    one_pod: bool


class Twin:
    """One of the labs."""

    def __init__(self, site: Site, client: Client) -> None:
        self.site, self._client = site, client
        self._pods: dict[str, tuple[str, ...]] = {}
        self._names: dict[str, str] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._writing = asyncio.Semaphore(WRITES_AT_ONCE)
        self._alone: dict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self.sent = 0

    async def start_pods(self) -> None:
        """Start the pods of endpoints and callers. All are ready when this returns."""
        await manifests.apply(
            self._client, [pod(name, "none", node) for name, node in {**PODS, **CALLERS}.items()]
        )
        await self.site.await_pods()
        listed = json.loads(await self._client.request("GET", POD_OBJECTS.path()))["items"]
        self._pods = {
            each["metadata"]["name"]: tuple(ip["ip"] for ip in each["status"]["podIPs"])
            for each in listed
        }
        self._names = {
            address: name for name, addresses in self._pods.items() for address in addresses
        }

    def address(self, pod: str) -> str:
        """Return the IPv4 address of an endpoint or caller."""
        return self._pods[pod][0]

    @contextmanager
    def answering_sctp(self) -> Iterator[None]:
        """Let the endpoints answer over SCTP, too."""
        families = (socket.AF_INET, socket.AF_INET6)
        sockets = {
            f"{name} {family}": namespace.make_socket(
                self.site.namespace(f"default/{name}"), family, socket.SOCK_RAW, sctp.PROTOCOL
            )
            for name in PODS
            for family in families
        }
        with sctp.InitResponder(sockets):
            yield

    async def label(self, zones: dict[str, str]) -> None:
        """Put the nodes into zones."""
        for node, zone in zones.items():
            await self._client.patch(
                NODE_OBJECTS, ("", node), {"metadata": {"labels": {ZONE_LABEL: zone}}}
            )

    async def show(self, scenes: Iterable[Scene]) -> None:
        """Create these objects at the API server."""
        await asyncio.gather(*map(self._show, scenes))

    async def _show(self, scene: Scene) -> None:
        async with self._writing:
            await manifests.apply(
                self._client, [scene.service, *map(self._addressed, scene.slices)]
            )
            if scene.ingress:
                status = {"status": {"loadBalancer": {"ingress": list(scene.ingress)}}}
                await self._client.patch(
                    SERVICES, ("default", scene.name), status, subresource="status"
                )

    async def remove(self, scenes: Iterable[Scene]) -> None:
        """Delete these objects."""
        await asyncio.gather(*map(self._remove, scenes))

    async def _remove(self, scene: Scene) -> None:
        async with self._writing:
            for each in scene.slices:
                await self._client.delete(ENDPOINT_SLICES, ("default", each["metadata"]["name"]))
            await self._client.delete(SERVICES, ("default", scene.name))

    def _addressed(self, slice_: Manifest) -> Manifest:
        six = slice_["addressType"] == "IPv6"
        endpoints = []
        for each in slice_["endpoints"]:
            fields = {key: value for key, value in each.items() if key != "pod"}
            endpoints.append(
                {
                    "addresses": [next(ip for ip in self._pods[each["pod"]] if (":" in ip) == six)],
                    **fields,
                }
            )
        return {**slice_, "endpoints": endpoints}

    async def send(self, probe: Probe, packets: int, patience_s: float) -> Results:
        """Return the results of this many packets. If the first has no answer, no more are sent."""
        first = await self._call(probe, patience_s)
        if not isinstance(first, Answer):
            return frozenset({("", "silence" if first == "unreachable" else first)})
        if probe.one_pod:
            found = [first, *[await self._call(probe, patience_s) for _ in range(packets - 1)]]
        else:
            found = [
                first,
                *await asyncio.gather(*(self._call(probe, patience_s) for _ in range(packets - 1))),
            ]
        results = {
            (each.pod, self._names.get(each.seen, each.seen))
            if isinstance(each, Answer)
            else ("", each)
            for each in found
        }
        # The labs may choose different pods, so only the number of pods is compared.
        if probe.one_pod:
            return frozenset({(str(len({who for who, _ in results})), seen) for _, seen in results})
        return frozenset(results)

    async def _call(self, probe: Probe, patience_s: float) -> Any:
        source = Source(probe.source, "node", "", ())
        self.sent += 1
        if probe.target.protocol == "SCTP":
            async with self._alone[probe.source, probe.target.address], self._turns:
                return await associate(self.site, source, probe.target, timeout_s=patience_s)
        async with self._turns:
            return await call(self.site, source, probe.target, timeout_s=patience_s)

    async def health(self, scene: Scene) -> list[object]:
        """Return each node's answer for the Service at its health port. The port is called
        at addresses of the Service's first family, because kube-proxy serves it only at addresses
        of the Service's families."""
        port, families = (
            scene.service["spec"].get("healthCheckNodePort"),
            scene.service["spec"]["ipFamilies"],
        )
        hosts = [self.site.topology.host(node) for node in NODES] if port else []
        return [
            await get_health(self.site, "client1", host.addresses[families[0] == "IPv6"], port)
            for host in hosts
        ]


class Twins(NamedTuple):
    ours: Twin
    theirs: Twin

    async def both(self, act: str, *arguments: Any) -> None:
        """Call the function for both labs."""
        await asyncio.gather(*(getattr(twin, act)(*arguments) for twin in self))

    async def differences(self, probes: Sequence[Probe], scenes: Sequence[Scene]) -> list[str]:
        """Return the lasting differences in the results of packets and health ports."""
        left, lines = list(probes), list[str]()
        unhealthy = list(scenes)
        for packets, patience_s in zip(PACKETS, PATIENCE_S, strict=True):
            mine, others = await asyncio.gather(
                *(self._send(twin, left, packets, patience_s) for twin in self)
            )
            results = zip(left, mine, others, strict=True)
            wrong = [
                (probe, one, other)
                for probe, one, other in results
                if one != other or _is_broken(one)
            ]
            health = [await asyncio.gather(*map(twin.health, unhealthy)) for twin in self]
            unhealthy_pairs = [
                (scene, one, other)
                for scene, one, other in zip(unhealthy, *health, strict=True)
                if one != other
            ]
            left, unhealthy = (
                [probe for probe, _, _ in wrong],
                [scene for scene, _, _ in unhealthy_pairs],
            )
            if not left and not unhealthy:
                return []
            await asyncio.sleep(PAUSE_S)
        lines += [
            f"{probe}\n  ours:   {sorted(one)}\n  theirs: {sorted(other)}"
            for probe, one, other in wrong
        ]
        return lines + [
            f"health ports of {scene.name}\n  ours:   {one}\n  theirs: {other}"
            for scene, one, other in unhealthy_pairs
        ]

    @staticmethod
    async def _send(
        twin: Twin, probes: Sequence[Probe], packets: int, patience_s: float
    ) -> list[Results]:
        return list(
            await asyncio.gather(*(twin.send(probe, packets, patience_s) for probe in probes))
        )


def _is_broken(results: Results) -> bool:
    """Return whether the result is a connection without an answer, which occurs during a change of
    state."""
    return any(seen == "broken" for _, seen in results)
