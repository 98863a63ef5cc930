"""Hundreds of random changes to a cluster, up to three in quick succession. After each group of
changes, packets must agree with the rules.

The whole system is real: API server, control plane, controller, two gateways, three nodes, pods,
and two clients outside. A run with a real API server, whose admission and garbage collection are
slower, makes a tenth of the changes. FAIRLEAD_SEED repeats a run by its seed, which is printed.
FAIRLEAD_CHANGES sets its length."""

import asyncio
import copy
import json
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import pytest
from tests.e2e.changes import NODES as NODE_NAMES
from tests.e2e.changes import Change, DesiredState, pod
from tests.e2e.oracle import (
    EXCLUDE_LABEL,
    Cluster,
    Json,
    Source,
    Target,
    balancer_addresses,
    frontends,
    health_answer,
    internal_addresses,
    is_ours,
)
from tests.e2e.packets import Disagreement, Probe, Prober, get_health, read_cluster, sources_of

from fairlead.kube.client import Client
from fairlead.kube.objects import NODES, PODS, SERVICES, Resource
from fairlead.lab import manifests
from fairlead.lab.site import Site

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.random,
    pytest.mark.parametrize(
        "apiserver",
        ["embedded", pytest.param("real", marks=pytest.mark.soak)],
        indirect=True,
        scope="module",
    ),
]

CHANGES = int(os.environ.get("FAIRLEAD_CHANGES") or 40)
REAL_CHANGES = CHANGES // 10
SEED = int(os.environ.get("FAIRLEAD_SEED") or 77)
DEADLINE_S = 60.0
AT_A_TIME = (1, 1, 2, 2, 3)
"""The maximum number of changes before the system gets time to converge."""
PROBES = 6
"""The number of probes of each changed object; three more go to other objects."""
KEPT = 6
SWEEP_EVERY = 50
RESOURCES: dict[str, Resource[Any]] = {"pods": PODS, "services": SERVICES, "nodes": NODES}


CALLERS = [pod(f"caller{number}", "none", node) for number, node in enumerate(NODE_NAMES, 1)]


