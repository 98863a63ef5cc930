"""The reflector with all API servers: lists, events, and resumption.

The servers are the embedded one, kube-apiserver over an etcd that supports streamed lists
(KEP-3157), and kube-apiserver over an etcd that is too old for them."""

import socket
from collections.abc import Mapping
from typing import Any

import pytest
from tests.kube.recording_proxy import RecordingProxy
from tests.lab.apiserver.api import Api

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES, Fields, ObjectKey, ObjectMeta, Resource
from fairlead.kube.reflector import Reflector
from fairlead.lab.apiserver.kinds import SERVICES as KIND

EVERY_SERVER = pytest.mark.parametrize("kind", ["embedded", "real", "older-etcd"])


def service(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"type": "ClusterIP", "ports": [{"port": 80}]}}


@EVERY_SERVER
@pytest.mark.parametrize("everywhere", [False, True], ids=["one namespace", "all namespaces"])
async def test_objects_equal_the_servers_objects(
    place: Api, client: Client, follow: Any, everywhere: bool
) -> None:
    for number in range(12):
        await place.create(KIND, service(f"s{number}"))
    reflector = Reflector(
        client, SERVICES, namespace="" if everywhere else place.namespace, floor_s=0.01
    )

    def of_namespace() -> dict[str, int]:
        return {
            key.name: found.spec.ports[0].port
            for key, found in reflector.objects.items()
            if key.namespace == place.namespace
        }

    async with follow(reflector) as follower:
        await follower.until(lambda: reflector.synced)
        assert of_namespace() == {f"s{number}": 80 for number in range(12)}
        await place.patch(KIND, "s3", {"spec": {"ports": [{"port": 81}]}})
        await place.delete(KIND, "s4")
        await place.create(KIND, service("new"))
        await follower.until(lambda: "new" in of_namespace())
        assert of_namespace() == {
            f"s{number}": 80 for number in range(12) if number not in (3, 4)
        } | {
            "s3": 81,
            "new": 80,
        }
        assert ObjectKey(place.namespace, "s4") not in follower.view
        assert reflector.lists == 1
        assert reflector.undecodable == 0


@EVERY_SERVER
async def test_the_list_is_streamed_if_the_server_supports_it(
    place: Api, follow: Any, kind: str
) -> None:
    """A server without streamed lists opens the watch and sends an error of code 500 in it; the
    list is then requested in pages, once."""
    for number in range(3):
        await place.create(KIND, service(f"s{number}"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        access = Access(f"http://127.0.0.1:{listener.getsockname()[1]}", token=place.access.token)
        async with RecordingProxy(place.access).listen(listener) as proxy, Client(access) as client:
            reflector = Reflector(client, SERVICES, namespace=place.namespace, floor_s=0.01)
            async with follow(reflector) as follower:
                await follower.until(
                    lambda: (
                        len(reflector.objects) == 3
                        and len(proxy.requests) >= (3 if kind == "older-etcd" else 1)
                    )
                )
            requests = [
                (
                    "streamed"
                    if "sendInitialEvents" in each.path
                    else "page"
                    if "limit=" in each.path
                    else "watch",
                    each.code,
                )
                for each in proxy.requests
            ]
            if kind == "older-etcd":
                assert requests == [("streamed", 200), ("page", 200), ("watch", 200)]
            else:
                assert requests == [("streamed", 200)]
            assert reflector.lists == 1


@EVERY_SERVER
async def test_a_watch_is_resumed_after_its_connection_breaks(place: Api, follow: Any) -> None:
    """Changes between two watches arrive in the next watch, without a new list."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        access = Access(url, token=place.access.token)
        async with RecordingProxy(place.access).listen(listener) as proxy, Client(access) as client:
            reflector = Reflector(
                client, SERVICES, namespace=place.namespace, floor_s=0.01, ceiling_s=0.05
            )
            async with follow(reflector) as follower:
                await follower.until(lambda: reflector.synced)
                for number in range(25):
                    await place.create(KIND, service(f"s{number}"))
                    if number % 5 == 0:
                        proxy.break_connections()
                await follower.until(lambda: len(reflector.objects) == 25)
                reported = [key for changed in follower.sets for key in changed]
                assert sorted(reported) == sorted(reflector.objects), (
                    "each object was reported once"
                )
                assert reflector.lists == 1
            watches = [
                request
                for request in proxy.requests
                if "watch=true" in request.path and request.code == 200
            ]
            assert len(watches) > 1


class Thing(Fields, frozen=True):
    metadata: ObjectMeta


def definition_of_things(group: str) -> Mapping[str, object]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"things.{group}"},
        "spec": {
            "group": group,
            "scope": "Cluster",
            "names": {
                "kind": "Thing",
                "plural": "things",
                "singular": "thing",
                "listKind": "ThingList",
            },
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object"}},
                },
            ],
        },
    }


async def test_a_kind_that_was_removed_and_installed_again_is_listed_again(
    place: Api, client: Client, follow: Any
) -> None:
    """This holds even if no object of the kind is created afterwards: the list alone shows that the
    kind exists."""
    group = f"{place.namespace}.example.com"
    definitions, things = (
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        f"/apis/{group}/v1/things",
    )
    absent: list[bool] = []
    reflector = Reflector(
        client,
        Resource(f"{group}/v1", "Thing", "things", False, Thing),
        floor_s=0.01,
        ceiling_s=0.05,
        on_absent=lambda: absent.append(True),
    )
    await place.do("POST", definitions, definition_of_things(group))
    try:
        async with follow(reflector) as follower:
            await follower.until(lambda: reflector.synced)
            thing = {"apiVersion": f"{group}/v1", "kind": "Thing", "metadata": {"name": "first"}}
            await place.do("POST", things, thing)
            await follower.until(lambda: len(follower.view) == 1)
            absent.clear()
            lists = reflector.lists
            await place.do("DELETE", f"{definitions}/things.{group}")
            await follower.until(lambda: bool(absent))
            await place.do("POST", definitions, definition_of_things(group))
            await follower.until(lambda: reflector.lists > lists)
            assert follower.view == {}
    finally:
        await place.do("DELETE", f"{definitions}/things.{group}")
