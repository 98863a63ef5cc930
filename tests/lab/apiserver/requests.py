"""Random requests about Services, valid and invalid; the same seed gives the same requests.

In: a random generator. Out: requests, as values. Left out are requests that the real server answers
with messages of its own libraries (Go's decoder, its regular expressions, a whole object as one
message), which the embedded server need not imitate: fields of a wrong type in patches, unknown
fields in strict patches, bodies that are not objects, malformed label selectors.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from tests.lab.apiserver.api import APPLY_PATCH, Object

from fairlead.lab.apiserver.registry import JSON_PATCH, MERGE_PATCH, STRATEGIC_MERGE_PATCH

NAMES = ("a", "b", "c")
ABSENT = object()


class Request(NamedTuple):
    """A request. If `body` is None, the body is the current object, modified by `change`."""

    method: str
    name: str
    body: Any = None
    media_type: str = "application/json"
    query: str = ""
    subresource: str = ""
    change: Object | None = None


def _port(random: Random) -> Object:
    port: Object = {"port": random.choice((80, 80, 443, 53, 0, 70000))}
    for field, values in {
        "name": ("http", "http", "https", "dns", "Bad_Name"),
        "protocol": ("TCP", "UDP", "UDP", "SCTP", "ICMP"),
        "nodePort": (30060, 30061, 30062, 80),
        "targetPort": (8080, "http", 0, "-"),
        "appProtocol": ("http", "kubernetes.io/h2c", "a b"),
    }.items():
        if random.random() < 0.35:
            port[field] = random.choice(values)
    return port


def _ports(random: Random) -> list[Object]:
    return [_port(random) for _ in range(random.choice((1, 1, 1, 2, 2, 3, 0)))]


def _one_of(*values: Any) -> Callable[[Random], Any]:
    return lambda random: random.choice(values)


SPEC: Mapping[str, Callable[[Random], Any]] = {
    "type": _one_of(
        "ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer", "ExternalName", "Balancer"
    ),
    "ports": _ports,
    "selector": _one_of({"app": "web"}, {}, {"a b": "c"}),
    "externalTrafficPolicy": _one_of("Local", "Local", "Cluster", "Nearby"),
    "internalTrafficPolicy": _one_of("Local", "Cluster", "Nearby"),
    "sessionAffinity": _one_of("ClientIP", "None", "Cookie"),
    "sessionAffinityConfig": _one_of(
        {"clientIP": {"timeoutSeconds": 60}}, {"clientIP": {"timeoutSeconds": 0}}, {}
    ),
    "ipFamilyPolicy": _one_of("SingleStack", "PreferDualStack", "RequireDualStack", "Dual"),
    "ipFamilies": _one_of(["IPv4"], ["IPv6"], ["IPv6", "IPv4"], ["IPv4", "IPv4"], ["IPv5"]),
    "clusterIP": _one_of(
        "None", "10.96.0.201", "10.96.0.202", "2001:db8:96::21", "192.0.2.1", "10.96.0"
    ),
    "clusterIPs": _one_of(
        ["10.96.0.203"],
        ["10.96.0.204", "2001:db8:96::22"],
        ["None"],
        ["10.96.0.205", "10.96.0.206"],
    ),
    "externalIPs": _one_of(["198.51.100.7"], ["127.0.0.1"], ["198.51.100.07"], []),
    "externalName": _one_of("a.example", "a.example.", "A_b"),
    "loadBalancerIP": _one_of("192.0.2.9", "x"),
    "loadBalancerClass": _one_of("example.com/a", "example.com/b", "bad class"),
    "loadBalancerSourceRanges": _one_of(
        ["192.0.2.0/24"], [" 192.0.2.0/24 "], ["192.0.2.1"], ["192.0.2.00/24"], []
    ),
    "allocateLoadBalancerNodePorts": _one_of(True, False, False),
    "healthCheckNodePort": _one_of(30070, 30071, 70000),
    "publishNotReadyAddresses": _one_of(True, False),
    "trafficDistribution": _one_of("PreferClose", "PreferSameNode", "PreferFar"),
    "ofTomorrow": _one_of(1),
}
METADATA: Mapping[str, Callable[[Random], Any]] = {
    "labels": _one_of({"a": "b"}, {"a": "c", "d": "e"}, {}, {"a b": "c"}, {"a": "-"}),
    "annotations": _one_of(
        {"example.com/x": "1"},
        {"service.beta.kubernetes.io/load-balancer-source-ranges": "192.0.2.0/24, 198.51.100.0/24"},
        {"service.beta.kubernetes.io/load-balancer-source-ranges": "x"},
    ),
    "finalizers": _one_of([], ["example.com/hold"], ["bare"]),
}
INGRESS = (
    {"ip": "192.0.2.10"},
    {"ip": "192.0.2.10", "ipMode": "Proxy"},
    {"ip": "2001:db8::1", "ipMode": "VIP", "ports": [{"port": 80, "protocol": "TCP"}]},
    {"hostname": "a.example"},
    {"hostname": "192.0.2.1"},
    {"hostname": "a.example", "ipMode": "VIP"},
    {"ip": "192.0.2.300"},
    {"ip": "192.0.2.10", "ipMode": "DSR"},
)


def _some(random: Random, fields: Mapping[str, Callable[[Random], Any]], chance: float) -> Object:
    return {field: choose(random) for field, choose in fields.items() if random.random() < chance}


def _spec(random: Random) -> Object:
    """Return the spec of a new Service; most are valid."""
    return {"type": "LoadBalancer", "ports": [{"port": 80}]} | _some(
        random, SPEC, random.choice((0.03, 0.08, 0.25))
    )


def _service(random: Random, name: str, spec: Object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name} | _some(random, METADATA, 0.08),
        "spec": spec,
    }


def _status(random: Random) -> Object:
    status: Object = {
        "loadBalancer": {
            "ingress": random.choices(
                INGRESS, weights=(6, 4, 4, 2, 1, 1, 1, 1), k=random.choice((0, 1, 1, 2))
            )
        }
    }
    if random.random() < 0.4:
        stamp = "2026-01-01T00:00:00Z"
        status["conditions"] = [
            {
                "type": kind,
                "status": "True",
                "reason": "Said",
                "message": "",
                "lastTransitionTime": stamp,
            }
            for kind in random.sample(("example.com/A", "example.com/B"), random.choice((1, 2)))
        ]
    return status


def _with_nulls(random: Random, spec: Object) -> Object:
    """Return a merge patch that also removes some fields."""
    return spec | {
        field: None for field in SPEC if field != "ofTomorrow" and random.random() < 0.05
    }


def _create(random: Random, name: str) -> Request:
    return Request("POST", "", _service(random, name, _spec(random)))


def _put_manifest(random: Random, name: str) -> Request:
    return Request("PUT", name, _service(random, name, _spec(random)))


def _put_changed(random: Random, name: str) -> Request:
    return Request("PUT", name, change=_with_nulls(random, _some(random, SPEC, 0.06)))


def _merge(random: Random, name: str) -> Request:
    body = {
        "metadata": _some(random, METADATA, 0.1),
        "spec": _with_nulls(random, _some(random, SPEC, 0.08)),
    }
    return Request("PATCH", name, body, MERGE_PATCH)


def _strategic(random: Random, name: str) -> Request:
    spec = _some(random, SPEC, 0.08)
    if random.random() < 0.3:
        spec["ports"] = [{"port": 80, "$patch": "delete"}, _port(random)]
    if random.random() < 0.1:
        spec["ports"] = [{"port": 443, "name": "s"}, {"port": 80, "name": "p"}]
        spec["$setElementOrder/ports"] = [{"port": 443}, {"port": 80}]
    body = {"metadata": _some(random, METADATA, 0.1), "spec": spec}
    return Request("PATCH", name, body, STRATEGIC_MERGE_PATCH)


def _json(random: Random, name: str) -> Request:
    operations = random.choice(
        (
            [{"op": "replace", "path": "/spec/ports/0/port", "value": 81}],
            [{"op": "add", "path": "/metadata/labels", "value": {"a": "b"}}],
            [{"op": "remove", "path": "/metadata/labels/a"}],
            [{"op": "test", "path": "/spec/type", "value": "NodePort"}],
            [{"op": "add", "path": "/spec/ports/-", "value": {"name": "more", "port": 99}}],
            [{"op": "remove", "path": "/spec/selector"}],
        )
    )
    return Request("PATCH", name, operations, JSON_PATCH)


def _apply(random: Random, name: str) -> Request:
    manager, force = random.choice(("one", "two")), random.choice(("true", "false", "false"))
    body = _service(
        random,
        name,
        _some(random, {field: SPEC[field] for field in SPEC if field != "ofTomorrow"}, 0.08),
    )
    if body["metadata"].get("finalizers") == []:
        del body["metadata"]["finalizers"]  # no effect, but the real server counts it as a change
    if random.random() < 0.7:
        body["spec"]["ports"] = [{"port": 80, "protocol": "TCP"}] + [{"name": "s", "port": 443}] * (
            random.random() < 0.3
        )
    return Request("PATCH", name, body, APPLY_PATCH, f"fieldManager={manager}&force={force}")


def _patch_status(random: Random, name: str) -> Request:
    return Request("PATCH", name, {"status": _status(random)}, MERGE_PATCH, subresource="status")


def _apply_status(random: Random, name: str) -> Request:
    manager, force = random.choice(("ctl", "other")), random.choice(("true", "false"))
    body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "status": _status(random),
    }
    return Request(
        "PATCH",
        name,
        body,
        APPLY_PATCH,
        f"fieldManager={manager}&force={force}",
        subresource="status",
    )


def _delete(random: Random, name: str) -> Request:
    options = random.choice(
        (
            None,
            None,
            {"preconditions": {"uid": "another"}},
            {"preconditions": {"resourceVersion": "1"}},
        )
    )
    return Request("DELETE", name, options)


def _get(_: Random, name: str) -> Request:
    return Request("GET", name)


KINDS: Mapping[Callable[[Random, str], Request], int] = {
    _create: 10,
    _put_manifest: 5,
    _put_changed: 6,
    _merge: 8,
    _strategic: 6,
    _json: 4,
    _apply: 8,
    _patch_status: 4,
    _apply_status: 4,
    _delete: 4,
    _get: 1,
}


def request(random: Random) -> Request:
    """Return the next request."""
    make = random.choices(list(KINDS), weights=list(KINDS.values()))[0]
    requested = make(random, random.choice(NAMES))
    if requested.method in ("POST", "PUT", "PATCH") and random.random() < 0.07:
        more = random.choice(("dryRun=All", "fieldValidation=Strict", "fieldManager=someone"))
        strict_patch = (
            requested.method == "PATCH" and requested.media_type != APPLY_PATCH and "Strict" in more
        )
        if not strict_patch and (
            "fieldManager" not in requested.query or "fieldManager" not in more
        ):
            requested = requested._replace(query="&".join(filter(None, (requested.query, more))))
    return requested