class Run:
    """The state of one run: the changes so far, and the probes to send."""

    def __init__(self, site: Site, client: Client, seed: int) -> None:
        self.site = site
        self.client = client
        self.desired = DesiredState(random.Random(seed))
        self.random = random.Random(seed + 1)
        self.prober = Prober(site, lambda: read_cluster(client))
        self.kept: list[Probe] = []
        """Flows of datagrams that keep their source port across all changes."""
        self.done: list[str] = []
        self.former: list[Target] = []
        """Former targets of Services, of which some are deleted."""

    async def step(self, most: int) -> int:
        """Make up to `most` changes, and check the packets after them. Return the number of
        changes."""
        before = await read_cluster(self.client)
        changes = [self.desired.next() for _ in range(min(most, self.random.choice(AT_A_TIME)))]
        for change in changes:
            self.done.append(change.text)
            await apply_change(self.client, change)
        self.former += [
            target for service in before.services for target in frontends(service, before.nodes)
        ]
        self.former = sorted(set(self.former[-60:]))
        after = await read_cluster(self.client)
        self.replace_flow(after)
        await self.check([*self.choose(after, changes), *self.kept])
        return len(changes)

    def replace_flow(self, cluster: Cluster) -> None:
        """Occasionally replace the oldest flow with a new one."""
        targets = [
            t
            for service in cluster.services
            for t in frontends(service, cluster.nodes)
            if t.protocol == "UDP"
        ]
        if targets and self.random.random() < 0.2:
            target = self.random.choice(targets)
            sources = [
                s
                for s in sources_of(self.site, cluster)
                if s.kind != "pod" or s.name.startswith("default/caller")
            ]
            if source := self.pick_source(sources, target):
                self.kept = [
                    *self.kept,
                    Probe(source, target, 1, source_port=20000 + len(self.done)),
                ][-KEPT:]

    async def check(self, probes: Sequence[Probe]) -> None:
        """Check that all probes agree with the oracle in the end, and also the Services' status."""
        try:
            await self.prober.agree(probes, deadline_s=DEADLINE_S)
        except Disagreement as disagreement:
            await self.fail(str(disagreement))

    def choose(self, cluster: Cluster, changes: Sequence[Change]) -> list[Probe]:
        """Choose some probes, most of them of the changed Services."""
        sources = sources_of(self.site, cluster)
        everywhere = [
            target for service in cluster.services for target in frontends(service, cluster.nodes)
        ]
        targets: list[Target] = []
        for change in changes:
            touched = [s for s in cluster.services if s["metadata"]["name"] in change.services]
            near = [target for service in touched for target in frontends(service, cluster.nodes)]
            targets += [
                self.random.choice(near or everywhere) for _ in range(PROBES) if near or everywhere
            ]
        targets += [self.random.choice(everywhere) for _ in range(3) if everywhere]
        targets += self.random.sample(self.former, min(1, len(self.former)))
        return [
            Probe(source, target)
            for target in targets
            if (source := self.pick_source(sources, target))
        ]

    def pick_source(self, sources: Sequence[Source], target: Target) -> Source | None:
        """Choose a client as often as nodes and pods together, because clients matter most."""
        reach = [source for source in sources if can_reach(source, target)]
        clients = [source for source in reach if source.kind == "client"]
        return (
            self.random.choice(clients if clients and self.random.random() < 0.5 else reach)
            if reach
            else None
        )

    async def sweep(self) -> None:
        """Probe every target from every source, and some of them until every pod has answered."""
        cluster = await read_cluster(self.client)
        targets = [
            target for service in cluster.services for target in frontends(service, cluster.nodes)
        ]
        pairs = [
            (s, target)
            for target in targets
            for s in sources_of(self.site, cluster)
            if can_reach(s, target)
        ]
        probes = [
            Probe(source, target, 1)
            for source, target in self.random.sample(pairs, min(len(pairs), 400))
        ]
        probes += [
            Probe(source, target, 8, True)
            for source, target in self.random.sample(pairs, min(len(pairs), 12))
        ]
        await self.check(probes)
        await self.check_health_ports()
        for service in (await read_cluster(self.client)).services:
            check_status(service)

    async def check_health_ports(self) -> None:
        """Check the answer of each node to load balancers that probe a Service with policy
        Local."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + DEADLINE_S
        while wrong := await self.wrong_health_ports():
            if loop.time() > end_s:
                await self.fail("\n".join(wrong))
            await asyncio.sleep(0.05)

    async def wrong_health_ports(self) -> list[str]:
        cluster = await read_cluster(self.client)
        wrong = []
        for service in cluster.services:
            for node in cluster.nodes:
                desired = health_answer(cluster, service, node["metadata"]["name"])
                if desired is None:
                    continue
                address, port = internal_addresses(node)[0], service["spec"]["healthCheckNodePort"]
                if (found := await get_health(self.site, "client1", address, port)) != desired:
                    wrong.append(
                        f"health of {service['metadata']['name']} at {address}:{port}: {found}, "
                        f"expected {desired}"
                    )
        return wrong

    async def fail(self, why: str) -> NoReturn:
        cluster = await read_cluster(self.client)
        changes = "\n".join(f"  {text}" for text in self.done[-12:])
        objects = "\n".join(f"  {line}" for line in described(cluster))
        pytest.fail(
            f"after change {len(self.done)} of seed {SEED}:\n{why}\n\nthe last "
            f"changes:\n{changes}\n\nthe objects:\n{objects}",
            pytrace=False,
        )


def can_reach(source: Source, target: Target) -> bool:
    """Return whether packets of the source are routed to the target. ClusterIPs are not routed
    outside the cluster."""
    return source.kind != "client" or not target.address.startswith(("10.96.", "2001:db8:96:"))


async def apply_change(client: Client, change: Change) -> None:
    for plural, name in change.delete:
        await client.delete(RESOURCES[plural], ("default", name))
    await manifests.apply(client, [m for m in change.apply if m["kind"] == "Pod"])
    for manifest in change.apply:
        if manifest["kind"] == "Service":
            await when_free(client, manifest, recreated=bool(change.delete))
    for plural, name, patch in change.patch:
        await client.patch(RESOURCES[plural], ("" if plural == "nodes" else "default", name), patch)


async def when_free(client: Client, manifest: Json, *, recreated: bool) -> None:
    """Apply the object. If it is to be recreated, first wait until the former object is gone: until
    then, the request would edit the former object."""
    key = ("default", manifest["metadata"]["name"])
    async with asyncio.timeout(DEADLINE_S):
        while recreated and any(
            s["metadata"]["name"] == key[1] for s in (await read_cluster(client)).services
        ):
            await asyncio.sleep(0.01)
    await manifests.apply(client, [manifest])


def check_status(service: Json) -> None:
    """Check that the Service has both the finalizer and addresses, or neither."""
    name, metadata, spec = service["metadata"]["name"], service["metadata"], service["spec"]
    shown = [
        entry["ip"]
        for entry in service.get("status", {}).get("loadBalancer", {}).get("ingress", ())
    ]
    claimed = "service.kubernetes.io/load-balancer-cleanup" in metadata.get("finalizers", ())
    families = [f"IPv{6 if ':' in address else 4}" for address in shown]
    assert claimed == is_ours(service), f"finalizer of {name}: {service}"
    assert families == (spec["ipFamilies"] if is_ours(service) else []), (
        f"addresses of {name}: {service}"
    )


def described(cluster: Cluster) -> list[str]:
    """Return a short description of the objects."""
    lines = []
    for one in cluster.pods:
        meta, status = one["metadata"], one.get("status", {})
        ready = any(
            c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ())
        )
        words = [
            meta["labels"].get("app", ""),
            one["spec"]["nodeName"],
            *(ip["ip"] for ip in status.get("podIPs", ())),
        ]
        words += [
            "ready" if ready else "unready",
            "terminating" if meta.get("deletionTimestamp") else "",
        ]
        lines.append(f"Pod {meta['name']}: {' '.join(words)}")
    for one in cluster.services:
        kept = {
            key: value
            for key, value in one["metadata"].items()
            if key in ("finalizers", "deletionTimestamp")
        }
        lines.append(
            f"Service {one['metadata']['name']}: {json.dumps(kept | one['spec'] | one['status'])}"
        )
    return lines + [
        f"Node {one['metadata']['name']}: {one['metadata']['labels']}" for one in cluster.nodes
    ]


async def test_packets_agree_with_the_rules_after_every_change(site: Site, client: Client) -> None:
    print(f"seed {SEED}")
    # Each node has a pod that belongs to no Service, so that there are clients on nodes with
    # endpoints and on nodes without.
    await manifests.apply(client, CALLERS)
    run = Run(site, client, SEED)
    changes = CHANGES - REAL_CHANGES if site.size.apiserver == "embedded" else REAL_CHANGES
    made = swept = 0
    while made < changes:
        made += await run.step(changes - made)
        if made - swept >= SWEEP_EVERY or made == changes:
            await run.sweep()
            swept = made
    print(f"{changes} changes, {run.prober.sent} packets")


class Lie(NamedTuple):
    """A false statement about one object of the API, which the oracle receives. Packets must refute
    it."""

    statement: str
    kind: str
    name: str
    tell: Callable[[dict[str, Any]], None]

    def applied_to(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the object changed as in the statement."""
        objects = copy.deepcopy(getattr(cluster, self.kind))
        self.tell(next(one for one in objects if one["metadata"]["name"] == self.name))
        return cluster._replace(**{self.kind: objects})


