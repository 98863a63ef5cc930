"""A lab with all roles of Fairlead, for end-to-end tests."""

import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fairlead.kube.client import Client
from fairlead.lab import namespace
from fairlead.lab.rundir import ApiServerKind
from fairlead.lab.site import Site

# A run that is terminated from outside deletes its labs, like an interrupted run.
signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="module")
def apiserver(request: pytest.FixtureRequest) -> ApiServerKind:
    """The API server of the lab: the embedded one, unless the test names another."""
    kind: ApiServerKind = getattr(request, "param", "embedded")
    if kind == "real":
        request.getfixturevalue("real_programs")
    return kind


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(apiserver: ApiServerKind) -> AsyncIterator[Site]:
    """Three nodes, two gateways, two clients. Each module has its own lab, for each API server."""
    async with Site.create(
        f"e2e{os.getpid()}", nodes=3, gateways=2, clients=2, apiserver=apiserver
    ) as site:
        for host in (*site.topology.of("node"), *site.topology.of("client")):
            # A datagram is refused with an ICMP error. The kernel's default limit is one error per
            # second, so without this setting a missing answer would prove nothing.
            limits = {"net/ipv4/icmp_ratelimit": 0, "net/ipv6/icmp/ratelimit": 0}
            namespace.set_sysctls(site.namespace(host.name), limits)
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(site: Site) -> AsyncIterator[Client]:
    async with site.client() as client:
        yield client
