"""A Pod gets its node by the subresource `binding`, once, and by nothing else."""

from typing import Any

import pytest

from fairlead.lab.apiserver.failure import ApiFailure
from fairlead.lab.apiserver.kinds import PODS
from fairlead.lab.apiserver.registry import Registry
from fairlead.lab.apiserver.writes import Write


def binding(node: str, **metadata: str) -> dict[str, Any]:
    target = {"apiVersion": "v1", "kind": "Node", "name": node} if node else {}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "web", **metadata}, "target": target}


@pytest.fixture
def pods(registry: Registry) -> Registry:
    """A registry with one Pod that has no node."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    registry.create(PODS, "default", pod, Write())
    return registry


def test_it_sets_the_node_and_says_so(pods: Registry) -> None:
    before = pods.get(PODS, "default", "web")
    pods.bind("default", "web", binding("node1"))
    after = pods.get(PODS, "default", "web")
    assert after.object["spec"]["nodeName"] == "node1"
    assert [(c["type"], c["status"]) for c in after.object["status"]["conditions"]] == [("PodScheduled", "True")]
    assert after.version > before.version
    assert "nodeName" not in before.object["spec"]


@pytest.mark.parametrize(
    ("asked", "code"), [(binding(""), 422), (binding("node2", uid="another"), 409)], ids=["no node", "another pod of this name"]
)
def test_a_binding_that_makes_no_sense_is_refused(pods: Registry, asked: dict[str, Any], code: int) -> None:
    with pytest.raises(ApiFailure) as refusal:
        pods.bind("default", "web", asked)
    assert refusal.value.code == code
    assert "nodeName" not in pods.get(PODS, "default", "web").object["spec"]


def test_a_pod_is_bound_once(pods: Registry) -> None:
    pods.bind("default", "web", binding("node1"))
    with pytest.raises(ApiFailure, match='already assigned to node "node1"'):
        pods.bind("default", "web", binding("node2"))
    with pytest.raises(ApiFailure, match="not found"):
        pods.bind("default", "nobody", binding("node2"))
