"""The rights of each role, verified in both directions: every call in its code is allowed, and
every right is used.

The calls of the code are read from the source (`api_calls`). In the scenario (`life.py`) the roles
are processes that use a real API server with RBAC, each with a token of its own ServiceAccount;
their requests are read from the server's audit log."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from tests.deploy.api_calls import VERBS, Right, Source, Unreadable, client_methods
from tests.deploy.chart import NAMESPACE, Manifest, find, render
from tests.deploy.life import POD, ROLES, Life, Use, allowed, service, until

import fairlead
from fairlead.config import Config
from fairlead.drivers.grant_cache import GrantCache
from fairlead.drivers.grants import AddHolder, GrantDriver
from fairlead.drivers.kept_addresses import KeptAddresses
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.drivers.service_status import ServiceWriter
from fairlead.errors import Conflict, Refused
from fairlead.kube.client import Client
from fairlead.kube.crds import POOL_FINALIZER
from fairlead.kube.events import EventRecorder
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab import process
from fairlead.lab.site import Site
from fairlead.lab.topology import PODS, POOL
from fairlead.model import Grant, ServiceKey
from fairlead.plan.keeping import limits_of
from fairlead.state import State

ROOT = Path(fairlead.__file__).parent
VALUES = {
    "namespace": {"create": True},
    "config": {
        "defaultClass": "fairlead.io/direct",
        "pools": [{"name": "lab", "addresses": list(POOL)}],
        "cluster": {"podCIDRs": [str(network) for network in PODS]},
        "controller": {"leaseDurationS": 3},
        "presence": {"leaseDurationS": 6},
        "announce": {"l2": {}},
        # The list for this gateway, selected by a pattern of names, takes precedence. No host has
        # the interface of the common list.
        "gateway": {"interfaces": ["elsewhere0"], "interfacesByNode": {"gw*": ["eth*"]}},
    },
    "gateway": {"enabled": True},
    "node": {"enabled": True, "apiServer": {"host": "192.0.2.1"}},
}
CONTROLLERS = (9440, 9450)
PORTS = ("-9441", "-9442")
BLOCKED_PORT = 32111
PRESENCE = Config().presence.namespace
POOL_ADDRESS = "198.51.100.69"
FROM_POOL = {"fairlead.io/address-pool": "extra"}


def pool(address: str) -> Manifest:
    return {
        "apiVersion": "fairlead.io/v1alpha1",
        "kind": "AddressPool",
        "metadata": {"name": "extra"},
        "spec": {"addresses": [address]},
    }


@pytest.fixture(scope="module")
def manifests(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    values = tmp_path_factory.mktemp("values") / "values.yaml"
    values.write_text(yaml.safe_dump(VALUES))
    return render(helm, "--values", values)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def life(
    real_programs: None, manifests: list[Manifest], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Life]:
    """A cluster that has run through the whole scenario, from start to removal, before the tests
    begin."""
    site = Site.create(
        f"rights{os.getpid()}", nodes=2, gateways=1, clients=1, roles=False, apiserver="real"
    )
    async with site:
        life = Life(site, tmp_path_factory.mktemp("life"))
        await life.install(manifests)
        await start_all(life)
        await serve_and_edit(life)
        await use_a_pool(life)
        await hand_over(life)
        await provoke_warnings(life)
        await find_existing_grant(life)
        await repeat_events(life)
        await leave_an_address_without_its_service(life)
        await query_status(life)
        await end(life)
        await remove_leftovers(life)
        yield life


async def start_all(life: Life) -> None:
    for port in CONTROLLERS:
        life.start("controller", "control", port)
    life.start(
        "gateway",
        "gw1",
        9441,
        "--node-name",
        "gw1",
        "--pin-path",
        str(life.site.directory.pins("gw1")),
    )
    for node in ("node1", "node2"):
        life.start("node", node, 9442, "--node-name", node)
    for host, port in (
        *(("control", each) for each in CONTROLLERS),
        ("gw1", 9441),
        ("node1", 9442),
        ("node2", 9442),
    ):
        await life.ready(host, port)


async def serve_and_edit(life: Life) -> None:
    await life.kubectl("apply", "-f", "-", objects=[POD, service("web", 80)])
    await life.served(80)
    await life.kubectl("apply", "-f", "-", objects=service("web", 80, 81))
    await life.served(81)
    await life.kubectl(
        "label", "node", "node2", "node.kubernetes.io/exclude-from-external-load-balancers=true"
    )
    await life.kubectl(
        "label", "node", "node2", "node.kubernetes.io/exclude-from-external-load-balancers-"
    )


async def use_a_pool(life: Life) -> None:
    """Use a pool, edit it while its Service has an address, and delete it while the Service still
    has the address: the pool reports the deletion, and stays."""
    await life.kubectl(
        "apply",
        "-f",
        "-",
        objects=[pool(POOL_ADDRESS), service("pooled", 83, annotations=FROM_POOL)],
    )
    await until(
        "an address of the pool is assigned", partial(has_address, life, "pooled", POOL_ADDRESS)
    )
    await until("the pool is held, and counts it", partial(is_held, life))
    await life.kubectl("apply", "-f", "-", objects=pool("198.51.100.70"))
    await life.kubectl("wait", "--for=condition=Stranded", "--timeout=60s", "addresspool/extra")
    await life.kubectl("delete", "addresspool", "extra", "--wait=false")
    await life.kubectl("wait", "--for=condition=Ready=False", "--timeout=60s", "addresspool/extra")
    await until(
        "the pool reports why it is not used", partial(has_pool_reason, life, "BeingDeleted")
    )
    await life.kubectl("delete", "service", "pooled", "--timeout=60s")
    await life.kubectl("wait", "--for=delete", "--timeout=60s", "addresspool/extra")


async def has_address(life: Life, name: str, address: str) -> bool:
    return await life.addresses(name) == [address]


async def is_held(life: Life) -> bool:
    shown = json.loads(await life.kubectl("get", "addresspool", "extra", "-o", "json"))
    return (
        POOL_FINALIZER in shown["metadata"].get("finalizers", ())
        and shown["status"]["assignedIPv4"] == 1
    )


async def has_pool_reason(life: Life, reason: str) -> bool:
    fields = f"involvedObject.kind=AddressPool,reason={reason},source=fairlead-controller"
    return bool(
        json.loads(await life.kubectl("get", "events", "--field-selector", fields, "-o", "json"))[
            "items"
        ]
    )


async def hand_over(life: Life) -> None:
    """Kill the leader; the other controller takes over and reports that an address cannot be
    assigned."""
    before = await life.holder()
    (leader,) = [port for port in CONTROLLERS if await life.works("control", port)]
    await process.one(life.site.name, f"control/controller-{leader}").kill()

    async def another() -> bool:
        return (await life.holder()) not in ("", before)

    await until("another controller leads", another)
    wanted = {"fairlead.io/addresses": "198.51.100.200"}
    await life.kubectl("apply", "-f", "-", objects=service("elsewhere", 80, annotations=wanted))
    await life.warned("fairlead-controller", "elsewhere")


async def provoke_warnings(life: Life) -> None:
    """Another process occupies the health port of a Service on its node: the node reports that, and
    gateways report that the health port does not answer."""
    squat = (
        f"import socket, time; held = socket.create_server(('', {BLOCKED_PORT})); time.sleep(600)"
    )
    squatter = life.site.spawn("node1", [sys.executable, "-c", squat], label="node1/squatter")
    await life.kubectl(
        "apply", "-f", "-", objects=service("blocked", 82, healthCheckNodePort=BLOCKED_PORT)
    )
    await life.warned("fairlead-node", "blocked")
    await life.warned("fairlead-gateway", "blocked")
    await squatter.kill()


async def find_existing_grant(life: Life) -> None:
    """As the controller, create the grant of an address that already has one, which a delayed watch
    has not shown yet. The server answers 409, and the driver reads the existing grant."""
    async with Client(await life.access("controller")) as client:
        state = State(())
        service = await client.get(SERVICES, ObjectKey("default", "web"))
        state.update_services({ObjectKey(*service.key): service})
        newest = ServiceCache(state)
        grants = GrantCache(state)
        keeping = KeptAddresses(
            client, state, grants, EventRecorder(client, "fairlead-controller"), limits_of(Config())
        )
        driver = GrantDriver(client, ServiceWriter(client, newest), newest, grants, keeping)
        (address,) = await life.addresses("web")
        give = AddHolder(service.key, service.metadata.uid, Grant(address, ("TCP/80", "TCP/81")))
        with pytest.raises(Conflict):
            await driver.apply([give])


async def repeat_events(life: Life) -> None:
    """Report the same Event as each role, and again as the next process of the role: there is one
    Event, whose count increases."""
    uid = json.loads(await life.kubectl("get", "service", "web", "-o", "json"))["metadata"]["uid"]
    for role in ROLES:
        for count in (1, 2):
            async with Client(await life.access(role)) as client, asyncio.TaskGroup() as group:
                recorder = EventRecorder(client, f"twice-{role}")
                writing = group.create_task(recorder.run())
                recorder.event(ServiceKey("default", "web"), uid, "Normal", "Twice", "said twice")
                await until(
                    f"{role} has reported the Event {count} times",
                    partial(has_event_count, life, f"twice-{role}", count),
                )
                writing.cancel()


async def has_event_count(life: Life, component: str, count: int) -> bool:
    shown = await life.kubectl(
        "get", "events", "--field-selector", f"source={component}", "-o", "json"
    )
    return [event["count"] for event in json.loads(shown)["items"]] == [count]


async def leave_an_address_without_its_service(life: Life) -> None:
    """While no controller runs, a user deletes a Service and removes its finalizer: its address is
    orphaned."""
    for left in process.find(life.site.name, "control/controller-"):
        await left.stop(10)
    await life.kubectl("delete", "service", "blocked", "--wait=false")
    await life.kubectl(
        "patch", "service", "blocked", "--type=merge", "-p", '{"metadata":{"finalizers":null}}'
    )
    life.start("controller", "control", CONTROLLERS[0])

    async def is_released() -> bool:
        return len(
            json.loads(await life.kubectl("get", "addressgrants", "-o", "json"))["items"]
        ) == len(await life.addresses("web"))

    await until("the address without a Service is released", is_released)


async def query_status(life: Life) -> None:
    """Query which roles run, with an account that may read the Leases, and with one that may
    not."""
    options = ("--config", str(life.configuration), "-o", "json")
    command = [str(Path(sys.executable).with_name("fairlead")), "status", "--cluster", *options]
    administrator = str(life.site.directory.kubeconfig_inside)
    code, told, _ = await life.site.exec(
        "client1", [*command, "--kubeconfig", administrator], timeout_s=60
    )
    assert code == 0
    found = sorted(
        (each["role"], each["state"]) for each in json.loads(told) if each["state"] != "gone"
    )
    assert found == [
        ("controller", "leads"),
        ("gateway", "ready"),
        ("node", "ready"),
        ("node", "ready"),
    ]
    code, _, errors = await life.site.exec(
        "client1", [*command, "--kubeconfig", str(life.kubeconfig("node"))], timeout_s=60
    )
    assert code == 1
    assert "may not read the Leases of the roles" in errors
    assert f"`list` and `watch` leases.coordination.k8s.io in namespace {PRESENCE}" in errors


async def remove_leftovers(life: Life) -> None:
    """Remove everything that a gateway and a node have left, including their Leases."""
    program = str(Path(sys.executable).with_name("fairlead"))
    for role, host, options in (
        ("gateway", "gw1", ("--pin-path", str(life.site.directory.pins("gw1")))),
        ("node", "node1", ()),
    ):
        files = ("--config", str(life.configuration), "--kubeconfig", str(life.kubeconfig(role)))
        code, _, errors = await life.site.exec(
            host, [program, role, "--cleanup", "--node-name", host, *options, *files]
        )
        assert code == 0, errors
    left = json.loads(await life.kubectl("get", "leases", "-n", PRESENCE, "-o", "json"))["items"]
    # A controller that is stopped deletes its Lease; the controller that was killed could not.
    names = sorted(each["metadata"]["name"] for each in left)
    assert [name for name in names if "controller" not in name] == ["fairlead-node-node2"]
    assert len(names) == 2


async def end(life: Life) -> None:
    """Delete the Services, and stop every role gracefully; the leader releases the Lease."""
    await life.kubectl("delete", "service", "web", "elsewhere", "--timeout=60s")
    running = [each for each in process.find(life.site.name) if each.leads]
    roles = [each for each in running if "controller-" in each.label or each.label.endswith(PORTS)]
    assert len(roles) == 4
    for role in roles:
        await role.stop(10)
    assert await life.holder() == ""


def rules_of(manifests: list[Manifest], kind: str, role: str) -> list[Manifest]:
    rules: list[Manifest] = find(manifests, kind, f"fairlead-{role}")["rules"]
    return rules


@pytest.mark.parametrize("role", ROLES)
def test_every_call_of_the_code_is_allowed(manifests: list[Manifest], role: str) -> None:
    """The calls include rare cases, which need not occur in the scenario. Leases are in the two
    namespaces of the roles."""
    needed = Source().rights(role)
    inside = {right for right in needed if right.resource.startswith("leases.")}
    roles = [
        each
        for each in manifests
        if each["kind"] == "Role" and each["metadata"]["name"].startswith(f"fairlead-{role}")
    ]
    allowed_inside = {right for each in roles for right in allowed(each["rules"])}
    lacking = {
        right: needed[right]
        for right in needed.keys() - allowed(rules_of(manifests, "ClusterRole", role)) - inside
    }
    lacking |= {right: needed[right] for right in inside - allowed_inside}
    assert not lacking, "the code can make calls that templates/access.yaml does not allow"


def test_every_method_of_the_client_has_a_verb() -> None:
    assert client_methods() == VERBS.keys() | {"apply", "request"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the source, for a test to modify."""
    return Path(
        shutil.copytree(
            ROOT, tmp_path / "fairlead", ignore=shutil.ignore_patterns("__pycache__", "objects")
        )
    )


