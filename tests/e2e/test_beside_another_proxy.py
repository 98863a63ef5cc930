"""A node that only decapsulates, beside another service proxy, with the privileges of the chart.

No kube-proxy runs here. A second `fairlead node`, which has no tunnel, translates packets for
published addresses as kube-proxy's rules do. The test therefore shows that both leave each other's
rules alone and that a packet passes through both, not what kube-proxy itself would do."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.e2e.load import Web, until

from fairlead.lab.process import Process
from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

NODE = "node1"
CAPABILITIES = {"ipip": "+net_admin,+bpf,+perfmon", "vxlan": "+net_admin"}
"""The capabilities that the chart grants to such a node; tests/deploy/test_chart.py checks the
chart."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CAPABILITIES)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    async with Site.create(
        f"beside{os.getpid()}",
        nodes=0,
        far_nodes=1,
        transport=Transport(tunnel=request.param, attach="tc"),
    ) as made:
        await made.stop_role(NODE)
        await run(made, "--config", str(made.directory.config), "--cleanup")
        yield made


async def run(site: Site, *options: str) -> None:
    code, said, errors = await site.exec(NODE, ["fairlead", "node", *options])
    assert code == 0, said + errors


def start(site: Site, name: str, port: int, allowed: str, **sections: Any) -> Process:
    """Start a `fairlead node` with these sections in its configuration, and with only these
    capabilities."""
    config = yaml.safe_load(site.directory.config.read_text()) | sections
    path = site.directory.path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    confine = [
        "setpriv",
        "--no-new-privs",
        "--inh-caps",
        "-all",
        "--bounding-set",
        f"-all,{allowed}",
    ]
    program = str(Path(sys.executable).with_name("fairlead"))
    files = [
        "--config",
        str(path),
        "--kubeconfig",
        str(site.directory.kubeconfig_inside),
        "--node-name",
        NODE,
    ]
    listen = f"127.0.0.1:{port}"
    return site.spawn(
        NODE, [*confine, program, "node", *files, "--listen", listen], label=f"{NODE}/{name}"
    )


async def test_a_node_that_only_decapsulates_creates_only_the_tunnel_which_outlives_the_process(
    site: Site,
) -> None:
    web = Web(site)
    await web.start([NODE])
    await web.create()

    async def answers() -> bool:
        return (await site.exec("client1", ["curl", "-sfm1", f"http://{web.address}/"]))[0] == 0

    async def ready(port: int) -> bool:
        return (await site.exec(NODE, ["curl", "-sf", f"http://127.0.0.1:{port}/readyz"]))[0] == 0

    proxy = start(site, "proxy", 9442, "+net_admin", tunnel={"kind": "none"})
    await until(lambda: ready(9442), "readiness of the service proxy")
    await web.await_weights([NODE])
    assert not await answers()
    before = await rules_of_the_proxy(site)
    tunnel = start(
        site, "tunnel", 9452, CAPABILITIES[site.size.transport.tunnel], node={"serviceProxy": False}
    )
    await until(lambda: ready(9452), "the tunnel's end")
    await until(answers, "an answer through the tunnel")
    assert await rules_of_the_proxy(site) == before
    for process in (tunnel, proxy):
        await process.kill()
    for _ in range(20):
        assert await answers()
    proxy = start(site, "proxy2", 9442, "+net_admin", tunnel={"kind": "none"})
    # A node without a tunnel in its configuration deletes a tunnel that is left over.
    async with asyncio.timeout(30):
        while await answers():
            await asyncio.sleep(0.1)
    await proxy.kill()


async def rules_of_the_proxy(site: Site) -> str:
    code, listed, errors = await site.exec(NODE, ["nft", "list", "table", "inet", "fairlead"])
    assert code == 0, errors
    return listed
