"""A real `fairlead controller` is killed at every write to a real Octavia and a real Neutron, and
its successor completes the work.

A Service with a floating IP is created, gets another port, and is deleted. At each write the
process is killed (SIGKILL) before the cloud receives the request, and again, when its successor
repeats the write, after the cloud has carried it out. `test_disconnects` covers more writes, with
drivers within the process of the test."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.test_disconnects import Disconnects
from tests.faults.trial import CHECK_INTERVAL_S, Trial, trial
from tests.openstack.cloud import NODES as ADDRESSES

from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICE_NAME_LABEL, SERVICES, ObjectKey
from fairlead.plan.classes import OCTAVIA
from fairlead.roles.octavia import SYSTEM

pytestmark = pytest.mark.soak

WEB = ObjectKey("default", "web")
PORTS: list[dict[str, Any]] = [{"name": "http", "port": 80}, {"name": "https", "port": 443}]
STEP_WITHIN_S = 300.0


class Step(NamedTuple):
    """A user's action, the ports that the Service shows afterwards, and the writes that it
    takes."""

    act: Callable[[Client], Awaitable[object]]
    ports: list[int]
    writes: list[str]


def spec(ports: list[dict[str, Any]]) -> dict[str, Any]:
    return {"spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": ports}}


STEPS = (
    Step(
        lambda client: client.create(
            SERVICES, {"metadata": {"name": WEB.name}, **spec(PORTS[:1])}, namespace=WEB.namespace
        ),
        [80],
        ["POST loadbalancers", "POST floatingips"],
    ),
    Step(
        lambda client: client.patch(SERVICES, WEB, spec(PORTS)),
        [80, 443],
        ["POST pools", "PUT pools/_/members", "POST healthmonitors", "POST listeners"],
    ),
    Step(
        lambda client: client.delete(SERVICES, WEB),
        [],
        ["DELETE floatingips/_", "DELETE loadbalancers/_"],
    ),
)


async def fill(client: Client) -> None:
    """Create a node with a pod of the Service, and the namespace that identifies the cluster."""
    if SYSTEM not in (await client.request("GET", "/api/v1/namespaces")).decode():
        await client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": SYSTEM}})
    node = {
        "metadata": {"name": "node1"},
        "status": {"addresses": [{"type": "InternalIP", "address": ADDRESSES["node1"]}]},
    }
    await client.create(NODES, node)
    labels = {SERVICE_NAME_LABEL: WEB.name, "endpointslice.kubernetes.io/managed-by": "a-test"}
    slice_ = {
        "metadata": {"name": "web-1", "labels": labels},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": ["198.51.100.1"], "nodeName": "node1", "conditions": {"ready": True}}
        ],
        "ports": [{"name": each["name"], "port": 8000 + each["port"]} for each in PORTS],
    }
    await client.create(ENDPOINT_SLICES, slice_, namespace=WEB.namespace)


class KilledController:
    """A controller that is killed at every write, and restarted each time."""

    def __init__(self, one: Trial, site: CloudSite) -> None:
        self._one = one
        self._site = site
        self._killed = False

    async def run_step(self, step: Step) -> None:
        site, one = self._site, self._one
        disconnects = Disconnects(self._kill)
        site.proxy.fault = site.neutron.fault = disconnects
        await step.act(one.client)
        async with asyncio.timeout(STEP_WITHIN_S):
            while await self._published_ports() != step.ports or self._killed:
                if self._killed:
                    await one.kill()
                    assert len(site.balancer_ids()) <= 1
                    assert len(site.floating) <= 1
                    self._killed = False
                    one.start()
                await asyncio.sleep(CHECK_INTERVAL_S)
        assert disconnects.lost == step.writes, one.log.read_text()[-3000:]
        assert self._ports_at_octavia() == step.ports
        assert len(site.balancer_ids()) == len(site.floating) == bool(step.ports)

    def _kill(self) -> None:
        """Kill the controller. Called in a thread of the proxy."""
        assert self._one.controller is not None
        self._one.controller.send(signal.SIGKILL)
        self._killed = True

    async def _published_ports(self) -> list[int]:
        """Return the ports that the Service shows; none if the Service is deleted."""
        try:
            service = await self._one.client.get(SERVICES, WEB)
        except NotFound:
            return []
        shown = service.status.load_balancer.ingress
        return sorted(port.port for each in shown for port in each.ports) if shown else [0]

    def _ports_at_octavia(self) -> list[int]:
        """Return the ports whose pool has a member."""
        lb = self._site.client.load_balancer
        found = lb.listeners(project_id=self._site.proxy.project)
        return sorted(
            each.protocol_port for each in found if list(lb.members(each.default_pool_id))
        )


async def test_a_controller_that_is_killed_at_every_write_completes_the_work_after_its_restart(
    cloud_site: CloudSite, tmp_path: Path
) -> None:
    site = cloud_site
    octavia = {
        "cloud": "test",
        "cloudsFile": site.config.clouds_file,
        "callsPerS": 1000,
        "provider": "ovn",
        "subnetId": site.openstack.subnet,
        "floatingNetworkId": site.openstack.external_network,
    }
    async with trial(tmp_path / "trial", defaultClass=OCTAVIA.name, octavia=octavia) as one:
        await fill(one.client)
        controller = KilledController(one, site)
        one.start()
        for step in STEPS:
            await controller.run_step(step)
        site.proxy.forward_all()
        site.neutron.forward_all()