def _unready(one: dict[str, Any]) -> None:
    one["status"]["conditions"] = []


def _elsewhere(one: dict[str, Any]) -> None:
    one["spec"]["nodeName"] = "node2"


def _cluster_policy(one: dict[str, Any]) -> None:
    one["spec"]["externalTrafficPolicy"] = "Cluster"


def _other_port(one: dict[str, Any]) -> None:
    one["spec"]["ports"][0]["port"] = 81


def _in_ranges(one: dict[str, Any]) -> None:
    one["spec"]["loadBalancerSourceRanges"] = ["192.0.2.0/24"]


LIES = (
    Lie("pod a1 is not ready", "pods", "a1", _unready),
    Lie("pod a1 is on node2", "pods", "a1", _elsewhere),
    Lie("Service a has policy Cluster", "services", "a", _cluster_policy),
    Lie("Service a has port 81", "services", "a", _other_port),
    Lie("Service a has source ranges that contain no client", "services", "a", _in_ranges),
)
PACKETS = 12
DISAGREES_S = 0.5
"""The time in which the checks may still agree with a lie."""


async def check_detected(
    prober: Prober, probes: Sequence[Probe], wrong: str, complaint: str = ""
) -> None:
    """Check that the probes disagree with the oracle, with this complaint. Otherwise fail with the
    results of the packets."""
    try:
        await prober.agree(probes, deadline_s=DISAGREES_S)
    except Disagreement as disagreement:
        message = str(disagreement)
    else:
        pytest.fail(
            f"the checks did not detect that {wrong}\n{prober.last_results()}", pytrace=False
        )
    assert complaint in message, f"unexpected complaint about: {wrong}"


