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
    assert read_manifests(["-"], io.StringIO(text)).ignored == {"Service": 1}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            f"{NODE}---\n{SERVICE.replace('port: 80,', 'port: eighty,')}",
            "f.yaml:2: Service: this is a text, not a whole number - at $.spec.ports[0].port",
        ),
        (SERVICE.replace("port: 80,", "port: eighty,"), "$.spec.ports[0].port"),
        (SERVICE.replace("Local", "local"), "$.spec.externalTrafficPolicy"),
        (SERVICE.replace("  name: web\n", ""), "f.yaml:1: Service: $.metadata.name is missing"),
        ("kind: Service\n", "f.yaml:1: $.apiVersion is missing"),
        (f"{NODE}---\n- 1\n", "f.yaml:2: this is not an object but list"),
        (f"{NODE}---\na: [\n", "f.yaml:2: this is not valid YAML"),
        (f"{SERVICE}---\n{SERVICE}", "f.yaml:2: Service default/web is in"),
        (
            "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Node, metadata: 3}]\n",
            "f.yaml:1: $.items[0]: Node",
        ),
    ],
)
def test_an_error_names_the_document_and_the_field(
    text: str, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(Refused) as refused:
        read_manifests([str(file)])
    assert complaint in str(refused.value)


def test_a_missing_file_and_a_folder_without_manifests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        read_manifests([tmp_path / "none.yaml"])
    with pytest.raises(Refused, match="no manifests"):
        read_manifests([tmp_path])


def test_documents_of_all_kinds_are_returned_unchanged() -> None:
    read = list(read_documents(["-"], io.StringIO(f"{OTHER}---\n{NODE}")))
    assert [(document.kind, document.place) for document in read] == [
        (("apps/v1", "Deployment"), "standard input:1"),
        (("v1", "Node"), "standard input:2"),
    ]
    assert read[1].object["status"] == {
        "addresses": [{"type": "InternalIP", "address": "192.0.2.10"}]
    }
