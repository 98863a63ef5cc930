"""A Pod is bound to a node by the subresource `binding` only, and only once."""

from typing import Any

import pytest
from tests.lab.apiserver.api import Api, Failed

from fairlead.lab.apiserver.kinds import PODS

Object = dict[str, Any]


def binding(node: str, **metadata: str) -> Object:
    target = {"apiVersion": "v1", "kind": "Node", "name": node} if node else {}
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "web", **metadata},
        "target": target,
    }


async def bind(api: Api, name: str, requested: Object) -> Object:
    return await api.do(
        "POST",
        api.path(PODS, name, "binding"),
        requested | {"metadata": requested["metadata"] | {"name": name}},
    )


@pytest.fixture
async def pods(api: Api) -> Api:
    """A server with one Pod that has no node."""
    await api.create(
        PODS, {"metadata": {"name": "web"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    )
    return api


async def test_a_binding_sets_the_node_and_the_condition(pods: Api) -> None:
    before = await pods.get(PODS, "web")
    assert "nodeName" not in before["spec"]
    answer = await bind(pods, "web", binding("node1"))
    assert (answer["kind"], answer["status"]) == ("Status", "Success")
    after = await pods.get(PODS, "web")
    assert after["spec"]["nodeName"] == "node1"
    assert [(c["type"], c["status"]) for c in after["status"]["conditions"]] == [
        ("PodScheduled", "True")
    ]
    assert after["metadata"]["generation"] == before["metadata"]["generation"]


@pytest.mark.parametrize(
    ("requested", "code", "expected"),
    [
        (binding(""), 500, "target.name: Required value"),
        (
            binding("node2", uid="another"),
            409,
            "Precondition failed: UID in precondition: another, UID in object meta: ",
        ),
    ],
    ids=["no node", "another pod of this name"],
)
async def test_an_invalid_binding_is_refused(
    pods: Api, requested: Object, code: int, expected: str
) -> None:
    with pytest.raises(Failed, match=expected) as refused:
        await bind(pods, "web", requested)
    assert refused.value.code == code
    assert "nodeName" not in (await pods.get(PODS, "web"))["spec"]


async def test_a_pod_is_bound_only_once(pods: Api) -> None:
    await bind(pods, "web", binding("node1"))
    with pytest.raises(Failed, match='already assigned to node "node1"'):
        await bind(pods, "web", binding("node2"))
    with pytest.raises(Failed, match="not found"):
        await bind(pods, "nobody", binding("node2"))
