"""Gateways on hosts outside the cluster: the commands of docs/install.md give them access, and the
systemd unit is valid."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.deploy.chart import DEPLOY, EVERYTHING, capabilities, render
from tests.deploy.documented import Reader, commands_of

from fairlead.config import Config
from fairlead.drivers.proxy.render import Paths
from fairlead.drivers.proxy.render import render as render_proxy
from fairlead.errors import Refused
from fairlead.kube.auth import find_access
from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICES
from fairlead.lab.kubeapiserver import KubeApiServer

UNIT = DEPLOY / "systemd" / "fairlead-gateway.service"
UNITS = sorted(UNIT.parent.iterdir())


async def test_the_documented_commands_give_a_gateway_access_to_the_api(
    server: KubeApiServer, tmp_path: Path
) -> None:
    reader = Reader(tmp_path, server.access)
    for section in ("With plain manifests", "Gateways outside the cluster"):
        (commands,) = commands_of(section)
        said = await reader.run(commands)
    assert said.endswith("yes\n")
    assert {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("token", "kubeconfig")} == {
        "token": 0o600,
        "kubeconfig": 0o600,
    }
    # The gateway is started in another folder: the token's path is relative to the kubeconfig.
    async with Client(find_access(tmp_path / "kubeconfig")) as client:
        for resource in (SERVICES, ENDPOINT_SLICES, NODES):
            await client.page(resource)
        with pytest.raises(Refused, match="fairlead-gateway"):
            await client.list(LEASES)


def analyze(unit: Path, *command: str) -> str:
    done = subprocess.run(
        ["systemd-analyze", *command, str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(params=UNITS, ids=lambda path: path.stem)
def unit(request: pytest.FixtureRequest, systemd_analyze: Path, tmp_path: Path) -> Path:
    """A unit, with a program that exists on this machine."""
    assert systemd_analyze.name == "systemd-analyze"
    original: Path = request.param
    copy = tmp_path / original.name
    copy.write_text(original.read_text().replace("/opt/fairlead/bin/fairlead", "/bin/true"))
    return copy


def test_systemd_accepts_the_unit(unit: Path) -> None:
    assert analyze(unit, "verify") == ""


def test_the_unit_is_confined(unit: Path) -> None:
    """The measure is systemd's exposure level: 10 is a service without any confinement, below 3 is
    rated OK."""
    (exposure,) = re.findall(
        r"Overall exposure level for \S+: ([0-9.]+)", analyze(unit, "security", "--offline=true")
    )
    assert float(exposure) < 3


def test_haproxy_outlives_the_gateway_of_the_unit() -> None:
    """systemd ends only the gateway's process, and keeps the folder in which the next gateway finds
    HAProxy."""
    lines = UNIT.read_text().splitlines()
    folder = Path(Config().gateway.proxy_path).parent
    assert {
        "KillMode=process",
        f"RuntimeDirectory={folder.relative_to('/run')}",
        "RuntimeDirectoryPreserve=yes",
    } <= set(lines)


def test_the_unit_permits_all_file_descriptors_that_haproxy_needs() -> None:
    (limit,) = re.findall(r"^LimitNOFILE=(\d+)", UNIT.read_text(), flags=re.MULTILINE)
    (taken,) = re.findall(r"fd-hard-limit (\d+)", render_proxy({}, Paths("/run/fairlead/haproxy")))
    assert int(limit) >= int(taken)


def test_the_unit_has_the_capabilities_of_the_chart(helm: Path) -> None:
    objects = render(helm, "--values", EVERYTHING)
    (bounds,) = re.findall(r"^CapabilityBoundingSet=(.*)", UNIT.read_text(), flags=re.MULTILINE)
    assert bounds.split() == [f"CAP_{each}" for each in capabilities(objects, "gateway")]
