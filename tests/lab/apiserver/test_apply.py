"""Server-side apply: owners, conflicts, and what becomes of fields that nobody wants any more."""

from collections.abc import Callable
from typing import Any

import pytest

from fairlead.lab.apiserver import ApiFailure, Registry, Write
from fairlead.lab.apiserver.kinds import NODES, SERVICES
from fairlead.lab.apiserver.ownership import leaves, read_owners, write_owners
from fairlead.lab.apiserver.schema import shape_of

Object = dict[str, Any]
Make = Callable[..., Object]


def config(**spec: Any) -> Object:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": spec}


def apply(registry: Registry, manager: str, wanted: Object, *, force: bool = False, subresource: str = "") -> Object:
    return registry.apply(SERVICES, "default", "web", wanted, Write(manager, subresource, force=force)).object


PORT = {"name": "http", "port": 80}
WANTED = config(type="LoadBalancer", selector={"app": "web"}, ports=[PORT])


def test_applying_the_same_again_is_no_change(registry: Registry) -> None:
    first = apply(registry, "a", WANTED)
    version = registry.store.version
    assert apply(registry, "a", WANTED) is first or apply(registry, "a", WANTED) == first
    assert registry.store.version == version


def test_what_the_server_fills_in_is_owned_by_nobody(registry: Registry) -> None:
    made = apply(registry, "a", WANTED)
    assert made["spec"]["clusterIP"]
    fields = made["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]
    assert set(fields) == {"f:type", "f:selector", "f:ports"}
    assert fields["f:ports"] == {'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:name": {}, "f:port": {}}}


def test_a_dropped_field_goes_if_nobody_else_has_it(registry: Registry) -> None:
    labels = {"one": "1", "two": "2"}
    apply(registry, "a", WANTED | {"metadata": {"name": "web", "labels": labels}})
    apply(registry, "b", {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "labels": {"two": "2"}}})
    after = apply(registry, "a", WANTED)
    assert after["metadata"]["labels"] == {"two": "2"}
    assert "two" not in str([entry for entry in after["metadata"]["managedFields"] if entry["manager"] == "a"])
    last = apply(registry, "b", {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}})
    assert "labels" not in last["metadata"]


def test_a_dropped_port_goes_with_all_of_it(registry: Registry) -> None:
    apply(registry, "a", config(type="LoadBalancer", ports=[PORT, {"name": "s", "port": 443, "targetPort": 8443}]))
    after = apply(registry, "a", config(type="LoadBalancer", ports=[PORT]))
    assert [port["port"] for port in after["spec"]["ports"]] == [80]


def test_two_protocols_on_one_port_are_two_items(registry: Registry) -> None:
    ports = [{"name": "t", "port": 53, "protocol": "TCP"}, {"name": "u", "port": 53, "protocol": "UDP"}]
    made = apply(registry, "a", config(type="LoadBalancer", ports=ports))
    assert [port["protocol"] for port in made["spec"]["ports"]] == ["TCP", "UDP"]
    after = apply(registry, "a", config(type="LoadBalancer", ports=ports[1:]))
    assert [port["name"] for port in after["spec"]["ports"]] == ["u"]


def test_a_conflict_names_the_manager_and_the_field(registry: Registry) -> None:
    apply(registry, "a", WANTED)
    other = config(externalTrafficPolicy="Local", type="NodePort", ports=[PORT | {"name": "other"}])
    with pytest.raises(ApiFailure) as refused:
        apply(registry, "b", other)
    assert (refused.value.code, refused.value.reason) == (409, "Conflict")
    assert refused.value.message == (
        'Apply failed with 2 conflicts: conflicts with "a":\n- .spec.ports[port=80,protocol="TCP"].name\n- .spec.type'
    )
    causes: Any = refused.value.details["causes"]
    assert causes[0] == {
        "reason": "FieldManagerConflict",
        "message": 'conflict with "a"',
        "field": '.spec.ports[port=80,protocol="TCP"].name',
    }
    with pytest.raises(ApiFailure, match=r'^Apply failed with 1 conflict: conflict with "a": \.spec\.type$'):
        apply(registry, "b", config(type="NodePort"))


def test_force_takes_the_field_over(registry: Registry) -> None:
    apply(registry, "a", WANTED)
    forced = apply(registry, "b", config(type="NodePort"), force=True)
    assert forced["spec"]["type"] == "NodePort"
    owners = {entry["manager"]: str(entry["fieldsV1"]) for entry in forced["metadata"]["managedFields"]}
    assert "f:type" in owners["b"]
    assert "f:type" not in owners["a"]
    assert "f:selector" in owners["a"]


