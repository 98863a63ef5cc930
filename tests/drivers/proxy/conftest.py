"""A network namespace, and a short path for sockets."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.drivers.proxy.site import balancer

from fairlead.drivers.proxy.spec import ProxySpec, specs_of
from fairlead.lab import namespace
from fairlead.model import ServiceKey


@pytest.fixture
def inside() -> Iterator[None]:
    """The test runs in a namespace of its own."""
    name = f"flt-{os.getpid()}-proxy"
    namespace.create(name)
    try:
        with namespace.inside(name):
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
    finally:
        namespace.delete(name)


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own are too long for a socket's path."""
    path = Path(tempfile.mkdtemp(prefix="flp"))
    yield path / "h"
    pids = path / "h" / "haproxy.pid"
    for pid in pids.read_text().split() if pids.exists() else ():  # a test that failed has not ended it
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_many() -> Callable[[int], dict[ServiceKey, ProxySpec]]:
    """So many Services, each with an address of its own and two nodes."""

    def make(count: int) -> dict[ServiceKey, ProxySpec]:
        keys = [ServiceKey("default", f"web{at}") for at in range(count)]
        made = [
            balancer({"node1": 1, "node2": 2}, key=key, addresses=(f"198.18.{at >> 8}.{at & 255}",))
            for at, key in enumerate(keys)
        ]
        return specs_of({each.service: each for each in made})

    return make