def add_to_node(copy: Path, line: str) -> None:
    """Insert a line at the start of the code that the role node runs."""
    path, start = copy / "roles" / "node.py", "    state = State("
    text = path.read_text()
    assert text.count(start) == 1
    path.write_text(text.replace(start, f"    {line}\n{start}"))


def test_a_new_call_in_the_source_is_found(copy: Path) -> None:
    add_to_node(copy, "await client.delete(NODES, ('', node_name))")
    assert Source(copy).rights("node").keys() - Source().rights("node").keys() == {
        Right("delete", "nodes")
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("await client.request('GET', where)", "a call by its path"),
        ("await session.get('/api/v1/services')", "a path of the API"),
        ("kinds = [NODES]", "cannot be determined"),
        (
            "await client.patch(NODES, key, body, subresource=part)",
            "a subresource that is no constant",
        ),
        ("where = NODES.path('default')", "cannot be determined"),
        (
            "from fairlead.kube.objects import Resource; pods = Resource('v1', 'Pod', 'pods', "
            "True, Node)",
            "no constant",
        ),
    ],
)
def test_a_call_whose_right_cannot_be_determined_is_an_error(
    copy: Path, line: str, words: str
) -> None:
    add_to_node(copy, line)
    with pytest.raises(Unreadable, match=words):
        Source(copy).rights("node")


