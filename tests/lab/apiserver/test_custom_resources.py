"""Custom resources on both API servers, with Fairlead's CRDs: defaults, pruning and validation, the
parts that each endpoint writes, and the output of kubectl. Each test uses unique names, because
these kinds are cluster-scoped."""

import secrets
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from tests.lab.apiserver.api import APPLY_PATCH, Api, Failed
from tests.lab.apiserver.conftest import CIDRS

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS, grant_name
from fairlead.kube.objects import Resource
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.registry import MERGE_PATCH, STRATEGIC_MERGE_PATCH
from fairlead.lab.kubeapiserver import KubeApiServer

Object = dict[str, Any]
GROUP = "fairlead.io/v1alpha1"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


class Custom:
    """A pool and a grant with unique names."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.name = api.namespace
        self.pools = ADDRESS_POOLS.path()
        self.grants = ADDRESS_GRANTS.path()
        self.pool = f"{self.pools}/{self.name}"
        self.address = (
            f"2001:db8::{secrets.randbits(15) + 0x8000:x}:{secrets.randbits(15) + 0x8000:x}"
        )
        self.grant = f"{self.grants}/{grant_name(self.address)}"

    def body(self, **spec: Any) -> Object:
        fields = {"addresses": ["192.0.2.1-192.0.2.9"]} | spec
        return {
            "apiVersion": GROUP,
            "kind": "AddressPool",
            "metadata": {"name": self.name},
            "spec": fields,
        }

    async def create(self, query: dict[str, str] | None = None, **spec: Any) -> Object:
        return await self.api.do("POST", self.pools, self.body(**spec), query=query or {})


@pytest.fixture
async def custom(api: Api) -> AsyncIterator[Custom]:
    async with Client(api.access) as client:
        await crds.install(client)
    made = Custom(api)
    yield made
    for path in (made.pool, made.grant):
        await api.call("PATCH", path, {"metadata": {"finalizers": None}}, MERGE_PATCH)
        await api.call("DELETE", path)


async def test_defaults_are_set_and_unknown_fields_are_pruned(custom: Custom) -> None:
    made = await custom.create(colour="red", serviceAllocation={"priority": 1, "shape": "round"})
    assert made["spec"] == {
        "addresses": ["192.0.2.1-192.0.2.9"],
        "autoAssign": True,
        "avoidBuggyIPs": False,
        "serviceAllocation": {"priority": 1},
    }
    assert made["metadata"]["generation"] == 1
    assert "status" not in made


async def test_unknown_fields_are_refused_with_strict_validation(custom: Custom) -> None:
    with pytest.raises(Failed, match=r'unknown field "spec\.colour"') as failed:
        await custom.create({"fieldValidation": "Strict"}, colour="red")
    assert failed.value.code == 400


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"addresses": []}, "spec.addresses"),
        ({"addresses": ["192.0.2.1;rm"]}, "spec.addresses[0]"),
        ({"addresses": "192.0.2.1"}, "spec.addresses"),
        ({"addresses": None}, "spec.addresses"),
        ({"autoAssign": "yes"}, "spec.autoAssign"),
        ({"serviceAllocation": {"priority": -1}}, "spec.serviceAllocation.priority"),
        (
            {
                "serviceAllocation": {
                    "serviceSelectors": [{"matchExpressions": [{"key": "a", "operator": "Is"}]}]
                }
            },
            "spec.serviceAllocation.serviceSelectors[0].matchExpressions[0].operator",
        ),
    ],
)
async def test_values_that_violate_the_schema_are_refused(
    custom: Custom, spec: Object, field: str
) -> None:
    with pytest.raises(Failed) as failed:
        await custom.create(**spec)
    assert any(cause.startswith(f"{field}: ") for cause in failed.value.causes), failed.value.causes


@pytest.mark.parametrize("section", [{}, {"method": "bgp", "communities": ["no-export"]}])
async def test_the_status_of_a_pool_keeps_the_last_valid_section(
    custom: Custom, section: Object
) -> None:
    """An empty section stays too, so the controller writes it once."""
    await custom.create()
    query = "?fieldManager=fairlead-pools&force=true"
    wanted = {
        "apiVersion": GROUP,
        "kind": "AddressPool",
        "metadata": {"name": custom.name},
        "status": {"announce": section},
    }
    for _ in range(2):
        await custom.api.do("PATCH", f"{custom.pool}/status{query}", wanted, APPLY_PATCH)
    assert (await custom.api.do("GET", custom.pool))["status"] == {"announce": section}


async def test_status_and_spec_are_written_separately(custom: Custom) -> None:
    made = await custom.create()
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Used",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    body = {
        "apiVersion": GROUP,
        "kind": "AddressPool",
        "metadata": {"name": custom.name, "labels": {"a": "b"}},
    }
    query = "?fieldManager=us&force=true"
    wanted = body | {
        "spec": {"addresses": ["192.0.2.77"]},
        "status": {"assignedIPv4": 2, "conditions": [condition]},
    }
    shown = await custom.api.do("PATCH", f"{custom.pool}/status{query}", wanted, APPLY_PATCH)
    assert shown["spec"] == made["spec"]
    assert shown["status"] == {"assignedIPv4": 2, "conditions": [condition]}
    assert "labels" not in shown["metadata"]
    assert shown["metadata"]["generation"] == 1
    edit = {"spec": {"autoAssign": False}, "status": {"assignedIPv4": 7}}
    edited = await custom.api.do("PATCH", custom.pool, edit, MERGE_PATCH)
    assert edited["metadata"]["generation"] == 2
    assert edited["status"]["assignedIPv4"] == 2
    labelled = await custom.api.do(
        "PATCH", custom.pool, {"metadata": {"labels": {"a": "b"}}}, MERGE_PATCH
    )
    assert labelled["metadata"]["generation"] == 2
    with pytest.raises(Failed) as failed:
        await custom.api.do(
            "PATCH",
            f"{custom.pool}/status",
            {"status": {"conditions": [{"type": "Ready"}]}},
            MERGE_PATCH,
        )
    assert failed.value.code == 422
    code, _ = await custom.api.call("PATCH", custom.pool, {"spec": {}}, STRATEGIC_MERGE_PATCH)
    assert code == 415


async def test_a_grant_is_updated_only_with_its_version_and_never_in_its_address(
    custom: Custom,
) -> None:
    holders = [{"namespace": "default", "name": "web", "uid": "u", "ports": ["TCP/80"]}]
    name = {"metadata": {"name": grant_name(custom.address)}}
    body: Object = {"apiVersion": GROUP, "kind": "AddressGrant"} | name
    spec = {"address": custom.address, "holders": holders}
    made = await custom.api.do("POST", custom.grants, body | {"spec": spec})
    with pytest.raises(Failed) as failed:
        await custom.api.do("POST", custom.grants, body | {"spec": spec})
    assert (failed.value.code, failed.value.reason) == (409, "AlreadyExists")
    path = custom.grant
    with pytest.raises(Failed, match=r"metadata\.resourceVersion"):
        await custom.api.do("PUT", path, body | {"spec": made["spec"]})
    moved = made | {"spec": made["spec"] | {"address": f"{custom.address}1"}}
    with pytest.raises(
        Failed, match=r"spec\.address: Invalid value: .*the address of a grant never changes"
    ):
        await custom.api.do("PUT", path, moved)
    twice = made | {"spec": made["spec"] | {"holders": holders * 2}}
    with pytest.raises(Failed, match=r"spec\.holders\[1\]: Duplicate value"):
        await custom.api.do("PUT", path, twice)
    kept = await custom.api.do("PUT", path, made | {"spec": made["spec"] | {"keep": True}})
    with pytest.raises(Failed) as failed:
        await custom.api.do("PUT", path, made)
    assert (failed.value.code, failed.value.reason) == (409, "Conflict")
    old, new = (
        {"preconditions": {"resourceVersion": each["metadata"]["resourceVersion"]}}
        for each in (made, kept)
    )
    with pytest.raises(Failed) as failed:
        await custom.api.do("DELETE", path, old)
    assert failed.value.code == 409
    await custom.api.do("DELETE", path, new)


async def test_kubectl_get_prints_the_columns(custom: Custom) -> None:
    await custom.create()
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Used",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"status": {"assignedIPv4": 2, "availableIPv4": 7, "conditions": [condition]}}
    await custom.api.do("PATCH", f"{custom.pool}/status", status, MERGE_PATCH)
    _, table = await custom.api.call("GET", custom.pool, Accept=TABLE)
    columns = [
        (each["name"], each["type"], each["priority"]) for each in table["columnDefinitions"]
    ]
    cells = dict(zip((name for name, _, _ in columns), table["rows"][0]["cells"], strict=True))
    assert ("Ready", "string", 0) in columns
    assert ("Assigned4", "integer", 0) in columns
    assert ("Stranded", "string", 1) in columns
    assert cells["Name"] == custom.name
    assert (cells["Ready"], cells["Assigned4"], cells["Free4"], cells["Auto"]) == (
        "True",
        2,
        7,
        True,
    )
    assert cells["Addresses"] == '["192.0.2.1-192.0.2.9"]'
    assert (cells["Stranded"], cells["Assigned6"]) == (None, None)


async def test_a_kind_without_a_crd_is_not_served(api: Api) -> None:
    name = f"things.{api.namespace}.example.com"
    group = api.namespace + ".example.com"
    path = f"/apis/{group}/v1/things"
    code, _ = await api.call("GET", path)
    assert code == 404
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object"}}}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": "Thing",
                "plural": "things",
                "singular": "thing",
                "listKind": "ThingList",
            },
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    await api.do("POST", definitions, definition)
    try:
        for _ in range(200):
            code, listed = await api.call("GET", path)
            if code == 200:
                break
        assert (code, listed["kind"], listed["items"]) == (200, "ThingList", [])
        assert "status" in await api.do("GET", f"{definitions}/{name}")
    finally:
        await api.do("DELETE", f"{definitions}/{name}")
    for _ in range(400):
        code, _ = await api.call("GET", path)
        if code == 404:
            break
    assert code == 404


async def test_both_servers_print_the_same_columns(real_apiserver: KubeApiServer) -> None:
    """The columns of grants with several holders and with none, and of pools without status."""
    shown = []
    async with (
        ApiServer(service_cidrs=CIDRS) as server,
        Api(Access(server.url), "embedded") as embedded,
        Api(real_apiserver.access, "real") as real,
    ):
        for api in (embedded, real):
            async with Client(api.access) as client:
                await crds.install(client)
            custom = Custom(api)
            shown.append([await printed(custom, ADDRESS_GRANTS, spec) for spec in GRANTS])
            shown[-1] += [await printed(custom, ADDRESS_POOLS, spec) for spec in POOLS]
    assert shown[0] == shown[1]
    first = dict(
        zip((name for name, *_ in shown[1][0].columns[1:-1]), shown[1][0].cells, strict=True)
    )
    assert first["First Service"] == "web", "the column shows the first holder"


GRANTS: tuple[Object, ...] = (
    {
        "address": "192.0.2.77",
        "pool": "main",
        "sharingKey": "shared",
        "keep": True,
        "holders": [
            {"namespace": "default", "name": "web"},
            {"namespace": "other", "name": "mail", "ports": ["TCP/25"]},
        ],
    },
    {"address": "192.0.2.78"},
    {"address": "192.0.2.79", "keep": False, "holders": []},
)
POOLS: tuple[Object, ...] = (
    {"addresses": ["192.0.2.1", "192.0.2.4/30"], "autoAssign": False},
    {"addresses": ["192.0.2.9"]},
)


class Printed(NamedTuple):
    """The cells of one object for `kubectl get`: name, type, format and priority of each column;
    values without name and age."""

    columns: list[tuple[str, str, str, int]]
    cells: list[object]


async def printed(custom: Custom, resource: Resource[Any], spec: Object, name: str = "") -> Printed:
    if not name:
        name = spec["address"] if "address" in spec else f"{custom.name}-{len(spec['addresses'])}"
    body = {"apiVersion": GROUP, "kind": resource.kind, "metadata": {"name": name}, "spec": spec}
    await custom.api.call("DELETE", resource.path("", name))
    await custom.api.do("POST", resource.path(), body)
    _, table = await custom.api.call("GET", resource.path("", name), Accept=TABLE)
    await custom.api.call("DELETE", resource.path("", name))
    columns = [
        (each["name"], each["type"], each["format"], each["priority"])
        for each in table["columnDefinitions"]
    ]
    (row,) = table["rows"]
    assert columns[-1][0] == "Age"
    return Printed(columns, row["cells"][1:-1])
