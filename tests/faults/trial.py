"""An API server in this process, and a real `fairlead controller` that reaches it through a
forwarder.

In: a directory for files, a configuration. Out: the controller, which a test starts, kills and
restarts; and the content of the server, as text that is equal for all runs with the same result:
without versions, times, or random uids."""

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml
from tests.faults.forwarder import Call, Forwarder

from fairlead.config import PresenceConfig
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICE_NAME_LABEL
from fairlead.lab import crds, process, settings
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.process import Process
from fairlead.roles.presence import Announcer
from fairlead.web import View

LAB = f"faults{os.getpid()}"
POOL = "192.0.2.1-192.0.2.2"
DEADLINE_S = 60.0
LEASE_S = 1
PRESENCE = PresenceConfig(lease_duration_s=3.0)
CHECK_INTERVAL_S = 0.02
OF_CHANCE = frozenset(
    [
        *(
            "resourceVersion",
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generation",
        ),
        *(
            "managedFields",
            "observedGeneration",
            "lastTransitionTime",
            "serviceVersion",
            "nodePort",
            "healthCheckNodePort",
        ),
        *("clusterIP", "clusterIPs"),
    ]
)
"""The fields that differ between runs."""
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
PASSING = ("Event", "Lease", "Namespace", "Node", "CustomResourceDefinition")
"""The kinds that do not belong to the result: Events, and kinds that the controller does not
manage."""


