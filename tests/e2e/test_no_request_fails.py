"""No request fails under a steady load of new and long-lived connections, whatever happens to
Fairlead or to the pods.

Each test puts one Service with policy Local, with five pods placed 3/1/1/0 on four nodes, through
events of one type, and counts: `failed`, new connections that lost a packet and had no answer
within a second, or had none within three seconds; `broken`, open connections that ended although
the server did not end them. Packets, processes and SIGKILLs are real. Random moments follow from
the seed, which a failure prints; FAIRLEAD_SEED sets it."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.load import GATEWAY, NAME, Load, Web, drops, forwarding, output, rules, until

from fairlead.kube.objects import SERVICES
from fairlead.lab import process
from fairlead.lab.pod import pod_label
from fairlead.lab.rundir import PINS
from fairlead.lab.server import SERVER_LABEL
from fairlead.lab.site import ROLES, Site
from fairlead.probe.steady import Period

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

SEED = int(os.environ.get("FAIRLEAD_SEED") or 77)
PLACEMENT = ("node1", "node1", "node1", "node2", "node3")
CONTROLLER = "control"
NODES = ("node1", "node2", "node3", "node4")
FOREIGN_FILTER = ("dev", "eth0", "ingress", "pref", "7")
EVERY_WATCH: dict[str, Any] = {"method": "GET", "path": "[?&]watch=true", "count": 22}
"""A fault that occurs once for each watch: three watches of each role, four of the lab's control
plane."""

BACK_WITHIN_MS = 1000
"""The maximum outage of a client after the death of a node."""


def seeded_random(test: str) -> random.Random:
    """Return the random source of one test. Its seed is printed, so that a failure shows how to
    repeat the test."""
    print(f"FAIRLEAD_SEED={SEED}")
    return random.Random(f"{SEED} {test}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with Site.create(f"calm{os.getpid()}", nodes=4, gateways=1, clients=1) as site:
        await Web(site).create()
        yield site


@pytest_asyncio.fixture(loop_scope="module")
async def web(site: Site) -> Web:
    """Return the Service in a known state, whatever state the previous test left."""
    process.one(site.name, SERVER_LABEL).send(signal.SIGCONT)
    web = Web(site)
    await until(web.api_server_answers, "answers of the API server")
    async with site.client() as client:
        await client.request("DELETE", "/_faults")
    await site.route_vips([GATEWAY])
    for host in site.topology.hosts:
        if site.directory.is_off(host.name):
            await site.revive_node(host.name)
        elif host.kind in ROLES and not runs(site, host.name):
            await site.start_role(host.name)
    await web.create()
    for name in await web.pods():
        await web.set_ready(name, ready=True)
    await web.place(PLACEMENT)
    return web


def runs(site: Site, host: str) -> bool:
    label = f"{host}/{ROLES[site.topology.host(host).kind]}"
    return any(role.label == label for role in process.find(site.name, label))


def check_unharmed(period: Period) -> None:
    """Check that no connection failed, and that there were connections."""
    assert period.requests > 50
    assert (period.failed, period.broken) == (0, []), f"seed {SEED}: {period}"


def check_nearly_unharmed(period: Period, late: int) -> None:
    """Check that no connection broke, and that at most `late` connections had to retry. While the
    API server fails, a gateway may not learn that the only pod of a node is deleted, until its
    probes show it. A client that connects in between is answered a second later."""
    assert period.requests > 50
    assert period.broken == [], f"seed {SEED}: {period}"
    assert period.failed <= late, f"seed {SEED}: {period}"
    assert period.failures.keys() <= {"TimeoutError"}, f"seed {SEED}: {period}"
    assert period.longest_gap_ms < BACK_WITHIN_MS + 1_000, f"seed {SEED}: {period}"


async def test_the_load_counts_lost_connections(web: Web) -> None:
    """The load must be able to fail: for four seconds the router has no route to the VIP."""

    async def cut() -> None:
        await web.site.route_vips([])
        await asyncio.sleep(4)
        await web.site.route_vips([GATEWAY])

    async with Load(web.site, web.address) as load:
        period = await load.counts_during(cut())
    assert period.failed > 0
    assert len(period.broken) > 0
    assert period.longest_gap_ms > 3000


async def test_no_request_fails_when_roles_are_killed_at_any_moment(web: Web) -> None:
    """Each role is killed repeatedly, several roles at the same time. Nothing in the cluster
    changes, so the rules of the nodes must not change either."""
    chance = seeded_random("roles")
    before = {node: await rules(web.site, node) for node in NODES}

    async def kill_repeatedly(host: str, own: random.Random) -> None:
        for _ in range(3):
            await asyncio.sleep(own.uniform(0.0, 3.0))
            await web.site.kill_role(host)
            await asyncio.sleep(own.uniform(0.0, 2.0))
            await web.site.start_role(host)

    async def all_at_once() -> None:
        async with asyncio.TaskGroup() as group:
            for host in (CONTROLLER, GATEWAY, *NODES):
                group.create_task(kill_repeatedly(host, random.Random(chance.random())))
        await web.await_weights(PLACEMENT)

    async with Load(web.site, web.address) as load:
        check_unharmed(await load.counts_during(all_at_once()))
    assert {node: await rules(web.site, node) for node in NODES} == before


async def test_no_request_fails_while_roles_are_stopped(web: Web) -> None:
    """The roles are stopped (SIGSTOP) for some seconds, like on a machine without free memory. A
    node whose health port does not answer gets no new connections and keeps the open ones. A
    gateway that was stopped does not attribute its own silence to the nodes."""
    chance = seeded_random("hang roles")

    async def stop(host: str, after_s: float, for_s: float) -> None:
        role = process.one(web.site.name, f"{host}/{ROLES[web.site.topology.host(host).kind]}")
        await asyncio.sleep(after_s)
        role.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            role.send(signal.SIGCONT)

    async def hang() -> None:
        async with asyncio.TaskGroup() as group:
            for host in (CONTROLLER, GATEWAY, *NODES):
                group.create_task(stop(host, chance.uniform(0.0, 3.0), chance.uniform(0.2, 3.0)))
        await web.await_weights(PLACEMENT)

    async with Load(web.site, web.address) as load:
        check_unharmed(await load.counts_during(hang()))


async def test_a_restarted_gateway_leaves_the_forwarding_state_unchanged(web: Web) -> None:
    """The kernel forwards without the process as before, and the next process changes nothing: it
    removes no member only because it has not probed the node yet."""
    chance = seeded_random("gateway")
    left = await forwarding(web.site)
    dropped = await drops(web.site)

    async def die_and_return() -> None:
        for _ in range(4):
            await web.site.kill_role(GATEWAY)
            await asyncio.sleep(chance.uniform(0.0, 1.5))
            assert await forwarding(web.site) == left
            await web.site.start_role(GATEWAY)
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            assert await forwarding(web.site) == left

    async with Load(web.site, web.address) as load:
        check_unharmed(await load.counts_during(die_and_return()))
        assert await drops(web.site) == dropped
    assert await forwarding(web.site) == left


async def test_no_request_fails_while_the_api_server_hangs(web: Web) -> None:
    """The API server is stopped (SIGSTOP) for some seconds. Meanwhile roles are killed and
    restarted, and their requests are answered when it continues."""
    chance = seeded_random("hang")
    server = process.one(web.site.name, SERVER_LABEL)
    target = [*PLACEMENT, "node4"]

    async def restart(host: str) -> None:
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        await web.site.kill_role(host)
        await asyncio.sleep(chance.uniform(0.0, 0.5))
        await web.site.start_role(host)

    async def go_on() -> None:
        await asyncio.sleep(4)
        server.send(signal.SIGCONT)

    async def hang() -> None:
        server.send(signal.SIGSTOP)
        async with asyncio.TaskGroup() as group:
            group.create_task(go_on())
            group.create_task(web.start(["node4"]))
            for host in (GATEWAY, CONTROLLER, "node2"):
                group.create_task(restart(host))
        await web.await_weights(target)

    async with Load(web.site, web.address) as load:
        check_unharmed(await load.counts_during(hang()))


async def test_no_request_fails_while_the_api_server_fails(web: Web) -> None:
    """Watches are closed, expire and are refused, lists fail, and connections are refused, while
    pods move between nodes."""
    chance = seeded_random("faults")
    faults: list[list[dict[str, Any]]] = [
        [{"action": "cut"} | EVERY_WATCH],
        [{"action": "expire"} | EVERY_WATCH],
        [{"action": "compact"}, {"action": "end"} | EVERY_WATCH],
        [{"action": "reset"} | EVERY_WATCH, {"action": "status", "code": 500} | EVERY_WATCH],
        [{"action": "refuse", "refuse_s": 1.5}, {"action": "reset"} | EVERY_WATCH],
    ]
    chance.shuffle(faults)

    async def fail() -> None:
        async with web.site.client() as client:
            for number, kinds in enumerate(faults):
                await client.request("POST", "/_faults", body=list(kinds))
                if any(kind["action"] == "refuse" for kind in kinds):
                    await web.site.kill_role("node3")
                    await web.site.start_role("node3")
                    await until(web.api_server_answers, "answers of the API server")
                await web.place([*PLACEMENT, "node4"] if number % 2 == 0 else PLACEMENT)

    async with Load(web.site, web.address, patience_s=BACK_WITHIN_MS / 1000) as load:
        check_nearly_unharmed(await load.counts_during(fail()), late=len(faults))


async def test_no_request_fails_while_pods_are_rolled_out_moved_and_scaled(web: Web) -> None:
    """Pods are replaced like by Kubernetes: first a new pod is created, then the old one ends when
    its clients have gone."""

    async def roll_out() -> None:
        for name, node in (await web.pods()).items():
            await web.start([node])
            await web.end([name])
        await web.await_weights(PLACEMENT)

    async def move() -> None:
        await web.place(["node1", "node1", "node1", "node4", "node3"])

    async def scale() -> None:
        await web.place([*PLACEMENT, *NODES, "node2"])
        await web.place(["node1", "node3", "node4"])

    async with Load(web.site, web.address) as load:
        for event in (roll_out, move, scale):
            check_unharmed(await load.counts_during(event(), watch_s=2))


async def test_no_request_fails_while_a_service_is_edited(web: Web) -> None:
    """Each field is edited and changed back, in place. Another policy has another health port, for
    which a gateway has no result at first. The gateway must not send traffic to a pod that is
    terminating and serving according to the API but no longer answers."""
    port = {"port": 80, "targetPort": "http"}
    edits: list[dict[str, Any]] = [
        {"externalTrafficPolicy": "Cluster"},
        {"externalTrafficPolicy": "Local"},
        {"sessionAffinity": "ClientIP"},
        {"sessionAffinity": "None"},
        {"loadBalancerSourceRanges": ["198.51.100.0/24"]},
        {"loadBalancerSourceRanges": None},
        {"ports": [port | {"targetPort": 8080}]},
        {"ports": [port]},
    ]

    async def edit() -> None:
        async with web.site.client() as client:
            for spec in edits:
                await client.patch(SERVICES, ("default", NAME), {"spec": spec})
                await asyncio.sleep(0.5)
        await web.await_weights(PLACEMENT)

    await web.place([*PLACEMENT, "node4"])
    [name] = [name for name, node in (await web.pods()).items() if node == "node4"]
    silent = process.one(web.site.name, pod_label("node4", "default", name))
    silent.send(signal.SIGSTOP)
    try:
        await web.place(PLACEMENT)
        async with Load(web.site, web.address) as load:
            check_unharmed(await load.counts_during(edit()))
    finally:
        silent.send(signal.SIGCONT)


async def test_only_connections_of_a_dead_node_are_lost(web: Web) -> None:
    """Only the connections of the node are lost; clients are served again within a second."""

    async def die() -> None:
        await web.site.kill_node("node1")

    async def come_back() -> None:
        await web.site.revive_node("node1")
        await web.await_weights(PLACEMENT)

    async with Load(web.site, web.address, timeout_s=0.2, patience_s=0.2) as load:
        dead = await load.counts_during(die(), watch_s=5)
    assert {each.node for each in dead.broken} == {"node1"}, dead
    assert dead.longest_gap_ms <= BACK_WITHIN_MS, dead
    async with Load(web.site, web.address) as load:
        check_unharmed(await load.counts_during(come_back(), watch_s=2))


async def test_roles_exit_on_sigterm_and_leave_the_data_plane(web: Web) -> None:
    """After SIGTERM the roles exit with exit code 0, and packets still pass."""
    hosts = (CONTROLLER, GATEWAY, *NODES)

    async def end_and_start() -> None:
        for host in hosts:
            await web.site.stop_role(host)
            role = await web.site.start_role(host)
            role.send(signal.SIGTERM)
            async with asyncio.timeout(60):
                await role.wait()
            assert role.exit_code == 0, host
        assert not any(runs(web.site, host) for host in hosts)
        await asyncio.sleep(1)
        for host in hosts:
            await web.site.start_role(host)
        await web.await_weights(PLACEMENT)

    async with Load(web.site, web.address) as load:
        check_unharmed(await load.counts_during(end_and_start()))


async def test_cleanup_removes_only_objects_of_fairlead(web: Web) -> None:
    site = web.site
    foreign = (
        "table inet foreign { chain input { type filter hook input priority 0; tcp dport 7 "
        "drop; }; }"
    )
    await output(site, "node1", "nft", foreign)
    await output(
        site,
        GATEWAY,
        "tc",
        "filter",
        "add",
        *FOREIGN_FILTER,
        "bpf",
        "bytecode",
        "1,6 0 0 0",
        "flowid",
        "1:1",
    )
    other_pins = PINS / f"{site.name}-other"
    other_pins.mkdir()
    try:
        before = await rules(site, "node1")
        for host in (GATEWAY, "node1"):
            await site.stop_role(host)
        program = str(Path(sys.executable).with_name("fairlead"))
        await _run_once(site, "node1", program, "--remove-at-stop")
        assert await rules(site, "node1") == [each for each in before if not ours(each)]
        await _run_once(site, "node1", program)
        assert any(map(ours, await rules(site, "node1")))
        await output(site, "node1", program, "node", "--cleanup")
        await output(
            site,
            GATEWAY,
            program,
            "gateway",
            "--cleanup",
            "--pin-path",
            str(site.directory.pins(GATEWAY)),
        )
        assert await rules(site, "node1") == [each for each in before if not ours(each)]
        filters = await output(site, GATEWAY, "tc", "filter", "show", "dev", "eth0", "ingress")
        assert {line.partition("chain")[0] for line in filters.splitlines()} == {
            "filter protocol all pref 7 bpf "
        }
        assert not site.directory.pins(GATEWAY).exists()
        assert other_pins.exists()
    finally:
        other_pins.rmdir()
    await output(site, "node1", "nft", "delete table inet foreign")
    await output(site, GATEWAY, "tc", "filter", "del", *FOREIGN_FILTER)
    for host in (GATEWAY, "node1"):
        await site.start_role(host)
    await web.await_weights(PLACEMENT)


async def _run_once(site: Site, host: str, program: str, *options: str) -> None:
    """Start the role `node`, wait until its rules are in force, and stop it."""
    settings = (
        "--config",
        str(site.directory.config),
        "--kubeconfig",
        str(site.directory.kubeconfig_of("node")),
    )
    role = site.spawn(
        host, [program, "node", *settings, "--node-name", host, *options], label=f"{host}/once"
    )

    async def is_ready() -> bool:
        code, _, _ = await site.exec(host, ["curl", "-sf", "http://127.0.0.1:9442/readyz"])
        return code == 0

    await until(is_ready, f"readiness of the role with {options}")
    assert any(map(ours, await rules(site, host)))
    role.send(signal.SIGTERM)
    async with asyncio.timeout(60):
        await role.wait()
    assert role.exit_code == 0


def ours(listed: dict[str, dict[str, str]]) -> bool:
    """Return whether an object in nft's listing belongs to the table of the role `node`."""
    ((kind, described),) = listed.items()
    return (described["name"] if kind == "table" else described.get("table")) == "fairlead"


async def test_no_request_fails_while_weights_change_a_hundred_times(web: Web) -> None:
    """Pods become unready and ready again at random, but never all at the same time, without effect
    on open connections. At first one node has all pods, as when the first pod of a Service becomes
    ready: its slots then need no transition, and only flow entries keep connections on the other
    nodes."""
    chance = seeded_random("weights")
    await web.place(["node1"])
    await until(web.on_one_node, "the removal of the terminated pods")
    await web.place(PLACEMENT)
    names = sorted(await web.pods())

    async def flip() -> None:
        unready: set[str] = set()
        for _ in range(100):
            name = chance.choice(names)
            if name in unready:
                unready.remove(name)
            elif len(unready) < len(names) - 1:
                unready.add(name)
            await web.set_ready(name, ready=name not in unready)
            await asyncio.sleep(chance.uniform(0.0, 0.2))
        for name in unready:
            await web.set_ready(name, ready=True)
        await web.await_weights(PLACEMENT)

    async with Load(web.site, web.address) as load:
        period = await load.counts_during(flip())
    print(period)
    assert period.broken == [], f"seed {SEED}: {period}"
