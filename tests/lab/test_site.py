"""A whole lab with its control plane, without Fairlead's roles: nodes, pods, slices, failures."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, SERVICES, EndpointSlice
from fairlead.kube.watch_events import ENVELOPE
from fairlead.lab import namespace, process
from fairlead.lab.objects import ENDPOINTS, NODES, PODS, Pod
from fairlead.lab.site import CLUSTER_LABEL, Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 60
PORTS = [
    {"name": "web", "containerPort": 8080},
    {"name": "dns", "containerPort": 5353, "protocol": "UDP"},
]


def pod(
    name: str, node: str = "", *, app: str = "web", port: int = 8080, grace_s: int = 30
) -> dict[str, Any]:
    ports = [PORTS[0] | {"containerPort": port}, PORTS[1]]
    spec: dict[str, Any] = {
        "containers": [{"name": "c", "image": "echo", "ports": ports}],
        "terminationGracePeriodSeconds": grace_s,
    }
    if node:
        spec["nodeName"] = node
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": app}},
        "spec": spec,
    }


def service(name: str, app: str, **spec: object) -> dict[str, Any]:
    fields = {
        "selector": {"app": app},
        "ports": [{"name": "web", "port": 80, "targetPort": "web"}],
    } | spec
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": fields}


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the result is true; return it."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (answer := await condition()):
                await asyncio.sleep(0.02)
            return answer
    except TimeoutError:
        pytest.fail(f"waited {DEADLINE_S} s in vain for {what}")


async def call(site: Site, host: str, address: str, port: int = 8080) -> Mapping[str, Any]:
    """Return what the echo server at an address reports to a host or pod."""
    reader, writer = await site.connect(host, address, port)
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            answer = await reader.read()
    finally:
        writer.close()
    said: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with Site.create(f"t{os.getpid()}", nodes=2, gateways=2, clients=1, roles=False) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(site: Site) -> AsyncIterator[Client]:
    async with site.client() as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(site: Site) -> AsyncIterator[dict[str, Pod]]:
    """Three permanent pods: two on node1, one on a node that the scheduler chooses."""
    await site.apply([pod("a", "node1"), pod("b", "node1"), pod("c")])
    await site.await_pods()
    async with site.client() as client:
        yield {name: await client.get(PODS, ("default", name)) for name in "abc"}


async def test_nodes_are_registered(client: Client) -> None:
    nodes = {
        node.metadata.name: json.loads(
            await client.request("GET", NODES.path("", node.metadata.name))
        )
        for node in await client.list(NODES)
    }
    assert sorted(nodes) == ["node1", "node2"]
    node = nodes["node2"]
    assert node["spec"]["podCIDRs"] == ["10.244.2.0/24", "2001:db8:244:2::/64"]
    assert [address["address"] for address in node["status"]["addresses"]] == [
        "192.0.2.22",
        "2001:db8:1::16",
        "node2",
    ]
    assert [
        condition["status"]
        for condition in node["status"]["conditions"]
        if condition["type"] == "Ready"
    ] == ["True"]


async def test_a_pod_without_a_node_is_scheduled_to_the_node_with_the_fewest_pods(
    web: dict[str, Pod],
) -> None:
    assert {name: pod.spec.node_name for name, pod in web.items()} == {
        "a": "node1",
        "b": "node1",
        "c": "node2",
    }


@pytest.mark.parametrize("family", [0, 1])
async def test_pods_answer_all_hosts_and_see_their_addresses(
    site: Site, web: dict[str, Pod], family: int
) -> None:
    addresses = {name: pod.status.pod_ips[family].ip for name, pod in web.items()}
    hosts = {host.name: host.addresses[family] for host in site.topology.hosts}
    for target in "ac":
        for caller in (*hosts, "default/b", "default/c", "default/a"):
            said = await call(site, caller, addresses[target])
            peer = hosts[caller] if caller in hosts else addresses[caller.removeprefix("default/")]
            assert (said["pod"], said["node"], said["peer"]) == (
                target,
                web[target].spec.node_name,
                peer,
            ), (caller, target)


async def test_pods_reach_outside_hosts_with_the_address_of_their_node(
    site: Site, web: dict[str, Pod]
) -> None:
    for family, address in enumerate(site.topology.host("client1").addresses):
        listener = site.socket("client1", 10 if ":" in address else 2)
        with listener:
            listener.bind((address, 0))
            listener.listen(1)
            listener.setblocking(False)
            _, writer = await site.connect("default/c", address, listener.getsockname()[1])
            accepted, peer = await asyncio.get_running_loop().sock_accept(listener)
            accepted.close()
            writer.close()
            assert peer[0] == site.topology.host("node2").addresses[family]


async def test_udp_reaches_a_pod_with_the_callers_address(site: Site, web: dict[str, Pod]) -> None:
    with site.socket("client1", kind=2) as sock:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DEADLINE_S):
            await loop.sock_connect(sock, (web["c"].status.pod_ips[0].ip, 5353))
            await loop.sock_sendall(sock, b"hello")
            said = json.loads(await loop.sock_recv(sock, 2000))
    assert (said["pod"], said["peer"], said["text"]) == ("c", "198.51.100.11", "hello")


async def test_any_command_can_run_in_a_pod(site: Site, web: dict[str, Pod]) -> None:
    exit_code, output, _ = await site.exec(
        "default/a", ["ip", "-br", "-4", "address", "show", "eth0"]
    )
    assert (exit_code, output.split()[-1]) == (0, f"{web['a'].status.pod_ips[0].ip}/32")
    with pytest.raises(Refused, match="not running"):
        await site.exec("default/nobody", ["true"])


async def test_routes_to_vips_follow_the_gateways(site: Site) -> None:
    async def hops(*family: str) -> list[str]:
        _, output, _ = await site.exec(
            "router",
            [
                "ip",
                *family,
                "-json",
                "route",
                "show",
                "root",
                "203.0.113.0/24" if not family else "2001:db8:f::/64",
            ],
        )
        (route,) = json.loads(output)
        return [hop["gateway"] for hop in route.get("nexthops", [route])]

    assert [await hops(), await hops("-6")] == [
        ["192.0.2.11", "192.0.2.12"],
        ["2001:db8:1::b", "2001:db8:1::c"],
    ]
    try:
        await site.route_vips(["gw2"])
        assert [await hops(), await hops("-6")] == [["192.0.2.12"], ["2001:db8:1::c"]]
    finally:
        await site.route_vips(["gw1", "gw2"])


async def slices_of(client: Client, name: str) -> list[EndpointSlice]:
    return await client.list(ENDPOINT_SLICES, label_selector=f"kubernetes.io/service-name={name}")


async def states_of(client: Client, name: str) -> dict[str, tuple[bool, bool, bool]]:
    """Return (ready, serving, terminating) by IPv4 address."""
    return {
        endpoint.addresses[0]: (endpoint.ready, endpoint.serving, endpoint.terminating)
        for slice_ in await slices_of(client, name)
        for endpoint in slice_.endpoints or ()
        if slice_.address_type == "IPv4"
    }


READY, NOT_READY, TERMINATING = (True, True, False), (False, False, False), (False, True, True)


async def test_slices_follow_readiness_named_ports_and_deletion(site: Site, client: Client) -> None:
    await site.apply(
        [pod("s1", "node1", app="s"), pod("s2", "node2", app="s", port=9090), service("s", "s")]
    )
    await site.await_pods()
    address = {
        name: (await client.get(PODS, ("default", name))).status.pod_ips[0].ip
        for name in ("s1", "s2")
    }

    async def are(**wanted: tuple[bool, bool, bool]) -> None:
        expected = {address[name]: state for name, state in wanted.items()}

        async def same() -> bool:
            return await states_of(client, "s") == expected

        await until(same, f"the endpoints {expected}")

    await are(s1=READY, s2=READY)
    ports = {
        slice_.ports[0].port: slice_.endpoints
        for slice_ in await slices_of(client, "s")
        if slice_.ports
    }
    assert {
        port: [(e.addresses[0], e.node_name) for e in endpoints or ()]
        for port, endpoints in ports.items()
    } == {
        8080: [(address["s1"], "node1")],
        9090: [(address["s2"], "node2")],
    }
    await client.patch(
        PODS, ("default", "s1"), {"metadata": {"annotations": {"lab.fairlead.io/ready": "false"}}}
    )
    await are(s1=NOT_READY, s2=READY)
    await client.patch(
        PODS, ("default", "s1"), {"metadata": {"annotations": {"lab.fairlead.io/ready": None}}}
    )
    await are(s1=READY, s2=READY)
    # An open connection keeps the server running, and so the terminating endpoint, during the test.
    _, writer = await site.connect("client1", address["s2"], 9090)
    writer.write(b"hello\n")
    await client.delete(PODS, ("default", "s2"))
    await are(s1=READY, s2=TERMINATING)
    writer.close()
    await are(s1=READY)
    await client.delete(SERVICES, ("default", "s"))

    async def gone() -> bool:
        return not await slices_of(client, "s")

    await until(gone, "the deletion of slices with their Service")
    await client.delete(PODS, ("default", "s1"))


async def test_endpoints_follow_readiness_and_are_deleted_with_their_service(
    site: Site, client: Client
) -> None:
    """Endpoints that another client wrote for a Service without a selector stay unchanged."""
    theirs = {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": {"name": "theirs"},
        "subsets": [
            {"addresses": [{"ip": "192.0.2.99"}], "ports": [{"port": 80, "protocol": "TCP"}]}
        ],
    }
    await site.apply(
        [
            service("theirs", "", selector=None),
            theirs,
            pod("e1", "node1", app="e"),
            service("e", "e"),
        ]
    )
    await site.await_pods()
    address = (await client.get(PODS, ("default", "e1"))).status.pod_ips[0].ip

    async def are(name: str, ready: list[str], waiting: list[str]) -> None:
        async def same() -> bool:
            try:
                subsets = (await client.get(ENDPOINTS, ("default", name))).subsets or ()
            except NotFound:
                return False
            found = [a.ip for subset in subsets for a in subset.addresses]
            return (found, [a.ip for subset in subsets for a in subset.not_ready_addresses]) == (
                ready,
                waiting,
            )

        await until(same, f"endpoints of {name}: {ready} {waiting}")

    await are("e", [address], [])
    await client.patch(
        PODS, ("default", "e1"), {"metadata": {"annotations": {"lab.fairlead.io/ready": "false"}}}
    )
    await are("e", [], [address])
    await client.delete(PODS, ("default", "e1"))
    await are("e", [], [])
    await are("theirs", ["192.0.2.99"], [])
    for name in ("e", "theirs"):
        await client.delete(SERVICES, ("default", name))

    async def gone() -> bool:
        return [
            each.metadata.name for each in await client.list(ENDPOINTS, namespace="default")
        ] == ["theirs"]

    await until(gone, "the deletion of Endpoints with their Service")
    await client.delete(ENDPOINTS, ("default", "theirs"))


async def test_slices_of_a_service_without_selector_are_left_alone(
    site: Site, client: Client, web: dict[str, Pod]
) -> None:
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "mine", "labels": {"kubernetes.io/service-name": "mine"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["192.0.2.99"]}],
        "ports": [{"name": "", "port": 80, "protocol": "TCP"}],
    }
    await site.apply([service("mine", "", selector=None), service("web", "web"), slice_])

    async def written() -> bool:
        return len(await states_of(client, "web")) == 3

    await until(written, "slices of the later Service")
    assert [found.metadata.name for found in await slices_of(client, "mine")] == ["mine"]
    for name in ("mine", "web"):
        await client.delete(SERVICES, ("default", name))


async def test_a_deleted_pod_serves_until_its_connections_end(site: Site, client: Client) -> None:
    await site.apply([pod("g", "node1", app="g")])
    await site.await_pods()
    place = site.namespace("default/g")
    address = (await client.get(PODS, ("default", "g"))).status.pod_ips[0].ip
    reader, writer = await site.connect("client1", address, 8080)
    writer.write(b"before\n")
    assert json.loads(await reader.readline())["text"] == "before"
    await client.delete(PODS, ("default", "g"))
    await asyncio.sleep(1.5)
    assert (await call(site, "client1", address))["pod"] == "g"
    writer.write(b"after\n")
    assert json.loads(await reader.readline())["text"] == "after"
    assert (await client.get(PODS, ("default", "g"))).metadata.deletion_timestamp
    writer.close()
    await until(lambda: is_gone(client, "g"), "the pod's end")
    assert place not in namespace.names(place)


async def is_gone(client: Client, name: str) -> bool:
    try:
        await client.get(PODS, ("default", name))
    except NotFound:
        return True
    return False


async def test_a_pod_is_killed_at_the_end_of_its_grace_period(site: Site, client: Client) -> None:
    await site.apply([pod("h", "node1", app="g", grace_s=1)])
    await site.await_pods()
    address = (await client.get(PODS, ("default", "h"))).status.pod_ips[0].ip
    reader, writer = await site.connect("client1", address, 8080)
    writer.write(b"stay\n")
    await reader.readline()
    await client.delete(PODS, ("default", "h"))
    await until(lambda: is_gone(client, "h"), "the pod's end")
    writer.close()


async def test_a_crashed_container_is_restarted(site: Site, client: Client) -> None:
    await site.apply([pod("k", "node1", app="k")])
    await site.await_pods()
    await process.one(site.name, "pod/node1/default.k").kill()

    async def restarted() -> bool:
        status = json.loads(await client.request("GET", PODS.path("default", "k")))["status"]
        ready = {condition["type"]: condition["status"] for condition in status["conditions"]}[
            "Ready"
        ]
        return bool(status["containerStatuses"][0]["restartCount"] == 1 and ready == "True")

    await until(restarted, "the restart")
    address = (await client.get(PODS, ("default", "k"))).status.pod_ips[0].ip
    assert (await call(site, "node2", address))["pod"] == "k"
    await client.request(
        "DELETE",
        PODS.path("default", "k"),
        body={"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0},
    )
    await until(lambda: is_gone(client, "k"), "the pod's end")


async def test_a_dead_node_is_silent_and_returns_with_its_pods(site: Site, client: Client) -> None:
    await site.apply([pod("n", "node2", app="n")])
    await site.await_pods()
    address = (await client.get(PODS, ("default", "n"))).status.pod_ips[0].ip
    await site.kill_node("node2")
    with pytest.raises(Unavailable, match=address):
        await site.connect("client1", address, 8080, timeout_s=0.3)
    assert process.find(site.name, "pod/node2/") == ()
    assert "node2" in [node.metadata.name for node in await client.list(NODES)]
    # The API server does not show the failure yet.
    assert (await client.get(PODS, ("default", "n"))).ready
    await site.revive_node("node2")

    async def answers() -> bool:
        pod = await client.get(PODS, ("default", "n"))
        with suppress(Unavailable):
            return bool((await call(site, "client1", pod.status.pod_ips[0].ip))["pod"] == "n")
        return False

    await until(answers, "the pod on the revived node")
    await client.delete(PODS, ("default", "n"))
    await until(lambda: is_gone(client, "n"), "the pod's end")


async def test_a_revived_node_has_no_ready_endpoint_of_before_its_boot(
    site: Site, client: Client
) -> None:
    """The kubelet reports a Pod as unready before it starts it, and the node's role starts after
    that, also if the control plane is late. Otherwise the role would lead connections to addresses
    that no longer exist."""
    await site.apply([pod("r", "node2", app="r"), service("r", "r")])
    (address,) = await until(lambda: states_of(client, "r"), "the endpoint")
    await site.kill_node("node2")
    before = await client.get(PODS, ("default", "r"))

    async def revive() -> dict[str, tuple[bool, bool, bool]]:
        await site.revive_node("node2")
        return await states_of(client, "r")

    async def is_on() -> bool:
        return not site.directory.is_off("node2")

    async def has_no_sandbox() -> bool:
        return not namespace.names(site.topology.pod_namespace("default", "r"))

    await until(has_no_sandbox, "the removal of the sandbox")
    control_plane = process.one(site.name, CLUSTER_LABEL)
    control_plane.send(signal.SIGSTOP)
    try:
        async with asyncio.TaskGroup() as group:
            reviving = group.create_task(revive())
            await until(is_on, "the boot of node2")
            await asyncio.sleep(0.8)
            control_plane.send(signal.SIGCONT)
    finally:
        control_plane.send(signal.SIGCONT)
    assert reviving.result().get(address) != READY
    await site.await_pods()
    events = await client.request(
        "GET",
        PODS.path("default"),
        parameters={
            "watch": "true",
            "resourceVersion": before.metadata.resource_version,
            "timeoutSeconds": "1",
        },
    )
    decoder = msgspec.json.Decoder(Pod)
    seen = [decoder.decode(ENVELOPE.decode(line).object) for line in events.splitlines()]
    assert [
        (each.status.pod_ips[0].ip == address, each.ready)
        for each in seen
        if each.metadata.uid == before.metadata.uid
    ] == [(True, False), (False, True)]
    await client.delete(SERVICES, ("default", "r"))
    await client.delete(PODS, ("default", "r"))
    await until(lambda: is_gone(client, "r"), "the pod's end")


async def test_a_host_network_pod_has_its_nodes_addresses(site: Site, client: Client) -> None:
    manifest = pod("hn", "node1", app="hn", port=18080)
    manifest["spec"]["hostNetwork"] = True
    await site.apply([manifest])
    await site.await_pods()
    assert (await call(site, "client1", "192.0.2.21", 18080))["pod"] == "hn"
    await client.delete(PODS, ("default", "hn"))
    await until(lambda: is_gone(client, "hn"), "the pod's end")
    assert namespace.path(site.namespace("node1")).exists()


async def test_a_role_that_does_not_run_cannot_be_stopped(site: Site) -> None:
    with pytest.raises(Conflict, match="gw1/gateway is not running"):
        await site.stop_role("gw1")
    with pytest.raises(Refused, match="no role"):
        await site.start_role("client1")
