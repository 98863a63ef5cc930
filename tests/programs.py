"""Fixtures that find or start the programs that `make tools` builds, and Hypothesis's settings.

They are a plugin, because the nested test runs (tests/nested.py) use the conftest without them."""

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, core, settings
from tests.needs import MISSING

from bench import scale
from fairlead.errors import Refused
from fairlead.lab.kubeapiserver import KubeApiServer, find_program

SEED = os.environ.get("FAIRLEAD_SEED")
settings.register_profile(
    "unhurried",
    deadline=None,  # on a busy machine, the duration of an example has no meaning
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not SEED,
)
settings.load_profile("unhurried")
if SEED:
    # As the option --hypothesis-seed does.
    core.global_force_seed = int(SEED)  # type: ignore[assignment]


@pytest.fixture(scope="session")
def real_programs() -> None:
    """Require kube-apiserver and etcd."""
    needed(partial(find_program, "kube-apiserver"))
    needed(partial(find_program, "etcd"))


@pytest.fixture(scope="session")
def older_etcd() -> Path:
    """Require Debian's etcd, over which kube-apiserver has no streamed lists, and return its
    path."""
    return needed(partial(find_unpacked, "debian-etcd", "etcd"))


@pytest.fixture(scope="session")
def kube_proxy() -> Path:
    """Require kube-proxy, and return its path."""
    return needed(partial(find_program, "kube-proxy"))


@pytest.fixture(scope="session")
def helm() -> Path:
    """Require helm, and return its path."""
    return needed(partial(find_program, "helm"))


@pytest.fixture(scope="session")
def systemd_analyze() -> Path:
    """Require systemd-analyze, and return its path."""
    return needed(partial(find_program, "systemd-analyze"))


@pytest.fixture(scope="session")
def official_client() -> Path:
    """Require the official Python client, and return the path of its Python interpreter."""
    return needed(scale.official_client)


@pytest.fixture(scope="session")
def bird() -> Path:
    """Require the routing daemon BIRD, and return its path."""
    return needed(partial(find_unpacked, "bird", "bird"))


def needed(find: Callable[[], Path]) -> Path:
    """Return the path of the program. If it is missing, skip the test, or fail it in CI."""
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
    """Yield the real API server of this process. Tests avoid conflicts by unique namespaces and
    names, and delete objects that have no namespace."""
    server = KubeApiServer(tmp_path_factory.mktemp("kube-apiserver"), lab=f"tests{os.getpid()}")
    asyncio.run(server.up())
    yield server
    asyncio.run(server.down())


@pytest.fixture(scope="session")
def older_real_apiserver(
    real_programs: None, older_etcd: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeApiServer]:
    """Yield a real API server over an etcd that is too old for streamed lists, as in many
    clusters."""
    server = KubeApiServer(
        tmp_path_factory.mktemp("older-etcd"), lab=f"tests{os.getpid()}", etcd=older_etcd
    )
    asyncio.run(server.up())
    yield server
    asyncio.run(server.down())


def find_unpacked(folder: str, name: str) -> Path:
    """Return the path of a program of a Debian package that `make tools` has unpacked into this
    folder of the cache. Raise Refused if the program is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = cache / "fairlead" / folder / name
    if not os.access(found, os.X_OK):
        raise Refused(f"{found} does not exist", fix="run `make tools`, which gets it from Debian")
    return found
