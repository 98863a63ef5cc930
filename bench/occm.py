"""The comparison of `bench.octavia` with OpenStack's own cloud controller:
openstack-cloud-controller-manager (OCCM).

In: a size, and a Keystone with its Octavia and the FaultProxy in front of it. Out: the same four
costs. OCCM is the program of cloud-provider-openstack (`sh tools/build.sh occm`) with its default
settings; it runs only its service controller. Its Services and nodes are in a real kube-apiserver.
The Services are internal, so no floating IP is created. OCCM still queries Neutron for floating IPs
and security groups, and Neutron answers that there are none. A change ends with the last call that
it took, once there was no call for `QUIET_S`: OCCM does not report completion.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from bench.cost import Cost, Figures, Size
from bench.options import progress
from tests.drivers.octavia.site import SUBNET
from tests.openstack.fault_proxy import FaultProxy, Response
from tests.openstack.keystone import REGION, Keystone
from tests.openstack.octavia import Octavia

from fairlead.errors import Refused, Unavailable
from fairlead.kube.client import Client
from fairlead.kube.objects import NODES, SERVICES
from fairlead.lab import process, settings
from fairlead.lab.kubeapiserver import KubeApiServer, find_program
from fairlead.lab.ports import free_port
from fairlead.lab.process import Process

PROGRAM = "openstack-cloud-controller-manager"
QUIET_S = 15.0
"""Longer than the pauses between two polls of a load balancer that is being changed, which begin
with a second and grow by a fifth each time."""
POLL_S = 0.1
WITHIN_S = 3600.0
INTERNAL = "service.beta.kubernetes.io/openstack-internal-load-balancer"
NOTHING = Response({"floatingips": [], "security_groups": []})


def find() -> Path | None:
    """Return the program, or None if it was not built."""
    with suppress(Refused):
        return find_program(PROGRAM)
    return None


@contextmanager
def empty_neutron() -> Iterator[str]:
    """Run a network service in which every list is empty; yield its URL."""
    with FaultProxy("http://127.0.0.1:1").listen() as proxy:
        link = {"href": f"{proxy.url}/v2.0/", "rel": "self"}
        versions = Response({"versions": [{"id": "v2.0", "status": "CURRENT", "links": [link]}]})
        proxy.fault = lambda call: versions if call.path == "/" else NOTHING
        yield proxy.url


class Occm:
    """One measurement, in its own folder."""

    def __init__(
        self, folder: Path, program: Path, size: Size, keystone: Keystone, proxy: FaultProxy
    ) -> None:
        self._folder, self._program, self._size, self._keystone, self._proxy = (
            folder,
            program,
            size,
            keystone,
            proxy,
        )
        self._lab = f"occm{os.getpid()}"

    async def measure(self, octavia: Octavia, slow_s: float) -> Figures:
        """Return all four costs; without the last if `slow_s` is 0."""
        size = self._size
        changed = size.services * size.ports
        async with (
            KubeApiServer(self._folder / "kubernetes", lab=self._lab) as server,
            Client(server.access) as client,
        ):
            (self._folder / "kubeconfig").write_text(settings.kubeconfig("bench", server.access))
            self._write_settings()
            for number in range(size.nodes):
                await client.create(NODES, _node(number))
            async with self._running() as child:
                for number in range(size.services):
                    await client.create(SERVICES, _service(number, size.ports), namespace="default")
                created = await self._cost(
                    child, "all are created", lambda: self._made() >= size.services
                )
                self._proxy.calls.clear()
                await client.create(NODES, _node(size.nodes))
                added = await self._cost(
                    child, "a node is added", lambda: self._filled() >= changed
                )
            self._proxy.calls.clear()
            async with self._running() as child:
                restarted = await self._cost(child, "it restarts", lambda: bool(self._proxy.calls))
                if not slow_s:
                    return Figures(created, added, restarted)
                self._proxy.calls.clear()
                with octavia.slow("configure", slow_s):
                    await client.delete(NODES, ("", _name(size.nodes)))
                    slowly = await self._cost(
                        child, "a node is removed, slowly", lambda: self._filled() >= changed
                    )
        return Figures(created, added, restarted, slowly)

    async def _cost(self, child: Process, what: str, reached: Callable[[], bool]) -> Cost:
        """Wait until `reached` and then until no calls are made any more; return the cost of the
        calls."""
        progress(f"{PROGRAM}: {what}")
        calls = self._proxy.calls
        begun_s = last_s = time.monotonic()
        seen = len(calls)
        while not (reached() and time.monotonic() - last_s > QUIET_S):
            now_s = time.monotonic()
            if now_s - begun_s > WITHIN_S or not child.running:
                tail = self._log.read_text(errors="replace").splitlines()[-3:]
                raise Unavailable(
                    f"{PROGRAM} exited, or was not done within {WITHIN_S:.0f} s; end of its log: "
                    f"{tail}"
                )
            if len(calls) != seen:
                seen, last_s = len(calls), now_s
            await asyncio.sleep(POLL_S)
        writes = sum(call.writes for call in calls)
        cost = Cost(last_s - begun_s, writes, len(calls) - writes)
        progress(f"{PROGRAM}: {what}: {cost}")
        return cost

    def _made(self) -> int:
        """Return the number of load balancers that were created."""
        return sum(
            call.method == "POST" and call.path.endswith("/loadbalancers")
            for call in self._proxy.calls
        )

    def _filled(self) -> int:
        """Return the number of pools whose members were written."""
        return sum(
            call.method == "PUT" and call.path.endswith("/members") for call in self._proxy.calls
        )

    @property
    def _log(self) -> Path:
        return self._folder / "occm.log"

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[Process]:
        arguments = {
            "cloud-provider": "openstack",
            "cloud-config": self._folder / "cloud.conf",
            "kubeconfig": self._folder / "kubeconfig",
            "controllers": "service-lb-controller",
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
            "secure-port": free_port(),
            "cert-dir": self._folder / "certificates",
        }
        argv = [str(self._program), *(f"--{name}={value}" for name, value in arguments.items())]
        child = process.spawn(self._lab, "occm", argv, log=self._log)
        try:
            yield child
        finally:
            await child.kill()

    def _write_settings(self) -> None:
        entry = self._keystone.entry("member")
        own = {
            "auth-url": entry["auth"]["auth_url"],
            "application-credential-id": entry["auth"]["application_credential_id"],
            "application-credential-secret": entry["auth"]["application_credential_secret"],
            "region": REGION,
        }
        lines = ["[Global]", *(f"{name}={value}" for name, value in own.items())]
        (self._folder / "cloud.conf").write_text(
            "\n".join([*lines, "[LoadBalancer]", f"subnet-id={SUBNET}", ""])
        )


def _name(number: int) -> str:
    return f"node{number}"


def _node(number: int) -> dict[str, object]:
    address = f"10.1.{number // 250}.{number % 250 + 1}"
    status = {
        "addresses": [{"type": "InternalIP", "address": address}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    metadata = {"name": _name(number)}
    return {
        "metadata": metadata,
        "spec": {"providerID": f"openstack:///{_name(number)}"},
        "status": status,
    }


def _service(number: int, ports: int) -> dict[str, object]:
    listed = [{"name": f"p{port}", "port": 80 + port} for port in range(ports)]
    spec = {"type": "LoadBalancer", "ports": listed}
    return {"metadata": {"name": f"web-{number}", "annotations": {INTERNAL: "true"}}, "spec": spec}
