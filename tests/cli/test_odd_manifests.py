"""`fairlead plan -f` with any odd value in any field: each Service is planned, refused or left out,
with a reason."""

import io
import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from fairlead.cli.plan import EXAMPLE, plan_of
from fairlead.kube.manifests import manifests_of, scan

OBJECTS: tuple[dict[str, Any], ...] = (
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "web",
            "namespace": "shop",
            "uid": "",
            "labels": {"app": "web"},
            "annotations": {"fairlead.io/addresses": "203.0.113.20"},
            "finalizers": ["example.org/x"],
            "creationTimestamp": None,
            "managedFields": [{"manager": "kubectl"}],
        },
        "spec": {
            "type": "LoadBalancer",
            "loadBalancerClass": "fairlead.io/direct",
            "selector": {"app": "web"},
            "clusterIP": "10.96.0.9",
            "clusterIPs": ["10.96.0.9"],
            "externalIPs": ["198.51.100.9"],
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "loadBalancerIP": "203.0.113.20",
            "loadBalancerSourceRanges": ["198.51.100.0/24"],
            "externalTrafficPolicy": "Local",
            "internalTrafficPolicy": "Cluster",
            "healthCheckNodePort": 32000,
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
            "publishNotReadyAddresses": False,
            "allocateLoadBalancerNodePorts": True,
            "trafficDistribution": "PreferClose",
            "externalName": "",
            "ports": [
                {
                    "name": "http",
                    "port": 80,
                    "protocol": "TCP",
                    "targetPort": 8080,
                    "nodePort": 30080,
                    "appProtocol": "http",
                }
            ],
        },
        "status": {
            "loadBalancer": {
                "ingress": [{"ip": "203.0.113.20", "ipMode": "VIP", "ports": [{"port": 80}]}]
            },
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    },
    {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "web-1",
            "namespace": "shop",
            "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": ["10.244.1.5"],
                "nodeName": "one",
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "hints": {"forZones": [{"name": "a"}]},
            }
        ],
    },
    {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "one", "labels": {"topology.kubernetes.io/zone": "a"}},
        "spec": {"podCIDRs": ["10.244.1.0/24"], "taints": [{"key": "a", "effect": "NoSchedule"}]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.21"}]},
    },
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop", "labels": {"a": "b"}}},
    {
        "apiVersion": "fairlead.io/v1alpha1",
        "kind": "AddressPool",
        "metadata": {"name": "main"},
        "spec": {
            "addresses": ["203.0.113.16/28"],
            "autoAssign": True,
            "serviceAllocation": {"priority": 1, "namespaces": ["shop"]},
        },
    },
)
ODD: tuple[Any, ...] = (
    *(None, "", "x", "a b", "22:30", "\u2028", "x" * 300),
    *(0, -1, 70000, 1 << 70, 1.5, True),
    *([], [None], [[]], {}, {"a": None}, {"a": 1}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all fields and items below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, below in items:
        yield (*path, name)
        if isinstance(below, dict | list):
            yield from places(below, (*path, name))


@pytest.mark.parametrize("number", range(len(OBJECTS)), ids=[each["kind"] for each in OBJECTS])
def test_any_odd_value_is_answered_with_a_plan_or_a_reason(number: int) -> None:
    for path in places(OBJECTS[number]):
        for odd in ODD:
            objects = deepcopy(OBJECTS)
            place: Any = objects[number]
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = odd
            text = "\n---\n".join(map(json.dumps, objects))
            read = manifests_of(scan(["-"], io.StringIO("# YAML\n" + text)))
            planned = plan_of(EXAMPLE, read)
            reasons = [str(each) for each in read.left_out] + [each.refused for each in planned]
            where = f"{path}: {odd!r}: {reasons}"
            if path not in (("apiVersion",), ("kind",), ("spec", "type")):
                assert planned or read.left_out_errors, where
            for reason in filter(None, reasons):
                assert "Expected" not in reason, where
                assert "Invalid enum" not in reason, where
