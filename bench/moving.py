"""The input of the benchmark of service proxies: a recording in which some Services have one
endpoint, and the events.

In: a recording. Out: the sampled Services, the events of the other Services, and a replay that both
proxies can read.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address
from itertools import cycle
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from bench.committed import FIRST_ADDRESS
from bench.stream import VERSION, Recording, Replay

from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICES, Service

MOVED_TO = "10.250.{}.{}"
FIRST_NODE_PORT = 50_001
"""Above the range of health check node ports; see `cluster`."""


class Sampled(NamedTuple):
    """A Service with a NodePort and one endpoint, whose address alternates between two."""

    cluster_ip: str
    balancer: str
    node_port: int
    slice: dict[str, Any]
    addresses: tuple[str, str]


class Move(NamedTuple):
    """An event: the Service, its endpoint's new address, the line of a watch."""

    service: str
    address: str
    line: str


class Others(NamedTuple):
    """Endless events of all Services but the sampled ones. `moves`: in a third of the Services, an
    endpoint gets an address that no event had before. `turns`: in the others, an endpoint becomes
    unready, then ready again."""

    moves: Iterator[Move]
    turns: Iterator[str]


def others_of(recorded: Recording, sampled: Sequence[Sampled]) -> Others:
    apart = {one.slice["metadata"]["name"] for one in sampled}
    slices = [json.loads(bytes(raw)) for raw in recorded.listed[ENDPOINT_SLICES.path()]]
    others = [each for each in slices if each["metadata"]["name"] not in apart]
    return Others(_moves(others[::3]), _turns([each for at, each in enumerate(others) if at % 3]))


def _moves(slices: Sequence[dict[str, Any]]) -> Iterator[Move]:
    for number, each in enumerate(cycle(slices)):
        address = str(IPv4Address(FIRST_ADDRESS) + number)
        each["endpoints"][0]["addresses"] = [address]
        yield Move(each["metadata"]["name"], address, modified(each))


def _turns(slices: Sequence[dict[str, Any]]) -> Iterator[str]:
    for ready in cycle((False, True)):
        for each in slices:
            each["endpoints"][0]["conditions"] |= {"ready": ready, "serving": ready}
            yield modified(each)


def sample(recorded: Recording, number: int) -> tuple[Recording, list[Sampled]]:
    """Return the recording with some Services changed to have one endpoint and a NodePort, and
    these Services."""
    services = {}
    listed = list(recorded.listed[SERVICES.path()])
    for at, raw in enumerate(listed):
        service = msgspec.json.decode(raw, type=Service)
        services[service.metadata.namespace, service.metadata.name] = at, service
    slices = list(recorded.listed[ENDPOINT_SLICES.path()])
    sampled = []
    for nth, at in enumerate(
        random.Random(3).sample(range(len(slices)), min(number, len(slices) // 2))
    ):
        one = json.loads(bytes(slices[at]))
        place, service = services[
            one["metadata"]["namespace"], one["metadata"]["labels"]["kubernetes.io/service-name"]
        ]
        addresses = MOVED_TO.format(1, nth + 1), MOVED_TO.format(2, nth + 1)
        one["endpoints"] = [{**one["endpoints"][0], "addresses": [addresses[0]]}]
        slices[at] = msgspec.Raw(msgspec.json.encode(one))
        body = json.loads(bytes(listed[place]))
        body["spec"]["ports"][0]["nodePort"] = node_port = FIRST_NODE_PORT + nth
        listed[place] = msgspec.Raw(msgspec.json.encode(body))
        balancer = service.status.load_balancer.ingress[0].ip
        cluster_ip = service.spec.cluster_ip or service.spec.cluster_ips[0]
        sampled.append(Sampled(cluster_ip, balancer, node_port, one, addresses))
    changed = {SERVICES.path(): listed, ENDPOINT_SLICES.path(): slices}
    return Recording({**recorded.listed, **changed}, recorded.turns), sampled


def name_of(body: bytes) -> str:
    """Return the name of an object."""
    return str(json.loads(body)["metadata"]["name"])


def modified(slice_: Mapping[str, Any]) -> str:
    """Return the line of a watch. Kind and version are added, because objects in lists have
    none."""
    body = {"kind": ENDPOINT_SLICES.kind, "apiVersion": "discovery.k8s.io/v1", **slice_}
    return json.dumps({"type": "MODIFIED", "object": body}, separators=(",", ":"))


class Reader(Replay):
    """A replay that service proxies can read: they request their own Node, and kube-proxy requests
    ServiceCIDRs."""

    def routes(self, application: web.Application) -> None:
        super().routes(application)
        application.router.add_get("/apis/networking.k8s.io/v1/servicecidrs", self._nothing)
        application.router.add_get(f"{NODES.path()}/{{name}}", self._one)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
        if request.path != NODES.path() or not name or "watch" in request.query:
            return await super()._answer(request)
        found = [msgspec.Raw(each) for each in self.listed(NODES) if name_of(each) == name]
        body = {
            "kind": "NodeList",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": VERSION},
            "items": found,
        }
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _one(self, request: web.Request) -> web.StreamResponse:
        found = (each for each in self.listed(NODES) if name_of(each) == request.match_info["name"])
        return web.Response(body=next(found), content_type="application/json")

    async def _nothing(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        body = {
            "kind": "ServiceCIDRList",
            "apiVersion": "networking.k8s.io/v1",
            "metadata": {"resourceVersion": "1"},
            "items": [],
        }
        return web.json_response(body)