def test_equal_values_are_shared_without_conflict(registry: Registry) -> None:
    apply(registry, "a", WANTED)
    both = apply(registry, "b", config(type="LoadBalancer"))
    assert all("f:type" in str(entry["fieldsV1"]) for entry in both["metadata"]["managedFields"])


def test_an_update_takes_over_what_it_changes(registry: Registry, make_service: Make) -> None:
    apply(registry, "a", WANTED)
    patch = {"spec": {"type": "NodePort"}}
    after = registry.patch(SERVICES, "default", "web", "application/merge-patch+json", patch, Write("edit")).object
    entries = {(entry["manager"], entry["operation"]): str(entry["fieldsV1"]) for entry in after["metadata"]["managedFields"]}
    assert entries["edit", "Update"] == "{'f:spec': {'f:type': {}}}"
    assert "f:type" not in entries["a", "Apply"]
    with pytest.raises(ApiFailure, match=r'conflict with "edit" using v1: \.spec\.type'):
        apply(registry, "a", WANTED)


def test_status_is_applied_through_its_subresource_only(registry: Registry) -> None:
    apply(registry, "a", WANTED)
    status = {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}, "conditions": [{"type": "X", "status": "True"}]}
    wanted = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "status": status,
        "spec": {"type": "NodePort"},
    }
    after = apply(registry, "ctl", wanted, subresource="status")
    assert after["spec"]["type"] == "LoadBalancer"
    assert after["status"]["loadBalancer"]["ingress"] == [{"ip": "192.0.2.1", "ipMode": "VIP"}]
    entry = next(entry for entry in after["metadata"]["managedFields"] if entry["manager"] == "ctl")
    assert entry["subresource"] == "status"
    assert entry["fieldsV1"]["f:status"]["f:conditions"] == {'k:{"type":"X"}': {".": {}, "f:status": {}, "f:type": {}}}
    version = registry.store.version
    apply(registry, "ctl", wanted, subresource="status")
    assert registry.store.version == version
    gone = apply(registry, "ctl", wanted | {"status": {}}, subresource="status")
    assert gone["status"].get("conditions", []) == []
    ignored = apply(registry, "a", WANTED | {"status": status})
    assert ignored["status"].get("loadBalancer", {}).get("ingress") is None


def test_two_controllers_keep_their_own_conditions(registry: Registry) -> None:
    apply(registry, "a", WANTED)
    for manager in ("one", "two"):
        condition = {"type": manager, "status": "True"}
        head = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}
        after = apply(registry, manager, head | {"status": {"conditions": [condition]}}, subresource="status")
    assert sorted(condition["type"] for condition in after["status"]["conditions"]) == ["one", "two"]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (WANTED | {"metadata": {"name": "other"}}, "does not match the name on the URL"),
        (WANTED | {"kind": "Pod"}, "the object provided is unrecognized"),
        (WANTED | {"metadata": {"name": "web", "managedFields": [{}]}}, "metadata.managedFields must be nil"),
    ],
)
def test_what_cannot_be_applied(registry: Registry, wanted: Object, told: str) -> None:
    with pytest.raises(ApiFailure, match=told) as refused:
        apply(registry, "a", wanted)
    assert refused.value.code == 400


def test_duplicate_items_are_refused(registry: Registry) -> None:
    apply(registry, "a", WANTED)
    with pytest.raises(ApiFailure, match=r"duplicate entries for key \[port=80,protocol=\"TCP\"\]"):
        apply(registry, "a", config(ports=[PORT, PORT | {"name": "again"}]))


def test_managed_fields_survive_a_round_trip(registry: Registry) -> None:
    apply(registry, "a", WANTED)
    made = apply(registry, "b", config(type="LoadBalancer", externalTrafficPolicy="Local"), force=True)
    entries = made["metadata"]["managedFields"]
    assert write_owners(read_owners(entries)) == entries


def test_an_equal_update_changes_no_owner(registry: Registry) -> None:
    made = apply(registry, "a", WANTED)
    version = registry.store.version
    registry.update(SERVICES, "default", "web", dict(made), Write("other"))
    assert registry.store.version == version


def test_leaves_name_items_by_their_keys() -> None:
    node = {"metadata": {"name": "n", "finalizers": ["a/b"]}, "spec": {"podCIDRs": ["192.0.2.0/24"], "taints": [{"key": "k"}]}}
    assert set(leaves(node, shape_of(NODES))) == {
        ("f:metadata", "f:finalizers", 'v:"a/b"'),
        ("f:spec", "f:podCIDRs", 'v:"192.0.2.0/24"'),
        ("f:spec", "f:taints"),
    }
