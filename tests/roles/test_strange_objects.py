"""Invalid objects: a node reports each of them, and serves every other Service as if they did not
exist. The object of a row may come from an old API server, or from another implementation; the
tests also check which objects the present API server admits."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import pytest
from tests.lab.apiserver.api import Api
from tests.roles.test_node import Role, until

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.kube.objects import EndpointSlice, ObjectKey, Service
from fairlead.lab.apiserver.kinds import ENDPOINT_SLICES, SERVICES
from fairlead.lab.kubeapiserver import KubeApiServer
from fairlead.model import ServiceKey

LONG = "n" * 63
DEADLINE_S = 60
NOT_ASKED = None
"""The fields that belong to the status, or that a dry run does not return."""


class Row(NamedTuple):
    """An invalid object: the `spec` of a Service with ClusterIP 10.96.1.N for row N, and its
    `endpoints`; the addresses at which it is still served, and the message about it. `admitted`:
    whether the present API server admits the object."""

    id: str
    spec: dict[str, Any] = {}
    ingress: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ("10.0.0.1",)
    target: int = 8080
    served: tuple[str, ...] = ("cluster",)
    message: str = ""
    admitted: bool | None = False
    name: str = ""


def port(number: int, **fields: Any) -> dict[str, Any]:
    return {"ports": [{"port": number, "protocol": "TCP", **fields}]}


def ranges(*texts: str) -> dict[str, Any]:
    return {"type": "LoadBalancer", "loadBalancerSourceRanges": list(texts)}


def affine(timeout_s: int) -> dict[str, Any]:
    return {
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": timeout_s}},
    }


ROWS = (
    Row(
        "a word",
        {"externalIPs": ["example.org"]},
        message="'example.org' of spec.externalIPs is not an IP address",
    ),
    Row("nothing", {"externalIPs": [""]}, message="'' of spec.externalIPs is not an IP address"),
    Row("three parts", {"externalIPs": ["203.0.113"]}, message="'203.0.113' of spec.externalIPs"),
    Row(
        "beyond 255",
        {"externalIPs": ["203.0.113.300"]},
        message="'203.0.113.300' of spec.externalIPs",
    ),
    Row(
        "three colons",
        {"externalIPs": ["2001:db8:::1"]},
        message="'2001:db8:::1' of spec.externalIPs",
    ),
    Row(
        "of a link", {"externalIPs": ["fe80::1%eth0"]}, message="'fe80::1%eth0' of spec.externalIPs"
    ),
    Row("leading zeros", {"externalIPs": ["203.000.113.007"]}, served=("cluster", "203.0.113.7")),
    Row("mapped", {"externalIPs": ["::ffff:203.0.113.8"]}, served=("cluster", "203.0.113.8")),
    Row(
        "a strange ingress",
        {"type": "LoadBalancer"},
        ("x",),
        message="'x' of status.loadBalancer.ingress",
        admitted=NOT_ASKED,
    ),
    Row(
        "an ingress with zeros",
        {"type": "LoadBalancer"},
        ("203.0.113.010",),
        served=("cluster", "203.0.113.10"),
        admitted=NOT_ASKED,
    ),
    Row(
        "no ClusterIP",
        {"clusterIP": "x", "clusterIPs": ["x"]},
        served=(),
        message="'x' of spec.clusterIPs is not an IP address",
    ),
    Row("port 0", port(0), served=(), message="port 0"),
    Row("port 70000", port(70_000), served=(), message="port 70000"),
    Row("port -1", port(-1), served=(), message="port -1"),
    Row(
        "node port 70000",
        {"type": "NodePort", **port(80, nodePort=70_000)},
        served=(),
        message="node port 70000",
        admitted=NOT_ASKED,
    ),
    Row(
        "health port 70000",
        {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 70_000},
        message="70000 of spec.healthCheckNodePort is not a port number",
    ),
    Row("a port twice", {"ports": [*port(80, name="a")["ports"], *port(80, name="b")["ports"]]}),
    Row(
        "blanks",
        ranges(" 192.0.2.0/24 "),
        ("203.0.113.20",),
        served=("cluster", "203.0.113.20"),
        admitted=True,
    ),
    Row(
        "bits behind the prefix",
        ranges("192.0.2.7/24"),
        ("203.0.113.21",),
        served=("cluster", "203.0.113.21"),
        admitted=NOT_ASKED,
    ),
    Row(
        "overlapping",
        ranges("192.0.2.0/24", "192.0.2.0/25"),
        ("203.0.113.22",),
        served=("cluster", "203.0.113.22"),
        admitted=True,
    ),
    Row(
        "no CIDR",
        ranges("192.0.2.0/99"),
        ("203.0.113.23",),
        served=(),
        message="source range '192.0.2.0/99' is not a CIDR",
    ),
    Row(
        "a CIDR without a length",
        ranges("192.0.2.0"),
        served=(),
        message="source range '192.0.2.0' is not a CIDR",
    ),
    Row("no time", affine(0)),
    Row("a long time", affine(10**12)),
    Row(
        "no endpoint",
        endpoints=("x",),
        message="endpoint 'x' port 8080 is not an IPv4 address and port",
    ),
    Row(
        "an endpoint of the other family",
        endpoints=("2001:db8::1",),
        message="endpoint '2001:db8::1' port 8080 is not an IPv4 address and port",
    ),
    Row("an endpoint with zeros", endpoints=("10.0.0.01",)),
    Row(
        "an endpoint's port 70000",
        target=70_000,
        message="endpoint '10.0.0.1' port 70000 is not an IPv4 address and port",
        admitted=True,
    ),
    Row(
        "1,000 endpoints",
        endpoints=tuple(f"10.1.{n // 250}.{n % 250 + 1}" for n in range(1000)),
        admitted=True,
    ),
    Row("long names", name=LONG, admitted=True),
)


def objects(number: int, row: Row, in_namespace: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Service and its EndpointSlice."""
    name = row.name or f"row-{number}"
    where = in_namespace or (LONG if row.name else "default")
    spec = {
        "type": "ClusterIP",
        "clusterIP": f"10.96.1.{number}",
        "clusterIPs": [f"10.96.1.{number}"],
        **port(80),
        **row.spec,
    }
    status = {"loadBalancer": {"ingress": [{"ip": ip} for ip in row.ingress]}}
    service = {
        "metadata": {"name": name, "namespace": where, "uid": "u"},
        "spec": spec,
        "status": status,
    }
    slice_ = {
        "metadata": {
            "name": name,
            "namespace": where,
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": [
            {"name": each.get("name", ""), "port": row.target, "protocol": "TCP"}
            for each in spec["ports"]
        ],
        "endpoints": [{"addresses": [address]} for address in row.endpoints],
    }
    return service, slice_


