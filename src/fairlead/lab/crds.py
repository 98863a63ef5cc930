"""Install Fairlead's CRDs on an API server, as `kubectl apply -f deploy/crds` does on a cluster.

In: a client. Out: when `install` returns, the server serves all of their resources. The definitions
are in `deploy/crds` of the source tree."""

import asyncio
from pathlib import Path

import fairlead
from fairlead.errors import Unavailable
from fairlead.kube.announcers import ANNOUNCERS
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.manifests import read_documents
from fairlead.lab import manifests

POLL_S = 0.05
TIMEOUT_S = 20.0


def folder() -> Path:
    """Return the folder that contains the CRDs."""
    return Path(fairlead.__file__).parents[2] / "deploy" / "crds"


async def install(client: Client, *, timeout_s: float = TIMEOUT_S) -> None:
    """Apply the CRDs and wait until the server serves their resources, which takes a real API
    server a moment. Raise Unavailable after `timeout_s` seconds."""
    await manifests.apply(client, [document.object for document in read_documents([folder()])])
    try:
        async with asyncio.timeout(timeout_s):
            while not await _served(client):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Unavailable(
            f"Fairlead's CRDs are not served {timeout_s} s after they were applied"
        ) from None


async def _served(client: Client) -> bool:
    try:
        await client.list(ADDRESS_POOLS)
        await client.list(ADDRESS_GRANTS)
        await client.list(ANNOUNCERS)
    except NotFound:
        return False
    return True
