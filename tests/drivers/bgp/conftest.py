"""Fixtures: a host and a router that share a link, each in its own network namespace."""

import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.drivers.bgp.routers import ROUTERS, Router

from fairlead.lab import namespace

HOST = f"flt-{os.getpid()}-bgp-host"
OTHER = f"flt-{os.getpid()}-bgp-other"
ROUTER = f"flt-{os.getpid()}-bgp-router"
SECOND = f"flt-{os.getpid()}-bgp-second"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def link() -> Iterator[None]:
    """Run the test in the namespace of a host. A bridge connects it to another host and to two
    routers: .1, .2, .254 and .253 of 198.51.100.0/24 and 2001:db8:1::/64."""
    names = {HOST: 1, OTHER: 2, ROUTER: 254, SECOND: 253}
    bridge = f"flt-{os.getpid()}-bgp-bridge"
    for name in (bridge, *names):
        namespace.create(name)
    try:
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for name, number in names.items():
            port = f"p{number}"
            _ip("-n", name, "link", "set", "lo", "up")
            words = ("link", "add", "e0", "netns", name, "type", "veth", "peer", "name", port)
            _ip(*words, "netns", bridge)
            _ip("-n", bridge, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "link", "set", "e0", "up")
            _ip("-n", name, "addr", "add", f"198.51.100.{number}/24", "dev", "e0")
            _ip("-n", name, "addr", "add", f"2001:db8:1::{number}/64", "dev", "e0", "nodad")
        with namespace.inside(HOST):
            yield
    finally:
        for name in (*names, bridge):
            namespace.delete(name)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short path: pytest's own paths are too long for sockets."""
    path = Path(tempfile.mkdtemp(prefix="flb"))
    path.chmod(0o755)
    yield path
    for file in path.rglob("bird.pid"):  # a BIRD that a test left running
        with suppress(ValueError, OSError):
            descriptor = os.pidfd_open(int(file.read_text()))
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            select.select([descriptor], [], [], 10)  # it writes to its log until it ends
            os.close(descriptor)
    shutil.rmtree(path, ignore_errors=True)


Routers = Callable[..., Router]


@pytest.fixture
def router_of(folder: Path) -> Iterator[Routers]:
    """Return a function that creates a router, which ends with the test."""
    created: list[Router] = []

    def create(kind: str, *neighbors: Any, inside: str = ROUTER, **fields: Any) -> Router:
        place = folder / f"r{len(created)}"
        place.mkdir()
        created.append(ROUTERS[kind](inside, place, *neighbors, **fields))
        return created[-1]

    yield create
    for each in created:
        each.stop()
