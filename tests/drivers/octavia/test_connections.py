"""The connections of the driver to the cloud."""

import os
from contextlib import suppress
from pathlib import Path

from tests.drivers.octavia.site import Site
from tests.openstack.clients import wait_until


def sockets() -> int:
    """Return the number of sockets of this process."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(each).startswith("socket:")
    return found


async def test_a_closed_cloud_has_no_open_connections(site: Site) -> None:
    before = sockets()
    await site.found()
    assert sockets() > before
    site.cloud.close()
    # The threads of the proxy, in this process, close their ends a moment later.
    wait_until(lambda: sockets() <= before)
