"""The life of a Service as its owner sees it, through the real kubectl: from apply to delete, in a
lab with all roles.

In: manifests and commands as users write them. Out: the output of `kubectl get` and `describe`, the
results of packets, and the state that is left in the kernels of gateways and nodes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.e2e.changes import pod
from tests.e2e.kubectl import Kubectl, addresses_of, service
from tests.e2e.oracle import Source, Target
from tests.e2e.packets import Probe, Prober, read_cluster, sources_of
from tests.pauses import pauses

from fairlead.kube.client import Client
from fairlead.lab import manifests
from fairlead.lab.site import Site
from fairlead.net.bpf import Map

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("apiserver", ["embedded", "real"], indirect=True, scope="module"),
]

DEADLINE_S = 60.0
FINALIZER = "service.kubernetes.io/load-balancer-cleanup"
POOL = "203.0.113."


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    """Wait until the value is true, and return it."""
    answer = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            waits = pauses()
            while not (answer := await condition()):
                await asyncio.sleep(next(waits))
            return answer
    except TimeoutError:
        pytest.fail(f"waited {DEADLINE_S} s in vain for {what}")


@pytest.fixture
def kubectl(site: Site) -> Kubectl:
    return Kubectl(site.directory.kubeconfig, site.name)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def pods(site: Site, client: Client) -> None:
    """Start pods on two of the three nodes, and a client pod."""
    await manifests.apply(
        client,
        [pod("w1", "web", "node1"), pod("w2", "web", "node2", make=1), pod("c", "none", "node3")],
    )
    await site.await_pods()


@pytest_asyncio.fixture(loop_scope="module")
async def clean(kubectl: Kubectl, site: Site) -> AsyncIterator[None]:
    """Check that no Service is left, and no state of a Service in any kernel."""
    yield
    await kubectl("delete", "services", "--all", "--all-namespaces", "--timeout=10s")
    await await_nothing_left(site)


async def listeners(site: Site, gateway: str) -> int:
    """Return the number of entries of the pinned map of listeners."""
    path = site.directory.pins(gateway)
    found = sorted(path.glob("**/listeners"))
    assert found, f"no map of listeners below {path}"
    table = Map.open(found[-1])
    try:
        return sum(1 for _ in table.items())
    finally:
        table.close()


async def rules_of(site: Site, node: str, *words: str) -> list[str]:
    """Return the lines of a node's table that contain one of these texts."""
    _, output, _ = await site.exec(node, ["nft", "list", "table", "inet", "fairlead"])
    return [line for line in output.splitlines() if any(word in line for word in words)]


async def await_nothing_left(site: Site) -> None:
    async def gone() -> bool:
        maps = [await listeners(site, host.name) for host in site.topology.of("gateway")]
        rules = [
            line
            for host in site.topology.of("node")
            for line in await rules_of(site, host.name, "default/")
        ]
        # A real API server has a Service of its own.
        return not any(maps) and not [line for line in rules if '"default/kubernetes"' not in line]

    await until(gone, "the removal of all state of Services in gateways and nodes")


async def check_reachable(
    site: Site, client: Client, address: str, port: int = 80, protocol: str = "TCP"
) -> None:
    """Check that client, node and pod get the oracle's result from this address, from each pod in
    turn."""
    sources = {one.name: one for one in sources_of(site, await read_cluster(client))}
    wanted: list[Source] = [sources["client1"], sources["node3"], sources["default/c"]]
    probes = [Probe(source, Target(address, port, protocol), 8, True) for source in wanted]
    await Prober(site, lambda: read_cluster(client)).agree(probes, deadline_s=DEADLINE_S)


async def assigned_addresses(kubectl: Kubectl, name: str, count: int = 1) -> list[str]:
    async def shown() -> list[str]:
        found = addresses_of(await kubectl.service(name))
        return found if len(found) == count else []

    answer: list[str] = await until(shown, f"{count} addresses of {name}")
    return answer