@pytest.fixture
async def driver(here: None) -> AsyncIterator[NodeProxyDriver]:
    made = NodeProxyDriver(node_addresses=lambda: ("192.0.2.1",), pod_cidrs=("10.0.0.0/8",))
    await made.open()
    yield made
    await made.close(remove=True)


@pytest.mark.root
async def test_invalid_objects_are_reported_and_all_others_are_served(
    driver: NodeProxyDriver,
) -> None:
    """All rows are applied at the same time, which is harder than one after the other, because they
    share transactions."""
    role = Role()
    sound = Row("sound", name="sound")
    everything = [objects(number, row) for number, row in enumerate((*ROWS, sound), 1)]
    for service, slice_ in everything:
        place = ObjectKey(service["metadata"]["namespace"], service["metadata"]["name"])
        role.state.update_services({place: msgspec.convert(service, Service)})
        role.state.update_slices({place: msgspec.convert(slice_, EndpointSlice)})
    wanted = {
        ServiceKey(service["metadata"]["namespace"], service["metadata"]["name"]): frozenset(
            f"10.96.1.{number}" if address == "cluster" else address for address in row.served
        )
        for number, (row, (service, _)) in enumerate(
            zip((*ROWS, sound), everything, strict=True), 1
        )
    }
    running = asyncio.create_task(role.loop(driver).run())
    async with asyncio.timeout(DEADLINE_S):
        while (found := await addresses(driver)) != {
            key: served for key, served in wanted.items() if served
        }:
            assert not running.done(), running.exception()
            await asyncio.sleep(0.05)
    assert len(found) == sum(bool(row.served) for row in ROWS) + 1
    message = {key: row.message for key, row in zip(wanted, (*ROWS, sound), strict=True)}
    await until(
        lambda: (
            {key for key, words in message.items() if words} <= {key for key, _, _ in role.events}
        )
    )
    for key, words in message.items():
        messages = [message for about, _, message in role.events if about == key]
        assert words in " ".join(messages) if words else not messages, (key, messages)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def addresses(driver: NodeProxyDriver) -> dict[ServiceKey, frozenset[str]]:
    """Return the addresses at which each Service is served."""
    there = await driver.read(None)
    return {
        key: frozenset(each.key.partition(" . ")[0] for each in spec if each.map == "services4")
        for key, spec in there.items()
    }


async def test_which_rows_the_present_api_server_admits(real_apiserver: KubeApiServer) -> None:
    wrong = []
    async with Api(real_apiserver.access, "real") as api:
        for number, row in enumerate(ROWS, 1):
            if row.admitted is NOT_ASKED:
                continue
            service, slice_ = objects(number, row, api.namespace)
            if service["spec"]["clusterIP"] != "x":
                del service["spec"]["clusterIP"], service["spec"]["clusterIPs"]
            codes = []
            for kind, body in ((SERVICES, service), (ENDPOINT_SLICES, slice_)):
                del body["metadata"]["namespace"]
                body["metadata"].pop("uid", None)
                status, _ = await api.call("POST", f"{api.path(kind)}?dryRun=All", body)
                codes.append(status)
            if (codes == [201, 201]) != row.admitted:
                wrong.append((row.id, codes))
    assert not wrong
