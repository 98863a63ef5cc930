"""A lab with Fairlead's roles: traffic from outside to a load-balancer address, while parts are
killed."""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.kube.objects import PODS, SERVICES
from fairlead.lab import namespace, process
from fairlead.lab.rundir import PINS
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 60
CONTAINERS = [{"name": "c", "image": "echo", "ports": [{"name": "web", "containerPort": 8080}]}]


def pod(name: str, node: str) -> dict[str, object]:
    metadata = {"name": name, "labels": {"app": "web"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": node, "containers": CONTAINERS},
    }


SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web"},
    "spec": {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "ipFamilyPolicy": "PreferDualStack",
        "selector": {"app": "web"},
        "ports": [{"port": 80, "targetPort": "web"}],
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with Site.create(f"r{os.getpid()}", nodes=2, gateways=1, clients=1) as site:
        await site.apply([pod("a", "node1"), pod("b", "node2"), SERVICE])
        await site.await_pods()
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vips(site: Site) -> tuple[str, ...]:
    """Return the Service's addresses, once all pods answer there."""
    async with site.client() as client, asyncio.timeout(DEADLINE_S):
        while not (
            ingress := (await client.get(SERVICES, ("default", "web"))).status.load_balancer.ingress
        ):
            await asyncio.sleep(0.05)
    found = tuple(entry.ip for entry in ingress)
    for address in found:
        await until_answered_by(site, address, {"a", "b"})
    return found


async def call(site: Site, address: str) -> tuple[str, str]:
    """Return (pod, peer) as reported by the pod that was reached."""
    reader, writer = await site.connect("client1", address, 80, timeout_s=1)
    try:
        async with asyncio.timeout(60):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            said = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
            return said["pod"], said["peer"]
    except (OSError, json.JSONDecodeError) as error:
        raise Unavailable(f"{address} did not answer whole: {error}") from error
    finally:
        writer.close()


async def until_answered_by(site: Site, address: str, pods: set[str]) -> None:
    """Return when these pods, and no others, answer twenty connections in a row."""
    answered: Counter[str] = Counter()
    try:
        async with asyncio.timeout(DEADLINE_S):
            while answered.keys() != pods or answered.total() < 20:
                try:
                    name, _ = await call(site, address)
                except Unavailable:
                    answered.clear()
                    continue
                if answered.total() >= 40 or name not in pods:
                    answered.clear()
                answered[name] += 1
    except TimeoutError:
        pytest.fail(f"{address} was answered by {dict(answered)}, not by {pods}")


async def test_pods_see_the_client(site: Site, vips: tuple[str, ...]) -> None:
    assert len(vips) == 2
    for address, client in zip(vips, site.topology.host("client1").addresses, strict=True):
        assert {(await call(site, address))[1] for _ in range(5)} == {client}


async def test_packets_are_forwarded_after_the_gateway_process_is_killed_and_restarted(
    site: Site, vips: tuple[str, ...]
) -> None:
    with pytest.raises(Refused, match="already running"):
        await site.start_role("gw1")
    await site.kill_role("gw1")
    with pytest.raises(Conflict, match="not running"):
        await site.kill_role("gw1")
    await until_answered_by(site, vips[0], {"a", "b"})
    await site.start_role("gw1")
    await until_answered_by(site, vips[0], {"a", "b"})


@pytest.mark.parametrize(("host", "left"), [("control", {"a", "b"}), ("node1", {"b"})])
async def test_a_stopped_role_can_be_started_again(
    site: Site, vips: tuple[str, ...], host: str, left: set[str]
) -> None:
    # A node whose health port is not served gets no new connections, although its rules exist.
    await site.stop_role(host)
    await until_answered_by(site, vips[0], left)
    await site.start_role(host)
    await until_answered_by(site, vips[0], {"a", "b"})


async def test_a_dead_node_gets_no_traffic_and_returns(site: Site, vips: tuple[str, ...]) -> None:
    await site.kill_node("node1")
    await until_answered_by(site, vips[0], {"b"})
    await site.revive_node("node1")
    for address in vips:
        await until_answered_by(site, address, {"a", "b"})


async def test_a_dead_gateway_boots_with_an_empty_kernel(site: Site, vips: tuple[str, ...]) -> None:
    await site.kill_node("gw1")
    with pytest.raises(Unavailable):
        await call(site, vips[0])
    await site.revive_node("gw1")
    await until_answered_by(site, vips[0], {"a", "b"})


async def test_a_running_host_is_not_revived(site: Site, vips: tuple[str, ...]) -> None:
    """A running host is left unchanged: its connections continue, and its namespace is the same.
    Only a role that has exited is started."""
    for host in ("node1", "gw1", "control"):
        before = namespace.identity(site.namespace(host))
        with pytest.raises(
            Refused,
            match=rf"{host} of lab {site.name} is up, and its roles run; .* lab kill --name "
            rf"{site.name} {host}",
        ):
            await site.revive_node(host)
        await site.kill_role(host)
        await site.revive_node(host)
        with pytest.raises(Refused, match="already running"):
            await site.start_role(host)
        assert namespace.identity(site.namespace(host)) == before
    with pytest.raises(Refused, match=f"client1 of lab {site.name} is up; "):
        await site.revive_node("client1")
    await until_answered_by(site, vips[0], {"a", "b"})


async def test_services_are_served_while_the_control_host_is_down(
    site: Site, vips: tuple[str, ...]
) -> None:
    """Existing Services are served without the control host; once it is back, new Services are
    served too, and no object is lost."""
    await site.kill_node("control")
    with pytest.raises(Unavailable):
        await site.connect("node1", "192.0.2.5", 6443, timeout_s=0.3)
    await until_answered_by(site, vips[0], {"a", "b"})
    await site.revive_node("control")
    await site.apply([pod("c", "node1")])
    for address in vips:
        await until_answered_by(site, address, {"a", "b", "c"})
    async with site.client() as client:
        await client.delete(PODS, ("default", "c"))
    await until_answered_by(site, vips[0], {"a", "b"})


async def test_the_lab_has_the_configmap_of_the_chart(site: Site, vips: tuple[str, ...]) -> None:
    """With this ConfigMap `kubectl fairlead plan` needs only the lab's kubeconfig as an option."""
    programs = Path(sys.executable).parent
    environment = os.environ | {
        "KUBECONFIG": str(site.directory.kubeconfig),
        "PATH": os.pathsep.join((str(programs), os.environ["PATH"])),
    }
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        "kubectl", "fairlead", "plan", stdout=pipe, stderr=pipe, env=environment
    )
    async with asyncio.timeout(DEADLINE_S):
        output, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    assert f"{vips[0]}:80/TCP" in output.decode()


async def test_down_removes_the_pins(lab_name: str) -> None:
    async with Site.create(lab_name, nodes=0, gateways=1, clients=0) as lab:
        assert list(PINS.glob(f"{lab_name}-gw1/*"))
        await lab.kill_role("gw1")
    assert not list(PINS.glob(f"{lab_name}-*"))
    assert not namespace.names(f"fl-{lab_name}-")
    assert process.find(lab_name) == ()


async def test_a_role_that_cannot_start_reports_the_reason_and_the_lab_is_removed(
    lab_name: str,
) -> None:
    lab = Site.create(lab_name, nodes=0, gateways=0, clients=0)

    def spoil(step: str) -> None:
        if step.startswith("fairlead controller"):
            Path(lab.directory.config).write_text("pools: 7\n")

    with pytest.raises(Unavailable, match=r"control/controller exited at startup(.|\n)*\$\.pools"):
        await lab.up(spoil)
    assert not namespace.names(f"fl-{lab_name}-")
    assert process.find(lab_name) == ()
    assert not lab.directory.path.exists()
