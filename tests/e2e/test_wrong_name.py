"""A `fairlead node` that is started with the name of another Node."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.load import Web, fetch, output, until

from fairlead.lab.site import ROLE_PORTS, Site

pytestmark = pytest.mark.root

PROGRAM = str(Path(sys.executable).with_name("fairlead"))
NODE2 = "192.0.2.22"


async def health_of(site: Site, host: str, port: int) -> str:
    """Return the status with which a port of the host's loopback answers."""
    url = f"http://127.0.0.1:{port}/readyz"
    return await output(site, host, "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", url)


async def answering(site: Site, address: str) -> list[str]:
    """Return the nodes of the pods that answer 12 connections; empty texts: no answer."""
    call = f'curl -s -m 2 http://{address}/ | grep -o \'"node": "[a-z0-9]*\' || echo'
    loop = f"for i in 1 2 3 4 5 6 7 8 9 10 11 12; do {call}; done"
    answers = await output(site, "client1", "sh", "-c", loop)
    return [line.rpartition('"')[2] for line in answers.split("\n")[:12]]


async def test_a_node_with_the_name_of_another_is_not_ready_and_gets_no_connections() -> None:
    async with Site.create(f"wrong{os.getpid()}", nodes=2, gateways=1, clients=1) as site:
        web = Web(site)
        await web.create()
        await web.place(("node1", "node2"))
        assert set(await answering(site, web.address)) == {"node1", "node2"}
        service = (await fetch(site, "node2", "/state"))["services"]["default/web"]
        port = service["plan"]["health_check"]["port"]

        await site.stop_role("node2")
        kubeconfig = str(site.directory.kubeconfig_of("node"))
        options = ("--config", str(site.directory.config), "--kubeconfig", kubeconfig)
        site.spawn("node2", [PROGRAM, "node", *options, "--node-name", "node1"], label="node2/node")

        async def is_known() -> bool:
            found = (await fetch(site, "node2", "/state")).get("host", [])
            return "NameOfAnotherNode" in [each["code"] for each in found]

        await until(is_known, "the finding about the name")
        assert await health_of(site, "node2", ROLE_PORTS["node"]) == "503"
        shown = await output(site, "node2", PROGRAM, "status")
        assert (
            f"does not work: this host has the address {NODE2} of Node node2 and no address of "
            "Node node1, whose name this node has" in shown
        )

        async def refuses() -> bool:
            return await health_of(site, "node2", port) == "503"

        await until(refuses, "the health port to answer 503")

        async def is_left() -> bool:
            states = {name: state for name, (_, state) in (await web.members()).items()}
            return states == {"node1": "active", "node2": "draining"}

        await until(is_left, "the gateway to leave the node")
        assert set(await answering(site, web.address)) == {"node1"}

        await site.stop_role("node2")
        await site.start_role("node2")
        await until(partial(serves_both, site, web.address), "both nodes to answer")


async def serves_both(site: Site, address: str) -> bool:
    return set(await answering(site, address)) == {"node1", "node2"}