async def await_described(kubectl: Kubectl, name: str, *words: str) -> str:
    async def described() -> str:
        text = await kubectl("describe", "service", name)
        return text if all(word in text for word in words) else ""

    answer: str = await until(described, f"{words} in kubectl describe service {name}")
    return answer


async def test_a_service_is_served_until_it_is_deleted_and_leaves_nothing(
    site: Site, client: Client, kubectl: Kubectl, clean: None
) -> None:
    await kubectl.apply("web")
    (address,) = await assigned_addresses(kubectl, "web")
    shown = await kubectl.service("web")
    assert FINALIZER in shown["metadata"]["finalizers"]
    assert shown["metadata"]["annotations"]["fairlead.io/class"] == "fairlead.io/direct"
    ports = [{"port": 80, "protocol": "TCP"}]
    assert shown["status"]["loadBalancer"]["ingress"] == [
        {"ip": address, "ipMode": "VIP", "ports": ports}
    ]
    assert shown["spec"]["healthCheckNodePort"] >= 30000
    text = await await_described(kubectl, "web", "EnsuredLoadBalancer", address)
    assert "Warning" not in text
    assert address in await kubectl("get", "services")
    await check_reachable(site, client, address)
    assert await listeners(site, "gw1") == await listeners(site, "gw2") == 1
    assert await rules_of(site, "node1", "default/web")
    await kubectl("delete", "service", "web", "--timeout=10s")
    assert "NotFound" in await kubectl("get", "service", "web", fails=True)
    await await_nothing_left(site)
    sources = sources_of(site, await read_cluster(client))
    probes = [Probe(source, Target(address, 80, "TCP"), 1) for source in sources]
    await Prober(site, lambda: read_cluster(client)).agree(probes, deadline_s=DEADLINE_S)


