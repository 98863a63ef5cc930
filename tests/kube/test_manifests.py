"""Manifests: which objects are read, and how errors are located."""

import io
import json
from pathlib import Path

import pytest

from fairlead.errors import Refused
from fairlead.kube.manifests import read_documents, read_manifests

SERVICE = """\
apiVersion: v1
kind: Service
metadata:
  name: web
  creationTimestamp: 2026-01-31T12:00:00Z
  annotations: {until: 2026-12-31}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  ports: [{port: 80, targetPort: http, nodePort: 30080}]
status:
  loadBalancer: {}
"""
SLICE = """\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [192.0.2.1], nodeName: one, conditions: {ready: true}}]
ports: [{name: "", port: 8080}]
"""
NODE = """\
apiVersion: v1
kind: Node
metadata: {name: one}
status: {addresses: [{type: InternalIP, address: 192.0.2.10}]}
"""
OTHER = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n"


def test_all_manifests_of_a_folder_are_read_and_other_kinds_are_counted(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.yaml").write_text(f"{SERVICE}---\n{OTHER}---\n# nothing\n---\n{SLICE}")
    (tmp_path / "deep" / "b.yml").write_text(NODE)
    (tmp_path / "deep" / "c.json").write_text(
        json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}})
    )
    (tmp_path / "README.md").write_text("no: [manifest")
    read = read_manifests([tmp_path])
    assert [service.key for service in read.services] == [("default", "web")]
    assert read.services[0].spec.ports[0].target_port == "http"
    assert read.services[0].metadata.creation_timestamp == "2026-01-31T12:00:00Z"
    assert read.services[0].metadata.annotations == {"until": "2026-12-31"}
    assert read.endpoint_slices[0].service == ("shop", "web")
    assert [(node.metadata.namespace, node.metadata.name) for node in read.nodes] == [("", "one")]
    assert read.ignored == {"Deployment": 1, "Secret": 1}


@pytest.mark.parametrize("kind", ["List", "ServiceList"])
def test_the_items_of_lists_are_read(kind: str) -> None:
    item = {"metadata": {"name": "web"}, "spec": {"ports": [{"port": 80}]}}
    if kind == "List":
        item |= {"apiVersion": "v1", "kind": "Service"}
    text = json.dumps(
        {"apiVersion": "v1", "kind": kind, "items": [item, item | {"metadata": {"name": "other"}}]}
    )
    assert [str(s.key) for s in read_manifests(["-"], io.StringIO(text)).services] == [
        "default/web",
        "default/other",
    ]


