"""The balancer for API servers. The gateway starts first, without even a kubeconfig. Then two real
API servers start, and all clients, including the gateway, reach them through the balancer. Failures
of an API server or of the gateway's process affect no client for long."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from ipaddress import ip_network
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import yaml

from fairlead.drivers.proxy import runtime
from fairlead.errors import Unavailable
from fairlead.lab import settings
from fairlead.lab.kubeapiserver import KubeApiServer
from fairlead.lab.process import Process
from fairlead.lab.site import Site
from fairlead.lab.topology import CONTROL

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 60.0
ADDRESS, ADDRESS6 = "203.0.113.5", "2001:db8:f::5"
URL, URL6 = f"https://{ADDRESS}:6443", f"https://[{ADDRESS6}]:6443"
PORTS = (7443, 7444)
MAX_CONNECTIONS = 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(real_programs: None) -> AsyncIterator[Site]:
    async with Site.create(
        f"apibal{os.getpid()}", nodes=0, gateways=1, clients=2, roles=False
    ) as site:
        yield site


class Gateway:
    """The gateway of the lab, with a configuration and a kubeconfig of its own."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self.kubeconfig = folder / "kubeconfig"
        self._config = folder / "fairlead.yaml"
        self.servers = [f"{site.topology.host(CONTROL).addresses[0]}:{port}" for port in PORTS]
        config = yaml.safe_load(site.directory.config.read_text())
        config["gateway"]["apiServer"] = {
            "addresses": [ADDRESS, ADDRESS6],
            "servers": self.servers,
            "sourceRanges": [
                str(ip_network(each)) for each in site.topology.host("client1").addresses
            ],
        }
        self._config.write_text(yaml.safe_dump(config))

    def _command(self, *more: str) -> list[str]:
        files = self.site.directory
        argv = [
            str(Path(sys.executable).with_name("fairlead")),
            "gateway",
            "--config",
            str(self._config),
        ]
        return [
            *argv,
            "--pin-path",
            str(files.pins("gw1")),
            "--proxy-path",
            str(files.proxy("gw1")),
            *more,
        ]

    def start(self) -> Process:
        return self.site.spawn(
            "gw1",
            self._command("--kubeconfig", str(self.kubeconfig), "--node-name", "gw1"),
            label="gw1/gateway",
        )

    async def clean_up(self) -> None:
        code, _, output = await self.site.exec("gw1", self._command("--cleanup"))
        assert code == 0, output

    async def ready(self) -> bool:
        code, _, _ = await self.site.exec("gw1", ["curl", "-sfm2", "http://127.0.0.1:9441/readyz"])
        return code == 0

    async def open_connections(self) -> list[int]:
        """Return the connections of each API server, as HAProxy reports them."""
        rows = await runtime.statistics(f"{self.site.directory.proxy('gw1')}-api/worker.sock")
        return [
            int(row["scur"]) for server in self.servers for row in rows if row["svname"] == server
        ]

    async def server_states(self) -> list[str]:
        """Return the state of the API servers, in the order of the configuration."""
        _, output, _ = await self.site.exec("gw1", ["curl", "-sfm2", "http://127.0.0.1:9441/state"])
        shown = json.loads(output or "{}").get("api_servers", {}).get("servers", {})
        return [shown.get(server, {}).get("state", "") for server in self.servers]


async def has_open(gateway: Gateway, *connections: int) -> bool:
    return await gateway.open_connections() == list(connections)


async def are_done(tasks: Sequence["asyncio.Future[bytes]"], count: int) -> bool:
    return sum(each.done() for each in tasks) >= count


async def until(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await holds():
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"waited {DEADLINE_S:.0f} s in vain for {what}")


async def lists_services(
    site: Site, token: str, host: str = "client1", times: int = 1, url: str = URL
) -> bool:
    """Return whether each of these sequential connections gets the list of Services."""
    argv = [
        "curl",
        "-skfm5",
        "-H",
        f"Authorization: Bearer {token}",
        f"{url}/api/v1/namespaces/default/services",
    ]
    for _ in range(times):
        if (await site.exec(host, argv))[0]:
            return False
    return True


