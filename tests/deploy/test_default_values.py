"""The chart's default: with a pool of the nodes' own network and nothing else, a Service of type
LoadBalancer works, beside kube-proxy.

The roles run with the configuration, the rights and the capabilities of the rendered manifests, at
a real API server. Only the paths of pins are options, because the nodes of a lab share a bpffs."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from tests.deploy.chart import Manifest, capabilities, render
from tests.deploy.life import POD, Life, service, until

from fairlead.lab import kubeproxy
from fairlead.lab.process import Process
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

NODES = ("node1", "node2", "node3")
GIVEN = (
    "namespace.create=true,config.pools[0].name=main,"
    "config.pools[0].addresses={192.0.2.240-192.0.2.250}"
)
PORT = 9441


class Installation:
    """The installed chart."""

    def __init__(self, life: Life, objects: list[Manifest]) -> None:
        self.life = life
        self.site = life.site
        self._capabilities = capabilities(objects, "gateway")

    async def start(self, node: str) -> Process:
        """Start the gateway on a node and return when it is ready."""
        bounds = ",".join(("-all", *(f"+{each.lower()}" for each in self._capabilities)))
        files = self.site.directory
        started = self.site.spawn(
            node,
            [
                *("setpriv", "--no-new-privs", "--inh-caps", "-all", "--bounding-set", bounds),
                *(str(Path(sys.executable).with_name("fairlead")), "gateway"),
                *("--config", str(self.life.configuration)),
                *("--kubeconfig", str(self.life.kubeconfig("gateway"))),
                *("--node-name", node, "--listen", f"127.0.0.1:{PORT}"),
                *("--pin-path", str(files.pins(node)), "--proxy-path", str(files.proxy(node))),
            ],
            label=f"{node}/gateway",
        )
        await self.life.ready(node, PORT)
        return started

    async def seen(self, caller: str, address: str) -> str:
        """Return the address of the caller as the pod sees it; empty if there is no answer."""
        code, answer, _ = await self.site.exec(caller, ["curl", "-sfm2", f"http://{address}/"])
        return str(json.loads(answer)["peer"]) if code == 0 else ""

    async def neighbor(self, caller: str, address: str) -> str:
        """Return the MAC address to which a host of the nodes' network sends."""
        _, shown, _ = await self.site.exec(caller, ["ip", "-j", "neigh", "show", address])
        (entry,) = json.loads(shown)
        return str(entry["lladdr"])


@pytest.fixture(scope="module")
def objects(helm: Path) -> list[Manifest]:
    return render(helm, "--set", GIVEN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def installed(
    real_programs: None,
    kube_proxy: Path,
    objects: list[Manifest],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Installation]:
    site = Site.create(
        f"default{os.getpid()}",
        nodes=len(NODES),
        gateways=0,
        clients=1,
        lan_clients=1,
        gateways_on_nodes=True,
        node_proxy="kube-proxy",
        announce="l2",
        roles=False,
        apiserver="real",
    )
    async with site:
        life = Life(site, tmp_path_factory.mktemp("life"))
        await asyncio.gather(*(kubeproxy.start(site, node) for node in NODES))
        await life.install(objects)
        life.start("controller", "control", 9440)
        await life.ready("control", 9440)
        yield Installation(life, objects)


async def test_a_pool_is_enough_for_a_service(installed: Installation) -> None:
    """The Service answers hosts of the nodes' network and clients behind the router, and its pod
    sees their addresses. A rolling restart of the gateways, and their end, interrupt nothing and
    move nothing."""
    site, life = installed.site, installed.life
    gateways = {node: await installed.start(node) for node in NODES}
    await life.kubectl("apply", "-f", "-", objects=[POD, service("web", 80)])
    await site.await_pods()
    await until("the Service has an address", partial(has_address, life))
    (address,) = await life.addresses("web")
    for caller in ("client1", "host1"):
        own = site.topology.host(caller).addresses[0]
        await until(
            f"the pod sees {caller} as {own}", partial(is_seen, installed, caller, address, own)
        )
    owner = await installed.neighbor("host1", address)
    await until("one announcer shows the address", partial(has_one_owner, life, address))
    for node in NODES:
        await gateways[node].stop(10)
        assert await installed.seen("host1", address)
        gateways[node] = await installed.start(node)
        assert await installed.seen("client1", address)
    for each in gateways.values():
        await each.kill()
    assert await installed.seen("host1", address)
    assert await installed.neighbor("host1", address) == owner


async def has_address(life: Life) -> bool:
    return bool(await life.addresses("web"))


async def is_seen(installed: Installation, caller: str, address: str, own: str) -> bool:
    return await installed.seen(caller, address) == own


async def has_one_owner(life: Life, address: str) -> bool:
    """Return whether exactly one Announcer shows the address."""
    shown = json.loads(await life.kubectl("get", "announcers", "-o", "json"))["items"]
    assert {each["metadata"]["name"] for each in shown} <= {f"gateway-{node}" for node in NODES}
    found = [
        one
        for each in shown
        for one in each.get("status", {}).get("addresses", [])
        if one["address"] == address
    ]
    return len(found) == 1
