"""Fixtures: a driver connected to the real Octavia."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import Site
from tests.openstack.cloud import Cloud
from tests.openstack.fault_proxy import FaultProxy
from tests.openstack.fixtures import FaultProxies

from fairlead.model import ServiceKey


class StoringRecorder:
    """An event recorder that stores the Events it receives."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def event(self, service: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        self.events.append((reason, message))


@pytest.fixture
def recorder() -> StoringRecorder:
    return StoringRecorder()


@pytest.fixture
def site(octavia_proxy: FaultProxy, tmp_path: Path, recorder: StoringRecorder) -> Iterator[Site]:
    made = Site(octavia_proxy, tmp_path, recorder)
    yield made
    octavia_proxy.forward_all()
    made.cloud.close()


@pytest.fixture
def cloud_site(
    cloud_proxies: FaultProxies, cloud: Cloud, tmp_path: Path, recorder: StoringRecorder
) -> Iterator[CloudSite]:
    made = CloudSite(cloud_proxies, cloud, tmp_path, recorder)
    yield made
    cloud_proxies.octavia.forward_all()
    cloud_proxies.neutron.forward_all()
    made.cloud.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("histories")))
    if "network_seed" in metafunc.fixturenames:
        metafunc.parametrize("network_seed", range(metafunc.config.getoption("histories") // 2))