async def test_edits_keep_the_address(
    site: Site, client: Client, kubectl: Kubectl, clean: None
) -> None:
    await kubectl.apply("web")
    (address,) = await assigned_addresses(kubectl, "web")
    await kubectl("patch", "service", "web", "-p", '{"spec":{"externalTrafficPolicy":"Cluster"}}')
    await check_reachable(site, client, address)
    ports = [
        {"name": "web", "port": 8000, "targetPort": "web"},
        {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": "dns"},
    ]
    await kubectl.apply("web", ports=ports, sessionAffinity="ClientIP")
    await check_reachable(site, client, address, 8000)
    await check_reachable(site, client, address, 53, "UDP")
    # The oracle expects a refusal here now.
    await check_reachable(site, client, address, 80)
    await kubectl("annotate", "service", "web", "example.com/note=anything")
    await kubectl("label", "service", "web", "team=a")
    await kubectl.apply("web", loadBalancerSourceRanges=["198.51.100.12/32", "10.244.0.0/16"])
    # The ranges contain the pod, but not client1.
    await check_reachable(site, client, address)
    await kubectl.apply("web")
    await check_reachable(site, client, address)
    assert addresses_of(await kubectl.service("web")) == [address]


async def test_a_requested_address_is_assigned_or_an_event_tells_why_not(
    site: Site, client: Client, kubectl: Kubectl, clean: None
) -> None:
    wish = {"fairlead.io/addresses": f"{POOL}77"}
    await kubectl.apply("web", annotations=wish)
    assert await assigned_addresses(kubectl, "web") == [f"{POOL}77"]
    await check_reachable(site, client, f"{POOL}77")
    await kubectl.apply("late", annotations=wish)
    await await_described(
        kubectl,
        "late",
        "Warning",
        "SyncLoadBalancerFailed",
        f"{POOL}77",
        "held by Service default/web",
    )
    assert addresses_of(await kubectl.service("late")) == []
    await kubectl.apply("odd", annotations={"fairlead.io/addresses": "192.0.2.200"})
    await await_described(kubectl, "odd", "Warning", "192.0.2.200", "is in no pool")
    await kubectl("annotate", "service", "web", "--overwrite", f"fairlead.io/addresses={POOL}78")

    async def moved() -> bool:
        return addresses_of(await kubectl.service("web")) == [f"{POOL}78"]

    await until(moved, "the address that is requested instead")
    await check_reachable(site, client, f"{POOL}78")
    assert await assigned_addresses(kubectl, "late") == [f"{POOL}77"]
    await check_reachable(site, client, f"{POOL}77")


async def test_changing_the_type_releases_the_address_and_back_assigns_one(
    site: Site, client: Client, kubectl: Kubectl, clean: None
) -> None:
    await kubectl.apply("web")
    (address,) = await assigned_addresses(kubectl, "web")
    await kubectl.apply("web", type="ClusterIP", externalTrafficPolicy=None)

    async def released() -> bool:
        shown = await kubectl.service("web")
        annotations = shown["metadata"].get("annotations", {})
        return not (
            shown["metadata"].get("finalizers")
            or addresses_of(shown)
            or "fairlead.io/class" in annotations
        )

    await until(released, "the removal of finalizer, address and claim")
    await await_described(kubectl, "web", "DeletedLoadBalancer")
    await check_reachable(site, client, address)
    assert await listeners(site, "gw1") == 0
    await kubectl.apply("web")
    (again,) = await assigned_addresses(kubectl, "web")
    await check_reachable(site, client, again)


async def test_a_service_of_another_class_is_not_claimed(
    site: Site, kubectl: Kubectl, clean: None
) -> None:
    await kubectl.apply("theirs", loadBalancerClass="example.com/other")
    await kubectl.apply("ours")
    await assigned_addresses(kubectl, "ours")
    await asyncio.sleep(0.5)
    shown = await kubectl.service("theirs")
    assert (addresses_of(shown), shown["metadata"].get("finalizers")) == ([], None)
    assert "fairlead.io/class" not in shown["metadata"]["annotations"]
    # The status that the other controller writes stays unchanged, and the nodes serve its address
    # like any other.
    status = {"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.200"}]}}}
    await kubectl(
        "patch",
        "service",
        "theirs",
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps(status),
    )
    await kubectl(
        "patch",
        "service",
        "theirs",
        "--type=merge",
        "-p",
        '{"metadata":{"finalizers":["example.com/theirs"]}}',
    )

    async def on_nodes() -> bool:
        return bool(await rules_of(site, "node1", "198.51.100.200"))

    await until(on_nodes, "rules for the address")
    assert await listeners(site, "gw1") == 1
    await kubectl("delete", "service", "theirs", "--wait=false")
    await asyncio.sleep(0.5)
    assert (await kubectl.service("theirs"))["metadata"]["finalizers"] == ["example.com/theirs"]
    await kubectl(
        "patch", "service", "theirs", "--type=merge", "-p", '{"metadata":{"finalizers":null}}'
    )


async def test_a_dual_stack_service_gets_and_serves_both_addresses(
    site: Site, client: Client, kubectl: Kubectl, clean: None
) -> None:
    await kubectl.apply("web", ipFamilyPolicy="RequireDualStack", ipFamilies=["IPv6", "IPv4"])
    six, four = await assigned_addresses(kubectl, "web", 2)
    assert (":" in six, ":" in four) == (True, False)
    await check_reachable(site, client, six)
    await check_reachable(site, client, four)
    await kubectl.apply("web", ipFamilyPolicy="SingleStack", ipFamilies=["IPv6"])
    assert await assigned_addresses(kubectl, "web") == [six]
    await check_reachable(site, client, six)
    await check_reachable(site, client, four)
    await kubectl.apply("web", ipFamilyPolicy="PreferDualStack", ipFamilies=["IPv6", "IPv4"])
    assert (await assigned_addresses(kubectl, "web", 2))[0] == six


@pytest_asyncio.fixture(loop_scope="module")
async def two_addresses(site: Site) -> AsyncIterator[None]:
    """Give the controller two addresses during a test."""
    whole = site.directory.config.read_text()
    configuration = yaml.safe_load(whole)
    configuration["pools"] = [{"name": "small", "addresses": [f"{POOL}20-{POOL}21"]}]
    await with_configuration(site, yaml.safe_dump(configuration))
    yield
    await with_configuration(site, whole)


