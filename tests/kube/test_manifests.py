"""Manifests: which objects are read, and how errors are located."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import pytest

from fairlead.errors import Refused
from fairlead.kube.manifests import Manifests, manifests_of, read_documents, scan

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
POOL = """\
apiVersion: fairlead.io/v1alpha1
kind: AddressPool
metadata: {name: main}
spec: {addresses: [203.0.113.0/24]}
"""
ENDPOINTS = """\
apiVersion: v1
kind: Endpoints
metadata: {name: db, namespace: shop}
subsets:
- addresses: [{ip: 198.51.100.7, nodeName: one}, {ip: "2001:db8::7"}]
  notReadyAddresses: [{ip: 198.51.100.8}]
  ports: [{port: 5432}]
"""
OTHER = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n"


def read_manifests(paths: Iterable[str | Path], stdin: TextIO | None = None) -> Manifests:
    return manifests_of(scan(paths, stdin))


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
            POOL.replace("v1alpha1", "v1"),
            "document 1, line 1",
            "there is no AddressPool of version fairlead.io/v1; write fairlead.io/v1alpha1",
        ),
        (
            SLICE.replace("/v1", "/v1beta1"),
            "document 1, line 1",
            "there is no EndpointSlice of version discovery.k8s.io/v1beta1; write discovery.k8s.io",
        ),
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
            "EndpointSlice shop/web-1: endpoints[0].addresses: Required value: must contain at",
        ),
        (
            SLICE.replace("[192.0.2.1]", "[pod.example.com]"),
            "document 1, line 1",
            "the API server would refuse EndpointSlice shop/web-1: endpoints[0].addresses: Invalid",
        ),
        (
            SLICE.replace("192.0.2.1]", "'::ffff:192.0.2.1']").replace("IPv4", "IPv6"),
            "document 1, line 1",
            "must not be an IPv4-mapped IPv6 address",
        ),
        (
            SLICE.replace("nodeName: one", "nodeName: One"),
            "document 1, line 1",
            'endpoints[0].nodeName: Invalid value: "One": a lowercase RFC 1123 subdomain must',
        ),
        (
            SLICE.replace('ports: [{name: "", ', 'ports: [{port: 1}, {name: "", '),
            "document 1, line 1",
            'EndpointSlice shop/web-1: ports[1].name: Duplicate value: ""',
        ),
        (
            NODE.replace("name: one", "name: One"),
            "document 1, line 1",
            'the API server would refuse Node One: metadata.name: Invalid value: "One"',
        ),
        (
            NODE.replace("status", "spec: {unschedulable: 'yes'}\nstatus"),
            "document 1, line 1",
            "Node one: 'yes' is not true or false - at $.spec.unschedulable; write true or false",
        ),
        (
            NODE.replace("one", "one, creationTimestamp: yesterday"),
            "document 1, line 1",
            "'yesterday' is not a time - at $.metadata.creationTimestamp; write it as 2026-01-31T",
        ),
        (
            NODE.replace(
                "one}", "one}\nspec: {taints: [{key: a, timeAdded: 2026-02-31T00:00:00Z}]}"
            ),
            "document 1, line 1",
            "'2026-02-31T00:00:00Z' is not a time - at $.spec.taints[0].timeAdded",
        ),
        (
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: a.b}\n",
            "document 1, line 1",
            'the API server would refuse Namespace a.b: metadata.name: Invalid value: "a.b"',
        ),
        (
            POOL.replace("addresses", "address"),
            "document 1, line 1",
            "the API server would refuse AddressPool main: spec.addresses: Required value",
        ),
        (
            ENDPOINTS.replace("198.51.100.7", "198.51.100.300"),
            "document 1, line 1",
            "the API server would refuse Endpoints shop/db: subsets[0].addresses[0].ip: Invalid",
        ),
        (
            SERVICE.replace("name: web", "generateName: web-"),
            "document 1, line 1",
            "it has metadata.generateName and no name, which `kubectl apply` refuses; write a name",
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


def test_fields_that_a_kind_does_not_have_are_named() -> None:
    text = "---\n".join(
        (
            SLICE.replace("nodeName", "nodename"),
            NODE.replace("addresses", "address"),
            POOL.replace("spec: {", "spec: {autoassign: false, "),
        )
    )
    read = read_manifests(["-"], io.StringIO(text))
    assert [each.reason.partition(" is not a field of ")[0] for each in read.left_out] == [
        "EndpointSlice shop/web-1: endpoints[0].nodename",
        "Node one: status.address",
        "AddressPool main: spec.autoassign",
    ]
    assert [each.reason.rpartition("; ")[2] for each in read.left_out] == [
        "did you mean nodeName?",
        "did you mean addresses?",
        "did you mean autoAssign?",
    ]
    assert read.left_out_errors == []


def test_an_object_of_a_server_may_be_older_than_the_rules() -> None:
    old = SLICE.replace("name: web-1", "name: web-1, uid: a").replace("192.0.2.1]", "192.0.2.01]")
    assert read_manifests(["-"], io.StringIO(old)).left_out == ()


def database(more: str = "") -> str:
    """Return a Service without a selector."""
    ports = "ports: [{port: 5432}]"
    return (
        "apiVersion: v1\nkind: Service\nmetadata: {name: db, namespace: shop}\n"
        f"spec: {{type: LoadBalancer, {ports}{more}}}\n---\n"
    )


def test_endpoints_of_a_service_without_a_selector_are_mirrored_as_by_the_control_plane() -> None:
    read = read_manifests(["-"], io.StringIO(database() + ENDPOINTS))
    shown = [
        (each.service, each.address_type, each.ports and each.ports[0].port)
        for each in read.endpoint_slices
    ]
    assert shown == [(("shop", "db"), "IPv4", 5432), (("shop", "db"), "IPv6", 5432)]
    endpoints = [each for slice_ in read.endpoint_slices for each in slice_.endpoints or ()]
    assert [(each.addresses, each.node_name, each.ready) for each in endpoints] == [
        (("198.51.100.7",), "one", True),
        (("198.51.100.8",), None, False),
        (("2001:db8::7",), None, True),
    ]
    assert (read.left_out, read.ignored) == ((), {})


@pytest.mark.parametrize(
    ("service", "endpoints"),
    [
        ("", ENDPOINTS),
        (database(", selector: {app: db}"), ENDPOINTS),
        (database(), ENDPOINTS.replace("shop", "other")),
        (
            database(),
            ENDPOINTS.replace(
                "shop}", 'shop, labels: {endpointslice.kubernetes.io/skip-mirror: "true"}}'
            ),
        ),
        (
            database(),
            ENDPOINTS.replace(
                "shop}", "shop, annotations: {control-plane.alpha.kubernetes.io/leader: a}}"
            ),
        ),
    ],
)
def test_other_endpoints_are_listed_as_not_read(service: str, endpoints: str) -> None:
    read = read_manifests(["-"], io.StringIO(service + endpoints))
    assert read.endpoint_slices == ()
    (note,) = read.left_out
    assert "are not read: the control plane mirrors into EndpointSlices only" in note.reason
    assert not note.is_error


def test_a_port_of_stored_endpoints_may_have_no_number() -> None:
    """Of stored objects only the types are checked."""
    stored = ENDPOINTS.replace("name: db", "name: db, uid: a").replace("port: 5432", "name: sql")
    (first, *_) = read_manifests(["-"], io.StringIO(database() + stored)).endpoint_slices
    assert [each.port for each in first.ports or ()] == [0]


def test_endpoints_that_a_server_has_mirrored_are_not_mirrored_again() -> None:
    labels = (
        "{kubernetes.io/service-name: db, "
        "endpointslice.kubernetes.io/managed-by: endpointslicemirroring-controller.k8s.io}"
    )
    mirror = SLICE.replace("{kubernetes.io/service-name: web}", labels)
    stored = ENDPOINTS.replace("name: db", "name: db, uid: a")
    read = read_manifests(["-"], io.StringIO(f"{database()}{mirror}---\n{stored}"))
    assert len(read.endpoint_slices) == 1
    assert read.ignored == {"Endpoints": 1}
