"""Fixtures: a network namespace, and a folder with a short path for sockets."""

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
    """Run the test in a separate network namespace."""
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
    """Return a folder with a short path: pytest's own paths are too long for sockets."""
    path = Path(tempfile.mkdtemp(prefix="flp"))
    yield path / "h"
    pids = path / "h" / "haproxy.pid"
    for pid in (
        pids.read_text().split() if pids.exists() else ()
        # A failed test has not stopped it.
    ):
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)
    shutil.rmtree(path, ignore_errors=True)
