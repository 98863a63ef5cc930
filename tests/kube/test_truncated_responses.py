"""A truncated response does not show that the object is wrong, so it counts as unavailable, and the
request is repeated."""

from typing import Any

import pytest
from aiohttp import web

from fairlead.errors import Refused, Unavailable
from fairlead.kube.objects import SERVICES

WHOLE = b'{"metadata": {"name": "web", "namespace": "default"}, "spec": {"ports": [{"port": 80}]}}'


def replying(body: bytes) -> Any:
    async def reply(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    return reply


@pytest.mark.parametrize("length", range(0, len(WHOLE), 7))
async def test_a_truncated_object_is_unavailable(length: int, scripted: Any) -> None:
    async with scripted(replying(WHOLE[:length])) as (_, client):
        with pytest.raises(Unavailable, match="not valid JSON"):
            await client.get(SERVICES, ("default", "web"))


async def test_an_object_with_wrong_types_is_refused(scripted: Any) -> None:
    async with scripted(replying(WHOLE.replace(b"80", b'"eighty"'))) as (_, client):
        with pytest.raises(Refused, match="correct the object"):
            await client.get(SERVICES, ("default", "web"))
