"""The real API server: it starts, it enforces RBAC, its parts may be killed, and it leaves nothing
behind."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from fairlead.errors import Refused
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES
from fairlead.lab import process
from fairlead.lab.kubeapiserver import KubeApiServer, find_program


@pytest.fixture
async def server(real_programs: None, tmp_path: Path) -> AsyncIterator[KubeApiServer]:
    lab = f"api{os.getpid()}"
    async with KubeApiServer(tmp_path / "server", lab=lab) as server:
        yield server
    assert process.find(lab) == ()


async def test_it_serves_again_after_its_parts_are_killed(server: KubeApiServer) -> None:
    async with Client(server.access) as client:
        version = msgspec.json.decode(await client.request("GET", "/version"))
        assert version["gitVersion"].startswith("v1.")
        await client.create(
            SERVICES,
            {
                "metadata": {"name": "web", "namespace": "default"},
                "spec": {"ports": [{"port": 80}]},
            },
        )
    assert server.server is not None
    assert server.etcd is not None
    await server.server.kill()
    await server.etcd.kill()
    server.start_etcd()
    await server.start_server()
    async with Client(server.access) as client:
        assert "web" in {service.metadata.name for service in await client.list(SERVICES)}


async def test_a_service_account_has_no_rights_before_a_role_binding(server: KubeApiServer) -> None:
    async with Client(server.access) as client:
        account = {"metadata": {"name": "nobody"}}
        await client.request("POST", "/api/v1/namespaces/default/serviceaccounts", body=account)
    token = await server.service_account_token("default/nobody")
    admin = server.access
    access = Access(
        admin.server, authority_pem=admin.authority_pem, server_name=admin.server_name, token=token
    )
    async with Client(access) as client:
        with pytest.raises(Refused, match="system:serviceaccount:default:nobody"):
            await client.list(SERVICES)


def test_programs_are_searched_in_order(tmp_path: Path) -> None:
    places = [tmp_path / "assets", tmp_path / "path", tmp_path / "cache" / "fairlead" / "bin"]
    environment = {
        "KUBEBUILDER_ASSETS": str(places[0]),
        "PATH": str(places[1]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    with pytest.raises(Refused, match="make tools"):
        find_program("etcd", environment)
    for place in reversed(places):
        place.mkdir(parents=True)
        (place / "etcd").touch(mode=0o755)
        assert find_program("etcd", environment) == place / "etcd"
