"""`fairlead gateway --cleanup` removes what remains after a container has ended together with its
HAProxy and its directory."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.drivers.proxy.site import VIP, balancer, reconcile

from fairlead.announce_sections import AnnounceConfig, BgpConfig
from fairlead.config import ApiServerConfig, Config, GatewayConfig
from fairlead.drivers.proxy import ProxyDriver
from fairlead.drivers.proxy.process import Haproxy
from fairlead.net import localroutes
from fairlead.roles.data_plane import apiserver_balancer
from fairlead.roles.gateway import clean_up

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]

API = ApiServerConfig(addresses=("203.0.113.5",), servers=("127.0.0.1:7443",))
BALANCERS = ["the balancer of class fairlead.io/proxy", "the API server balancer"]


def end_with_its_container(haproxy: Haproxy) -> None:
    pid = haproxy.master_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    shutil.rmtree(haproxy.folder)


async def routes() -> set[str]:
    return await localroutes.present() | await localroutes.present(localroutes.API_PROTOCOL)


def rules() -> str:
    return subprocess.run(
        ["nft", "list", "ruleset"], capture_output=True, text=True, check=True
    ).stdout


async def test_cleanup_removes_everything_whether_haproxy_runs_or_not(folder: Path) -> None:
    section = GatewayConfig(
        proxy_path=str(folder), pin_path=str(folder.parent / "pins"), api_server=API
    )
    # The default directory of BIRD may belong to another process of this machine.
    announce = AnnounceConfig(bgp=BgpConfig(directory=str(folder.parent / "bird")))
    config = Config(gateway=section, announce=announce)
    without_api = msgspec.structs.replace(
        config, gateway=msgspec.structs.replace(section, api_server=None)
    )
    for running in (True, False):
        driver, api = ProxyDriver(folder), apiserver_balancer(config)
        await driver.read(None)
        await reconcile(driver, balancer({"node1": 1}))
        await api.ensure()
        assert await routes() == {VIP, *API.addresses}
        assert rules().count("table inet fairlead_") == 2
        if not running:
            end_with_its_container(driver.haproxy)
            end_with_its_container(api.haproxy)
        with capture_logs() as said:
            await clean_up(without_api)  # no configuration of the API server balancer is needed
        assert [line["what"] for line in said if line["event"] == "removed"] == BALANCERS
        assert (await routes(), rules()) == (set(), "")
    with capture_logs() as said:
        await clean_up(config)
    assert ["nothing to remove" in line["event"] for line in said] == [True]
