"""Five hundred random changes to a cluster; after each, packets must agree with the rules.

The whole system is real: API server, control plane, controller, two gateways, three nodes, pods, and two clients outside.
A run is repeated by its seed, which is printed: FAIRLEAD_SEED. FAIRLEAD_CHANGES makes it shorter or longer.
"""

import asyncio
import json
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.e2e.changes import NODES as NODE_NAMES
from tests.e2e.changes import Change, Wanted, pod
from tests.e2e.oracle import Cluster, Json, Source, Target, frontends, is_ours
from tests.e2e.packets import Disagreement, Probe, Prober, read_cluster, sources_of

from fairlead.kube.client import Client
from fairlead.kube.objects import NODES, PODS, SERVICES, Resource
from fairlead.lab import manifests
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

CHANGES = int(os.environ.get("FAIRLEAD_CHANGES", "500"))
SEED = int(os.environ.get("FAIRLEAD_SEED") or random.randrange(1 << 32))
DEADLINE_S = 10.0
PROBES = 10
SWEEP_EVERY = 25
RESOURCES: dict[str, Resource[Any]] = {"pods": PODS, "services": SERVICES, "nodes": NODES}


class Run:
    """The state of one run: what was done, what to send."""

    def __init__(self, site: Site, client: Client, seed: int) -> None:
        self.site = site
        self.client = client
        self.wanted = Wanted(random.Random(seed))
        self.random = random.Random(seed + 1)
        self.prober = Prober(site, client)
        self.done: list[str] = []
        self.former: list[Target] = []
        """Where Services were once; of some of them nothing is left."""

    async def step(self) -> None:
        change = self.wanted.next()
        self.done.append(change.text)
        before = await read_cluster(self.client)
        await carry_out(self.client, change)
        self.former += [target for service in before.services for target in frontends(service, before.nodes)]
        self.former = sorted(set(self.former[-60:]))
        await self.hold(self.choose(await read_cluster(self.client), change))

    async def hold(self, probes: Sequence[Probe]) -> None:
        """All of these must agree with the oracle in the end, and so must what the Services say of themselves."""
        try:
            await self.prober.agree(probes, deadline_s=DEADLINE_S)
        except Disagreement as disagreement:
            cluster = await read_cluster(self.client)
            pytest.fail(
                f"after change {len(self.done)} of seed {SEED}:\n{disagreement}\n\nthe last changes:\n"
                + "\n".join(f"  {text}" for text in self.done[-12:])
                + "\n\nthe objects:\n"
                + "\n".join(f"  {line}" for line in described(cluster)),
                pytrace=False,
            )

    def choose(self, cluster: Cluster, change: Change) -> list[Probe]:
        """A few packets, most of them to the Service that was changed."""
        sources = sources_of(self.site, cluster)
        touched = [s for s in cluster.services if s["metadata"]["name"] in change.services]
        everywhere = [target for service in cluster.services for target in frontends(service, cluster.nodes)]
        near = [target for service in touched for target in frontends(service, cluster.nodes)]
        targets = [self.random.choice(near or everywhere) for _ in range(PROBES - 4) if near or everywhere]
        targets += [self.random.choice(everywhere) for _ in range(3) if everywhere]
        targets += self.random.sample(self.former, min(1, len(self.former)))
        return [Probe(source, target) for target in targets if (source := self.pick_source(sources, target))]

    def pick_source(self, sources: Sequence[Source], target: Target) -> Source | None:
        """Clients as often as nodes and pods together: that is what it is all about."""
        reach = [source for source in sources if can_reach(source, target)]
        clients = [source for source in reach if source.kind == "client"]
        return self.random.choice(clients if clients and self.random.random() < 0.5 else reach) if reach else None

    async def sweep(self) -> None:
        """Everything from everywhere, and some of it until every pod has answered."""
        cluster = await read_cluster(self.client)
        targets = [target for service in cluster.services for target in frontends(service, cluster.nodes)]
        pairs = [(s, target) for target in targets for s in sources_of(self.site, cluster) if can_reach(s, target)]
        probes = [Probe(source, target, 1) for source, target in self.random.sample(pairs, min(len(pairs), 400))]
        probes += [Probe(source, target, 8, True) for source, target in self.random.sample(pairs, min(len(pairs), 12))]
        await self.hold(probes)
        for service in (await read_cluster(self.client)).services:
            check_status(service)


