"""An API server for tests that install, and take away, what others need or do not expect."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fairlead.lab.kubeapiserver import KubeApiServer


@pytest.fixture
async def server(real_programs: None, tmp_path: Path) -> AsyncIterator[KubeApiServer]:
    """A real one, of this test alone."""
    async with KubeApiServer(tmp_path / "server", lab=f"deploy{os.getpid()}") as server:
        yield server
