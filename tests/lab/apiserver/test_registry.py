"""The verbs on objects of every kind: versions, no-op writes, deletion, namespaces."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from fairlead.lab.apiserver import ApiFailure, Deletion, Registry, Write
from fairlead.lab.apiserver.kinds import ENDPOINT_SLICES, EVENTS, LEASES, NAMESPACES, NODES, PODS, SERVICES

Object = dict[str, Any]
Make = Callable[..., Object]
WRITE = Write("test")


def pod(name: str = "p", **spec: Any) -> Object:
    fields = {"containers": [{"name": "c", "image": "example.com/web:1"}]} | spec
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": fields}


def test_a_write_that_changes_nothing_stores_nothing(registry: Registry, make_service: Make) -> None:
    made = registry.create(SERVICES, "default", make_service(), WRITE)
    watcher = registry.store.watch(SERVICES, None)
    registry.update(SERVICES, "default", "web", make_service(), WRITE)
    registry.update(SERVICES, "default", "web", deepcopy(made.object), Write("other"))
    registry.patch(SERVICES, "default", "web", "application/merge-patch+json", {"spec": {"type": "LoadBalancer"}}, WRITE)
    assert registry.store.version == made.version
    assert not watcher.pending


def test_the_version_must_match(registry: Registry, make_service: Make) -> None:
    made = registry.create(SERVICES, "default", make_service(), WRITE).object
    changed = deepcopy(made)
    changed["metadata"]["labels"] = {"a": "b"}
    registry.update(SERVICES, "default", "web", deepcopy(changed), WRITE)
    with pytest.raises(ApiFailure) as refused:
        registry.update(SERVICES, "default", "web", changed, WRITE)
    assert (refused.value.code, refused.value.reason) == (409, "Conflict")
    assert refused.value.message == (
        'Operation cannot be fulfilled on services "web": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"], "labels": {"a": "c"}}}
    with pytest.raises(ApiFailure, match="the object has been modified"):
        registry.patch(SERVICES, "default", "web", "application/merge-patch+json", stale, WRITE)


def test_stored_objects_never_change(registry: Registry, make_service: Make) -> None:
    stored = registry.create(SERVICES, "default", make_service(), WRITE)
    before = deepcopy(stored.object)
    for media_type in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
        patch = {"metadata": {"labels": {media_type[12:17]: "x"}}, "spec": {"type": "ClusterIP"}}
        # Node ports go when the type does: a patch that shared its ports with the stored object would take them there too.
        registry.patch(SERVICES, "default", "web", media_type, patch, WRITE)
        registry.patch(SERVICES, "default", "web", media_type, {"spec": {"type": "LoadBalancer"}}, WRITE)
    operations = [{"op": "replace", "path": "/spec/ports/0/port", "value": 81}]
    registry.patch(SERVICES, "default", "web", "application/json-patch+json", operations, WRITE)
    assert stored.object == before


def test_what_only_the_server_sets_cannot_be_set(registry: Registry, make_service: Make) -> None:
    service = make_service()
    service["metadata"] |= {"uid": "mine", "resourceVersion": "7", "creationTimestamp": "2001-01-01T00:00:00Z", "generation": 9}
    made = registry.create(SERVICES, "default", service, WRITE).object["metadata"]
    assert made["uid"] != "mine"
    assert made["creationTimestamp"] > "2020"
    assert made["generation"] == 1


def test_generated_names(registry: Registry) -> None:
    named = pod() | {"metadata": {"generateName": "web-"}}
    names = {registry.create(PODS, "default", deepcopy(named), WRITE).object["metadata"]["name"] for _ in range(5)}
    assert len(names) == 5
    assert all(name.startswith("web-") and len(name) == 9 for name in names)


@pytest.mark.parametrize(
    ("kind", "namespace", "obj", "told"),
    [
        (PODS, "default", pod("Upper"), 'metadata.name: Invalid value: "Upper": a lowercase RFC 1123 subdomain'),
        (PODS, "default", {"metadata": {}, "spec": pod()["spec"]}, "metadata.name: Required value: name or generateName"),
        (PODS, "default", pod(containers=[]), "spec.containers: Required value"),
        (PODS, "default", pod(containers=[{"name": "c"}]), r"spec.containers\[0\].image: Required value"),
        (NODES, "", {"metadata": {"name": "n"}, "spec": {"podCIDRs": ["x"]}}, r"spec.podCIDRs\[0\]: Invalid value: \"x\""),
        (NODES, "", {"metadata": {"name": "n", "labels": {"a b": ""}}}, 'metadata.labels: Invalid value: "a b"'),
        (ENDPOINT_SLICES, "default", {"metadata": {"name": "s"}}, "addressType: Required value"),
        (
            ENDPOINT_SLICES,
            "default",
            {"metadata": {"name": "s"}, "addressType": "IPv4", "endpoints": [{"addresses": ["2001:db8::1"]}]},
            r'endpoints\[0\].addresses\[0\]: Invalid value: "2001:db8::1": must be a valid IPv4 address',
        ),
        (
            ENDPOINT_SLICES,
            "default",
            {"metadata": {"name": "s"}, "addressType": "IPv4", "endpoints": [{"addresses": []}]},
            r"endpoints\[0\].addresses: Required value: must contain at least 1 address",
        ),
        (LEASES, "default", {"metadata": {"name": "l"}, "spec": {"leaseDurationSeconds": 0}}, "must be greater than 0"),
        (
            EVENTS,
            "default",
            {"metadata": {"name": "e"}, "involvedObject": {"namespace": "x"}},
            "does not match event.namespace",
        ),
        (NAMESPACES, "", {"metadata": {"name": "a.b"}}, 'metadata.name: Invalid value: "a.b": a lowercase RFC 1123 label'),
        (SERVICES, "default", {"metadata": {"name": "w", "finalizers": ["bare"]}}, "neither a standard finalizer name nor"),
    ],
)
def test_other_kinds_are_checked_lightly(registry: Registry, kind: Any, namespace: str, obj: Object, told: str) -> None:
    with pytest.raises(ApiFailure, match=told) as refused:
        registry.create(kind, namespace, obj, WRITE)
    assert refused.value.code == 422


def test_missing_namespaces_and_names(registry: Registry, make_service: Make) -> None:
    service = make_service()
    service["metadata"]["namespace"] = "nowhere"
    with pytest.raises(ApiFailure, match='namespaces "nowhere" not found') as refused:
        registry.create(SERVICES, "nowhere", service, WRITE)
    assert refused.value.code == 404
    registry.create(SERVICES, "default", make_service(), WRITE)
    with pytest.raises(ApiFailure, match='services "web" already exists') as refused:
        registry.create(SERVICES, "default", make_service(), WRITE)
    assert (refused.value.code, refused.value.reason) == (409, "AlreadyExists")
    with pytest.raises(ApiFailure, match=r'leases\.coordination\.k8s\.io "x" not found'):
        registry.get(LEASES, "default", "x")
    assert sorted(item.key[1] for item in registry.store.all_of(NAMESPACES)) == ["default", "kube-node-lease", "kube-system"]


def test_every_field_that_is_given_is_kept(registry: Registry) -> None:
    spec = {"containers": [{"name": "c", "image": "x", "env": [{"name": "A", "value": "1"}], "ofTomorrow": {"a": [1]}}]}
    made = registry.create(PODS, "default", pod(containers=spec["containers"]), WRITE).object
    assert made["spec"]["containers"][0]["ofTomorrow"] == {"a": [1]}


def test_a_pods_grace_period(registry: Registry) -> None:
    registry.create(PODS, "default", pod(nodeName="n1", terminationGracePeriodSeconds=17), WRITE)
    marked, gone = registry.delete(PODS, "default", "p", Deletion())
    metadata = marked.object["metadata"]
    assert (gone, metadata["deletionGracePeriodSeconds"]) == (False, 17)
    version = registry.store.version
    registry.delete(PODS, "default", "p", Deletion())
    assert registry.store.version == version, "asking again changes nothing"
    shorter, gone = registry.delete(PODS, "default", "p", Deletion(grace_period_s=3))
    assert (gone, shorter.object["metadata"]["deletionGracePeriodSeconds"]) == (False, 3)
    assert registry.delete(PODS, "default", "p", Deletion(grace_period_s=0))[1]
    assert registry.store.get(PODS, "default", "p") is None


@pytest.mark.parametrize("phase", [None, "Succeeded", "Failed"])
def test_a_pod_that_does_not_run_goes_at_once(registry: Registry, phase: str | None) -> None:
    made = registry.create(PODS, "default", pod(**({"nodeName": "n1"} if phase else {})), WRITE).object
    if phase:
        registry.update(PODS, "default", "p", deepcopy(made) | {"status": {"phase": phase}}, Write("test", "status"))
    assert registry.delete(PODS, "default", "p", Deletion())[1]


def test_finalizers_hold_an_object(registry: Registry, make_service: Make) -> None:
    service = make_service()
    service["metadata"]["finalizers"] = ["example.com/a", "example.com/b"]
    registry.create(SERVICES, "default", service, WRITE)
    marked, gone = registry.delete(SERVICES, "default", "web", Deletion())
    assert not gone
    assert marked.object["metadata"]["deletionTimestamp"]
    more = deepcopy(marked.object)
    more["metadata"]["finalizers"].append("example.com/c")
    with pytest.raises(ApiFailure, match="no new finalizers can be added if the object is being deleted"):
        registry.update(SERVICES, "default", "web", more, WRITE)
    revived = deepcopy(marked.object)
    del revived["metadata"]["deletionTimestamp"]
    assert registry.update(SERVICES, "default", "web", revived, WRITE).object["metadata"]["deletionTimestamp"]
    patch = {"metadata": {"finalizers": ["example.com/b"]}}
    registry.patch(SERVICES, "default", "web", "application/merge-patch+json", patch, WRITE)
    assert registry.store.get(SERVICES, "default", "web") is not None
    last = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["example.com/b"]}}
    registry.patch(SERVICES, "default", "web", "application/strategic-merge-patch+json", last, Write("test", "status"))
    assert registry.store.get(SERVICES, "default", "web") is None


def test_preconditions(registry: Registry, make_service: Make) -> None:
    made = registry.create(SERVICES, "default", make_service(), WRITE).object["metadata"]
    with pytest.raises(ApiFailure, match="Precondition failed: UID in precondition: other, UID in object meta"):
        registry.delete(SERVICES, "default", "web", Deletion(uid="other"))
    with pytest.raises(ApiFailure, match="Precondition failed: ResourceVersion in precondition: 1"):
        registry.delete(SERVICES, "default", "web", Deletion(resource_version="1"))
    fits = Deletion(uid=made["uid"], resource_version=made["resourceVersion"])
    assert registry.delete(SERVICES, "default", "web", fits)[1]


def test_a_namespace_takes_its_objects_along(registry: Registry) -> None:
    registry.create(NAMESPACES, "", {"metadata": {"name": "shop"}}, WRITE)
    registry.create(PODS, "shop", pod("idle"), WRITE)
    registry.create(PODS, "shop", pod("busy", nodeName="n1"), WRITE)
    marked, gone = registry.delete(NAMESPACES, "", "shop", Deletion())
    assert (gone, marked.object["status"]["phase"]) == (False, "Terminating")
    assert registry.store.get(PODS, "shop", "idle") is None
    with pytest.raises(ApiFailure, match="because it is being terminated") as refused:
        registry.create(PODS, "shop", pod("late"), WRITE)
    assert refused.value.code == 403
    registry.delete(PODS, "shop", "busy", Deletion(grace_period_s=0))
    assert registry.store.get(NAMESPACES, "", "shop") is None


def test_a_pods_spec_is_fixed_but_for_images(registry: Registry) -> None:
    made = registry.create(PODS, "default", pod(nodeName="n1"), WRITE).object
    image = deepcopy(made)
    image["spec"]["containers"][0]["image"] = "example.com/web:2"
    assert registry.update(PODS, "default", "p", image, WRITE).object["metadata"]["generation"] == 2
    moved = {"spec": {"nodeName": "n2"}}
    with pytest.raises(ApiFailure, match="spec: Forbidden: pod updates may not change fields other than"):
        registry.patch(PODS, "default", "p", "application/merge-patch+json", moved, WRITE)


def test_a_lease_needs_its_version_and_may_be_made_by_update(registry: Registry) -> None:
    lease = {"metadata": {"name": "leader"}, "spec": {"holderIdentity": "a"}}
    made = registry.update(LEASES, "default", "leader", deepcopy(lease), WRITE).object
    with pytest.raises(ApiFailure, match=r"metadata\.resourceVersion: Invalid value: 0x0: must be specified for an update"):
        registry.update(LEASES, "default", "leader", deepcopy(lease), WRITE)
    taken = deepcopy(made)
    taken["spec"]["holderIdentity"] = "b"
    registry.update(LEASES, "default", "leader", deepcopy(taken), WRITE)
    with pytest.raises(ApiFailure, match="the object has been modified"):
        registry.update(LEASES, "default", "leader", taken, WRITE)


def test_a_node_registers_with_its_status(registry: Registry) -> None:
    addresses = [{"type": "InternalIP", "address": "192.0.2.1"}]
    made = registry.create(NODES, "", {"metadata": {"name": "n1"}, "status": {"addresses": addresses}}, WRITE).object
    assert made["status"]["addresses"] == addresses
    patch = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    unchanged = registry.patch(NODES, "", "n1", "application/strategic-merge-patch+json", patch, WRITE).object
    assert "conditions" not in unchanged["status"]
    media_type = "application/strategic-merge-patch+json"
    written = registry.patch(NODES, "", "n1", media_type, patch, Write("kubelet", "status")).object
    assert written["status"] == {"addresses": addresses, "conditions": [{"type": "Ready", "status": "True"}]}
