"""The real OpenStack as fixtures. What is started, is started once in a run, and only when a test asks for it.

`octavia`: Octavia with provider `amphora`. `octavia_front`: the way to it for one test, with a project of its own.
"""

import uuid
from collections.abc import Iterator

import pytest
from tests.conftest import needed
from tests.openstack import clients, places
from tests.openstack.front import Front
from tests.openstack.octavia import Octavia


@pytest.fixture(scope="session")
def openstack_programs() -> None:
    """A test that takes this runs only where `make tools` has installed OpenStack."""
    needed(places.whole)


@pytest.fixture(scope="session")
def octavia(openstack_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Octavia]:
    """Octavia; every caller is its administrator."""
    server = Octavia(tmp_path_factory.mktemp("octavia"))
    server.start()
    yield server
    server.end()


@pytest.fixture
def octavia_front(octavia: Octavia) -> Iterator[Front]:
    """A front before Octavia. What is made through it belongs to `front.project`, and is deleted when the test has ended."""
    project = uuid.uuid4().hex
    with Front(octavia.url, project=project).listen() as front:
        yield front
    clients.clear(clients.without_auth(octavia=octavia.url), project)
