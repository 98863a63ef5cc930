"""Server-side apply: owners, conflicts, and the removal of fields that are no longer applied."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.lab.apiserver.api import Api, Failed, version_of

from fairlead.lab.apiserver.kinds import NODES, SERVICES
from fairlead.lab.apiserver.ownership import leaves, read_owners, write_owners
from fairlead.lab.apiserver.schema import shape_of

Object = dict[str, Any]
Make = Callable[..., Object]


def config(**spec: Any) -> Object:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": spec}


async def apply(
    api: Api, manager: str, wanted: Object, *, force: bool = False, subresource: str = ""
) -> Object:
    return await api.apply(SERVICES, "web", wanted, manager, force=force, subresource=subresource)


PORT = {"name": "http", "port": 80}
WANTED = config(type="LoadBalancer", selector={"app": "web"}, ports=[PORT])


async def test_an_equal_apply_changes_nothing(api: Api) -> None:
    first = await apply(api, "a", WANTED)
    assert await apply(api, "a", WANTED) == first


async def test_defaulted_fields_have_no_owner(api: Api) -> None:
    made = await apply(api, "a", WANTED)
    assert made["spec"]["clusterIP"]
    fields = made["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]
    assert set(fields) == {"f:type", "f:selector", "f:ports"}
    assert fields["f:ports"] == {
        'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:name": {}, "f:port": {}}
    }


async def test_a_field_that_is_no_longer_applied_is_removed_if_it_has_no_other_owner(
    api: Api,
) -> None:
    labels = {"one": "1", "two": "2"}
    await apply(api, "a", WANTED | {"metadata": {"name": "web", "labels": labels}})
    await apply(
        api,
        "b",
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web", "labels": {"two": "2"}},
        },
    )
    after = await apply(api, "a", WANTED)
    assert after["metadata"]["labels"] == {"two": "2"}
    assert "two" not in str(
        [entry for entry in after["metadata"]["managedFields"] if entry["manager"] == "a"]
    )
    last = await apply(
        api, "b", {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}
    )
    assert "labels" not in last["metadata"]


async def test_a_port_that_is_no_longer_applied_is_removed_completely(api: Api) -> None:
    await apply(
        api,
        "a",
        config(type="LoadBalancer", ports=[PORT, {"name": "s", "port": 443, "targetPort": 8443}]),
    )
    after = await apply(api, "a", config(type="LoadBalancer", ports=[PORT]))
    assert [port["port"] for port in after["spec"]["ports"]] == [80]


async def test_two_protocols_on_one_port_are_two_items(api: Api) -> None:
    ports = [
        {"name": "t", "port": 53, "protocol": "TCP"},
        {"name": "u", "port": 53, "protocol": "UDP"},
    ]
    made = await apply(api, "a", config(type="LoadBalancer", ports=ports))
    assert [port["protocol"] for port in made["spec"]["ports"]] == ["TCP", "UDP"]
    after = await apply(api, "a", config(type="LoadBalancer", ports=ports[1:]))
    assert [port["name"] for port in after["spec"]["ports"]] == ["u"]


async def test_a_conflict_names_the_manager_and_the_field(api: Api) -> None:
    await apply(api, "a", WANTED)
    other = config(externalTrafficPolicy="Local", type="NodePort", ports=[PORT | {"name": "other"}])
    with pytest.raises(Failed) as refused:
        await apply(api, "b", other)
    assert (refused.value.code, refused.value.reason) == (409, "Conflict")
    assert refused.value.message == (
        'Apply failed with 2 conflicts: conflicts with "a":\n- .spec.type\n- '
        '.spec.ports[port=80,protocol="TCP"].name'
    )
    causes: Any = refused.value.details["causes"]
    assert causes[1] == {
        "reason": "FieldManagerConflict",
        "message": 'conflict with "a"',
        "field": '.spec.ports[port=80,protocol="TCP"].name',
    }
    with pytest.raises(
        Failed, match=r'^Apply failed with 1 conflict: conflict with "a": \.spec\.type$'
    ):
        await apply(api, "b", config(type="NodePort"))


async def test_a_forced_apply_takes_over_the_field(api: Api) -> None:
    await apply(api, "a", WANTED)
    forced = await apply(api, "b", config(type="NodePort"), force=True)
    assert forced["spec"]["type"] == "NodePort"
    owners = {
        entry["manager"]: str(entry["fieldsV1"]) for entry in forced["metadata"]["managedFields"]
    }
    assert "f:type" in owners["b"]
    assert "f:type" not in owners["a"]
    assert "f:selector" in owners["a"]


async def test_equal_values_are_shared_without_conflict(api: Api) -> None:
    await apply(api, "a", WANTED)
    both = await apply(api, "b", config(type="LoadBalancer"))
    assert all("f:type" in str(entry["fieldsV1"]) for entry in both["metadata"]["managedFields"])


async def test_an_update_takes_over_the_fields_that_it_changes(
    api: Api, make_service: Make
) -> None:
    await apply(api, "a", WANTED)
    patch = {"spec": {"type": "NodePort"}}
    after = await api.patch(SERVICES, "web", patch, fieldManager="edit")
    entries = {
        (entry["manager"], entry["operation"]): str(entry["fieldsV1"])
        for entry in after["metadata"]["managedFields"]
    }
    assert entries["edit", "Update"] == "{'f:spec': {'f:type': {}}}"
    assert "f:type" not in entries["a", "Apply"]
    with pytest.raises(Failed, match=r'conflict with "edit" using v1: \.spec\.type'):
        await apply(api, "a", WANTED)


async def test_status_is_applied_through_its_subresource_only(api: Api) -> None:
    await apply(api, "a", WANTED)
    status = {
        "loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]},
        "conditions": [{"type": "X", "status": "True"}],
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "status": status,
        "spec": {"sessionAffinity": "ClientIP"},
    }
    after = await apply(api, "ctl", wanted, subresource="status")
    assert after["spec"]["sessionAffinity"] == "None"
    assert after["status"]["loadBalancer"]["ingress"] == [{"ip": "192.0.2.1", "ipMode": "VIP"}]
    entry = next(entry for entry in after["metadata"]["managedFields"] if entry["manager"] == "ctl")
    assert entry["subresource"] == "status"
    assert entry["fieldsV1"]["f:status"]["f:conditions"] == {
        'k:{"type":"X"}': {".": {}, "f:status": {}, "f:type": {}}
    }
    assert version_of(await apply(api, "ctl", wanted, subresource="status")) == version_of(after)
    gone = await apply(api, "ctl", wanted | {"status": {}}, subresource="status")
    assert gone["status"].get("conditions", []) == []
    ignored = await apply(api, "a", WANTED | {"status": status})
    assert ignored["status"].get("loadBalancer", {}).get("ingress") is None


async def test_two_controllers_keep_their_own_conditions(api: Api) -> None:
    await apply(api, "a", WANTED)
    for manager in ("one", "two"):
        condition = {"type": manager, "status": "True"}
        head = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}
        after = await apply(
            api, manager, head | {"status": {"conditions": [condition]}}, subresource="status"
        )
    assert sorted(condition["type"] for condition in after["status"]["conditions"]) == [
        "one",
        "two",
    ]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (WANTED | {"metadata": {"name": "other"}}, "does not match the name on the URL"),
        (WANTED | {"kind": "Pod"}, "invalid object type: /v1, Kind=Pod"),
        (
            WANTED | {"metadata": {"name": "web", "managedFields": [{}]}},
            "metadata.managedFields must be nil",
        ),
    ],
)
async def test_an_invalid_apply_is_refused(api: Api, wanted: Object, expected: str) -> None:
    with pytest.raises(Failed, match=expected) as refused:
        await apply(api, "a", wanted)
    assert refused.value.code == 400


async def test_duplicate_items_are_refused(api: Api) -> None:
    await apply(api, "a", WANTED)
    with pytest.raises(Failed, match=r"duplicate entries for key \[port=80,protocol=\"TCP\"\]"):
        await apply(api, "a", config(ports=[PORT, PORT | {"name": "again"}]))


async def test_managed_fields_survive_a_round_trip(api: Api) -> None:
    await apply(api, "a", WANTED)
    made = await apply(
        api, "b", config(type="LoadBalancer", externalTrafficPolicy="Local"), force=True
    )
    entries = made["metadata"]["managedFields"]
    assert write_owners(read_owners(entries)) == entries


async def test_an_equal_update_changes_no_owner(api: Api) -> None:
    made = await apply(api, "a", WANTED)
    assert await api.update(SERVICES, "web", dict(made), fieldManager="other") == made


def test_leaves_name_items_by_their_keys() -> None:
    node = {
        "metadata": {"name": "n", "finalizers": ["a/b"]},
        "spec": {"podCIDRs": ["192.0.2.0/24"], "taints": [{"key": "k"}]},
    }
    assert set(leaves(node, shape_of(NODES))) == {
        ("f:metadata", "f:finalizers", 'v:"a/b"'),
        ("f:spec", "f:podCIDRs", 'v:"192.0.2.0/24"'),
        ("f:spec", "f:taints"),
    }
