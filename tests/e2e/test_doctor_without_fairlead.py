"""`fairlead doctor` in a cluster without Fairlead: a kube-apiserver, a kube-proxy on each node, and
a balancer by hand, which publishes addresses with kubectl and routes them to the nodes with pods.

Each fault is injected alone. It is named with its object and nothing else is, packets confirm it,
and after its remedy packets pass and nothing is named."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import yaml
from tests.e2e.kubectl import Kubectl, service
from tests.e2e.load import until
from tests.e2e.oracle import Answer, Observed, Source, Target
from tests.e2e.packets import call

from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, EXCLUDE_LABEL, NODES, SERVICES
from fairlead.lab import kubeproxy, process
from fairlead.lab.objects import READY_ANNOTATION
from fairlead.lab.site import Site
from fairlead.model import ServiceKey

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PROGRAM = Path(sys.executable).with_name("fairlead")
ADDRESS = "203.0.113.10"
WEB = ServiceKey("default", "web")
TARGET = Target(ADDRESS, 80, "TCP")
HOSTS = ("node1", "node2", "node3")
PODS = {"a1": "node1", "a2": "node2"}
CALLER = "caller"
DEADLINE_S = 90.0
ANSWER_S = 2.0
Manifest = dict[str, Any]


class Cluster(NamedTuple):
    site: Site
    kubectl: Kubectl
    client: Client

    async def apply(self, *objects: Manifest) -> None:
        await self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    async def pods(self, **placed: str) -> None:
        """Start pods of the Service, and wait until they are ready."""
        await self.apply(*(pod(name, on) for name, on in placed.items()))
        await self.site.await_pods()

    async def serve(self, **spec: Any) -> None:
        """Create the Service, and publish its address as the balancer."""
        await self.apply(service("web", **spec))
        await self.publish()

    async def again(self, **spec: Any) -> None:
        """Create the Service again, with other fields, unserved."""
        await self.kubectl("delete", "service", "web")
        await self.apply(service("web", **spec))

    async def publish(self) -> None:
        ingress = {"status": {"loadBalancer": {"ingress": [{"ip": ADDRESS, "ipMode": "VIP"}]}}}
        writer = "--subresource=status", "--field-manager=balancer-by-hand"
        patch = json.dumps(ingress)
        await self.kubectl("patch", "service", "web", *writer, "--type=merge", "-p", patch)

    async def route(self) -> None:
        """Route the address to the nodes with endpoints that serve, without those that are excluded
        from load balancers, as a balancer that asks the health ports of nodes."""
        excluded = {
            each.metadata.name
            for each in await self.client.list(NODES)
            if EXCLUDE_LABEL in each.metadata.labels
        }
        serving = {
            endpoint.node_name
            for each in await self.client.list(ENDPOINT_SLICES, namespace="default")
            if each.service == WEB and each.address_type == "IPv4"
            for endpoint in each.endpoints or ()
            if endpoint.serving
        }
        await self.site.route_vips([each for each in HOSTS if each in serving - excluded])

    async def answer(self, source: str = "client1") -> Observed:
        """Call the Service from a client or pod."""
        await self.route()
        caller = Source(source, "pod" if "/" in source else "client", "", ())
        return await call(self.site, caller, TARGET, timeout_s=ANSWER_S)

    async def works(self, source: str = "client1") -> bool:
        """Return whether a pod answers and, if the caller is outside, sees its address."""
        found = await self.answer(source)
        addresses = () if "/" in source else self.site.topology.host(source).addresses
        return isinstance(found, Answer) and (not addresses or found.seen in addresses)

    async def fails(self, source: str = "client1") -> bool:
        return not isinstance(await self.answer(source), Answer)

    async def findings(self) -> list[Manifest]:
        """Run the command. Return its findings."""
        options = "-A", "--grace", "1", "-o", "json"
        child = await asyncio.create_subprocess_exec(
            *(str(PROGRAM), "doctor", "--kubeconfig", str(self.site.directory.kubeconfig)),
            *options,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=process.environment(self.site.name, "doctor"),
        )
        async with asyncio.timeout(DEADLINE_S):
            output, errors = await child.communicate()
        assert errors == b""
        found: list[Manifest] = json.loads(output)["findings"]
        assert child.returncode == bool(found)
        return found

    async def finds(self, *wanted: tuple[str, str]) -> list[Manifest]:
        """Wait until the command finds exactly this."""
        found: list[Manifest] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    found = await self.findings()
                    if [(each["code"], each["subject"]) for each in found] == list(wanted):
                        return found
        raise AssertionError(f"wanted {wanted}, found {found}")

    async def execute(self, command: str) -> None:
        """Run a remedy as it is printed."""
        environment = process.environment(self.site.name, "remedy")
        child = await asyncio.create_subprocess_exec(
            *("sh", "-ec", command),
            env={**environment, "KUBECONFIG": str(self.site.directory.kubeconfig)},
        )
        async with asyncio.timeout(DEADLINE_S):
            assert await child.wait() == 0, command


def pod(name: str, on: str, app: str = "web") -> Manifest:
    ports = [{"name": "web", "containerPort": 8080}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": app}},
        "spec": {
            "nodeName": on,
            "terminationGracePeriodSeconds": 60,
            "containers": [{"name": "echo", "image": "echo", "ports": ports}],
        },
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(real_programs: None, kube_proxy: Path) -> AsyncIterator[Cluster]:
    name = f"other{os.getpid()}"
    async with (
        Site.create(name, nodes=3, gateways=0, clients=1, roles=False, apiserver="real") as site,
        site.client() as client,
    ):
        cluster = Cluster(site, Kubectl(site.directory.kubeconfig, site.name), client)
        # A lab has the kinds and accounts of Fairlead, this cluster has nothing of it.
        await cluster.kubectl("delete", "customresourcedefinitions", "--all")
        await cluster.kubectl("delete", "serviceaccounts", "-n", "fairlead-system", "--all")
        await asyncio.gather(*(kubeproxy.start(site, each) for each in HOSTS))
        await cluster.apply(pod(CALLER, "node3", CALLER))
        await cluster.pods(**PODS)
        await cluster.serve()
        yield cluster


Step = Callable[[Cluster], Awaitable[None]]


class Fault(NamedTuple):
    """A fault. `undo`: how it is removed; None: by the command that is the remedy. `after`: what
    has to be done after the remedy. `fails`: who gets no answer."""

    code: str
    make: Step
    undo: Step | None = None
    after: Step | None = None
    fails: str = "client1"
    subject: str = "Service default/web"


def commands(*lines: str) -> Step:
    """Return a step that runs commands of kubectl. Words are separated by spaces."""

    async def run(cluster: Cluster) -> None:
        for line in lines:
            await cluster.kubectl(*line.split(" "))

    return run


async def restored(cluster: Cluster) -> None:
    await cluster.again()
    await cluster.publish()


async def served(cluster: Cluster) -> None:
    await cluster.serve()


async def all_terminating(cluster: Cluster) -> None:
    """Delete the pods while each has an open connection, for which it stays."""
    for name in PODS:
        held = cluster.site.socket(CALLER_POD, socket.AF_INET, socket.SOCK_STREAM)
        HELD.append(held)
        shown = json.loads(await cluster.kubectl("get", "pod", name, "-o", "json"))
        held.settimeout(ANSWER_S)
        await asyncio.to_thread(held.connect, (shown["status"]["podIP"], 8080))
    await cluster.kubectl("delete", "pods", *PODS, "--wait=false")


async def new_pods(cluster: Cluster) -> None:
    while HELD:
        HELD.pop().close()
    await cluster.kubectl("wait", "pods", *PODS, "--for=delete", "--timeout=60s")
    await cluster.pods(**PODS)


async def endpoints_without_node(cluster: Cluster) -> None:
    shown = json.loads(await cluster.kubectl("get", "pod", "a1", "-o", "json"))
    await cluster.again(selector=None)
    await cluster.publish()
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "by-hand", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [shown["status"]["podIP"]], "conditions": {"ready": True}}],
        "ports": [{"name": "web", "port": 8080, "protocol": "TCP"}],
    }
    await cluster.apply(slice_)


async def endpoints_with_node(cluster: Cluster) -> None:
    await cluster.kubectl("delete", "endpointslice", "by-hand")
    await restored(cluster)


async def class_unserved(cluster: Cluster) -> None:
    await cluster.again(loadBalancerClass="example.com/none")


async def clients_only(cluster: Cluster) -> None:
    client = cluster.site.topology.host("client1").addresses[0]
    ranges = json.dumps({"spec": {"loadBalancerSourceRanges": [f"{client}/32"]}})
    await cluster.kubectl("patch", "service", "web", "--type=merge", "-p", ranges)


async def unevenly_placed(cluster: Cluster) -> None:
    await cluster.pods(a3="node1", a4="node1")


async def policy_for_the_cluster(cluster: Cluster) -> None:
    await cluster.apply(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "inside"},
            "spec": {
                "podSelector": {"matchLabels": {"app": "web"}},
                "ingress": [{"from": [{"podSelector": {}}]}],
            },
        }
    )


async def two_writers(cluster: Cluster) -> None:
    async def write() -> None:
        number = 0
        while True:
            number += 1
            ingress = [{"ip": f"203.0.113.{10 + number % 2}", "ipMode": "VIP"}]
            body = {"status": {"loadBalancer": {"ingress": ingress}}}
            manager = f"balancer-{number % 2}"
            await cluster.client.patch(
                SERVICES, ("default", "web"), body, subresource="status", field_manager=manager
            )
            await asyncio.sleep(0.3)

    WRITERS.append(asyncio.create_task(write()))


async def one_writer(cluster: Cluster) -> None:
    for each in WRITERS:
        each.cancel()
    await asyncio.gather(*WRITERS, return_exceptions=True)
    WRITERS.clear()
    await cluster.publish()


HELD: list[socket.socket] = []
WRITERS: list[asyncio.Task[None]] = []
CALLER_POD = f"default/{CALLER}"
NOBODY = ""
FAULTS = [
    Fault(
        "SelectorMatchesNothing",
        commands('patch service web --type=merge -p {"spec":{"selector":{"app":"wep"}}}'),
    ),
    Fault(
        "TargetPortNameUnknown",
        commands(
            "patch service web --type=json -p "
            '[{"op":"replace","path":"/spec/ports/0/targetPort","value":"http"}]'
        ),
    ),
    Fault(
        "PodsNotReady",
        commands(f"annotate pods a1 a2 {READY_ANNOTATION}=false"),
        commands(f"annotate pods a1 a2 {READY_ANNOTATION}-"),
    ),
    Fault("AllTerminating", all_terminating, new_pods, fails=NOBODY),
    Fault("ExcludedNode", commands(f"label nodes node1 node2 {EXCLUDE_LABEL}=")),
    Fault("SourceRangeForgetsPods", clients_only, fails=CALLER_POD),
    Fault("EndpointsWithoutNode", endpoints_without_node, endpoints_with_node),
    Fault("UnfairByPlacement", unevenly_placed, commands("delete pods a3 a4"), fails=NOBODY),
    Fault("ClassUnserved", class_unserved, restored),
    Fault("TwoControllers", two_writers, one_writer, fails=NOBODY),
    Fault(
        "FinalizerOrphaned",
        commands(
            'patch service web --type=merge -p {"metadata":{"finalizers":["example.com/lb"]}}',
            "delete service web --wait=false",
        ),
        after=served,
        fails=NOBODY,
    ),
    # Nothing in this cluster enforces the policy.
    Fault(
        "NetworkPolicyDropsClients",
        policy_for_the_cluster,
        after=commands("delete networkpolicy inside"),
        fails=NOBODY,
        subject="NetworkPolicy default/inside",
    ),
]


async def is_well(cluster: Cluster) -> None:
    """Check that clients and pods are served, and that nothing is named."""
    for source in ("client1", CALLER_POD):
        await until(partial(cluster.works, source), f"an answer to {source}")
    await cluster.finds()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: each.code)
async def test_a_fault_is_named_until_its_remedy_is_carried_out(
    fault: Fault, cluster: Cluster
) -> None:
    await is_well(cluster)
    await fault.make(cluster)
    try:
        (found,) = await cluster.finds((fault.code, fault.subject))
        if fault.fails:
            await until(partial(cluster.fails, fault.fails), f"no answer to {fault.fails}")
    finally:
        # The next faults need a cluster that works.
        if fault.undo is not None:
            await fault.undo(cluster)
    if fault.undo is None:
        await cluster.execute(found["remedy"])
    if fault.after is not None:
        await fault.after(cluster)
    await is_well(cluster)


async def test_a_cluster_that_works_has_no_finding_whatever_it_does(cluster: Cluster) -> None:
    await is_well(cluster)
    await cluster.pods(b1="node2", b2="node1")  # a rollout
    await cluster.kubectl("delete", "pods", *PODS)
    await is_well(cluster)
    await cluster.kubectl("cordon", "node1")  # a drain
    await cluster.pods(a1="node3")
    await cluster.kubectl("delete", "pod", "b2")
    await is_well(cluster)
    await cluster.kubectl("uncordon", "node1")
    await is_well(cluster)
