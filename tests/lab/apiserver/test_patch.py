"""The patches that modify an object, each against a table."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.lab.apiserver import ApiFailure
from fairlead.lab.apiserver.kinds import NODES, PODS, SERVICES
from fairlead.lab.apiserver.patch import json_patch, merge, strategic_merge
from fairlead.lab.apiserver.schema import shape_of

HTTP = {"name": "http", "port": 80, "protocol": "TCP", "nodePort": 30080}
HTTPS = {"name": "https", "port": 443, "protocol": "TCP"}


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch_follows_the_table_of_rfc_7386(target: Any, patch: Any, result: Any) -> None:
    before = deepcopy(target)
    assert merge(target, patch) == result
    assert target == before


@pytest.mark.parametrize(
    ("patch", "ports"),
    [
        ([{"port": 80, "name": "web"}], [HTTP | {"name": "web"}, HTTPS]),
        ([{"port": 81, "name": "new"}], [{"port": 81, "name": "new"}, HTTP, HTTPS]),
        ([{"port": 443, "$patch": "delete"}], [HTTP]),
        ([{"$patch": "replace"}, {"port": 1}], [{"port": 1}]),
        (
            [{"port": 80, "nodePort": None}],
            [{"name": "http", "port": 80, "protocol": "TCP"}, HTTPS],
        ),
    ],
)
def test_strategic_merge_of_ports(patch: list[Any], ports: list[Any]) -> None:
    service = {"spec": {"ports": [HTTP, HTTPS]}}
    before = deepcopy(service)
    assert strategic_merge(service, {"spec": {"ports": patch}}, shape_of(SERVICES)) == {
        "spec": {"ports": ports}
    }
    assert service == before


def test_strategic_merge_keeps_the_order_that_the_client_names() -> None:
    service = {"spec": {"ports": [HTTP, HTTPS]}}
    patch = {
        "spec": {
            "$setElementOrder/ports": [{"port": 53}, {"port": 443}, {"port": 80}],
            "ports": [{"port": 53}],
        }
    }
    merged = strategic_merge(service, patch, shape_of(SERVICES))
    assert [port["port"] for port in merged["spec"]["ports"]] == [53, 443, 80]


def test_strategic_merge_of_conditions_finalizers_and_owners() -> None:
    node = {
        "metadata": {"finalizers": ["a/1"], "ownerReferences": [{"uid": "1", "name": "x"}]},
        "status": {
            "conditions": [
                {"type": "Ready", "status": "False", "reason": "r"},
                {"type": "Disk", "status": "False"},
            ]
        },
    }
    patch = {
        "metadata": {"finalizers": ["b/2", "a/1"], "ownerReferences": [{"uid": "1", "name": "y"}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    merged = strategic_merge(node, patch, shape_of(NODES))
    assert merged["metadata"] == {
        "finalizers": ["b/2", "a/1"],
        "ownerReferences": [{"uid": "1", "name": "y"}],
    }
    assert merged["status"]["conditions"] == [
        {"type": "Ready", "status": "True", "reason": "r"},
        {"type": "Disk", "status": "False"},
    ]
    removed = strategic_merge(
        merged, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a/1"]}}, shape_of(NODES)
    )
    assert removed["metadata"]["finalizers"] == ["b/2"]


def test_strategic_merge_merges_containers_by_name() -> None:
    pod = {
        "spec": {
            "containers": [
                {"name": "a", "image": "x:1", "ports": [{"containerPort": 80, "name": "p"}]}
            ]
        }
    }
    patch = {
        "spec": {"containers": [{"name": "a", "image": "x:2", "ports": [{"containerPort": 81}]}]}
    }
    assert strategic_merge(pod, patch, shape_of(PODS))["spec"]["containers"] == [
        {
            "name": "a",
            "image": "x:2",
            "ports": [{"containerPort": 81}, {"containerPort": 80, "name": "p"}],
        }
    ]


def test_strategic_merge_without_the_key_is_refused() -> None:
    with pytest.raises(ApiFailure, match="does not contain declared merge key: port") as refused:
        strategic_merge(
            {"spec": {"ports": [HTTP]}}, {"spec": {"ports": [{"name": "x"}]}}, shape_of(SERVICES)
        )
    assert refused.value.code == 500, (
        "kube-apiserver also answers an invalid strategic patch with 500"
    )


@pytest.mark.parametrize(
    ("operations", "result"),
    [
        ([{"op": "add", "path": "/baz", "value": "qux"}], {"foo": ["bar"], "baz": "qux"}),
        ([{"op": "add", "path": "/foo/0", "value": "qux"}], {"foo": ["qux", "bar"]}),
        ([{"op": "add", "path": "/foo/-", "value": "qux"}], {"foo": ["bar", "qux"]}),
        ([{"op": "remove", "path": "/foo/0"}], {"foo": []}),
        ([{"op": "replace", "path": "/foo", "value": 1}], {"foo": 1}),
        ([{"op": "copy", "from": "/foo", "path": "/x"}], {"foo": ["bar"], "x": ["bar"]}),
        ([{"op": "move", "from": "/foo", "path": "/a~1b~0"}], {"a/b~": ["bar"]}),
        ([{"op": "test", "path": "/foo/0", "value": "bar"}], {"foo": ["bar"]}),
    ],
)
def test_json_patch_follows_rfc_6902(operations: list[Any], result: Any) -> None:
    assert json_patch({"foo": ["bar"]}, operations) == result


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/foo/0", "value": "other"},
        {"op": "remove", "path": "/missing"},
        {"op": "replace", "path": "/missing", "value": 1},
        {"op": "add", "path": "/foo/9", "value": 1},
        {"op": "fold", "path": "/foo"},
        {"path": "/foo"},
    ],
)
def test_an_impossible_json_patch_is_invalid(operation: Any) -> None:
    with pytest.raises(ApiFailure) as refused:
        json_patch({"foo": ["bar"]}, [operation])
    assert refused.value.code == 422


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["x", "y"]),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.sampled_from("abc"), below, max_size=3)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@given(target=OBJECTS, patch=OBJECTS)
def test_a_merge_patch_is_idempotent(target: Any, patch: Any) -> None:
    once = merge(target, patch)
    assert merge(once, patch) == once
