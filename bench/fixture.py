"""A large cluster, as objects to create through the API. Pure.

In: the number of Services, of endpoints per Service and of Nodes. Out: JSON bodies as kubectl, the
EndpointSlice controller and kubelets send them: with last-applied annotations, targetRefs, images
and conditions, most of which Fairlead never reads. Invariant: equal sizes give equal objects.
Addresses are of RFC 2544, the range for benchmarks.
"""

import json
import random
from collections.abc import Mapping
from ipaddress import IPv4Address
from typing import Any
from uuid import UUID

import msgspec

Body = dict[str, Any]

SERVICES_IN_A_NAMESPACE = 100
VIP_POOL = "198.18.0.0/16"
FIRST_NODE = IPv4Address("198.19.0.1")
IMAGES = 35
"""Images per Node. A kubelet reports at most 50."""


class Size(msgspec.Struct, frozen=True):
    """The size of the cluster."""

    services: int
    endpoints: int
    """Endpoints of each Service, all in one EndpointSlice."""
    nodes: int

    @property
    def namespaces(self) -> int:
        return -(-self.services // SERVICES_IN_A_NAMESPACE)

    def __str__(self) -> str:
        return f"{self.services}x{self.endpoints}x{self.nodes}"


def place_of(number: int) -> tuple[str, str]:
    """Return namespace and name of a Service."""
    return f"team-{number // SERVICES_IN_A_NAMESPACE:03}", f"shop-{number:05}"


def slice_name(service_name: str) -> str:
    return f"{service_name}-x7k2p"


def node_name(number: int) -> str:
    return f"worker-{number:04}.example.com"


def service(number: int) -> Body:
    namespace, name = place_of(number)
    labels = _labels(name)
    body: Body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {
            "type": "LoadBalancer",
            "loadBalancerClass": "fairlead.io/direct",
            "externalTrafficPolicy": "Local",
            # 10,000 health check node ports exceed the default range already; nothing here uses
            # node ports in addition.
            "allocateLoadBalancerNodePorts": False,
            "selector": {
                "app.kubernetes.io/name": name,
                "app.kubernetes.io/instance": "production",
            },
            "ports": [{"name": "http", "port": 80, "targetPort": 8080, "protocol": "TCP"}],
        },
    }
    applied = json.dumps(body, separators=(",", ":")) + "\n"
    body["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": applied}
    return body


def endpoint_slice(number: int, size: Size, uid: str) -> Body:
    """Return the slice of the Service with this UID. All its endpoints are ready."""
    namespace, name = place_of(number)
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": slice_name(name),
            "generateName": f"{name}-",
            "namespace": namespace,
            "labels": {
                **_labels(name),
                "kubernetes.io/service-name": name,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
            "annotations": {
                "endpoints.kubernetes.io/last-change-trigger-time": "2026-11-20T09:42:17Z"
            },
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "name": name,
                    "uid": uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": [_endpoint(number, index, size) for index in range(size.endpoints)],
    }


def node(number: int) -> Body:
    name, address = node_name(number), str(FIRST_NODE + number)
    zone = f"zone-{number % 3}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "node.kubernetes.io/instance-type": "m1.xlarge",
                "topology.kubernetes.io/region": "region-1",
                "topology.kubernetes.io/zone": zone,
            },
            "annotations": {
                "node.alpha.kubernetes.io/ttl": "0",
                "volumes.kubernetes.io/controller-managed-attach-detach": "true",
            },
        },
        "spec": {
            "podCIDR": _pod_cidr(number),
            "podCIDRs": [_pod_cidr(number)],
            "providerID": f"openstack:///{_uid(number)}",
        },
        "status": node_status(number, address),
    }


def node_status(number: int, address: str) -> Body:
    amounts = {
        "cpu": "16",
        "ephemeral-storage": "203070420Ki",
        "hugepages-2Mi": "0",
        "memory": "65806460Ki",
        "pods": "110",
    }
    moment = "2026-11-20T09:42:17Z"
    return {
        "addresses": [
            {"type": "InternalIP", "address": address},
            {"type": "Hostname", "address": node_name(number)},
        ],
        "capacity": amounts,
        "allocatable": amounts,
        "conditions": [
            {
                "type": kind,
                "status": status,
                "reason": f"Kubelet{why}",
                "message": f"kubelet says: {why}",
                "lastHeartbeatTime": moment,
                "lastTransitionTime": moment,
            }
            for kind, status, why in (
                ("MemoryPressure", "False", "HasSufficientMemory"),
                ("DiskPressure", "False", "HasNoDiskPressure"),
                ("PIDPressure", "False", "HasSufficientPID"),
                ("Ready", "True", "Ready"),
            )
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        "images": [_image(number, index) for index in range(IMAGES)],
        "nodeInfo": {
            "machineID": _uid(number).replace("-", ""),
            "systemUUID": _uid(number),
            "bootID": _uid(number + 1_000_000),
            "kernelVersion": "6.1.0-41-amd64",
            "osImage": "Debian GNU/Linux 12 (bookworm)",
            "containerRuntimeVersion": "containerd://2.1.4",
            "kubeletVersion": "v1.36.3",
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": "amd64",
        },
    }


def _labels(name: str) -> Mapping[str, str]:
    return {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/instance": "production",
        "app.kubernetes.io/part-of": "storefront",
        "app.kubernetes.io/managed-by": "Helm",
    }


def _endpoint(number: int, index: int, size: Size) -> Body:
    """Return an endpoint. Pods are spread evenly in a pseudo-random order: the n-th pod of all has
    its own node and address."""
    nth = number * size.endpoints + index
    on = (nth * _stride(size.nodes) + number) % size.nodes
    namespace, name = place_of(number)
    return {
        "addresses": [_pod_address(on, nth // size.nodes)],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "nodeName": node_name(on),
        "zone": f"zone-{on % 3}",
        "targetRef": {
            "kind": "Pod",
            "namespace": namespace,
            "name": f"{name}-7d9c6b5f4-{index:05}",
            "uid": _uid(nth + 10_000_000),
        },
    }


def _stride(nodes: int) -> int:
    """Return a step that visits every node before it returns to the first, without a visible
    order."""
    return next(step for step in (617, 619, 631) if nodes % step)


def _pod_cidr(number: int) -> str:
    return f"10.{number // 256}.{number % 256}.0/24"


def _pod_address(on: int, nth: int) -> str:
    return f"10.{on // 256}.{on % 256}.{nth % 250 + 2}"


def _image(number: int, index: int) -> Body:
    name = f"registry.example.com/storefront/component-{(number + index) % 300:03}"
    digest = f"{_random(index).getrandbits(256):064x}"
    return {
        "names": [f"{name}@sha256:{digest}", f"{name}:v1.{index}.0"],
        "sizeBytes": 52_428_800 + index,
    }


def _uid(number: int) -> str:
    return str(UUID(int=_random(number).getrandbits(128), version=4))


def _random(number: int) -> random.Random:
    return random.Random(number)