def refuting(probes: Sequence[Probe], truth: Cluster, lie: Cluster) -> list[Probe]:
    """Return the probes for which every answer that is correct under the truth is wrong under the
    lie, whichever pod answers.

    One such probe refutes the lie with certainty. Any other probe may agree with it by chance: if
    one of two pods may answer under the lie, all packets go to that pod once in 2**PACKETS times.
    """
    pairs = [(p, p.expected(truth).answers, p.expected(lie).answers) for p in probes]
    return [probe for probe, right, wrong in pairs if right and not right & wrong]


async def probes_of_a(site: Site, client: Client) -> list[Probe]:
    """Return probes of Service a from outside, from a node and from a pod, once both of its pods
    are ready: before that, every client is refused, which is no evidence against any lie."""
    probes: list[Probe] = []
    named: set[str] = set()
    try:
        async with asyncio.timeout(DEADLINE_S):
            while len(probes) != 6 or named != {"default/a1", "default/a2"}:
                await asyncio.sleep(0.05)
                cluster = await read_cluster(client)
                targets = [t for one in cluster.services for t in targets_of_client(one, cluster)]
                callers = ("client1", "node2", "default/caller1")
                sources = [one for one in sources_of(site, cluster) if one.name in callers]
                probes = [Probe(source, t, PACKETS, True) for source in sources for t in targets]
                expected = [probe.expected(cluster) for probe in probes]
                named = {answer.pod for each in expected for answer in each.answers}
    except TimeoutError:
        objects = "\n".join(described(await read_cluster(client)))
        pytest.fail(f"Service a and its pods were not ready; the objects:\n{objects}")
    return probes


async def test_wrong_objects_and_a_broken_data_plane_are_detected(
    site: Site, client: Client
) -> None:
    """The checks of this file fail when the oracle receives other objects than the system, and when
    the system is broken."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "a"},
        "spec": {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "selector": {"app": "a"},
            "ports": [{"port": 80, "targetPort": 8080}],
        },
    }
    # Earlier changes may have excluded nodes from external load balancers.
    for node in NODE_NAMES:
        await client.patch(NODES, ("", node), {"metadata": {"labels": {EXCLUDE_LABEL: None}}})
    pods = [*CALLERS, pod("a1", "a", "node1"), pod("a2", "a", "node3")]
    await manifests.apply(client, [*pods, service])
    probes = await probes_of_a(site, client)
    await Prober(site, lambda: read_cluster(client)).agree(probes, deadline_s=DEADLINE_S)
    probes = [probe._replace(all_pods=False) for probe in probes]
    for lie in LIES:

        async def read_lie(lie: Lie = lie) -> Cluster:
            return lie.applied_to(await read_cluster(client))

        truth = await read_cluster(client)
        assert refuting(probes, truth, lie.applied_to(truth)), (
            f"no probe can refute: {lie.statement}"
        )
        # If a lie forbids answers, a machine that stands still seems to confirm it, because nothing
        # is answered then. In truth pods answer all of these packets, so a long timeout for silence
        # costs no time.
        prober = Prober(site, read_lie, silence_s=DEADLINE_S)
        await check_detected(prober, probes, f"the oracle received: {lie.statement}")
    # Finally a node loses its rules, and its role is killed, so that it cannot restore them.
    await site.kill_role("node1")
    await site.exec("node1", ["nft", "delete", "table", "inet", "fairlead"])
    prober = Prober(site, lambda: read_cluster(client))
    await check_detected(prober, probes, "node1 has lost its rules", "instead of an answer")


def targets_of_client(service: Json, cluster: Cluster) -> list[Target]:
    """Return the targets of a client for Service a: its load-balancer address, and the NodePort of
    the first node."""
    if service["metadata"]["name"] != "a":
        return []
    node = internal_addresses(cluster.nodes[0])[0]
    desired = (*balancer_addresses(service), node)
    return [target for target in frontends(service, cluster.nodes) if target.address in desired]
