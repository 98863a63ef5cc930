"""Clients of Services of class proxy in a lab: the pod that each reaches, and the client address
that the pod sees.

In: a running lab, its hosts and pods, addresses. Out: the answer of an echo server
(`fairlead.lab.echo`), with a wait where the system must first converge."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.e2e.kubectl import Kubectl
from tests.pauses import pauses

from fairlead.errors import Unavailable
from fairlead.lab.site import Site

DEADLINE_S = 60.0
PROXY = "fairlead.io/proxy"
PATIENCE_S = 15.0
"""The timeout of clients where no connection may be lost. A lost connection gets no answer at all,
or ends at once; an answer that is only slow, on a busy machine, is not a loss."""


class EchoConnection:
    """A connection to an echo server, from a host of the lab."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, site: Site, host: str, address: str, port: int = 80) -> "EchoConnection":
        return cls(*await site.connect(host, address, port, timeout_s=2))

    async def request(self) -> dict[str, Any]:
        async with asyncio.timeout(3):
            self._writer.write(b"who\n")
            answer: dict[str, Any] = json.loads(await self._reader.readline() or b"{}")
        return answer

    def close(self) -> None:
        self._writer.close()


async def call(site: Site, host: str, address: str, port: int = 80) -> dict[str, Any]:
    """Return the pod's answer; an empty dictionary if there is none."""
    try:
        connection = await EchoConnection.open(site, host, address, port)
        try:
            return await connection.request()
        finally:
            connection.close()
    except (OSError, TimeoutError, Unavailable, json.JSONDecodeError):
        return {}


async def until(
    site: Site, host: str, address: str, holds: Callable[[dict[str, Any]], bool]
) -> None:
    answer: dict[str, Any] = {}
    try:
        async with asyncio.timeout(DEADLINE_S):
            # Eight calls, because connections are distributed over both gateways, and the condition
            # must hold at both.
            while not all([holds(answer := await call(site, host, address)) for _ in range(8)]):
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"{host} to {address}: last answer {answer}")


async def ingress(
    kubectl: Kubectl, name: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        for pause_s in pauses():
            shown = (await kubectl.service(name))["status"]["loadBalancer"].get("ingress", [])
            if shown and holds(shown[0]):
                entry: dict[str, Any] = shown[0]
                return entry
            await asyncio.sleep(pause_s)
    raise AssertionError  # there is always another pause


async def await_described(kubectl: Kubectl, name: str, *words: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for pause_s in pauses():
            text = await kubectl("describe", "service", name)
            if all(word in text for word in words):
                return
            await asyncio.sleep(pause_s)
