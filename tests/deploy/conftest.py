"""An API server for tests that install or remove objects on which other tests depend."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fairlead.lab.kubeapiserver import KubeApiServer


@pytest.fixture
async def server(real_programs: None, tmp_path: Path) -> AsyncIterator[KubeApiServer]:
    """A real API server for this test alone."""
    async with KubeApiServer(tmp_path / "server", lab=f"deploy{os.getpid()}") as server:
        yield server
