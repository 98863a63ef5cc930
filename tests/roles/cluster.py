"""A cluster that consists only of objects: an API server, a controller in this process, and the
objects that a kubelet, an EndpointSlice controller and a gateway would write.

In: the objects that a test needs. Out: the output of kubectl. No packet is forwarded here; the labs
of tests/e2e forward packets."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.kubectl import Kubectl, addresses_of, service
from tests.pauses import pauses

from fairlead.config import Config, ControllerConfig, PoolConfig, PresenceConfig, WebConfig
from fairlead.kube.access import Access
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICES, ObjectKey
from fairlead.lab import settings
from fairlead.roles import controller
from fairlead.roles.presence import Announcer
from fairlead.sections import OctaviaConfig
from fairlead.web import View

DEADLINE_S = 300.0
GRACE_PERIOD_S = 0.5
"""The time for which a problem must last before the controller reports it. It is shorter than in
production, because the problems that tests create are lasting ones."""
GATEWAY = "gw1"
LEASE_S = 3.0
FINALIZER = "service.kubernetes.io/load-balancer-cleanup"
POOL = ("203.0.113.20-203.0.113.29", "2001:db8:f::20-2001:db8:f::29")

Object = Mapping[str, Any]


class Cluster:
    """A namespace on an API server, for one test. All names are in this namespace."""

    def __init__(self, access: Access, client: Client, folder: Path) -> None:
        self.namespace = f"life-{secrets.token_hex(4)}"
        self.client = client
        self.default_class: str | None = "fairlead.io/direct"
        self.pool: Sequence[str] = POOL
        self.octavia: OctaviaConfig | None = None
        self.presence = PresenceConfig(namespace=self.namespace, lease_duration_s=LEASE_S)
        self.keeps = 10
        self._access = access
        self._nodes: set[str] = set()
        self._controller: asyncio.Task[None] | None = None
        self.gateway = View("gateway", GATEWAY)
        """The view of the gateway. Only its Lease is real."""
        self.gateway.standing_by = lambda: True
        self._gateway: asyncio.Task[None] | None = None
        self.kubeconfig = kubeconfig = folder / "kubeconfig"
        written = yaml.safe_load(settings.kubeconfig("life", access))
        written["contexts"][0]["context"]["namespace"] = self.namespace
        kubeconfig.write_text(yaml.safe_dump(written))
        self.kubectl = Kubectl(kubeconfig, "life")

    async def start_gateway(self) -> None:
        """Announce a gateway from now on."""
        if self._gateway is None:
            announcer = Announcer(self.client, self.presence, self.gateway, GATEWAY)
            self._gateway = asyncio.ensure_future(announcer.run())

    async def stop_gateway(self) -> None:
        """Stop the gateway as if it had been killed: its Lease stays."""
        if self._gateway is not None:
            self._gateway.cancel()
            await asyncio.gather(self._gateway, return_exceptions=True)
            self._gateway = None

    async def start_controller(self, *, gateway: bool = True) -> None:
        """Start a controller, which leads as soon as its predecessor has stopped. Start a gateway
        too, unless the test wants none."""
        if gateway:
            await self.start_gateway()
        config = Config(
            default_class=self.default_class,
            pools=(PoolConfig("life", tuple(self.pool)),),
            controller=ControllerConfig(
                lease_namespace=self.namespace,
                lease_duration_s=5.0,
                kept_addresses_per_namespace=self.keeps,
            ),
            presence=self.presence,
            web=WebConfig(listen=""),
            octavia=self.octavia,
        )
        self._controller = asyncio.ensure_future(
            controller.run(
                config, self._access, grace_period_s=GRACE_PERIOD_S, start_s=GRACE_PERIOD_S
            )
        )

    async def stop_controller(self) -> None:
        """Stop the controller like SIGTERM. Fail the test if the controller has ended by itself."""
        if self._controller is not None:
            assert not self._controller.done(), self._controller.exception()
            self._controller.cancel()
            await asyncio.gather(self._controller, return_exceptions=True)
            self._controller = None

    async def stop(self) -> None:
        """Stop controller and gateway."""
        await self.stop_controller()
        await self.stop_gateway()

    async def clear(self) -> None:
        """Delete Services and the objects without a namespace, which could affect later runs."""
        await self.stop_gateway()
        await self.kubectl("delete", "services", "--all", "--wait=false")
        names = (await self.kubectl("get", "services", "-o", "name")).split()
        for name in names:
            await self.kubectl(
                "patch", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}'
            )
        for node in set(self._nodes):
            await self.remove_node(node)

    async def add_node(self, name: str, number: int, *, pod_cidrs: Sequence[str] = ()) -> None:
        addresses = [f"192.0.2.{number}", f"2001:db8:1::{number}"]
        status = {
            "addresses": [{"type": "InternalIP", "address": address} for address in addresses]
        }
        spec = {"podCIDRs": list(pod_cidrs), "podCIDR": pod_cidrs[0]} if pod_cidrs else {}
        await self.client.create(NODES, {"metadata": {"name": name}, "spec": spec})
        await self.client.patch(
            NODES, ObjectKey("", name), {"status": status}, subresource="status"
        )
        self._nodes.add(name)

    async def remove_node(self, name: str) -> None:
        await self.client.delete(NODES, ObjectKey("", name))
        self._nodes.discard(name)

    async def set_endpoints(
        self,
        service_name: str,
        *rows: tuple[str, str, bool],
        name: str = "a",
        ports: Sequence[tuple[str, int, str]] = (),
    ) -> None:
        """Write an EndpointSlice with these endpoints (address, node or empty, ready)."""
        labels = {
            "kubernetes.io/service-name": service_name,
            "endpointslice.kubernetes.io/managed-by": "a-test",
        }
        endpoints = [
            {"addresses": [address], "conditions": {"ready": ready}}
            | ({"nodeName": node} if node else {})
            for address, node, ready in rows
        ]
        family = "IPv6" if rows and ":" in rows[0][0] else "IPv4"
        body = {
            "metadata": {"labels": labels},
            "addressType": family,
            "endpoints": endpoints,
            "ports": [
                {"name": n, "port": p, "protocol": t} for n, p, t in ports or [("web", 8080, "TCP")]
            ],
        }
        key = ObjectKey(self.namespace, f"{service_name}-{name}")
        await self.client.apply(ENDPOINT_SLICES, key, body, field_manager="a-test", force=True)

    async def apply(self, name: str, **fields: Any) -> None:
        await self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(service(name, **fields)))

    async def patch(self, name: str, spec: Object) -> None:
        await self.kubectl(
            "patch", "service", name, "--type=merge", "-p", json.dumps({"spec": spec})
        )

    async def service(self, name: str) -> Object:
        """Return the Service as `kubectl get -o json` shows it, which costs ten times as much."""
        path = SERVICES.path(self.namespace, name)
        shown: Object = json.loads(await self.client.request("GET", path))
        return shown

    async def addresses(self, name: str, count: int = 1) -> list[str]:
        """Wait until the Service shows this number of addresses, and return them."""

        async def shown() -> list[str] | None:
            found = addresses_of(await self.service(name))
            return found if len(found) == count else None

        found: list[str] = await until(shown, f"{count} addresses of {name}")
        return found

    async def described(self, name: str, *words: str) -> str:
        """Wait until `kubectl describe` shows all of these texts."""
        text = ""

        async def described() -> str:
            nonlocal text
            text = await self.kubectl("describe", "service", name)
            return text if all(word in text for word in words) else ""

        try:
            return str(await until(described, ""))
        except TimeoutError:
            missing = [word for word in words if word not in text]
            pytest.fail(f"kubectl describe service {name} shows no {missing}:\n{text}")

    async def conditions(self, name: str) -> dict[str, Object]:
        return conditions_of(await self.service(name))

    async def has(self, name: str, **expected: str) -> dict[str, Object]:
        """Wait for conditions such as `Ready="False/NoReadyEndpoints"`."""

        async def shown() -> dict[str, Object] | None:
            found = await self.conditions(name)
            texts = {kind: f"{each['status']}/{each['reason']}" for kind, each in found.items()}
            return found if expected.items() <= texts.items() else None

        answer: dict[str, Object] = await until(shown, f"conditions {expected} of {name}")
        return answer

    async def gone(self, name: str) -> None:
        async def is_gone() -> bool:
            try:
                await self.service(name)
            except NotFound:
                return True
            return False

        await until(is_gone, f"the removal of Service {name}")

    async def released(self, name: str) -> Object:
        """Wait until the Service has no mark or finalizer of Fairlead, and return the Service."""

        async def is_released() -> Object | None:
            shown = await self.service(name)
            meta = shown["metadata"]
            ours = FINALIZER in meta.get("finalizers", ()) or "fairlead.io/class" in meta.get(
                "annotations", {}
            )
            ours = ours or bool(conditions_of(shown)) or bool(addresses_of(shown))
            return None if ours else shown

        answer: Object = await until(is_released, f"the release of Service {name}")
        return answer

    async def events(self, name: str, *, reason: str = "") -> list[Object]:
        selector = f"involvedObject.name={name}" + (f",reason={reason}" if reason else "")
        found = json.loads(
            await self.kubectl("get", "events", "--field-selector", selector, "-o", "json")
        )
        return list(found["items"])


def conditions_of(shown: Object) -> dict[str, Object]:
    """Return the conditions of a Service that belong to Fairlead, by type."""
    found = {each["type"]: each for each in shown["status"].get("conditions", ())}
    return {
        kind.removeprefix("fairlead.io/"): each
        for kind, each in found.items()
        if kind.startswith("fairlead.io/")
    }


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    """Wait until the function returns a true value, and return this value."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            waits = pauses()
            while not (answer := await condition()):
                await asyncio.sleep(next(waits))
            return answer
    except TimeoutError:
        raise TimeoutError(f"waited {DEADLINE_S} s in vain for {what}") from None
