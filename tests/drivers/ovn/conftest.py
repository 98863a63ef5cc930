"""Fixtures: a site with a real OVN, shared by the tests of a file, and the central part of OVN."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.drivers.ovn.rows import SITE

from fairlead.lab import namespace, process
from fairlead.lab.ovn.central import Central
from fairlead.lab.ovn.layout import Topology
from fairlead.lab.ovn.site import OvnSite

COUNTS = (3, 1, 0)
"""The number of pods of each chassis."""


@pytest.fixture(scope="module")
def site(ovn_programs: None) -> Iterator[OvnSite]:
    """A site with three chassis, four pods and a client."""
    yield from running_site(f"ovr{os.getpid()}", "router")


@pytest.fixture(scope="module")
def gateway_site(ovn_programs: None) -> Iterator[OvnSite]:
    """The same with a gateway router on each chassis."""
    yield from running_site(f"ovg{os.getpid()}", "gateways")


def running_site(name: str, topology: Topology) -> Iterator[OvnSite]:
    """Create a site, yield it once, and remove it."""
    # The path of a Unix socket is short, and that of pytest's own directories is not.
    directory = Path(tempfile.mkdtemp(prefix="flt-"))
    made = OvnSite(name, f"flt-{name}", directory, COUNTS, topology)
    try:
        asyncio.run(made.up())
        yield made
    finally:
        asyncio.run(made.down())


@pytest.fixture
async def central(ovn_programs: None) -> AsyncIterator[Central]:
    """The central part of OVN, with the router and the switch of SITE, without hypervisors."""
    name = f"ovc{os.getpid()}"
    inside = f"flt-{name}"
    directory = Path(tempfile.mkdtemp(prefix="flt-"))
    namespace.create(inside)
    made = Central(name, directory, inside)
    try:
        await made.start()
        await made.control("nb", "lr-add", SITE.router)
        for each in SITE.switches:
            await made.control("nb", "ls-add", each)
        yield made
    finally:
        await process.kill_all(process.find(name))
        namespace.delete(inside)
        shutil.rmtree(directory)
