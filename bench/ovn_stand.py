"""The network of `bench.ovn`: a real OVN with three chassis, four pods and a client; an API
server in this process; and `fairlead controller` as shipped, in a process of its own.

In: Services and the backends of their EndpointSlices. Out: their addresses, and the CPU time and
memory of each program. Invariant: when the stand is closed, no process, namespace or file of it
is left.

Thousands of Services are copies of one that the controller has served: they are put into the store
of the API server in the state in which a controller leaves them, with their AddressGrants. Without
that, writing to the API would take most of the time."""

import asyncio
import json
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from os import getpid
from pathlib import Path

import yaml
from bench.announce_parts import resident_mib
from bench.ovn_figures import PROGRAMS, WRITER, Usage
from bench.ovn_watched import WITHIN_S, within

from fairlead.errors import Unavailable
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICES
from fairlead.lab import crds, process, settings
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.ovn.central import Central
from fairlead.lab.ovn.layout import ROUTER
from fairlead.lab.ovn.site import POD_PORT, OvnSite
from fairlead.lab.process import Process
from fairlead.plan.status import CONDITION_TYPES

COUNTS = (3, 1, 0)
"""The number of pods of each chassis."""
NAMESPACE, CLUSTER, CLASS = "default", "bench", "fairlead.io/ovn"
PRESENCE = "fairlead-presence"
POOL = ("203.0.113.0/25", "198.18.0.0/16")
FIRST_COPY = ip_address("198.18.0.1")
PLAIN_NETWORK, PLAIN_SOURCE = "203.0.113.128/25", "198.51.100.11"
"""The addresses that do not belong to Fairlead, and the address of the client from which it calls
them: conntrack cannot translate two connections from one port to the same pod."""
TEMPLATE = "background-0"
DRAIN_TIMEOUT_S = 3600.0
"""A drain time-out that is longer than a run, so that no row changes by itself."""
POLL_S = 0.02
IDLE_CPU_S, IDLE_WITHIN_S = 0.1, 300.0
STOP_S = 30.0
LINES_SHOWN = 20
_LABELS = {"northd": "ovn-northd", "ovsdb-nb": "ovsdb-server", "ovsdb-sb": "ovsdb-server"}


