"""The real OpenStack as fixtures. Each part is started once in a run, when a test first needs it.

`octavia`: Octavia with provider `amphora`.
`octavia_front`: a front for it for one test, with a project of its own.
`keystone`: Octavia with provider `amphora` and authentication, and Keystone.
`cloud`: Octavia with both providers, over Neutron and OVN.
`fronts`: fronts for its APIs for one test, with a project of their own.
`packets`: its network carries packets while the test runs."""

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.openstack import clients, places
from tests.openstack.cloud import Cloud
from tests.openstack.front import Front
from tests.openstack.keystone import Keystone
from tests.openstack.octavia import Octavia
from tests.openstack.packets import Packets
from tests.programs import needed


class Fronts(NamedTuple):
    """A front for each API of the cloud."""

    octavia: Front
    neutron: Front


@pytest.fixture(scope="session")
def openstack_programs() -> None:
    """A test that takes this runs only where `make setup` has installed OpenStack."""
    needed(places.whole)


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
def octavia_front(octavia: Octavia) -> Iterator[Front]:
    """A front for Octavia. Objects that are created through it belong to `front.project`, and are
    deleted after the test."""
    project = uuid.uuid4().hex
    with Front(octavia.url, project=project).listen() as front:
        yield front
    clients.clear(clients.without_auth(octavia=octavia.url), project)


@pytest.fixture(scope="session")
def cloud(openstack_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """The cloud without authentication; every caller is its administrator."""
    whole = Cloud(tmp_path_factory.mktemp("cloud"))
    whole.start()
    yield whole
    whole.end()


@pytest.fixture
def fronts(cloud: Cloud) -> Iterator[Fronts]:
    """Fronts for the cloud's Octavia and Neutron, both with one project. Its load balancers and
    floating IPs are deleted after the test."""
    project = uuid.uuid4().hex
    octavia, neutron = (
        Front(cloud.octavia.url, project=project),
        Front(cloud.neutron, project=project),
    )
    with octavia.listen(), neutron.listen():
        yield Fronts(octavia, neutron)
    client = cloud.client()
    clients.clear(client, project)
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
