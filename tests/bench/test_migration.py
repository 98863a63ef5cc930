"""Services keep their addresses on the way from MetalLB to Fairlead and back, with MetalLB's own
controller. `sh tools/build.sh metallb` builds it.

The steps are those of docs/migration.md, with its commands, in a lab with a real API server."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench.metallb import Metallb, find
from tests.e2e.kubectl import Kubectl, addresses_of, service
from tests.e2e.load import Web, until

from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES, Service
from fairlead.kube.reflector import Reflector
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.soak]

PROGRAM = Path(sys.executable).with_name("fairlead")
NODES = ("node1", "node2")
OLD = "metallb.universe.tf"
POOL = ("203.0.113.10-203.0.113.40", "2001:db8:f::10-2001:db8:f::40")
"""Addresses for which the router of the lab has routes to the gateway."""
DUAL: Mapping[str, Any] = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}
SHARED = {f"{OLD}/allow-shared-ip": "dns", f"{OLD}/loadBalancerIPs": "203.0.113.31"}


def port(number: int, protocol: str = "TCP") -> list[dict[str, Any]]:
    return [{"name": "web", "port": number, "protocol": protocol, "targetPort": "http"}]


def services() -> list[dict[str, Any]]:
    """Return Services in the order in which they are created. The first one is deleted, so that
    its address is the first that a controller chooses for any other."""
    ports = port(80)
    return [
        service("first", ports=ports),
        service("web", ports=ports),
        service("asks", ports=ports, annotations={f"{OLD}/loadBalancerIPs": "203.0.113.30"}),
        service("in-spec", ports=ports, loadBalancerIP="203.0.113.32"),
        service("of-pool", ports=ports, annotations={f"{OLD}/address-pool": "lab"}),
        service("both", ports=ports, **DUAL),
        service("dns-tcp", ports=port(53), annotations=SHARED),
        service("dns-udp", ports=port(53, "UDP"), annotations=SHARED),
    ]


class Lab:
    """A lab whose only gateway and nodes run, without a controller, and MetalLB."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.kubectl = Kubectl(site.directory.kubeconfig, site.name)
        self.metallb = Metallb(site)
        self.shown: dict[str, list[tuple[str, ...]]] = {}
        """The addresses that each Service has shown, without repetitions."""

    async def configure(self, default_class: str | None) -> None:
        """Restart Fairlead's controller with this default class, and without pools."""
        path = self.site.directory.config
        configuration = yaml.safe_load(path.read_text()) | {"pools": []}
        configuration.pop("defaultClass", None)
        if default_class is not None:
            configuration["defaultClass"] = default_class
        path.write_text(yaml.safe_dump(configuration))
        await self.site.stop_role("control")
        await self.site.start_role("control")

    async def migrate(self, *command: str) -> str:
        """Return what `fairlead migrate` prints."""
        child = await asyncio.create_subprocess_exec(
            *(str(PROGRAM), "migrate", *command),
            *("--kubeconfig", str(self.site.directory.kubeconfig)),
            *("--config", str(self.site.directory.config)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await child.communicate()
        assert child.returncode == 0, errors.decode()
        assert b"is in no pool of MetalLB" not in errors
        return output.decode()

    async def addresses(self) -> dict[str, list[str]]:
        """Return the addresses of all load balancers, sorted: MetalLB sorts requested addresses as
        texts, so that it shows those of a dual-stack Service in another order than before."""
        listed = yaml.safe_load(await self.kubectl("get", "services", "-o", "yaml"))
        return {
            each["metadata"]["name"]: sorted(addresses_of(each))
            for each in listed["items"]
            if each["spec"]["type"] == "LoadBalancer"
        }

    async def await_addresses(self, wanted: Mapping[str, list[str]] | None = None) -> None:
        """Wait until all Services have addresses, or these."""

        found: dict[str, list[str]] = {}

        async def have() -> object:
            nonlocal found
            found = await self.addresses()
            return all(found.values()) if wanted is None else found == wanted

        try:
            await until(have, f"addresses {wanted}")
        except AssertionError:
            log = self.site.directory.log("control/metallb-controller").read_text()
            raise AssertionError(f"{found} instead of {wanted}; {log[-3000:]}") from None

    async def witness(self, client: Client) -> None:
        """Record every status."""
        reflector = Reflector(client, SERVICES, namespace="default")
        async for changes in reflector.changes():
            for key, found in changes.items():
                if found is not None and found.spec.type == "LoadBalancer":
                    shown = self.shown.setdefault(key.name, [])
                    if (now := _ips(found)) not in shown[-1:]:
                        shown.append(now)


def _ips(found: Service) -> tuple[str, ...]:
    return tuple(sorted(each.ip for each in found.status.load_balancer.ingress))


@asynccontextmanager
async def lab() -> AsyncIterator[Lab]:
    made = Site.create(f"mig{os.getpid()}", nodes=len(NODES), apiserver="real")
    async with made as site:
        found = Lab(site)
        await found.configure(None)
        await found.metallb.install_controller("lab", POOL)
        yield found


async def test_services_keep_their_addresses_on_the_way_from_metallb_and_back() -> None:
    find()
    async with lab() as here, here.site.client() as client:
        await Web(here.site).start(NODES)
        for each in services():
            await here.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(each))
            await here.await_addresses()
        await here.kubectl("delete", "service", "first")
        before = await here.addresses()
        assert before["web"] != ["203.0.113.10"]

        # There: docs/migration.md, 1 to 4.
        output = await here.migrate("services")
        assert all(address in output for each in before.values() for address in each)
        await here.kubectl("apply", "-f", "-", stdin=await here.migrate("pools"))
        watching = asyncio.ensure_future(here.witness(client))
        await here.metallb.controller().stop(10)
        await here.configure("fairlead.io/direct")
        for name in before:
            for condition in ("fairlead.io/Accepted", "fairlead.io/Programmed"):
                await here.kubectl(
                    "wait", f"--for=condition={condition}", f"service/{name}", "--timeout=60s"
                )
        assert {name: list(map(list, each)) for name, each in here.shown.items()} == {
            name: [addresses] for name, addresses in before.items()
        }, "an address was missing for a moment"
        reader, writer = await here.site.connect("client1", before["web"][0], 80)
        writer.write(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n")
        assert b"200" in (await reader.read())[:20]
        writer.close()
        young = service(
            "young", ports=port(80), annotations={"fairlead.io/addresses": "203.0.113.39"}
        )
        await here.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(young))
        await here.await_addresses(before | {"young": ["203.0.113.39"]})

        # And back: docs/migration.md, Rollback.
        command = "apply --server-side --field-manager=fairlead-migrate --force-conflicts -f -"
        requests = await here.migrate("back", "--to", "metallb")
        await here.kubectl(*command.split(), stdin=requests)
        await here.configure(None)

        async def are_released() -> bool:
            return not any((await here.addresses()).values())

        await until(are_released, "the release of all Services")
        here.metallb.start_controller()
        await here.await_addresses(before | {"young": ["203.0.113.39"]})
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for name, addresses in before.items():
            assert set(here.shown[name]) <= {tuple(addresses), ()}, "another address was shown"
