"""A network namespace, and a short path for sockets."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fairlead.lab import namespace


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
    for pid in (
        pids.read_text().split() if pids.exists() else ()
    ):  # a test that failed has not ended it
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)
    shutil.rmtree(path, ignore_errors=True)
