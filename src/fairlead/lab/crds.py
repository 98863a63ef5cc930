"""Teach an API server our own kinds, as `kubectl apply -f deploy/crds` does on a cluster.

In: a client. Out: AddressPools and AddressGrants are served when `install` returns.
The definitions stand in `deploy/crds` of the source tree.
"""

import asyncio
from pathlib import Path

import fairlead
from fairlead.errors import Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.manifests import read_documents
from fairlead.lab import manifests

LOOK_S = 0.05
TIMEOUT_S = 20.0


def folder() -> Path:
    """Where the definitions are."""
    return Path(fairlead.__file__).parents[2] / "deploy" / "crds"


async def install(client: Client, *, timeout_s: float = TIMEOUT_S) -> None:
    """Apply the definitions and wait until their kinds are served: a real API server takes a
    moment."""
    await manifests.apply(client, [document.object for document in read_documents([folder()])])
    try:
        async with asyncio.timeout(timeout_s):
            while not await _served(client):
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise Unavailable(
            f"AddressPool and AddressGrant are not served {timeout_s} s after their definitions "
            "were applied"
        ) from None


async def _served(client: Client) -> bool:
    try:
        await client.list(ADDRESS_POOLS)
        await client.list(ADDRESS_GRANTS)
    except NotFound:
        return False
    return True