async def with_configuration(site: Site, text: str) -> None:
    await site.stop_role("control")
    site.directory.config.write_text(text)
    await site.start_role("control")


async def test_an_exhausted_pool_is_reported_and_a_released_address_is_reassigned(
    site: Site, client: Client, kubectl: Kubectl, clean: None, two_addresses: None
) -> None:
    for name in ("first", "second"):
        await kubectl.apply(name)
        await assigned_addresses(kubectl, name)
    await kubectl.apply("third")
    await await_described(
        kubectl,
        "third",
        "Warning",
        "SyncLoadBalancerFailed",
        "no IPv4 address is free in pool small",
    )
    events = await kubectl("get", "events", "--field-selector", "involvedObject.name=third")
    assert "SyncLoadBalancerFailed" in events
    assert addresses_of(await kubectl.service("third")) == []
    (address,) = await assigned_addresses(kubectl, "first")
    await kubectl("delete", "service", "first", "--timeout=10s")
    assert await assigned_addresses(kubectl, "third") == [address]
    await check_reachable(site, client, address)


async def test_addresses_outlive_the_controller(
    site: Site, client: Client, kubectl: Kubectl, clean: None
) -> None:
    names = ("a", "b", "c")
    for name in names:
        await kubectl.apply(name)
    before = {name: await assigned_addresses(kubectl, name) for name in names}
    await site.kill_role("control")
    # While the controller is stopped, no address is granted or released; deletions wait for it.
    await kubectl.apply("d")
    await kubectl("delete", "service", "a", "--wait=false")
    await check_reachable(site, client, before["b"][0])
    assert FINALIZER in (await kubectl.service("a"))["metadata"]["finalizers"]
    assert addresses_of(await kubectl.service("d")) == []
    await site.start_role("control")

    async def gone() -> bool:
        return "service/a" not in await kubectl("get", "services", "-o", "name")

    await until(gone, "the removal of the deleted Service")
    await assigned_addresses(kubectl, "d")
    assert {name: await assigned_addresses(kubectl, name) for name in ("b", "c")} == {
        name: before[name] for name in ("b", "c")
    }


async def test_services_with_one_name_in_two_namespaces_are_independent(
    site: Site, client: Client, kubectl: Kubectl, clean: None
) -> None:
    await kubectl("create", "namespace", "other")
    await kubectl.apply("web")
    manifest = service("web")
    manifest["metadata"]["namespace"] = "other"
    await kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    async def both() -> list[str]:
        items = json.loads(await kubectl("get", "services", "-A", "-o", "json"))["items"]
        found = {
            one["metadata"]["namespace"]: addresses_of(one)
            for one in items
            if one["metadata"]["name"] == "web"
        }
        return (
            [*found["default"], *found["other"]]
            if all(map(found.get, ("default", "other")))
            else []
        )

    addresses = await until(both, "an address for each")
    assert len(set(addresses)) == 2
    assert await listeners(site, "gw1") == 2
    await kubectl("delete", "service", "web", "-n", "other", "--timeout=10s")
    await check_reachable(site, client, addresses[0])
    await check_reachable(site, client, addresses[1])


async def test_events_report_what_keeps_a_service_from_being_served(
    site: Site, client: Client, kubectl: Kubectl, clean: None
) -> None:
    await kubectl.apply("web")
    (address,) = await assigned_addresses(kubectl, "web")
    await check_reachable(site, client, address)
    assert "Warning" not in await kubectl("describe", "service", "web")
    nodes = [host.name for host in site.topology.of("node")]
    for node in nodes:
        await site.stop_role(node)
    try:
        # The rules still exist; only the confirmation of them is missing.
        await await_described(kubectl, "web", "Warning", "HealthChecksFailing", "node1 (")
        await check_reachable(site, client, address)
    finally:
        for node in nodes:
            await site.start_role(node)
