"""Connections to the cloud."""

import os
from contextlib import suppress
from pathlib import Path

from tests.drivers.octavia.site import Site
from tests.openstack.clients import until


def sockets() -> int:
    """Return the number of this process's sockets."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(each).startswith("socket:")
    return found


async def test_a_cloud_that_is_closed_keeps_no_line(site: Site) -> None:
    before = sockets()
    await site.found()
    assert sockets() > before
    site.cloud.close()
    until(lambda: sockets() <= before)  # the front's ends too, when its threads have seen it