async def accepts_connections(site: Site) -> bool:
    """Return whether the balancer accepts connections."""
    try:
        _, writer = await site.connect("client1", ADDRESS, 6443, timeout_s=1)
    except Unavailable:
        return False
    writer.close()
    return True


@pytest.mark.soak
async def test_clients_reach_an_api_server_while_servers_and_the_gateway_process_fail(
    site: Site, tmp_path: Path
) -> None:
    gateway = Gateway(site, tmp_path)
    gateway.start()
    await until(
        "connections to the balancer without any API server", lambda: accepts_connections(site)
    )
    assert not await gateway.ready()

    one = KubeApiServer(
        tmp_path / "cluster",
        lab=site.name,
        inside=site.topology.namespace(CONTROL),
        address=site.topology.host(CONTROL).addresses[0],
        port=PORTS[0],
    )
    async with one:
        other = one.replica(PORTS[1])
        await other.start_server()
        access = msgspec.structs.replace(one.access, server=URL)
        site.directory.write_kubeconfig(gateway.kubeconfig, settings.kubeconfig(site.name, access))
        await until("readiness of the gateway, through its own balancer", gateway.ready)
        await until("readiness of both API servers", lambda: has_states(gateway, "ready", "ready"))
        token = access.token
        assert await lists_services(site, token, times=6)
        assert await lists_services(site, token, url=URL6)
        assert not await lists_services(site, token, "client2", url=URL6)
        assert not await lists_services(site, token, "client2")
        assert await lists_services(site, token, "gw1")
        _, output, _ = await site.exec("gw1", ["fairlead", "status"])
        rows = [line.split() for line in output.splitlines()]
        assert ["API", "SERVER", "STATE", "OPEN", "CONNECTIONS"] in rows
        shown = {row[0]: row[1] for row in rows if row and row[0] in gateway.servers}
        assert shown == dict.fromkeys(gateway.servers, "ready")

        # The gateway's process is killed without effect on clients. Then an API server freezes: its
        # clients are disconnected, and reconnect to the other one.
        await site.kill_role("gw1")
        assert await lists_services(site, token, times=4)
        await until("the end of all connections", lambda: has_open(gateway, 0, 0))
        connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        while (
            0 in (open_counts := await gateway.open_connections())
            and len(connections) < MAX_CONNECTIONS
        ):
            connections.append(await site.connect("client1", ADDRESS, 6443))
            await asyncio.sleep(0.1)
        assert all(open_counts), open_counts
        assert other.server is not None
        other.server.send(signal.SIGSTOP)
        await until("answers of the other API server", lambda: lists_services(site, token, times=8))
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in connections]
        await until(
            "the end of the connections of the frozen API server",
            lambda: are_done(ended, open_counts[1]),
        )
        assert sum(each.done() for each in ended) == open_counts[1] < len(ended)
        gateway.start()
        await until("readiness of the new gateway process", gateway.ready)
        await until(
            "the state `down` of the frozen API server",
            lambda: has_states(gateway, "ready", "down"),
        )
        other.server.send(signal.SIGCONT)
        await until(
            "readiness of the continued API server", lambda: has_states(gateway, "ready", "ready")
        )
        for each in ended:
            each.cancel()
        for _, writer in connections:
            writer.close()

        # An API server that reports itself as not ready keeps its connections.
        connections = [await site.connect("client1", ADDRESS, 6443) for _ in range(2)]
        assert one.etcd is not None
        one.etcd.send(signal.SIGSTOP)
        await until(
            "the state `not ready` of both API servers",
            lambda: has_states(gateway, "not ready", "not ready"),
        )
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in connections]
        assert not (await asyncio.wait(ended, timeout=1))[0]
        one.etcd.send(signal.SIGCONT)
        await until(
            "readiness of both API servers again", lambda: has_states(gateway, "ready", "ready")
        )
        await until("answers of both API servers", lambda: lists_services(site, token, times=4))
        for each in ended:
            each.cancel()
        for _, writer in connections:
            writer.close()
        await other.down()

    await site.kill_role("gw1")
    assert await accepts_connections(site)
    await gateway.clean_up()
    assert not await accepts_connections(site)


async def has_states(gateway: Gateway, *states: str) -> bool:
    return await gateway.server_states() == list(states)