def test_a_kind_of_the_same_name_in_another_group_is_ignored() -> None:
    text = (
        "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: web}\nspec: "
        "{template: 3}\n"
    )
    assert read_manifests(["-"], io.StringIO(text)).ignored == {
        "Service (serving.knative.dev/v1)": 1
    }


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        (
            SLICE.replace("port: 8080", "port: x"),
            "document 1, line 1",
            "'x' is not a whole number - at $.ports[0].port",
        ),
        (NODE.replace("one", "22", 1), "document 1, line 1", "metadata.name must be a string: put"),
        (f"{NODE}\tspec: {{}}\n", "document 1, line 5", "this is not valid YAML: "),
        (SERVICE.replace("  name: web\n", ""), "document 1, line 1", "Service: metadata.name is"),
        ("kind: Service\n", "document 1, line 1", "apiVersion is missing or no text"),
        ("apiVersion: v1\nkind:\n", "document 1, line 1", "kind is missing or no text"),
        (f"---\n{OTHER}---\n\n- 1\n", "document 2, line 7", "this is not an object but a list"),
        ("apiVersion: v1\nkind: service\n", "document 1, line 1", "there is no kind service in v1"),
        ("apiVersion: v2\nkind: Service\n", "document 1, line 1", "there is no apiVersion v2"),
        (
            "apiVersion: v1\nkind: List\nitems: [null]\n",
            "document 1, line 1, items[0]",
            "this is not an object but null",
        ),
        (
            "apiVersion: v1\nkind: List\nitems: [1]\n",
            "document 1, line 1, items[0]",
            "this is not an object but a number",
        ),
        (f"{OTHER}---\na: [\n", "document 2, line 6", "this is not valid YAML"),
        (
            f"{NODE}---\n{NODE}",
            "document 2, line 6",
            "Node one is in {}, document 1, line 1 already",
        ),
        (
            "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Node, metadata: 3}]\n",
            "document 1, line 1, items[0]",
            "Node: metadata must be a mapping",
        ),
        ("apiVersion: v1\nkind: List\nitems: 3\n", "document 1, line 1", "items must be a list"),
        (
            SLICE.replace("{kubernetes.io/service-name: web}", "{app: true}"),
            "document 1, line 1",
            "true or false, not a text - at $.metadata.labels[app]; write it in quotes",
        ),
        (
            SLICE.replace("addresses: [192.0.2.1], ", ""),
            "document 1, line 1",
            "EndpointSlice: the field addresses is missing - at $.endpoints[0]; add addresses",
        ),
        (
            SLICE.replace("[192.0.2.1]", "[pod.example.com]"),
            "document 1, line 1",
            "the API server would refuse EndpointSlice shop/web-1: endpoints[0].addresses: Invalid",
        ),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place_and_the_rest_is_read(
    text: str, place: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"{text}---\n{SERVICE.replace('web', 'last')}")
    read = read_manifests([str(file)])
    assert [str(each.key) for each in read.services] == ["default/last"]
    (left_out,) = read.left_out
    assert left_out.place == f"{file}, {place}"
    assert reason.format(file) in left_out.reason


def test_commands_that_need_every_document_get_an_error(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"{NODE}---\na: [\n")
    with pytest.raises(Refused, match="document 2, line 7: this is not valid YAML"):
        list(read_documents([file]))


def test_null_is_as_good_as_absent() -> None:
    """As a chart renders them whose values are empty."""
    text = """\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: null, labels: null, annotations: null, finalizers: null}
spec:
  type: LoadBalancer
  selector: {app: web, tier: null}
  clusterIP: null
  externalIPs: null
  ports: [{name: null, port: 80, protocol: null, targetPort: null, nodePort: null}]
  sessionAffinity: null
  sessionAffinityConfig: null
  loadBalancerIP: null
  loadBalancerSourceRanges: null
  externalTrafficPolicy: null
  internalTrafficPolicy: null
  publishNotReadyAddresses: null
  allocateLoadBalancerNodePorts: null
status: null
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [192.0.2.1], nodeName: null, conditions: null, hints: null}]
ports: [{name: null, port: 8080, protocol: null}]
---
apiVersion: v1
kind: Node
metadata: {name: one}
spec: {podCIDR: null, podCIDRs: null, taints: null}
status: {addresses: null}
---
apiVersion: v1
kind: List
items:
"""
    read = read_manifests(["-"], io.StringIO(text))
    assert not read.left_out
    (service,) = read.services
    assert service.spec.selector == {"app": "web", "tier": ""}
    assert (service.spec.type, service.spec.external_traffic_policy) == ("LoadBalancer", "Cluster")
    assert read.endpoint_slices[0].service == ("default", "web")
    assert len(read.nodes) == 1


def test_a_missing_file_and_a_folder_without_manifests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        read_manifests([tmp_path / "none.yaml"])
    with pytest.raises(Refused, match="no manifests"):
        read_manifests([tmp_path])


def test_documents_of_all_kinds_are_returned_unchanged() -> None:
    read = list(read_documents(["-"], io.StringIO(f"{OTHER}---\n{NODE}")))
    assert [(document.kind, document.place) for document in read] == [
        (("apps/v1", "Deployment"), "standard input, document 1, line 1"),
        (("v1", "Node"), "standard input, document 2, line 5"),
    ]
    assert read[1].object["status"] == {
        "addresses": [{"type": "InternalIP", "address": "192.0.2.10"}]
    }
