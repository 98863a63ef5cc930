"""The OpenAPI documents describe the kinds, and the protobuf form equals the JSON form."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.lab.apiserver.api import Api
from tests.lab.apiserver.gnostic import decode

from fairlead.kube.rules.fields import Fields
from fairlead.kube.rules.types import struct_in
from fairlead.lab.apiserver import openapi, openapi_protobuf
from fairlead.lab.apiserver.kinds import KINDS, Kind
from fairlead.lab.apiserver.schema import Shape, shape_of
from fairlead.lab.apiserver.wire import FIELDS_OF
from fairlead.lab.kubeapiserver import KubeApiServer

Object = dict[str, Any]
CORE = "io.k8s.api.core.v1."
META = "io.k8s.apimachinery.pkg.apis.meta.v1."
DOCUMENT = openapi.swagger("v1.36.0")
DEFINITIONS: Object = DOCUMENT["definitions"]


def schemas(schema: Object) -> Iterator[Object]:
    """Yield a schema and all schemas in it."""
    yield schema
    for below in schema.get("properties", {}).values():
        yield from schemas(below)
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from schemas(schema[name])


def merge_rule_of(definition: str, field: str) -> Object:
    properties: Object = DEFINITIONS[definition]["properties"]
    return {name: value for name, value in properties[field].items() if name.startswith("x-")}


@pytest.mark.parametrize(
    ("definition", "field", "strategy", "key"),
    [
        (CORE + "ServiceSpec", "ports", "merge", "port"),
        (CORE + "ServiceStatus", "conditions", "merge", "type"),
        (CORE + "PodSpec", "containers", "merge", "name"),
        (CORE + "PodSpec", "initContainers", "merge", "name"),
        (CORE + "PodSpec", "volumes", "merge,retainKeys", "name"),
        (CORE + "PodSpec", "hostAliases", "merge", "ip"),
        (CORE + "PodSpec", "tolerations", None, None),
        (CORE + "Container", "env", "merge", "name"),
        (CORE + "Container", "ports", "merge", "containerPort"),
        (CORE + "Container", "volumeMounts", "merge", "mountPath"),
        (CORE + "Container", "command", None, None),
        (CORE + "NodeStatus", "addresses", "merge", "type"),
        (CORE + "NodeStatus", "conditions", "merge", "type"),
        (CORE + "NodeSpec", "podCIDRs", "merge", None),
        (CORE + "NodeSpec", "taints", None, None),
        (CORE + "NamespaceStatus", "conditions", "merge", "type"),
        (META + "ObjectMeta", "finalizers", "merge", None),
        (META + "ObjectMeta", "ownerReferences", "merge", "uid"),
        ("io.k8s.api.discovery.v1.EndpointSlice", "endpoints", None, None),
    ],
)
def test_lists_merge_as_in_the_api_reference(
    definition: str, field: str, strategy: str | None, key: str | None
) -> None:
    extensions = merge_rule_of(definition, field)
    assert extensions.get("x-kubernetes-patch-strategy") == strategy
    assert extensions.get("x-kubernetes-patch-merge-key") == key
    assert extensions["x-kubernetes-list-type"] == (
        "atomic" if not strategy else "map" if key else "set"
    )


def test_keys_of_server_side_apply() -> None:
    assert merge_rule_of(CORE + "ServiceSpec", "ports")["x-kubernetes-list-map-keys"] == [
        "port",
        "protocol",
    ]
    assert merge_rule_of(CORE + "ServiceSpec", "selector") == {"x-kubernetes-map-type": "atomic"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_each_kind_is_found_by_its_group_and_version(kind: Kind) -> None:
    wanted = {"group": kind.group, "version": kind.version, "kind": kind.kind}
    found = [
        definition
        for definition in DEFINITIONS.values()
        if wanted in definition.get("x-kubernetes-group-version-kind", [])
    ]
    assert len(found) == 1
    assert {"apiVersion", "kind", "metadata"} <= found[0]["properties"].keys()
    patches = [path["patch"] for path in DOCUMENT["paths"].values()]
    [patch] = [patch for patch in patches if patch["x-kubernetes-group-version-kind"] == wanted]
    assert {"dryRun", "fieldManager", "force"} <= {
        parameter["name"] for parameter in patch["parameters"]
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_merge_rule_is_for_an_existing_field_and_consistent_for_its_type(
    kind: Kind,
) -> None:
    """Otherwise a merge rule is misspelt, or a definition has the right rule for a type in one
    place and a wrong one in another."""
    seen: dict[type[Fields], Shape] = {}

    def check(of: type[Fields], shape: Shape) -> None:
        assert seen.setdefault(of, shape).fields == shape.fields
        properties = DEFINITIONS[openapi.definition_name(of)]["properties"]
        assert shape.fields.keys() <= properties.keys()
        for field in msgspec.structs.fields(of):
            struct, _ = struct_in(field.type)
            if struct is not None:
                check(struct, shape.below(field.encode_name))

    check(FIELDS_OF[kind], shape_of(kind))


def test_no_schema_makes_kubectl_panic() -> None:
    """kubectl panics where a schema, two levels above a change, has neither a type nor a
    reference."""
    for name, definition in DEFINITIONS.items():
        for schema in schemas(definition):
            assert (
                "type" in schema or schema["$ref"].removeprefix("#/definitions/") in DEFINITIONS
            ), name


def test_both_versions_of_openapi_describe_the_same() -> None:
    described: Object = {}
    for path in dict.fromkeys(kind.path for kind in KINDS):
        document = openapi.openapi(path, "v1.36.0", KINDS)
        assert document is not None
        described |= document["components"]["schemas"]
    told_in_v3 = json.loads(
        json.dumps(described).replace("#/components/schemas/", "#/definitions/")
    )
    assert told_in_v3 == DEFINITIONS


def test_the_protobuf_form_equals_the_json_form() -> None:
    assert decode(openapi_protobuf.encode(DOCUMENT)) == DOCUMENT


def test_a_document_has_the_expected_protobuf_bytes() -> None:
    """A document encoded by hand: NamedSchema "a" with a TypeItem and one extension, whose value is
    YAML."""
    schema = b"\xb2\x01\x08\x0a\x06object" + b"\xfa\x01\x0c\x0a\x03x-b\x12\x05\x12\x03[1]"
    named = b"\x0a\x01a" + b"\x12" + bytes([len(schema)]) + schema
    wanted = (
        b"\x0a\x032.0" + b"\x4a" + bytes([len(named) + 2]) + b"\x0a" + bytes([len(named)]) + named
    )
    assert (
        openapi_protobuf.encode(
            {"swagger": "2.0", "definitions": {"a": {"type": "object", "x-b": [1]}}}
        )
        == wanted
    )


def test_a_field_without_a_protobuf_number_is_an_error() -> None:
    with pytest.raises(KeyError, match="maximum"):
        openapi_protobuf.encode({"definitions": {"a": {"type": "integer", "maximum": 3}}})


NEVER_MERGED = {
    ("Endpoint", "addresses"),
    ("PodStatus", "hostIPs"),
    ("ResourceRequirements", "claims"),
}
"""Lists with a merge rule that the embedded server does not support. They are inside lists that are
replaced as a whole, or no client of the lab uses them."""


async def test_the_definitions_are_those_of_the_real_server(real_apiserver: KubeApiServer) -> None:
    """The server drops unknown fields, so no field of the real server may be missing."""
    async with Api(real_apiserver.access, "real") as api:
        real: Object = (await api.do("GET", "/openapi/v2"))["definitions"]

    def sort(schema: Object) -> Object:
        """Return the type of a field, and how it merges."""
        referred = real.get(schema.get("$ref", "").removeprefix("#/definitions/"), schema)
        plain = "string" if referred.get("type") == "string" else "object"
        merge_rule_of = {
            name: value for name, value in schema.items() if name.startswith("x-kubernetes-")
        }
        return (
            merge_rule_of
            | {"type": schema.get("type", plain)}
            | ({"items": sort(schema["items"])} if "items" in schema else {})
        )

    # Of CustomResourceDefinition only the fields that Fairlead's CRDs need are known.
    for name, definition in DEFINITIONS.items():
        if "apiextensions" in name:
            continue
        kind, theirs = name.rpartition(".")[2], real[name]["properties"]
        assert definition["properties"].keys() == theirs.keys(), name
        for field, schema in definition["properties"].items():
            ours = {"type": "object"} if "$ref" in schema else sort(schema)
            if (kind, field) not in NEVER_MERGED:
                assert ours == sort(theirs[field]), (name, field)