def can_reach(source: Source, target: Target) -> bool:
    """ClusterIPs are not routed outside the cluster."""
    return source.kind != "client" or not target.address.startswith(("10.96.", "2001:db8:96:"))


async def carry_out(client: Client, change: Change) -> None:
    for plural, name in change.delete:
        await client.delete(RESOURCES[plural], ("default", name))
    await manifests.apply(client, [m for m in change.apply if m["kind"] == "Pod"])
    for manifest in change.apply:
        if manifest["kind"] == "Service":
            await when_free(client, manifest, anew=bool(change.delete))
    for plural, name, patch in change.patch:
        await client.patch(RESOURCES[plural], ("" if plural == "nodes" else "default", name), patch)


async def when_free(client: Client, manifest: Json, *, anew: bool) -> None:
    """Apply it; if it is to be made anew, once its predecessor is gone: until then it would be an edit of that one."""
    key = ("default", manifest["metadata"]["name"])
    async with asyncio.timeout(DEADLINE_S):
        while anew and any(s["metadata"]["name"] == key[1] for s in (await read_cluster(client)).services):
            await asyncio.sleep(0.01)
    await manifests.apply(client, [manifest])


def check_status(service: Json) -> None:
    """Its claim and its addresses are complete, or there is nothing of either."""
    name, metadata, spec = service["metadata"]["name"], service["metadata"], service["spec"]
    shown = [entry["ip"] for entry in service.get("status", {}).get("loadBalancer", {}).get("ingress", ())]
    claimed = "service.kubernetes.io/load-balancer-cleanup" in metadata.get("finalizers", ())
    families = [f"IPv{6 if ':' in address else 4}" for address in shown]
    assert claimed == is_ours(service), f"finalizer of {name}: {service}"
    assert families == (spec["ipFamilies"] if is_ours(service) else []), f"addresses of {name}: {service}"


def described(cluster: Cluster) -> list[str]:
    """The objects in short."""
    lines = []
    for one in cluster.pods:
        meta, status = one["metadata"], one.get("status", {})
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))
        words = [meta["labels"].get("app", ""), one["spec"]["nodeName"], *(ip["ip"] for ip in status.get("podIPs", ()))]
        words += ["ready" if ready else "unready", "terminating" if meta.get("deletionTimestamp") else ""]
        lines.append(f"Pod {meta['name']}: {' '.join(words)}")
    for one in cluster.services:
        kept = {key: value for key, value in one["metadata"].items() if key in ("finalizers", "deletionTimestamp")}
        lines.append(f"Service {one['metadata']['name']}: {json.dumps(kept | one['spec'] | one['status'])}")
    return lines + [f"Node {one['metadata']['name']}: {one['metadata']['labels']}" for one in cluster.nodes]


async def test_packets_agree_with_the_rules_after_every_change(site: Site, client: Client) -> None:
    print(f"seed {SEED}")
    # On each node a pod that belongs to no Service: nodes with endpoints and without both have callers.
    callers = [pod(f"caller{number}", "none", node) for number, node in enumerate(NODE_NAMES, 1)]
    await manifests.apply(client, callers)
    run = Run(site, client, SEED)
    for number in range(1, CHANGES + 1):
        await run.step()
        if number % SWEEP_EVERY == 0 or number == CHANGES:
            await run.sweep()
    print(f"{CHANGES} changes, {run.prober.sent} packets")


async def test_a_wrong_answer_is_noticed(site: Site, client: Client) -> None:
    """The same checks, with objects that are not what the system was told: a lie in one of them has to come out."""
