"""The client with both API servers, and with responses that no correct server sends."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.lab.apiserver.api import Api

from fairlead.errors import Conflict, Refused
from fairlead.kube.access import Access
from fairlead.kube.answers import (
    Expired,
    NotFound,
    RefusedByServer,
    ServerUnavailable,
    Unauthenticated,
)
from fairlead.kube.client import JSON_PATCH, STRATEGIC_MERGE_PATCH, Client
from fairlead.kube.objects import (
    NODES,
    SERVICES,
    LoadBalancerIngress,
    ObjectKey,
    Service,
    ServiceMeta,
    ServicePort,
    ServiceSpec,
)
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.kinds import NODES as KINDS_NODES

WEB = ("default", "web")


def service(namespace: str, name: str = "web", port: int = 80) -> Service:
    return Service(
        ServiceMeta(name, namespace, labels={"app": name}),
        ServiceSpec("LoadBalancer", (ServicePort(port),)),
    )


@pytest.fixture
def web(place: Api) -> ObjectKey:
    return ObjectKey(place.namespace, "web")


async def test_an_object_is_created_patched_and_deleted(client: Client, web: ObjectKey) -> None:
    made = await client.create(SERVICES, service(web.namespace))
    assert made.metadata.uid
    assert made.spec.cluster_ip
    assert await client.get(SERVICES, web) == made

    with pytest.raises(Conflict):
        await client.create(SERVICES, service(web.namespace))

    patched = await client.patch(SERVICES, web, {"metadata": {"annotations": {"a": "b"}}})
    assert patched.metadata.annotations == {"a": "b"}
    patched = await client.patch(
        SERVICES,
        web,
        [{"op": "remove", "path": "/metadata/annotations/a"}],
        content_type=JSON_PATCH,
    )
    assert patched.metadata.annotations == {}
    more = {"spec": {"ports": [{"port": 443, "name": "tls"}, {"port": 80, "name": "plain"}]}}
    patched = await client.patch(SERVICES, web, more, content_type=STRATEGIC_MERGE_PATCH)
    assert {port.port for port in patched.spec.ports} == {80, 443}

    with pytest.raises(Conflict):
        await client.delete(SERVICES, web, uid="another")
    await client.delete(SERVICES, web, uid=made.metadata.uid)
    with pytest.raises(NotFound) as missing:
        await client.get(SERVICES, web)
    assert missing.value.status == 404


async def test_a_replacement_needs_the_present_resource_version(
    client: Client, web: ObjectKey
) -> None:
    made = await client.create(SERVICES, service(web.namespace))
    await client.patch(SERVICES, web, {"metadata": {"annotations": {"a": "b"}}})
    with pytest.raises(Conflict):
        await client.replace(SERVICES, web, made)
    await client.replace(SERVICES, web, await client.get(SERVICES, web))


async def test_server_side_apply_of_a_status_respects_the_managers_of_its_fields(
    client: Client, web: ObjectKey
) -> None:
    async def apply(manager: str, status: Mapping[str, object], *, force: bool = False) -> Service:
        return await client.apply(
            SERVICES, web, status, field_manager=manager, subresource="status", force=force
        )

    await client.create(SERVICES, service(web.namespace))
    applied = await apply(
        "one", {"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.7", "ipMode": "Proxy"}]}}}
    )
    assert applied.status.load_balancer.ingress == (
        LoadBalancerIngress("203.0.113.7", ip_mode="Proxy"),
    )
    other = {"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.8"}]}}}
    with pytest.raises(Conflict, match="one"):
        await apply("two", other)
    forced = await apply("two", other, force=True)
    assert forced.status.load_balancer.ingress == (
        LoadBalancerIngress("203.0.113.8", ip_mode="VIP"),
    )
    # A field that a manager no longer sends is removed.
    assert (await apply("two", {})).status.load_balancer.ingress == ()


async def test_server_side_apply_creates_objects_with_and_without_a_namespace(
    client: Client, web: ObjectKey, place: Api
) -> None:
    place.remove_later(KINDS_NODES, place.namespace)
    node = await client.apply(
        NODES, ("", place.namespace), {"metadata": {"labels": {"a": "b"}}}, field_manager="me"
    )
    assert node.metadata.name == place.namespace
    assert node.metadata.labels["a"] == "b"
    made = await client.apply(
        SERVICES, web, {"spec": {"ports": [{"port": 80}]}}, field_manager="me"
    )
    assert (made.metadata.namespace, made.metadata.name) == web


async def test_a_list_contains_all_pages_and_only_selected_objects(
    client: Client, place: Api
) -> None:
    namespace = place.namespace
    for number in range(7):
        await client.create(SERVICES, service(namespace, f"web-{number}"))
    page = await client.page(SERVICES, namespace=namespace, limit=3)
    assert len(page.items or ()) == 3
    assert page.metadata.continue_
    assert len(await client.list(SERVICES, namespace=namespace)) == 7
    chosen = await client.list(SERVICES, namespace=namespace, label_selector="app=web-3")
    assert [service.metadata.name for service in chosen] == ["web-3"]
    assert await client.list(SERVICES, namespace="kube-public") == []
    assert len(await client.list(SERVICES, namespace=namespace, page_size=2)) == 7
    assert (
        len(
            [
                service
                for service in await client.list(SERVICES, page_size=2)
                if service.metadata.namespace == namespace
            ]
        )
        == 7
    )


async def test_a_rejection_contains_the_message_of_the_server(
    client: Client, web: ObjectKey
) -> None:
    wrong = {
        "metadata": {"name": "web", "namespace": web.namespace},
        "spec": {"ports": [{"port": 99999}]},
    }
    with pytest.raises(RefusedByServer, match="99999") as refused:
        await client.create(SERVICES, wrong)
    assert refused.value.status == 422
    assert f"POST {client.access.server}/api/v1/namespaces/{web.namespace}/services" in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (401, Unauthenticated),
        (403, Refused),
        (409, Conflict),
        (410, Expired),
        (429, ServerUnavailable),
        (503, ServerUnavailable),
    ],
)
async def test_requests_and_watches_raise_the_error_of_the_status(
    code: int, error: type[Exception], scripted: Any, replies: Any
) -> None:
    async with scripted(replies.failure(code, "no")) as (_, client):
        with pytest.raises(error):
            await client.get(SERVICES, WEB)
        with pytest.raises(error):
            async for _ in client.stream(SERVICES, parameters={}):
                pass


async def test_a_silent_server_is_unavailable_after_the_timeout(
    scripted: Any, replies: Any
) -> None:
    async with scripted(replies.watch(), timeout_s=0.2) as (_, client):
        with pytest.raises(ServerUnavailable, match=r"not answered in 0\.2 s"):
            await client.get(SERVICES, WEB)


async def test_a_closed_port_is_unavailable() -> None:
    async with ApiServer() as server:
        url = server.url
    async with Client(Access(url), timeout_s=5) as client:
        with pytest.raises(ServerUnavailable, match="GET http"):
            await client.get(SERVICES, WEB)


async def test_responses_that_are_not_objects_raise_an_error(scripted: Any, replies: Any) -> None:
    async with scripted(replies.json("surprise")) as (_, client):
        with pytest.raises(Refused, match="cannot be read"):
            await client.get(SERVICES, WEB)
        with pytest.raises(ServerUnavailable, match="not a list"):
            await client.list(SERVICES)


async def test_redirections_are_not_followed_with_the_token(scripted: Any, replies: Any) -> None:
    async with scripted(replies.json({}, 302, Location="http://192.0.2.1/")) as (_, client):
        with pytest.raises(Refused, match="redirections"):
            await client.get(SERVICES, WEB)


async def test_the_path_in_the_url_of_the_server_precedes_the_api_path(
    scripted: Any, replies: Any
) -> None:
    async with scripted(replies.json({"metadata": {"name": "web"}})) as (server, _):
        async with Client(Access(server.url + "/k8s/clusters/c-1/")) as client:
            await client.get(SERVICES, WEB)
        assert server.requests[0][2] == "/k8s/clusters/c-1/api/v1/namespaces/default/services/web"