@pytest.mark.long
@pytest.mark.root
def test_no_request_of_a_role_was_forbidden(life: Life) -> None:
    uses = life.uses()
    assert {use.role for use in uses} == set(ROLES)
    denied = {use for use in uses if use.code in (401, 403)}
    assert denied == {
        Use("node", "list", "leases.coordination.k8s.io", PRESENCE, "", 403)
        # `query_status` causes these.
    }


@pytest.mark.root
@pytest.mark.parametrize("role", ROLES)
def test_every_right_is_needed(life: Life, manifests: list[Manifest], role: str) -> None:
    """The uses outside the namespaces of the roles are exactly those that the ClusterRole
    allows."""
    elsewhere = [
        use
        for use in life.uses()
        if use.role == role and use.namespace not in (NAMESPACE, PRESENCE)
    ]
    assert {(use.verb, use.resource) for use in elsewhere} == allowed(
        rules_of(manifests, "ClusterRole", role)
    )


@pytest.mark.root
def test_only_the_lease_is_needed_in_the_namespace_of_the_roles(
    life: Life, manifests: list[Manifest]
) -> None:
    inside = [use for use in life.uses() if use.namespace == NAMESPACE]
    assert {use.role for use in inside} == {"controller"}
    assert {(use.verb, use.resource) for use in inside} == allowed(
        rules_of(manifests, "Role", "controller")
    )
    assert {use.name for use in inside if use.verb != "create"} == {"fairlead-controller"}


