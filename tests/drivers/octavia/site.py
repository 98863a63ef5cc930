"""A driver of class octavia before the real Octavia, without a Kubernetes: Services are given as the values that are planned.

In: a Front before Octavia. Out: Services served by a driver, as the loop would do it, and what is at Octavia then.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import yaml
from tests.openstack.front import Front

from fairlead.config import OctaviaConfig
from fairlead.drivers.octavia.apply import Pace
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.driver import OctaviaDriver
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.tree import Found, FoundTree
from fairlead.errors import Conflict, FairleadError
from fairlead.kube.events import Recorder
from fairlead.model import (
    HealthMonitor,
    Listener,
    LoadBalancer,
    Member,
    OctaviaChecks,
    OctaviaPlace,
    OctaviaSettings,
    Outcome,
    ServiceKey,
)

WEB = ServiceKey("default", "web")
SUBNET = "0f1a7c1e-0000-4000-8000-000000000001"
QUICK = Pace(first_s=0.05, last_s=0.2, patience_s=30.0)
CHECKS = OctaviaChecks()
MOST_PASSES = 30


def member(number: int, weight: int = 1) -> Member:
    return Member(f"node{number}", f"10.1.0.{number}", weight, "active" if weight else "draining")


def listener(port: int = 80, *members: Member, protocol: str = "TCP") -> Listener:
    return Listener("IPv4", port, protocol, "Local", 30000 + port, members or (member(1), member(2, 2)))  # type: ignore[arg-type]


def settings(**fields: object) -> OctaviaSettings:
    given = {"provider": "amphora", "place": OctaviaPlace(SUBNET), "checks": CHECKS, "asking": (("TCP", "HTTP"),)} | fields
    return OctaviaSettings(**given)  # type: ignore[arg-type]


def service(
    *listeners: Listener, uid: str = "uid-web", octavia: OctaviaSettings | None = None, **fields: object
) -> LoadBalancer:
    return msgspec.structs.replace(
        LoadBalancer(
            WEB,
            uid,
            "fairlead.io/octavia",
            (),
            tuple(sorted(listeners or (listener(),))),
            health_monitor=HealthMonitor(32000, "/healthz"),
            octavia=octavia or settings(),
        ),
        **fields,
    )


def clouds_file(folder: Path, url: str) -> Path:
    """A clouds.yaml for an Octavia that asks for no token."""
    cloud = {
        "auth_type": "none",
        "auth": {"endpoint": url},
        "load_balancer_endpoint_override": url,
        "load_balancer_api_version": "2",
        "region_name": "R",
    }
    path = folder / "clouds.yaml"
    path.write_text(yaml.safe_dump({"clouds": {"test": cloud}}))
    return path


class Site:
    """One cluster, of a name that nobody else has."""

    def __init__(self, front: Front, folder: Path, recorder: Recorder) -> None:
        self.front = front
        self.owner = Owner(front.project, "test")
        self.config = OctaviaConfig(cloud="test", clouds_file=str(clouds_file(folder, front.url)), calls_per_s=1000.0)
        self._recorder = recorder
        self.cloud = Cloud(self.config)
        self.driver = self.anew()

    def anew(self) -> OctaviaDriver:
        """A driver that knows nothing, as after a restart."""
        self.driver = OctaviaDriver(self.cloud, self.owner, self._recorder, clock=time.monotonic, pace=QUICK)
        return self.driver

    async def once(self, *services: LoadBalancer) -> Mapping[ServiceKey, Outcome]:
        """One pass, for the Service `web`, or for the absence of it."""
        desired = self.driver.render({each.service: each for each in services})
        changes = self.driver.diff(desired, await self.driver.read([WEB]))
        return await self.driver.apply(changes) if changes else {}

    async def bring(self, *services: LoadBalancer) -> list[str]:
        """Pass after pass until it is done; what kept it from being done before."""
        told: list[str] = []
        for _ in range(MOST_PASSES):
            try:
                outcomes = await self.once(*services)
            except Conflict as error:
                told.append(str(error))
                continue
            except FairleadError as error:
                told.append(str(error))
                continue
            if not outcomes:
                return told
            told += [outcome.message for outcome in outcomes.values()]
        raise AssertionError(told)

    async def found(self) -> Found:
        """What a driver finds that knows nothing."""
        fresh = OctaviaDriver(self.cloud, self.owner, self._recorder, clock=time.monotonic)
        return (await fresh.read(None)).get(WEB, Found(()))

    async def tree(self) -> FoundTree:
        (tree,) = (await self.found()).trees
        return tree

    def forget(self) -> None:
        """Count calls from now on."""
        self.front.calls.clear()

    @property
    def writes(self) -> list[str]:
        """What was written, without ids: `PUT pools/_/members`."""
        return [_told(each.method, each.path) for each in self.front.writes]

    @property
    def reads(self) -> list[str]:
        return [_told(each.method, each.path) for each in self.front.calls if not each.writes]


def _told(method: str, path: str) -> str:
    parts = path.partition("?")[0].partition("/lbaas/")[2].split("/")
    return f"{method} {'/'.join('_' if len(part) == 36 else part for part in parts)}"
