"""A lab with all of Fairlead's roles in it, for the tests of the whole."""

import os
import signal
from collections.abc import AsyncIterator

import pytest_asyncio

from fairlead.kube.client import Client
from fairlead.lab import namespace
from fairlead.lab.site import Site

# A run that is ended from outside takes its labs down, as one that is interrupted does.
signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    """Three nodes, two gateways, two clients. Each module has its own."""
    async with Site.create(f"e2e{os.getpid()}", nodes=3, gateways=2, clients=2) as site:
        for host in (*site.topology.of("node"), *site.topology.of("client")):
            # Refusals of datagrams are ICMP; at the usual limit of one a second, silence would prove nothing.
            limits = {"net/ipv4/icmp_ratelimit": 0, "net/ipv6/icmp/ratelimit": 0}
            namespace.set_sysctls(site.namespace(host.name), limits)
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(site: Site) -> AsyncIterator[Client]:
    async with site.client() as client:
        yield client
