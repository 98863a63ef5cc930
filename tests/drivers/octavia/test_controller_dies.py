"""A real `fairlead controller` is killed at every write to a real Octavia and a real Neutron, and
its successor completes the work.

A Service with a floating IP is created, gets another port, and is deleted. At each write the
process is killed (SIGKILL) before the cloud receives the request, and again, when a successor makes
the same write, after the cloud has done it. `test_cuts` covers more writes, with drivers within the
process of the test."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.test_cuts import Cuts
from tests.faults.trial import CHECK_INTERVAL_S, Trial, trial
from tests.openstack.cloud import NODES as ADDRESSES

from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICE_NAME_LABEL, SERVICES, ObjectKey
from fairlead.plan.classes import OCTAVIA
from fairlead.roles.octavia import SYSTEM

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


LIFE = (
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


class Killing:
    """A controller that is killed at every write and restarted."""

    def __init__(self, one: Trial, site: CloudSite) -> None:
        self._one = one
        self._site = site
        self._killed = False

    async def through(self, step: Step) -> None:
        site, one = self._site, self._one
        cuts = Cuts(self._kill)
        site.front.fate = site.neutron.fate = cuts
        await step.act(one.client)
        async with asyncio.timeout(STEP_WITHIN_S):
            while await self._shown() != step.ports or self._killed:
                if self._killed:
                    await one.kill()
                    assert len(site.everything()) <= 1
                    assert len(site.floating) <= 1
                    self._killed = False
                    one.start()
                await asyncio.sleep(CHECK_INTERVAL_S)
        assert cuts.lost == step.writes, one.log.read_text()[-3000:]
        assert self._at_octavia() == step.ports
        assert len(site.everything()) == len(site.floating) == bool(step.ports)

    def _kill(self) -> None:
        """Kill the controller. Called in a thread of the front."""
        assert self._one.controller is not None
        self._one.controller.send(signal.SIGKILL)
        self._killed = True

    async def _shown(self) -> list[int]:
        """Return the ports that the Service shows; none if the Service is deleted."""
        try:
            service = await self._one.client.get(SERVICES, WEB)
        except NotFound:
            return []
        shown = service.status.load_balancer.ingress
        return sorted(port.port for each in shown for port in each.ports) if shown else [0]

    def _at_octavia(self) -> list[int]:
        """Return the ports whose pool has a member."""
        lb = self._site.client.load_balancer
        found = lb.listeners(project_id=self._site.front.project)
        return sorted(
            each.protocol_port for each in found if list(lb.members(each.default_pool_id))
        )


async def test_it_is_killed_at_every_write_before_and_after(
    cloud_site: CloudSite, tmp_path: Path
) -> None:
    site = cloud_site
    octavia = {
        "cloud": "test",
        "cloudsFile": site.config.clouds_file,
        "callsPerS": 1000,
        "provider": "ovn",
        "subnetId": site.at.subnet,
        "floatingNetworkId": site.at.external_network,
    }
    async with trial(tmp_path / "trial", defaultClass=OCTAVIA.name, octavia=octavia) as one:
        await fill(one.client)
        killing = Killing(one, site)
        one.start()
        for step in LIFE:
            await killing.through(step)
        site.front.pass_on()
        site.neutron.pass_on()
