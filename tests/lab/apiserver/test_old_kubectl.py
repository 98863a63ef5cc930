"""The exact requests of kubectl 1.20 and the answers that it needs, for machines without it.

Recorded from its requests (`-v=9`): it accepts the OpenAPI document in protobuf only, does not use
field validation by the server, and names a field manager in each write.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.lab.apiserver.api import Api, Object
from tests.lab.apiserver.gnostic import decode

from fairlead.lab.apiserver.kinds import SERVICES

Make = Callable[..., Object]
AGENT = "kubectl/v1.20.2 (linux/amd64) kubernetes/faecb19"
TABLE = (
    ",".join(
        f"application/json;as=Table;v={version};g=meta.k8s.io" for version in ("v1", "v1beta1")
    )
    + ",application/json"
)
APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


class Answer:
    """A response: the code, the headers and the bytes."""

    def __init__(self, code: int, headers: Object, data: bytes) -> None:
        self.code, self.headers, self.data = code, headers, data

    @property
    def document(self) -> Object:
        document: Object = json.loads(self.data)
        return document


Send = Callable[..., Any]


@pytest.fixture
def send(api: Api) -> Send:
    async def send_as_kubectl(
        method: str,
        path: str,
        body: object = None,
        media_type: str = "",
        accept: str = "application/json",
    ) -> Answer:
        media = {"media_type": media_type} if media_type else {}
        async with api.request(
            method, path, body=body, User_Agent=AGENT, Accept=accept, **media
        ) as answer:
            return Answer(answer.status, dict(answer.headers), await answer.read())

    return send_as_kubectl


async def test_the_openapi_document(api: Api, send: Send) -> None:
    accept = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"
    answer = await send("GET", "/openapi/v2?timeout=32s", accept=accept)
    assert answer.code == 200
    assert (
        answer.headers["Content-Type"]
        == "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
    )
    in_json = await send("GET", "/openapi/v2", accept="application/json, */*")
    assert in_json.headers["Content-Type"].startswith("application/json")
    if api.name == "embedded":
        assert decode(answer.data) == in_json.document, (
            "the document of the real server may have further fields"
        )
    assert in_json.document["definitions"]["io.k8s.api.core.v1.Service"]["properties"].keys() >= {
        "spec",
        "status",
    }


async def test_discovery(send: Send) -> None:
    accept = "application/json, */*"
    assert (await send("GET", "/api?timeout=32s", accept=accept)).document["versions"] == ["v1"]
    groups = (await send("GET", "/apis?timeout=32s", accept=accept)).document["groups"]
    served = {group["preferredVersion"]["groupVersion"] for group in groups}
    assert served >= {"discovery.k8s.io/v1", "coordination.k8s.io/v1"}
    for path in ("/api/v1", *(f"/apis/{version}" for version in served)):
        resources = (await send("GET", f"{path}?timeout=32s", accept=accept)).document
        assert resources["kind"] == "APIResourceList"
        assert resources["resources"]


async def test_apply_diff_apply(api: Api, send: Send, make_service: Make) -> None:
    mine = api.path(SERVICES, "web")
    assert (await send("GET", mine)).code == 404
    ports = [{"name": "http", "port": 80}, {"name": "https", "port": 443}]
    service = make_service(ports=ports, externalTrafficPolicy="Local")
    service["metadata"]["annotations"] = {APPLIED: json.dumps(service)}
    manager = "fieldManager=kubectl-client-side-apply"
    created = await send("POST", f"{api.path(SERVICES)}?{manager}", service, "application/json")
    assert created.code == 201
    strategic = "application/strategic-merge-patch+json"
    change = {
        "spec": {
            "$setElementOrder/ports": [{"port": 80}],
            "ports": [{"$patch": "delete", "port": 443}],
        }
    }
    version = created.document["metadata"]["resourceVersion"]
    shown = await send(
        "PATCH",
        f"{mine}?dryRun=All&{manager}",
        change | {"metadata": {"resourceVersion": version}},
        strategic,
    )
    assert [port["port"] for port in shown.document["spec"]["ports"]] == [80]
    assert [port["port"] for port in (await api.get(SERVICES, "web"))["spec"]["ports"]] == [80, 443]
    patched = await send("PATCH", f"{mine}?{manager}", change, strategic)
    assert (patched.code, patched.headers.get("Warning")) == (200, None)
    assert patched.document["spec"]["ports"] == shown.document["spec"]["ports"]
    [entry] = patched.document["metadata"]["managedFields"]
    assert entry["manager"] == "kubectl-client-side-apply"


async def test_server_side_apply(api: Api, send: Send, make_service: Make) -> None:
    path = f"{api.path(SERVICES, 'web')}?fieldManager=kubectl&force=false"
    created = await send("PATCH", path, make_service(), "application/apply-patch+yaml")
    assert created.code == 201
    again = await send("PATCH", path, make_service(), "application/apply-patch+yaml")
    assert (
        again.document["metadata"]["resourceVersion"]
        == created.document["metadata"]["resourceVersion"]
    )


async def test_get_label_delete(api: Api, send: Send, make_service: Make) -> None:
    await send("POST", api.path(SERVICES), make_service(), "application/json")
    table = (await send("GET", f"{api.path(SERVICES)}?limit=500", accept=TABLE)).document
    assert (table["kind"], table["apiVersion"]) == ("Table", "meta.k8s.io/v1")
    assert [row["cells"][:2] for row in table["rows"]] == [["web", "LoadBalancer"]]
    label = {"metadata": {"labels": {"tier": "front"}}}
    labelled = await send(
        "PATCH",
        f"{api.path(SERVICES, 'web')}?fieldManager=kubectl-label",
        label,
        "application/merge-patch+json",
    )
    assert labelled.document["metadata"]["labels"] == {"tier": "front"}
    gone = await send(
        "DELETE", api.path(SERVICES, "web"), {"propagationPolicy": "Background"}, "application/json"
    )
    assert gone.code == 200
    left = await send("GET", f"{api.path(SERVICES)}?fieldSelector=metadata.name%3Dweb")
    assert left.document["items"] == []


async def test_a_misspelt_field_causes_a_warning_without_a_request_for_validation(
    api: Api, send: Send, make_service: Make
) -> None:
    made = await send(
        "POST", api.path(SERVICES), make_service(externalTraficPolicy="Local"), "application/json"
    )
    assert made.code == 201
    assert made.headers["Warning"] == '299 - "unknown field \\"spec.externalTraficPolicy\\""'