class Stand:
    """Created by `stand`."""

    def __init__(self, site: OvnSite, server: ApiServer, client: Client) -> None:
        self.site = site
        self._server, self._client = server, client
        self._controller: Process | None = None
        self._processes = [each for each in process.find(site.lab) if _program(each) in PROGRAMS]
        for each in self._processes:
            process.set_nice(each.pid, 0)  # all of them are measured

    def start_controller(self) -> None:
        """Start the controller."""
        folder = self.site.directory
        config, access = folder / "fairlead.yaml", folder / "kubeconfig"
        config.write_text(yaml.safe_dump(configuration(self.site.central)))
        access.write_text(settings.kubeconfig("bench", Access(self._server.url)))
        argv = process.python(
            *("fairlead", "controller", "--config", str(config), "--kubeconfig", str(access)),
            *("--listen", ""),
        )
        self._controller = process.spawn(
            self.site.lab, "fairlead/controller", argv, log=folder / "controller.log"
        )

    async def stop_controller(self) -> None:
        """Stop the controller, if it runs."""
        if self._controller is not None:
            await self._controller.stop(STOP_S)
            self._controller = None

    def check(self) -> None:
        """Raise Unavailable if the controller has ended by itself."""
        if self._controller is not None and not self._controller.running:
            lines = (self.site.directory / "controller.log").read_text().splitlines()
            raise Unavailable("the controller has ended:\n" + "\n".join(lines[-LINES_SHOWN:]))

    async def add_node(self, name: str) -> None:
        """Create the Node of a chassis."""
        await self._client.create(NODES, {"metadata": {"name": name}})

    async def add_service(self, name: str, backends: Sequence[str]) -> str:
        """Create a Service of the class, and return its address once the controller has published
        it and written the conditions."""
        await self.set_backends(name, backends)
        spec = {
            "type": "LoadBalancer",
            "loadBalancerClass": CLASS,
            "externalTrafficPolicy": "Local",
            "ports": [{"name": "web", "port": 80, "targetPort": POD_PORT}],
        }
        body = {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}
        await self._client.create(SERVICES, body)
        async with within(f"Service {name} was served"):
            while True:
                status = (await self._client.get(SERVICES, (NAMESPACE, name))).status
                types = {each.type for each in status.conditions if each.status == "True"}
                if status.load_balancer.ingress and types.issuperset(CONDITION_TYPES):
                    return status.load_balancer.ingress[0].ip
                self.check()
                await asyncio.sleep(POLL_S)

    async def set_backends(self, name: str, backends: Sequence[str]) -> float:
        """Write the EndpointSlice of a Service with these addresses of pods. Return the time of
        the answer (CLOCK_MONOTONIC)."""
        labels = {"kubernetes.io/service-name": name}
        labels |= {"endpointslice.kubernetes.io/managed-by": "bench"}
        endpoints = [
            {"addresses": [each], "conditions": {"ready": True}, "nodeName": "ch1"}
            for each in backends
        ]
        body = {
            "metadata": {"labels": labels},
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": [{"name": "web", "port": POD_PORT, "protocol": "TCP"}],
        }
        key = (NAMESPACE, f"{name}-a")
        await self._client.apply(ENDPOINT_SLICES, key, body, field_manager="bench", force=True)
        return time.monotonic()

    async def fill(self, count: int) -> None:
        """Add this number of copies of Service TEMPLATE, while no controller runs."""
        store = self._server.store
        service = await self._client.get(SERVICES, (NAMESPACE, TEMPLATE))
        plurals = {each.plural for each in (SERVICES, ENDPOINT_SLICES, ADDRESS_GRANTS)}
        originals = [
            (kind, stored.encoded.decode())
            for kind in store.kinds()
            if kind.plural in plurals
            for stored in store.all_of(kind)
            if f'"{TEMPLATE}'.encode() in stored.encoded
        ]
        for number in range(count):
            replaced = {
                TEMPLATE: f"background-{number + 1}",
                service.metadata.uid: str(uuid.uuid4()),
                service.status.load_balancer.ingress[0].ip: str(FIRST_COPY + number),
                background(0)[0].rpartition(".")[0]: background(number + 1)[0].rpartition(".")[0],
            }
            for kind, text in originals:
                for old, new in replaced.items():
                    text = text.replace(old, new)
                store.put(kind, json.loads(text))

    def usage(self) -> Usage:
        """Return the CPU seconds of each program so far."""
        return self._sums(_cpu_s)

    def resident(self) -> Usage:
        """Return the resident memory of each program, in MiB."""
        return self._sums(resident_mib)

    async def idle(self) -> None:
        """Return when the programs have nothing to do any more. Raise Unavailable if they never
        have."""
        used = self.usage()
        for _ in range(int(IDLE_WITHIN_S)):
            await asyncio.sleep(1)
            before, used = used, self.usage()
            if sum(used.values()) - sum(before.values()) < IDLE_CPU_S:
                return
        raise Unavailable(f"OVN and the controller were busy for {IDLE_WITHIN_S:.0f} s")

    async def at_client(self, argv: Sequence[str]) -> str:
        """Return the output of a command that runs on the client. Raise Unavailable if it fails."""
        inside = self.site.namespace("client")
        code, output, errors = await process.run(
            inside, argv, lab=self.site.lab, timeout_s=WITHIN_S
        )
        if code:
            raise Unavailable(f"{' '.join(argv)} ended with {code}: {(errors or output).strip()}")
        return output

    def _sums(self, figure: Callable[[int], float]) -> Usage:
        sums = dict.fromkeys(PROGRAMS, 0.0)
        for each in (*self._processes, *([self._controller] if self._controller else [])):
            sums[_program(each)] += figure(each.pid)
        return sums


@asynccontextmanager
async def stand() -> AsyncIterator[Stand]:
    """Build a stand, without Services and without a controller."""
    name = f"ovb{getpid()}"
    # The path of a Unix socket has at most 107 characters.
    site = OvnSite(name, f"flt-{name}", Path(tempfile.mkdtemp(prefix="flb-")), COUNTS)
    try:
        await site.up()
        async with ApiServer() as server, Client(Access(server.url)) as client:
            await crds.install(client)
            namespace = {"metadata": {"name": PRESENCE}}
            await client.request("POST", "/api/v1/namespaces", body=namespace)
            made = Stand(site, server, client)
            for each in site.chassis:
                await made.add_node(each.name)
            for command in (
                f"ip address add {PLAIN_SOURCE}/24 dev eth0",
                f"ip route add {PLAIN_NETWORK} via 198.51.100.1 src {PLAIN_SOURCE}",
            ):
                await made.at_client(command.split())
            try:
                yield made
            finally:
                await made.stop_controller()
    finally:
        await site.down()


def configuration(central: Central) -> dict[str, object]:
    """Return fairlead.yaml of the controller."""
    return {
        "pools": [{"name": "bench", "addresses": list(POOL)}],
        "controller": {"leaseNamespace": NAMESPACE},
        "presence": {"namespace": PRESENCE},
        "ovn": {
            "northbound": [central.remote("nb")],
            "southbound": [central.remote("sb")],
            "router": ROUTER,
            "clusterId": CLUSTER,
            "drainTimeoutS": DRAIN_TIMEOUT_S,
        },
    }


def background(number: int) -> Sequence[str]:
    """Return the addresses of the pods of a Service in the background. These pods do not exist."""
    return [f"10.{245 + number // 250 % 10}.{number % 250}.{each}" for each in (10, 11, 12)]


def _program(each: Process) -> str:
    name = each.label.rpartition("/")[2]
    return WRITER if name == "controller" else _LABELS.get(name, name)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of all its threads, in nanosecond resolution, as
    clock_getcpuclockid(3) does."""
    return time.clock_gettime((~pid << 3) | 2)
