"""A driver before the real Octavia."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers.octavia.site import Site
from tests.openstack.front import Front

from fairlead.model import ServiceKey


class Heard:
    """An event recorder that keeps what it is told."""

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
