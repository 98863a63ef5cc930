"""A namespace of an API server with one Service that is served, and faults for it.

In: an API server without controllers. Out: objects as controllers, kubelets and users leave them,
written with the same field managers. A `Fault` is what one change makes of them."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fairlead.config import Config, PoolConfig, PresenceConfig
from fairlead.doctor.examine import examine
from fairlead.doctor.finding import RootCause
from fairlead.doctor.gather import Request
from fairlead.doctor.report import Report
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_POOLS
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import CLEANUP_FINALIZER, EXCLUDE_LABEL, PODS, SERVICES
from fairlead.kube.presence import NotServed, Presence, lease_body, lease_name
from fairlead.lab import manifests
from fairlead.lab import objects as lab_objects
from fairlead.lab.slices import MANAGED_BY_LABEL, MANAGER, compare, plan_slices
from fairlead.plan.service import CLAIM_MANAGER, CLASS_ANNOTATION

Manifest = dict[str, Any]
DEADLINE_S = 30.0
SHORT_S = 0.05
LEASE_S = 3600
DIRECT, PROXY, STATIC = "fairlead.io/direct", "fairlead.io/proxy", "example.com/static"
ADDRESS, OTHER = "203.0.113.1", "203.0.113.2"
ADDRESSES_V6 = (ADDRESS, "2001:db8:1::1")
NODES = ("n1", "n2", "n3", "n4")
"""The Node n4 is for the fault that excludes it."""
START = datetime(2026, 1, 1, tzinfo=UTC)


def node(name: str) -> Manifest:
    number = NODES.index(name) + 1
    cidr = f"10.244.{number}.0/24"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {"podCIDR": cidr, "podCIDRs": [cidr]},
    }


async def make_nodes(client: Client) -> None:
    await manifests.apply(client, map(node, NODES))
    for number, name in enumerate(NODES, 1):
        addresses = [{"type": "InternalIP", "address": f"192.0.2.{number}"}]
        await client.patch(
            lab_objects.NODES,
            ("", name),
            {"status": {"addresses": addresses}},
            subresource="status",
        )


class World:
    """The namespace. `fairlead`: whether Fairlead serves it; otherwise a balancer without a class
    does, and Fairlead is not installed."""

    def __init__(self, client: Client, kubeconfig: Path, namespace: str, *, fairlead: bool) -> None:
        self.client = client
        self.namespace = namespace
        self.fairlead = fairlead
        self.class_: str | None = DIRECT if fairlead else None
        self.tasks: list[asyncio.Task[None]] = []
        self._kubeconfig = kubeconfig

    @property
    def config(self) -> Config | None:
        if not self.fairlead:
            return None
        pools = (PoolConfig("main", ("203.0.113.0/24",)),)
        presence = PresenceConfig(namespace=self.namespace)
        return Config(default_class=DIRECT, pools=pools, presence=presence)

    @property
    def subject(self) -> str:
        return f"Service {self.namespace}/web"

    async def build(self) -> None:
        """Make two ready pods on two nodes, and a Service that is served."""
        name = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        await manifests.apply(self.client, [name])
        for number in (1, 2):
            await self.pod(f"w{number}", f"n{number}")
        if self.fairlead:
            for role, process in (("controller", "c1"), ("gateway", "gw1"), ("gateway", "gw2")):
                await self.lease(role, process)
        await self.service()
        await self.serve()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def service(self, name: str = "web", **spec: Any) -> None:
        """Apply a Service; a field that is None is left out."""
        fields = {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "loadBalancerClass": self.class_,
            "selector": {"app": "web"},
            "ports": [{"name": "web", "port": 80, "protocol": "TCP", "targetPort": "web"}],
        } | spec
        written = {key: value for key, value in fields.items() if value is not None}
        metadata = {"name": name, "namespace": self.namespace}
        await manifests.apply(
            self.client,
            [{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": written}],
        )

    async def again(self, *, annotations: Mapping[str, str] | None = None, **spec: Any) -> None:
        """Create the Service again, unserved, with other fields."""
        key = self.namespace, "web"
        await self.client.patch(SERVICES, key, {"metadata": {"finalizers": []}})
        await self.client.delete(SERVICES, key)
        await self.service(**spec)
        if annotations:
            await self.client.patch(SERVICES, key, {"metadata": {"annotations": annotations}})

    async def serve(
        self, *addresses: str, name: str = "web", mode: str = "VIP", error: str = ""
    ) -> None:
        """Write what the controller of the Service writes."""
        key = (self.namespace, name)
        ingress: list[Manifest] = [{"ip": each, "ipMode": mode} for each in addresses or (ADDRESS,)]
        if error:
            ingress[0]["ports"] = [{"port": 80, "protocol": "TCP", "error": error}]
        status = {"status": {"loadBalancer": {"ingress": ingress}}}
        if not self.fairlead or self.class_ == STATIC:
            await self.client.patch(
                SERVICES, key, status, subresource="status", field_manager="static-lb"
            )
            return
        claim = {
            "metadata": {
                "annotations": {CLASS_ANNOTATION: self.class_},
                "finalizers": [CLEANUP_FINALIZER],
            }
        }
        await self.client.apply(SERVICES, key, claim, field_manager=CLAIM_MANAGER, force=True)
        await self.client.apply(
            SERVICES,
            key,
            status,
            field_manager="fairlead-status",
            subresource="status",
            force=True,
        )

    async def pod(self, name: str, on: str, *, starts: bool = False) -> None:
        """Make a ready pod, or one that its kubelet is about to start."""
        spec = {
            "nodeName": on,
            "containers": [
                {"name": "web", "image": "web", "ports": [{"name": "web", "containerPort": 8080}]}
            ],
        }
        metadata = {"name": name, "namespace": self.namespace, "labels": {"app": "web"}}
        await manifests.apply(
            self.client, [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}]
        )
        if not starts:
            await self.report(name, ready=True)

    async def remove(self, *pods: str) -> None:
        """Delete pods as their kubelets do when they have ended."""
        for name in pods:
            path = PODS.path(self.namespace, name)
            await self.client.request("DELETE", path, body={"gracePeriodSeconds": 0})

    async def report(self, name: str, *, ready: bool) -> None:
        """Write the status of a pod as a kubelet does."""
        number = sum(map(ord, name)) % 200 + 10
        address = f"10.244.1.{number}"
        condition = {
            "type": "Ready",
            "status": str(ready),
            "lastTransitionTime": START.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [condition],
        }
        await self.client.patch(
            PODS, (self.namespace, name), {"status": status}, subresource="status"
        )

    async def lease(
        self, role: str, name: str, *, age_s: float = 0, lasts_s: int = LEASE_S, **record: Any
    ) -> None:
        """Write the Lease of a process of Fairlead."""
        presence = Presence(role, name, "0.1.0", START.isoformat(), ready=True, **record)
        renewed = datetime.now(UTC) - timedelta(seconds=age_s)
        body = lease_body(
            presence,
            identity=name,
            now=renewed.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            lease_s=lasts_s,
        )
        await self.client.apply(
            LEASES,
            (self.namespace, lease_name(role, name)),
            body,
            field_manager="fairlead-presence",
            force=True,
        )

    async def slices(self) -> None:
        """Write EndpointSlices as the controller of Kubernetes does."""
        pods = await self.client.list(lab_objects.PODS, namespace=self.namespace)
        known = await self.client.list(
            lab_objects.SLICES,
            namespace=self.namespace,
            label_selector=f"{MANAGED_BY_LABEL}={MANAGER}",
        )
        services = await self.client.list(SERVICES, namespace=self.namespace)
        desired = {
            name: slice_
            for service in services
            for name, slice_ in plan_slices(service, pods).items()
        }
        difference = compare(desired, {each.metadata.name: each for each in known})
        for slice_ in difference.create:
            await self.client.create(lab_objects.SLICES, slice_)
        for slice_ in difference.replace:
            await self.client.replace(
                lab_objects.SLICES, (self.namespace, slice_.metadata.name), slice_
            )
        for slice_ in difference.delete:
            await self.client.delete(lab_objects.SLICES, (self.namespace, slice_.metadata.name))

    async def kubectl(self, command: str) -> None:
        """Run a command of kubectl in the namespace."""
        await self.execute(f"kubectl -n {self.namespace} {command}")

    async def execute(self, command: str) -> None:
        """Run a command as it is printed."""
        environment = {
            "HOME": str(self._kubeconfig.parent),
            "KUBECONFIG": str(self._kubeconfig),
            "PATH": os.environ["PATH"],
        }
        child = await asyncio.create_subprocess_exec(
            "sh", "-ec", command, env=environment, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(DEADLINE_S):
            _, errors = await child.communicate()
        assert child.returncode == 0, f"{command}: {errors.decode()}"

    async def report_of(self, *, grace_s: float = 0, observe_s: float = SHORT_S) -> Report:
        """Return what the doctor says about the namespace."""
        await self.slices()
        request = Request((), self.namespace, self.config, grace_s=grace_s, observe_s=observe_s)
        return await examine(self.client, request)

    async def finds(
        self, *wanted: tuple[str, str], observe_s: float = SHORT_S
    ) -> tuple[RootCause, ...]:
        """Wait until the doctor finds exactly this. Return the findings."""
        found: tuple[RootCause, ...] = ()
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    found = (await self.report_of(observe_s=observe_s)).findings
                    if [each.key for each in found] == list(wanted):
                        return found
                    await asyncio.sleep(SHORT_S)
        raise AssertionError(f"wanted {wanted}, found {found}")


Step = Callable[[World], Awaitable[None]]


class Fault(NamedTuple):
    """A fault: the code of its finding, and how it is made. `fix`: how it is removed after the
    remedy of the finding was executed; with `by_hand` instead of it, because the remedy is no
    command that removes the fault. `subject`: that of the finding, with the namespace for {}."""

    code: str
    make: Step
    fix: Step | None = None
    by_hand: bool = False
    subject: str = "Service {}/web"
    observe_s: float = SHORT_S

    async def play(self, world: World) -> None:
        """Make the fault, check that it is named and nothing else, remove it, and check that
        nothing is named."""
        await self.make(world)
        key = self.code, self.subject.format(world.namespace)
        (found,) = await world.finds(key, observe_s=self.observe_s)
        assert found.known_by
        if not self.by_hand:
            await world.execute(found.remedy)
        if self.fix is not None:
            await self.fix(world)
        await world.finds()


def commands(*lines: str) -> Step:
    """Return a step that runs commands of kubectl."""

    async def run(world: World) -> None:
        for line in lines:
            await world.kubectl(line.replace("{}", world.namespace))

    return run


def merge(spec: Manifest) -> Step:
    """Return a step that changes fields of the Service."""

    async def run(world: World) -> None:
        await world.client.patch(SERVICES, (world.namespace, "web"), {"spec": spec})

    return run


async def served(world: World) -> None:
    await world.serve()


async def class_unserved(world: World) -> None:
    await world.again(loadBalancerClass="fairlead.io/driect" if world.fairlead else "example.com/x")


async def unready(world: World) -> None:
    for name in ("w1", "w2"):
        await world.report(name, ready=False)


async def ready(world: World) -> None:
    for name in ("w1", "w2"):
        await world.report(name, ready=True)


async def deleted_pods(world: World) -> None:
    for name in ("w1", "w2"):
        await world.client.delete(PODS, (world.namespace, name))


async def new_pods(world: World) -> None:
    for number in (3, 4):
        await world.pod(f"w{number}", f"n{number - 2}")


async def overwritten(world: World) -> None:
    async def write() -> None:
        number = 0
        while True:
            number += 1
            body = {"status": {"loadBalancer": {"ingress": [{"ip": f"203.0.113.{number % 2}"}]}}}
            await world.client.patch(
                SERVICES,
                (world.namespace, "web"),
                body,
                subresource="status",
                field_manager=f"balancer-{number % 2}",
            )
            await asyncio.sleep(SHORT_S)

    world.tasks.append(asyncio.create_task(write()))


async def no_longer_overwritten(world: World) -> None:
    await world.end()
    await world.serve()


async def address_of_another(world: World) -> None:
    await world.service("other")
    await world.serve(OTHER, name="other")
    await world.again(annotations={"fairlead.io/addresses": OTHER})


async def requests_nothing(world: World) -> None:
    annotations = {"metadata": {"annotations": {"fairlead.io/addresses": None}}}
    await world.client.patch(SERVICES, (world.namespace, "web"), annotations)
    await world.serve()


async def pool_full(world: World) -> None:
    pool = {
        "apiVersion": "fairlead.io/v1alpha1",
        "kind": "AddressPool",
        "metadata": {"name": world.namespace},
        "spec": {"addresses": ["198.51.100.1"], "autoAssign": False},
    }
    await manifests.apply(world.client, [pool])
    await world.service("other")
    await world.serve("198.51.100.1", name="other")
    await world.again(annotations={"fairlead.io/address-pool": world.namespace})


async def pool_extended(world: World) -> None:
    key = "", world.namespace
    patch = {"spec": {"addresses": ["198.51.100.1-198.51.100.2"]}}
    await world.client.patch(ADDRESS_POOLS, key, patch)
    await world.serve("198.51.100.2")
    await world.client.delete(ADDRESS_POOLS, key)


async def pods_on_an_excluded_node(world: World) -> None:
    await world.remove("w1", "w2")
    await world.pod("w5", "n4")
    labels = {"metadata": {"labels": {EXCLUDE_LABEL: ""}}}
    await world.client.patch(lab_objects.NODES, ("", "n4"), labels)


async def ranges_of_one_family(world: World) -> None:
    await world.again(
        ipFamilyPolicy="RequireDualStack",
        ipFamilies=["IPv4", "IPv6"],
        loadBalancerSourceRanges=["0.0.0.0/0"],
    )
    await world.serve(*ADDRESSES_V6)


async def unevenly_placed(world: World) -> None:
    if world.fairlead:
        world.class_ = STATIC
        await world.again()
        await world.serve()
    await world.pod("w6", "n1")


async def evenly_placed(world: World) -> None:
    await world.remove("w6")


async def deleted_without_its_controller(world: World) -> None:
    if world.fairlead:
        await world.client.delete(LEASES, (world.namespace, lease_name("controller", "c1")))
    else:
        finalizers = {"metadata": {"finalizers": ["example.com/load-balancer"]}}
        await world.client.patch(SERVICES, (world.namespace, "web"), finalizers)
    await world.client.delete(SERVICES, (world.namespace, "web"))


async def without_node_ports(world: World) -> None:
    world.class_ = PROXY
    await world.again(allocateLoadBalancerNodePorts=False)
    await world.serve(mode="Proxy", error="fairlead.io/NodePortMissing")


async def policy_for_the_cluster(world: World) -> None:
    inside = [{"podSelector": {}}, {"ipBlock": {"cidr": "10.244.0.0/16"}}]
    await policy(world, [{"from": inside}])


async def policy_for_nobody(world: World) -> None:
    await policy(world, [])


async def policy(world: World, ingress: list[Manifest]) -> None:
    spec = {
        "podSelector": {"matchLabels": {"app": "web"}},
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    metadata = {"name": "inside", "namespace": world.namespace}
    await manifests.apply(
        world.client,
        [
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": metadata,
                "spec": spec,
            }
        ],
    )


async def gateway_differs(world: World) -> None:
    not_served = (NotServed(f"{world.namespace}/web", "table memory is used up"),)
    await world.lease("gateway", "gw2", not_served=not_served, not_served_count=1)


async def gateway_gone(world: World) -> None:
    await world.lease("gateway", "gw2", age_s=60, lasts_s=1)
    for role, name in (("controller", "c1"), ("gateway", "gw1")):
        await world.lease(role, name, lasts_s=1)

    async def renew() -> None:
        while True:
            for role, name in (("controller", "c1"), ("gateway", "gw1")):
                await world.lease(role, name, lasts_s=1)
            await asyncio.sleep(0.2)

    world.tasks.append(asyncio.create_task(renew()))


async def gateway_back(world: World) -> None:
    await world.end()
    for role, name in (("controller", "c1"), ("gateway", "gw1"), ("gateway", "gw2")):
        await world.lease(role, name)


async def slice_with_another_port(world: World) -> None:
    await slice_by_hand(world, "https", "n1")


async def slice_without_a_node(world: World) -> None:
    await slice_by_hand(world, "web", None)


async def slice_right(world: World) -> None:
    await world.client.delete(lab_objects.SLICES, (world.namespace, "by-hand"))
    await slice_by_hand(world, "web", "n1")


async def address_of_a_node(world: World) -> None:
    await world.serve("192.0.2.1")


async def slice_by_hand(world: World, port: str, on: str | None) -> None:
    """Replace the selector by an EndpointSlice."""
    await world.again(selector=None)
    await world.serve()
    metadata = {
        "name": "by-hand",
        "namespace": world.namespace,
        "labels": {"kubernetes.io/service-name": "web"},
    }
    endpoint = {"addresses": ["10.244.1.99"], "conditions": {"ready": True}}
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": "IPv4",
        "endpoints": [endpoint | ({"nodeName": on} if on else {})],
        "ports": [{"name": port, "port": 8080, "protocol": "TCP"}],
    }
    await manifests.apply(world.client, [slice_])


TYPED = merge({"selector": {"app": "wep"}})
UNKNOWN_PORT = {"name": "web", "port": 80, "protocol": "TCP", "targetPort": "http"}
GRANT_LESS = (
    "patch clusterrole fairlead-gateway --type=json -p "
    '\'[{"op":"test","path":"/rules/2/resources/0","value":"events"},'
    '{"op":"replace","path":"/rules/2/verbs","value":["get"]}]\''
)
EVERYWHERE = [
    Fault("SelectorMatchesNothing", TYPED),
    Fault("TargetPortNameUnknown", merge({"ports": [UNKNOWN_PORT]})),
    Fault("PodsNotReady", unready, ready),
    Fault("AllTerminating", deleted_pods, new_pods, by_hand=True),
    Fault("TwoControllers", overwritten, no_longer_overwritten, observe_s=0.5),
    Fault("ExcludedNode", pods_on_an_excluded_node),
    Fault("SourceRangeForgetsPods", merge({"loadBalancerSourceRanges": ["198.51.100.0/24"]})),
    Fault("PortNameDiffers", slice_with_another_port, slice_right, by_hand=True),
    Fault("EndpointsWithoutNode", slice_without_a_node, slice_right, by_hand=True),
    Fault("SourceRangeForgetsFamily", ranges_of_one_family),
    Fault("UnfairByPlacement", unevenly_placed, evenly_placed, by_hand=True),
    Fault("FinalizerOrphaned", deleted_without_its_controller),
]
"""The faults that are named without Fairlead in the cluster too."""
WITH_FAIRLEAD = [
    *EVERYWHERE,
    Fault("ClassUnserved", class_unserved, served),
    Fault("AddressExcluded", address_of_a_node, served, by_hand=True),
    Fault("AddressElsewhere", address_of_another, requests_nothing, by_hand=True),
    Fault("PoolExhausted", pool_full, pool_extended, by_hand=True, subject="AddressPool {}"),
    Fault("NodePortMissing", without_node_ports),
    Fault(
        "NetworkPolicyDropsClients",
        policy_for_the_cluster,
        subject="NetworkPolicy {}/inside",
    ),
    Fault(
        "ApiForbidden",
        commands(GRANT_LESS),
        subject="ServiceAccount fairlead-system/fairlead-gateway",
    ),
    Fault(
        "ApiForbidden",
        commands("delete clusterrolebinding fairlead-gateway"),
        subject="ServiceAccount fairlead-system/fairlead-gateway",
    ),
    Fault(
        "NetworkPolicyDropsClients",
        policy_for_nobody,
        subject="NetworkPolicy {}/inside",
    ),
    Fault("GatewaysDiffer", gateway_differs, gateway_back, by_hand=True, subject="gateway gw2"),
    Fault("GatewayStale", gateway_gone, gateway_back, by_hand=True, subject="gateway gw2"),
]
WITHOUT_FAIRLEAD = [*EVERYWHERE, Fault("ClassUnserved", class_unserved, served, by_hand=True)]
OTHERWISE_WITHOUT_FAIRLEAD = (
    "ClassUnserved",
    "ExcludedNode",
    "FinalizerOrphaned",
    "UnfairByPlacement",
)
"""Faults whose rules see something else without Fairlead."""


def rights() -> list[Manifest]:
    """Return the ServiceAccounts and the rights of the manifests that users apply."""
    path = Path(__file__).parents[2] / "deploy" / "manifests" / "controller.yaml"
    kinds = ("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding")
    return [each for each in yaml.safe_load_all(path.read_text()) if each["kind"] in kinds]


async def delete_all(world: World) -> None:
    """Remove what the world has outside of its namespace."""
    labels = {"metadata": {"labels": {EXCLUDE_LABEL: None}}}
    await world.client.patch(lab_objects.NODES, ("", "n4"), labels)
    with suppress(NotFound):
        await world.client.delete(ADDRESS_POOLS, ("", world.namespace))
    with suppress(NotFound):
        await world.client.request("DELETE", f"/api/v1/namespaces/{world.namespace}")
