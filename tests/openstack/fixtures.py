"""The real OpenStack as fixtures. Each part is started once in a run, when a test first needs it.

`octavia`: Octavia with provider `amphora`.
`octavia_proxy`: a proxy in front of it for one test, with a project of its own.
`keystone`: Octavia with provider `amphora` and authentication, and Keystone.
`cloud`: Octavia with both providers, over Neutron and OVN.
`cloud_proxies`: proxies in front of its APIs for one test, with a project of their own.
`packets`: its network carries packets while the test runs."""

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.openstack import clients, places
from tests.openstack.cloud import Cloud
from tests.openstack.fault_proxy import FaultProxy
from tests.openstack.keystone import Keystone
from tests.openstack.octavia import Octavia
from tests.openstack.packets import Packets
from tests.programs import needed


class FaultProxies(NamedTuple):
    """A proxy for each API of the cloud."""

    octavia: FaultProxy
    neutron: FaultProxy


@pytest.fixture(scope="session")
def openstack_programs() -> None:
    """A test that takes this runs only where `make setup` has installed OpenStack."""
    needed(places.require_all)


@pytest.fixture(scope="session")
def octavia(
    openstack_programs: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Octavia]:
    """Octavia without authentication; every caller is its administrator."""
    server = Octavia(tmp_path_factory.mktemp("octavia"))
    server.start()
    yield server
    server.end()


@pytest.fixture
def octavia_proxy(octavia: Octavia) -> Iterator[FaultProxy]:
    """A proxy for Octavia. Objects that are created through it belong to `proxy.project`, and are
    deleted after the test."""
    project = uuid.uuid4().hex
    with FaultProxy(octavia.url, project=project).listen() as proxy:
        yield proxy
    clients.delete_load_balancers(clients.without_auth(octavia=octavia.url), project)


@pytest.fixture(scope="session")
def cloud(openstack_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """The cloud without authentication; every caller is its administrator."""
    whole = Cloud(tmp_path_factory.mktemp("cloud"))
    whole.start()
    yield whole
    whole.end()


@pytest.fixture
def cloud_proxies(cloud: Cloud) -> Iterator[FaultProxies]:
    """Proxies in front of the cloud's Octavia and Neutron, both with one project. The load
    balancers and floating IPs of the project are deleted after the test."""
    project = uuid.uuid4().hex
    octavia, neutron = (
        FaultProxy(cloud.octavia.url, project=project),
        FaultProxy(cloud.neutron, project=project),
    )
    with octavia.listen(), neutron.listen():
        yield FaultProxies(octavia, neutron)
    client = cloud.client()
    clients.delete_load_balancers(client, project)
    for address in client.network.ips(project_id=project):
        client.network.delete_ip(address)


@pytest.fixture
async def packets(cloud: Cloud, tmp_path: Path) -> AsyncIterator[Packets]:
    """Let the cloud carry packets."""
    (directory := tmp_path / "chassis").mkdir()
    made = Packets(cloud, directory)
    await made.start()
    yield made
    made.end()


@pytest.fixture(scope="session")
def keystone(
    openstack_programs: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keystone]:
    """Keystone and its Octavia. `keystone.clouds` has two sets of credentials."""
    both = Keystone(tmp_path_factory.mktemp("keystone"))
    both.start()
    yield both
    both.end()
