"""The verbs on objects of every kind: versions, writes that change nothing, deletion,
namespaces."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from tests.lab.apiserver.api import Api, Failed, version_of

from fairlead.lab.apiserver import ApiFailure, Deletion, Registry, Write
from fairlead.lab.apiserver.kinds import (
    ENDPOINT_SLICES,
    EVENTS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    Kind,
)

Object = dict[str, Any]
Make = Callable[..., Object]
WRITE = Write("test")
STRATEGIC = "application/strategic-merge-patch+json"


def pod(name: str = "p", **spec: Any) -> Object:
    fields = {"containers": [{"name": "c", "image": "example.com/web:1"}]} | spec
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": fields}


async def test_a_write_that_changes_nothing_stores_nothing(api: Api, make_service: Make) -> None:
    made = await api.create(SERVICES, make_service())
    written = await api.update(SERVICES, "web", make_service())
    equal = await api.update(SERVICES, "web", made, fieldManager="other")
    patched = await api.patch(SERVICES, "web", {"spec": {"type": "LoadBalancer"}})
    assert written == equal == patched == made
    async with api.watch(SERVICES, f"resourceVersion={version_of(made)}") as watch:
        await api.create(SERVICES, make_service("next"))
        assert (await watch.next())["object"]["metadata"]["name"] == "next"


async def test_the_version_must_match(api: Api, make_service: Make) -> None:
    made = await api.create(SERVICES, make_service())
    changed = deepcopy(made)
    changed["metadata"]["labels"] = {"a": "b"}
    await api.update(SERVICES, "web", deepcopy(changed))
    with pytest.raises(Failed) as refused:
        await api.update(SERVICES, "web", changed)
    assert (refused.value.code, refused.value.reason) == (409, "Conflict")
    assert refused.value.message == (
        'Operation cannot be fulfilled on services "web": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    stale = {
        "metadata": {"resourceVersion": made["metadata"]["resourceVersion"], "labels": {"a": "c"}}
    }
    with pytest.raises(Failed, match="the object has been modified"):
        await api.patch(SERVICES, "web", stale, "application/merge-patch+json")


def test_stored_objects_never_change(registry: Registry, make_service: Make) -> None:
    stored = registry.create(SERVICES, "default", make_service(), WRITE)
    before = deepcopy(stored.object)

    def patch(media_type: str, patch: object) -> None:
        registry.patch(SERVICES, "default", "web", media_type, patch, WRITE)

    for media_type in ("application/merge-patch+json", STRATEGIC):
        # A change of the type removes node ports. If the patched object shared its ports with the
        # stored object, the stored object would lose them, too.
        patch(
            media_type,
            {"metadata": {"labels": {media_type[12:17]: "x"}}, "spec": {"type": "ClusterIP"}},
        )
        patch(media_type, {"spec": {"type": "LoadBalancer"}})
    patch(
        "application/json-patch+json",
        [{"op": "replace", "path": "/spec/ports/0/port", "value": 81}],
    )
    assert stored.object == before


async def test_fields_of_the_server_cannot_be_set_by_clients(api: Api, make_service: Make) -> None:
    service = make_service()
    service["metadata"] |= {
        "uid": "mine",
        "creationTimestamp": "2001-01-01T00:00:00Z",
        "managedFields": [],
    }
    made = (await api.create(SERVICES, service))["metadata"]
    assert made["uid"] != "mine"
    assert made["creationTimestamp"] > "2020"
    assert "generation" not in made, "Services have no generation"
    with pytest.raises(Failed, match="resourceVersion should not be set on objects to be created"):
        await api.create(
            SERVICES, {"metadata": {"name": "b", "resourceVersion": "7"}, "spec": service["spec"]}
        )


async def test_generated_names(api: Api) -> None:
    named = pod() | {"metadata": {"generateName": "web-"}}
    names = {(await api.create(PODS, deepcopy(named)))["metadata"]["name"] for _ in range(5)}
    assert len(names) == 5
    assert all(name.startswith("web-") and len(name) == 9 for name in names)


@pytest.mark.parametrize(
    ("kind", "obj", "expected"),
    [
        (
            PODS,
            pod("Upper"),
            'metadata.name: Invalid value: "Upper": a lowercase RFC 1123 subdomain',
        ),
        (
            PODS,
            {"metadata": {}, "spec": pod()["spec"]},
            "metadata.name: Required value: name or generateName",
        ),
        (PODS, pod(containers=[]), "spec.containers: Required value"),
        (PODS, pod(containers=[{"name": "c"}]), r"spec.containers\[0\].image: Required value"),
        (
            NODES,
            {"metadata": {"name": "n"}, "spec": {"podCIDRs": ["x"]}},
            r"spec.podCIDRs\[0\]: Invalid value: \"x\"",
        ),
        (
            NODES,
            {"metadata": {"name": "n", "labels": {"a b": ""}}},
            'metadata.labels: Invalid value: "a b"',
        ),
        (ENDPOINT_SLICES, {"metadata": {"name": "s"}}, "addressType: Required value"),
        (
            ENDPOINT_SLICES,
            {
                "metadata": {"name": "s"},
                "addressType": "IPv4",
                "endpoints": [{"addresses": ["2001:db8::1"]}],
            },
            r'endpoints\[0\].addresses: Invalid value: "2001:db8::1": must be an IPv4 address',
        ),
        (
            ENDPOINT_SLICES,
            {"metadata": {"name": "s"}, "addressType": "IPv4", "endpoints": [{"addresses": []}]},
            r"endpoints\[0\].addresses: Required value: must contain at least 1 address",
        ),
        (
            LEASES,
            {"metadata": {"name": "l"}, "spec": {"leaseDurationSeconds": 0}},
            "must be greater than 0",
        ),
        (
            EVENTS,
            {"metadata": {"name": "e"}, "involvedObject": {"namespace": "x"}},
            "does not match event.namespace",
        ),
        (
            NAMESPACES,
            {"metadata": {"name": "a.b"}},
            'metadata.name: Invalid value: "a.b": must not contain dots',
        ),
        (
            SERVICES,
            {"metadata": {"name": "w", "finalizers": ["bare"]}},
            "neither a standard finalizer name nor",
        ),
    ],
)
async def test_other_kinds_are_checked_lightly(
    api: Api, kind: Kind, obj: Object, expected: str
) -> None:
    with pytest.raises(Failed, match=expected) as refused:
        await api.create(kind, obj)
    assert refused.value.code == 422


async def test_missing_namespaces_and_names(api: Api, make_service: Make) -> None:
    with pytest.raises(Failed, match='namespaces "nowhere" not found') as refused:
        await api.create(SERVICES, make_service(), namespace="nowhere")
    assert refused.value.code == 404
    await api.create(SERVICES, make_service())
    with pytest.raises(Failed, match='services "web" already exists') as refused:
        await api.create(SERVICES, make_service())
    assert (refused.value.code, refused.value.reason) == (409, "AlreadyExists")
    with pytest.raises(Failed, match=r'leases\.coordination\.k8s\.io "x" not found'):
        await api.get(LEASES, "x")
    names = {item["metadata"]["name"] for item in await api.items(NAMESPACES)}
    assert names >= {"default", "kube-node-lease", "kube-public", "kube-system", api.namespace}


async def test_a_field_that_the_kind_does_not_have_is_dropped(api: Api) -> None:
    containers = [
        {"name": "c", "image": "x", "env": [{"name": "A", "value": "1"}], "ofTomorrow": {"a": [1]}}
    ]
    container = (await api.create(PODS, pod(containers=containers)))["spec"]["containers"][0]
    assert container["env"] == [{"name": "A", "value": "1"}]
    assert "ofTomorrow" not in container


async def test_a_pods_grace_period(api: Api) -> None:
    await api.create(PODS, pod(nodeName="n1", terminationGracePeriodSeconds=17))
    marked = await api.delete(PODS, "p")
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 17
    assert version_of(await api.delete(PODS, "p")) == version_of(marked), (
        "a repeated deletion changes nothing"
    )
    shorter = await api.delete(PODS, "p", gracePeriodSeconds=3)
    assert shorter["metadata"]["deletionGracePeriodSeconds"] == 3
    await api.delete(PODS, "p", gracePeriodSeconds=0)
    assert await api.find(PODS, "p") is None


@pytest.mark.parametrize("phase", [None, "Succeeded", "Failed"])
async def test_a_pod_that_does_not_run_is_deleted_at_once(api: Api, phase: str | None) -> None:
    made = await api.create(PODS, pod(**({"nodeName": "n1"} if phase else {})))
    if phase:
        await api.update(PODS, "p", made | {"status": {"phase": phase}}, subresource="status")
    await api.delete(PODS, "p")
    assert await api.find(PODS, "p") is None


async def test_an_object_stays_until_its_finalizers_are_removed(
    api: Api, make_service: Make
) -> None:
    service = make_service()
    service["metadata"]["finalizers"] = ["example.com/a", "example.com/b"]
    await api.create(SERVICES, service)
    await api.delete(SERVICES, "web")
    marked = await api.get(SERVICES, "web")
    assert marked["metadata"]["deletionTimestamp"]
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 0
    more = deepcopy(marked)
    more["metadata"]["finalizers"].append("example.com/c")
    with pytest.raises(
        Failed, match="no new finalizers can be added if the object is being deleted"
    ):
        await api.update(SERVICES, "web", more)
    revived = deepcopy(marked)
    del revived["metadata"]["deletionTimestamp"]
    assert (await api.update(SERVICES, "web", revived))["metadata"]["deletionTimestamp"]
    await api.patch(SERVICES, "web", {"metadata": {"finalizers": ["example.com/b"]}})
    assert await api.find(SERVICES, "web") is not None
    last = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["example.com/b"]}}
    await api.patch(SERVICES, "web", last, STRATEGIC, subresource="status")
    assert await api.find(SERVICES, "web") is None


async def test_a_deletion_checks_its_preconditions(api: Api, make_service: Make) -> None:
    made = (await api.create(SERVICES, make_service()))["metadata"]
    with pytest.raises(
        Failed, match=r"the UID in the precondition \(other\) does not match the UID in record"
    ):
        await api.delete(SERVICES, "web", preconditions={"uid": "other"})
    with pytest.raises(
        Failed, match=r"the ResourceVersion in the precondition \(1\) does not match"
    ):
        await api.delete(SERVICES, "web", preconditions={"resourceVersion": "1"})
    await api.delete(
        SERVICES,
        "web",
        preconditions={"uid": made["uid"], "resourceVersion": made["resourceVersion"]},
    )
    assert await api.find(SERVICES, "web") is None


async def test_the_response_to_a_deletion(api: Api, make_service: Make) -> None:
    made = await api.create(SERVICES, make_service())
    gone = await api.delete(SERVICES, "web")
    assert (gone["kind"], gone["metadata"]["uid"]) == ("Service", made["metadata"]["uid"])
    lease = await api.create(LEASES, {"metadata": {"name": "l"}})
    answer = await api.delete(LEASES, "l")
    assert (answer["kind"], answer["status"]) == ("Status", "Success")
    details = {
        "name": "l",
        "group": "coordination.k8s.io",
        "kind": "leases",
        "uid": lease["metadata"]["uid"],
    }
    assert answer["details"] == details


async def test_no_object_is_created_in_a_terminating_namespace(api: Api) -> None:
    name = f"{api.namespace}-shop"
    await api.create(NAMESPACES, {"metadata": {"name": name}})
    await api.create(PODS, pod("busy", nodeName="n1"), namespace=name)
    await api.delete(NAMESPACES, name)
    assert (await api.get(NAMESPACES, name))["status"]["phase"] == "Terminating"
    with pytest.raises(Failed, match="because it is being terminated") as refused:
        await api.create(PODS, pod("late"), namespace=name)
    assert (refused.value.code, refused.value.reason) == (403, "Forbidden")


def test_deleting_a_namespace_deletes_its_objects(registry: Registry) -> None:
    """In a cluster the namespace controller deletes the objects. A bare API server has none, so the
    embedded server does that itself."""
    registry.create(NAMESPACES, "", {"metadata": {"name": "shop"}}, WRITE)
    registry.create(PODS, "shop", pod("idle"), WRITE)
    registry.create(PODS, "shop", pod("busy", nodeName="n1"), WRITE)
    marked, gone = registry.delete(NAMESPACES, "", "shop", Deletion())
    assert (gone, marked.object["status"]["phase"]) == (False, "Terminating")
    assert registry.store.get(PODS, "shop", "idle") is None
    with pytest.raises(ApiFailure, match="because it is being terminated"):
        registry.create(PODS, "shop", pod("late"), WRITE)
    registry.delete(PODS, "shop", "busy", Deletion(grace_period_s=0))
    assert registry.store.get(NAMESPACES, "", "shop") is None


async def test_only_images_of_a_pod_can_be_changed(api: Api) -> None:
    made = await api.create(PODS, pod(nodeName="n1"))
    image = deepcopy(made)
    image["spec"]["containers"][0]["image"] = "example.com/web:2"
    assert (await api.update(PODS, "p", image))["metadata"]["generation"] == 2
    moved = {"spec": {"nodeName": "n2"}}
    with pytest.raises(
        Failed, match="spec: Forbidden: pod updates may not change fields other than"
    ):
        await api.patch(PODS, "p", moved, "application/merge-patch+json")


async def test_a_lease_is_updated_only_with_its_version_and_may_be_created_by_update(
    api: Api,
) -> None:
    lease = {"metadata": {"name": "leader"}, "spec": {"holderIdentity": "a"}}
    made = await api.update(LEASES, "leader", deepcopy(lease))
    with pytest.raises(
        Failed,
        match=r"metadata\.resourceVersion: Invalid value: 0: must be specified for an update",
    ):
        await api.update(LEASES, "leader", deepcopy(lease))
    taken = deepcopy(made)
    taken["spec"]["holderIdentity"] = "b"
    await api.update(LEASES, "leader", deepcopy(taken))
    with pytest.raises(Failed, match="the object has been modified"):
        await api.update(LEASES, "leader", taken)


async def test_a_node_registers_with_its_status(api: Api) -> None:
    name = f"n-{api.namespace}"
    addresses = [{"type": "InternalIP", "address": "192.0.2.1"}]
    made = await api.create(NODES, {"metadata": {"name": name}, "status": {"addresses": addresses}})
    assert made["status"]["addresses"] == addresses
    patch = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    unchanged = await api.patch(NODES, name, patch, STRATEGIC)
    assert "conditions" not in unchanged["status"]
    written = (await api.patch(NODES, name, patch, STRATEGIC, subresource="status"))["status"]
    assert written["addresses"] == addresses
    assert [(condition["type"], condition["status"]) for condition in written["conditions"]] == [
        ("Ready", "True")
    ]
