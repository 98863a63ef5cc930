"""Null and empty fields of ports, in Services, EndpointSlices and Endpoints: what the API server
accepts is accepted, with the same defaults, and what it refuses is refused."""

from typing import Any, Final

import pytest
from tests.lab.apiserver.api import Api

from fairlead.kube.mirrored import mirrors
from fairlead.kube.objects import EndpointPort
from fairlead.kube.rules.types import without_nulls
from fairlead.kube.submission import Families, submit
from fairlead.kube.written import refusal
from fairlead.lab.kubeapiserver import KubeApiServer

PATHS: Final = {
    "Service": "/api/v1/namespaces/{}/services",
    "EndpointSlice": "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
    "Endpoints": "/api/v1/namespaces/{}/endpoints",
}
PORTS: Final[dict[str, dict[str, Any]]] = {
    "no field": {},
    "null protocol": {"protocol": None},
    "empty protocol": {"protocol": ""},
    "lower case": {"protocol": "tcp"},
    "null name": {"name": None},
    "empty name": {"name": ""},
    "null port": {"port": None},
    "port zero": {"port": 0},
    "null appProtocol": {"appProtocol": None},
    "empty appProtocol": {"appProtocol": ""},
    "appProtocol with a space": {"appProtocol": "a b"},
    "null targetPort": {"targetPort": None},
    "empty targetPort": {"targetPort": ""},
    "targetPort zero": {"targetPort": 0},
    "null nodePort": {"nodePort": None},
}
REFUSED: Final = {
    "Service": {
        *("lower case", "null port", "port zero"),
        *("empty appProtocol", "appProtocol with a space"),
    },
    "EndpointSlice": {
        *("empty protocol", "lower case"),
        *("empty appProtocol", "appProtocol with a space"),
    },
    "Endpoints": {
        *("lower case", "null port", "port zero"),
        *("empty appProtocol", "appProtocol with a space"),
    },
}
ROWS: Final = [
    (kind, name)
    for kind in PATHS
    for name, fields in PORTS.items()
    if kind == "Service" or not fields.keys() & {"targetPort", "nodePort"}
]


def written(kind: str, name: str) -> dict[str, Any]:
    """Return an object whose only port has these fields."""
    port = {"port": 80, **PORTS[name]}
    parts: dict[str, dict[str, Any]] = {
        "Service": {"spec": {"type": "LoadBalancer", "ports": [port]}},
        "EndpointSlice": {
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["192.0.2.1"]}],
            "ports": [port],
        },
        "Endpoints": {"subsets": [{"addresses": [{"ip": "192.0.2.1"}], "ports": [port]}]},
    }
    version = "discovery.k8s.io/v1" if kind == "EndpointSlice" else "v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "odd"}, **parts[kind]}


def is_refused(kind: str, object_: dict[str, Any]) -> bool:
    given = without_nulls(object_ | {"metadata": {"name": "odd", "namespace": "default"}})
    if kind == "Service":
        (submission,) = submit([given], Families())
        return bool(submission.refused)
    return bool(refusal(kind, given))


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_empty_fields_of_ports_are_defaulted_or_refused(kind: str, name: str) -> None:
    assert is_refused(kind, written(kind, name)) == (name in REFUSED[kind])


async def test_the_api_server_decides_in_the_same_way(real_apiserver: KubeApiServer) -> None:
    async with Api(real_apiserver.access, "real") as api:
        refused: dict[str, set[str]] = {kind: set() for kind in PATHS}
        for kind, name in ROWS:
            path = f"{PATHS[kind].format(api.namespace)}?dryRun=All"
            status, answer = await api.call("POST", path, written(kind, name))
            assert status in (201, 422), answer
            if status == 422:
                refused[kind].add(name)
    assert refused == REFUSED


def test_endpoints_with_an_empty_protocol_are_mirrored_as_tcp() -> None:
    endpoints = written("Endpoints", "empty protocol")
    endpoints["metadata"]["namespace"] = "default"
    (mirror,) = mirrors(endpoints)
    assert mirror.ports == (EndpointPort("", 80, "TCP"),)