class Trial:
    """The server, the forwarder and the controller. `server` is in memory; `client` belongs to a
    user, and does not use the forwarder."""

    def __init__(
        self, server: ApiServer, client: Client, folder: Path, config: Mapping[str, object]
    ) -> None:
        self.server = server
        self.client = client
        self.forwarder = Forwarder(server.url, self._kill_now)
        self.controller: Process | None = None
        self._folder = folder
        self._config = config
        self._begun = 0
        self.log = folder / "controller.log"

    def configure(self) -> None:
        """Write the files that the controller reads."""
        self._folder.mkdir(parents=True, exist_ok=True)
        config = {
            "defaultClass": "fairlead.io/direct",
            "pools": [{"name": "trial", "addresses": [POOL]}],
            "controller": {"leaseDurationS": LEASE_S},
            "presence": {"leaseDurationS": PRESENCE.lease_duration_s},
            **self._config,
        }
        (self._folder / "fairlead.yaml").write_text(yaml.safe_dump(config))
        (self._folder / "kubeconfig").write_text(
            settings.kubeconfig("trial", Access(self.forwarder.url))
        )

    async def announce_gateway(self) -> None:
        """Announce a gateway, so that the controller sees a live one. The gateway itself does not
        exist."""
        view = View("gateway", "gw1")
        view.standing_by = lambda: True
        await Announcer(self.client, PRESENCE, view, "gw1").run()

    def start(self, *, under: Sequence[str] = ()) -> None:
        """Start a controller. It gets the Lease when the Lease of the previous controller has
        expired. `under`: a command that runs the controller."""
        self._begun = len(self.forwarder.calls)
        # Faults for the previous controller are removed.
        self.forwarder.resume()
        argv = [
            *under,
            str(Path(sys.executable).with_name("fairlead")),
            "controller",
            "--listen",
            "",
        ]
        argv += [
            "--config",
            str(self._folder / "fairlead.yaml"),
            "--kubeconfig",
            str(self._folder / "kubeconfig"),
        ]
        self.controller = process.spawn(LAB, "trial/controller", argv, log=self.log)

    def _kill_now(self) -> None:
        if self.controller is not None:
            self.controller.send(signal.SIGKILL)

    async def kill(self) -> None:
        if self.controller is not None:
            await self.controller.kill()
            self.controller = None

    async def leading(self) -> None:
        """Return when the controller that was started has written its name into the Lease."""

        async def written() -> bool:
            return any(call.writes_lease for call in self.forwarder.calls[self._begun :])

        await self.until(written, "leadership of the controller")

    async def make_endpoints(self, *services: str) -> None:
        """Create a node, and a ready pod on it for each of these Services."""
        node = {
            "metadata": {"name": "node1"},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.101"}]},
        }
        await self.client.create(NODES, node)
        for name in services:
            labels = {SERVICE_NAME_LABEL: name, "endpointslice.kubernetes.io/managed-by": "a-test"}
            pod = {
                "addresses": ["198.51.100.1"],
                "nodeName": "node1",
                "conditions": {"ready": True},
            }
            ports = [{"name": "http", "port": 8080}, {"name": "dns", "port": 53, "protocol": "UDP"}]
            slice_ = {"metadata": {"name": f"{name}-1", "labels": labels}, "addressType": "IPv4"}
            await self.client.create(
                ENDPOINT_SLICES, slice_ | {"endpoints": [pod], "ports": ports}, namespace="default"
            )

    async def until_killed(self) -> Call:
        """Wait until the forwarder has killed the process as armed."""
        async with asyncio.timeout(DEADLINE_S):
            while self.forwarder.struck is None:
                await asyncio.sleep(CHECK_INTERVAL_S)
        await self.kill()
        return self.forwarder.struck

    async def stop(self) -> None:
        """Stop the controller gracefully, so that it releases the Lease."""
        if self.controller is not None:
            self.controller.send(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                await self.controller.wait()
            self.controller = None

    def shown(self) -> list[str]:
        """Return the content of the server without random and transient values."""
        objects = [each for each in self.objects() if each["kind"] not in PASSING]
        names = {
            each["metadata"]["uid"]: f"uid of {each['kind']} {each['metadata']['name']}"
            for each in objects
        }
        lines = []
        for each in sorted(objects, key=lambda each: (each["kind"], each["metadata"]["name"])):
            text = msgspec.json.encode(_lasting(each), order="sorted").decode()
            lines.append(
                UID.sub(lambda found: names.get(found[0], "uid of a deleted object"), text)
            )
        return lines

    def events(self) -> Counter[tuple[str, str, str]]:
        """Return how often each Event was written, by object, reason and message."""
        said: Counter[tuple[str, str, str]] = Counter()
        for each in self.objects():
            if each["kind"] == "Event":
                said[each["involvedObject"]["name"], each["reason"], each["message"]] += each.get(
                    "count", 1
                )
        return said

    async def until_shown(self, wanted: list[str], when: str) -> None:
        """Wait until the server shows exactly this content."""

        async def equal() -> bool:
            return self.shown() == wanted

        await self.until(equal, when + "; expected is\n" + "\n".join(wanted))

    async def until(self, condition: Callable[[], Awaitable[bool]], when: str) -> None:
        """Wait until the condition is true."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not await condition():
                    await asyncio.sleep(CHECK_INTERVAL_S)
        except TimeoutError:
            there, words = "\n".join(self.shown()), self.log.read_text()[-3000:]
            raise AssertionError(
                f"the condition was not met in time: {when}\nthe server contains\n{there}\n"
                f"The log of the controller:\n{words}"
            ) from None

    def objects(self) -> list[Any]:
        """Return all objects of the server."""
        store = self.server.store
        return [stored.object for kind in store.kinds() for stored in store.all_of(kind)]


def _lasting(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _lasting(each) for name, each in value.items() if name not in OF_CHANCE}
    return [_lasting(each) for each in value] if isinstance(value, list) else value


@asynccontextmanager
async def trial(folder: Path, **config: object) -> AsyncIterator[Trial]:
    """Create a server and a forwarder, without a controller. Everything that was started is stopped
    at the end. `config`: additions to the controller's configuration."""
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await crds.install(client)
        made = Trial(server, client, folder, config)
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": PRESENCE.namespace}}
        )
        async with made.forwarder.listen():
            made.configure()
            gateway = asyncio.ensure_future(made.announce_gateway())
            try:
                yield made
            finally:
                gateway.cancel()
                await asyncio.gather(gateway, return_exceptions=True)
                await made.kill()
