"""Fixtures that find or start the programs that `make tools` builds, and Hypothesis's settings.

They are a plugin, because the nested test runs (tests/nested.py) use the conftest without them."""

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.needs import MISSING

from bench import scale
from fairlead.errors import Refused
from fairlead.lab.kubeapiserver import KubeApiServer, find_program

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")  # a busy machine proves nothing about an example


@pytest.fixture(scope="session")
def real_programs() -> None:
    """Require kube-apiserver and etcd."""
    needed(partial(find_program, "kube-apiserver"))
    needed(partial(find_program, "etcd"))


@pytest.fixture(scope="session")
def older_etcd() -> Path:
    """Debian's etcd, over which kube-apiserver has no streamed lists. A test with this fixture
    needs that etcd."""
    return needed(find_older_etcd)


@pytest.fixture(scope="session")
def kube_proxy() -> Path:
    """Require kube-proxy, and return its path."""
    return needed(partial(find_program, "kube-proxy"))


@pytest.fixture(scope="session")
def helm() -> Path:
    """The program, likewise."""
    return needed(partial(find_program, "helm"))


@pytest.fixture(scope="session")
def systemd_analyze() -> Path:
    """The program, likewise."""
    return needed(partial(find_program, "systemd-analyze"))


@pytest.fixture(scope="session")
def official_client() -> Path:
    """The Python that has the official client, likewise."""
    return needed(scale.official_client)


def needed(find: Callable[[], Path]) -> Path:
    """Return the path of the program; without it, skip the test."""
    try:
        return find()
    except Refused as error:
        if os.environ.get("CI"):
            pytest.fail(f"{MISSING}: {error}")
        pytest.skip(f"{MISSING}: {error}")


@pytest.fixture(scope="session")
def real_apiserver(
    real_programs: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeApiServer]:
    """One real API server for all tests of this process. Tests avoid conflicts by their namespaces
    and names, and delete objects without a namespace."""
    server = KubeApiServer(tmp_path_factory.mktemp("kube-apiserver"), lab=f"tests{os.getpid()}")
    asyncio.run(server.up())
    yield server
    asyncio.run(server.down())


@pytest.fixture(scope="session")
def older_real_apiserver(
    real_programs: None, older_etcd: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeApiServer]:
    """A real API server over an etcd that is too old for streamed lists, as many clusters still
    have it."""
    server = KubeApiServer(
        tmp_path_factory.mktemp("older-etcd"), lab=f"tests{os.getpid()}", etcd=older_etcd
    )
    asyncio.run(server.up())
    yield server
    asyncio.run(server.down())


def find_older_etcd() -> Path:
    """The path to which `make tools` unpacked Debian's etcd. Raises Refused if it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = cache / "fairlead" / "debian-etcd" / "etcd"
    if not os.access(found, os.X_OK):
        raise Refused(
            f"{found} is not there", fix="run `make tools`: it takes this etcd from Debian"
        )
    return found
