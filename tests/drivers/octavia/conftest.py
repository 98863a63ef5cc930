"""Fixtures: a driver connected to the real Octavia."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import Site
from tests.openstack.cloud import Cloud
from tests.openstack.fixtures import Fronts
from tests.openstack.front import Front

from fairlead.model import ServiceKey


class Heard:
    """An event recorder that stores the Events it receives."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def event(self, service: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        self.events.append((reason, message))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def site(octavia_front: Front, tmp_path: Path, heard: Heard) -> Iterator[Site]:
    made = Site(octavia_front, tmp_path, heard)
    yield made
    octavia_front.pass_on()
    made.cloud.close()


@pytest.fixture
def cloud_site(fronts: Fronts, cloud: Cloud, tmp_path: Path, heard: Heard) -> Iterator[CloudSite]:
    made = CloudSite(fronts, cloud, tmp_path, heard)
    yield made
    fronts.octavia.pass_on()
    fronts.neutron.pass_on()
    made.cloud.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("histories")))
    if "network_seed" in metafunc.fixturenames:
        metafunc.parametrize("network_seed", range(metafunc.config.getoption("histories") // 2))
