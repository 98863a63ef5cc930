"""A real Octavia: its API, its worker and its provider `amphora`, without machines.

In: a directory. Out: the URL of its API, functions that make its provider fail or wait, and the
heartbeats that amphorae would send. Upstream's own no-op drivers replace machines and their
network: nothing is checked against a Neutron, and every VIP without a requested address is
198.51.100.1."""

import hashlib
import hmac
import json
import socket
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tests.openstack import places, settings
from tests.openstack.database import Database
from tests.openstack.processes import Processes, RunningProcess
from tests.openstack.servers.ready import READY
from tests.openstack.settings import Sections

from fairlead.lab.ports import free_port

Step = Literal["boot", "configure"]
"""See `servers.amphorae`."""
MemberStatus = Literal["UP", "DOWN", "DRAIN", "MAINT", "no check"]
"""The statuses that an amphora reports for a member."""
TRAFFIC = {"tx": 0, "rx": 0, "conns": 0, "totconns": 0, "ereq": 0}


class Octavia:
    """Octavia. Call `start` and `end` once each. `url` has no path."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.heartbeats = free_port(socket.SOCK_DGRAM)
        self.url = f"http://127.0.0.1:{self.port}"
        self.conf = directory / "octavia.conf"
        self.database = Database(directory)
        self._processes = Processes(directory)

    def start(self) -> None:
        """Start Octavia, and return when it answers. Raise Refused if it is not installed,
        Unavailable if it does not start."""
        try:
            self.prepare({})
            self.serve().await_line(READY)
        except BaseException:
            self.end()
            raise

    def prepare(self, changes: Sections) -> None:
        """Write its settings, with these changes, and start its database."""
        own = settings.octavia(self.directory, self.database.url("octavia"), self.heartbeats)
        self.conf.write_text(settings.text(settings.merged(own, changes)))
        self.database.copy(places.template())
        self.database.start(self._processes)

    def serve(self) -> RunningProcess:
        """Start the server, and wait for READY."""
        return self._processes.python("octavia", self.conf, str(self.port))

    def end(self) -> None:
        """Stop all processes and delete large files; logs stay."""
        self._processes.end()
        self.database.remove()

    @contextmanager
    def failing(self, step: Step) -> Iterator[None]:
        """Within the block the provider fails at this step of every load balancer."""
        with self._control_file(f"fail-{step}"):
            yield

    @contextmanager
    def holding(self, step: Step) -> Iterator[None]:
        """Within the block the provider waits at this step, so that requested changes stay PENDING.
        It continues at the end."""
        with self._control_file(f"hold-{step}"):
            yield

    @contextmanager
    def slow(self, step: Step, seconds: float) -> Iterator[None]:
        """Within the block the provider takes this long for this step of every load balancer."""
        with self._control_file(f"slow-{step}", f"{seconds}"):
            yield

    @contextmanager
    def _control_file(self, name: str, text: str = "") -> Iterator[None]:
        file = self.directory / name
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").rename(file)
        try:
            yield
        finally:
            file.unlink()

    def heartbeat(
        self,
        amphora: str,
        pools: Mapping[tuple[str, str], Mapping[str, MemberStatus]],
        *,
        traffic: Mapping[str, int] = TRAFFIC,
    ) -> None:
        """Send the heartbeat of this amphora (its id: see `load_balancer.amphorae`): the status of
        the members of each (pool, listener). It must contain all listeners of the load balancer:
        Octavia considers an amphora that lacks one outdated, and ignores the heartbeat. `traffic`:
        for each listener, bytes out and in, open and total connections, failed requests. Octavia
        processes the heartbeat a moment later; operating_status follows."""
        heartbeat = {
            "id": amphora,
            "seq": 1,
            "ver": 3,
            "listeners": {
                listener: {"status": "OPEN", "stats": dict(traffic)} for _, listener in pools
            },
            "pools": {
                f"{pool}:{listener}": {"status": "UP", "members": dict(members)}
                for (pool, listener), members in pools.items()
            },
        }
        payload = zlib.compress(json.dumps(heartbeat).encode(), 9)
        signature = (
            hmac.new(settings.HEARTBEAT_KEY.encode(), payload, hashlib.sha256).hexdigest().encode()
        )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.sendto(payload + signature, ("127.0.0.1", self.heartbeats))