@pytest.mark.root
@pytest.mark.parametrize("role", ROLES)
def test_every_right_on_the_leases_of_processes_is_needed(
    life: Life, manifests: list[Manifest], role: str
) -> None:
    there = [
        use
        for use in life.uses()
        if use.role == role and use.namespace == PRESENCE and use.code != 403
    ]
    rules = find(manifests, "Role", f"fairlead-{role}-presence")["rules"]
    assert {(use.verb, use.resource) for use in there} == allowed(rules)
    own = {use.name for use in there if use.verb in ("get", "patch")}
    assert own
    assert all(name.startswith(f"fairlead-{role}-") for name in own)


@pytest.mark.root
@pytest.mark.parametrize("role", ["gateway", "node"])
def test_gateways_and_nodes_write_events_and_their_lease_only(life: Life, role: str) -> None:
    written = {
        (use.resource, use.namespace == PRESENCE)
        for use in life.uses()
        if use.role == role and use.verb not in ("get", "list", "watch")
    }
    assert written == {("events", False), ("leases.coordination.k8s.io", True)}


@pytest.mark.root
@pytest.mark.parametrize("role", ROLES)
async def test_the_api_server_enforces_rbac(life: Life, role: str) -> None:
    """An account cannot even read objects to which it has no rights."""
    access = await life.access(role)
    async with Client(access) as client:
        for path in ("/api/v1/secrets", f"/api/v1/namespaces/{NAMESPACE}/configmaps/fairlead"):
            with pytest.raises(Refused, match=r"cannot (list|get) resource"):
                await client.request("GET", path)
