"""The embedded server answers some hundreds of requests about Services like the real one: code,
reason, message, and the resulting object, field by field, with its owners."""

import asyncio
from collections.abc import AsyncIterator
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from tests.lab.apiserver.api import Api, Object
from tests.lab.apiserver.conftest import CIDRS
from tests.lab.apiserver.differential import answer_of, differences
from tests.lab.apiserver.requests import NAMES, Request, request

from fairlead.kube.access import Access
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.kinds import SERVICES
from fairlead.lab.kubeapiserver import KubeApiServer

STEPS = 60


@pytest.fixture
async def both(real_apiserver: KubeApiServer) -> AsyncIterator[tuple[Api, Api]]:
    async with (
        ApiServer(service_cidrs=CIDRS) as server,
        Api(Access(server.url), "embedded") as embedded,
        Api(real_apiserver.access, "real") as real,
    ):
        yield embedded, real


async def body_of(api: Api, requested: Request) -> Any:
    """Return the body to send: the body of the request, or the modified object of this server."""
    if requested.change is None:
        return requested.body
    there = await api.find(SERVICES, requested.name)
    if there is None:
        return {"metadata": {"name": requested.name}, "spec": {"ports": [{"port": 80}]}}
    changed = deepcopy(there)
    changed["spec"] = {
        name: value
        for name, value in (changed["spec"] | requested.change).items()
        if value is not None
    }
    return changed


async def answer(api: Api, requested: Request) -> Object:
    path = api.path(SERVICES, requested.name, requested.subresource) + (
        f"?{requested.query}" if requested.query else ""
    )
    status, body = await api.call(
        requested.method, path, await body_of(api, requested), requested.media_type
    )
    return answer_of(status, body, api.namespace)


@pytest.mark.parametrize("seed", range(6))
async def test_both_servers_answer_alike(both: tuple[Api, Api], seed: int) -> None:
    random = Random(seed)
    codes: set[int] = set()
    for step in range(STEPS):
        requested = request(random)
        one, other = await asyncio.gather(*(answer(api, requested) for api in both))
        codes.add(other["status"])
        found = "\n".join(differences(one, other))
        assert not found, (
            f"seed {seed}, step {step}: {requested}\nembedded and real differ:\n{found}"
        )
    assert {200, 201, 422} <= codes
    for name in NAMES:
        one, other = [answer_of(200, await api.find(SERVICES, name), api.namespace) for api in both]
        assert not list(differences(one, other))
