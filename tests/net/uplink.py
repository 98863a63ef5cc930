"""A host with an uplink and no pod, as after a boot, in a network namespace."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from fairlead.lab import namespace


class Host:
    """A host with default routes of both families, by its uplink eth0."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ip(self, *words: str) -> None:
        """Run `ip` in the namespace of the host."""
        command = ["ip", "-n", self.name, *words]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


@contextmanager
def host_with_uplink(name: str) -> Iterator[Host]:
    """Make the host, in a namespace of this name, for the duration of the block."""
    namespace.create(name)
    host = Host(name)
    try:
        host.ip("link", "set", "lo", "up")
        host.ip("link", "add", "eth0", "type", "veth", "peer", "name", "router")
        for each in ("eth0", "router"):
            host.ip("link", "set", each, "up")
        host.ip("address", "add", "192.0.2.21/24", "dev", "eth0")
        host.ip("address", "add", "2001:db8:1::21/64", "dev", "eth0", "nodad")
        host.ip("route", "add", "default", "via", "192.0.2.1")
        host.ip("-6", "route", "add", "default", "via", "2001:db8:1::1")
        yield host
    finally:
        namespace.delete(name)
