"""A driver of class octavia connected to the real Octavia, without Kubernetes: tests pass Services
as planned values.

In: a Front for Octavia. Out: Services that the driver serves, with passes as the loop would make
them, and the resulting state at Octavia."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import yaml
from tests.openstack import clients
from tests.openstack.front import Call, Front

from fairlead.drivers.octavia.apply import Pace
from fairlead.drivers.octavia.balancers import BalancerState, Found
from fairlead.drivers.octavia.changes import Change
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.driver import AGAIN_S, OctaviaDriver
from fairlead.drivers.octavia.marks import Owner
from fairlead.errors import Conflict, FairleadError
from fairlead.kube.events import Recorder
from fairlead.model import (
    ExistingLoadBalancer,
    HealthMonitor,
    Listener,
    LoadBalancer,
    Member,
    OctaviaChecks,
    OctaviaPlace,
    OctaviaSettings,
    Outcome,
    Protocol,
    ServiceKey,
)
from fairlead.plan.cloud import Claimant, with_existing
from fairlead.sections import OctaviaConfig

WEB = ServiceKey("default", "web")
SUBNET = "0f1a7c1e-0000-4000-8000-000000000001"
QUICK = Pace(first_s=0.1, last_s=1.0, timeout_s=180.0)
"""The interval between polls. A poll costs Octavia a tenth of the work that is waited for."""
CHECKS = OctaviaChecks()
MAX_PASSES = 60
Seen = dict[ServiceKey, ExistingLoadBalancer | None]


def member(number: int, weight: int = 1) -> Member:
    return Member(f"node{number}", f"10.1.0.{number}", weight, "active" if weight else "draining")


def listener(port: int = 80, *members: Member, protocol: Protocol = "TCP") -> Listener:
    members = members or (member(1), member(2, 2))
    return Listener("IPv4", port, protocol, "Local", 30000 + port, members)


def settings(**fields: object) -> OctaviaSettings:
    given = {
        "provider": "amphora",
        "place": OctaviaPlace(SUBNET),
        "checks": CHECKS,
        "monitor_types": (("TCP", "HTTP"),),
    } | fields
    return OctaviaSettings(**given)  # type: ignore[arg-type]


def service(
    *listeners: Listener,
    uid: str = "uid-web",
    octavia: OctaviaSettings | None = None,
    **fields: object,
) -> LoadBalancer:
    return msgspec.structs.replace(
        LoadBalancer(
            WEB,
            uid,
            "fairlead.io/octavia",
            (),
            tuple(sorted(listeners or (listener(),))),
            health_monitor=HealthMonitor(32000, "/healthz"),
            settings=octavia or settings(),
        ),
        **fields,
    )


def planned(wanted: LoadBalancer, existing: ExistingLoadBalancer | None = None) -> LoadBalancer:
    """Return the planned value. The `addresses` of the test's argument are the addresses that the
    Service shows."""
    asked = wanted.settings
    assert isinstance(asked, OctaviaSettings)
    held = asked.held if asked.existing is not None else wanted.addresses
    asked = msgspec.structs.replace(asked, held=held)
    return with_existing(msgspec.structs.replace(wanted, settings=asked), existing)


def clouds_file(folder: Path, url: str, neutron: str = "") -> Path:
    """Write a clouds.yaml for an Octavia and a Neutron without authentication."""
    cloud = {
        "auth_type": "none",
        "auth": {"endpoint": url},
        "load_balancer_endpoint_override": url,
        "load_balancer_api_version": "2",
        "region_name": "R",
    } | ({"network_endpoint_override": neutron} if neutron else {})
    path = folder / "clouds.yaml"
    path.write_text(yaml.safe_dump({"clouds": {"test": cloud}}))
    return path


class Site:
    """One cluster with a unique name."""

    def __init__(
        self, front: Front, folder: Path, recorder: Recorder, neutron: Front | None = None
    ) -> None:
        """Create the site. `neutron`: the URL of Neutron; if given, floating IPs and security
        groups are managed."""
        self.front, self.neutron = front, neutron
        self.owner = Owner(front.project, "test")
        file = clouds_file(folder, front.url, neutron.url if neutron is not None else "")
        self.config = OctaviaConfig(cloud="test", clouds_file=str(file), calls_per_s=1000.0)
        self._recorder = recorder
        self.cloud = Cloud(self.config)
        self.client = clients.without_auth(octavia=front.url)
        """A client for the test itself."""
        self.later_s = 0.0
        """Seconds that are added to the real time."""
        self._wanted: dict[ServiceKey, LoadBalancer | None] = {}
        self._seen: dict[OctaviaDriver, Seen] = {}
        self.driver = self.anew()

    def anew(self) -> OctaviaDriver:
        """Return a new driver without memory, as after a restart."""
        self.driver = self._driver()
        return self.driver

    def _driver(self) -> OctaviaDriver:
        seen: Seen = {}
        driver = OctaviaDriver(
            self.cloud,
            self.owner,
            self._recorder,
            claimant_of=self._claimant_of,
            observe=seen.__setitem__,
            clock=self._clock,
            pace=QUICK,
            manage_floating_ips=bool(self.neutron),
            manage_security_group=bool(self.neutron),
        )
        self._seen[driver] = seen
        return driver

    @property
    def seen(self) -> Mapping[ServiceKey, ExistingLoadBalancer | None]:
        """The load balancers that the driver has reported to the plan."""
        return self._seen[self.driver]

    def planned(self, wanted: LoadBalancer) -> LoadBalancer:
        """Return the planned value with what a plan knows of the existing load balancer."""
        return planned(wanted, self.seen.get(wanted.service))

    def _claimant_of(self, key: ServiceKey) -> Claimant | None:
        wanted = self._wanted.get(key)
        if wanted is None:
            return None
        asked = wanted.settings
        shared_or_adopted = asked.shared_or_adopted if isinstance(asked, OctaviaSettings) else None
        return Claimant(wanted.uid, wanted.addresses, shared_or_adopted)

    def _clock(self) -> float:
        return time.monotonic() + self.later_s

    async def once(
        self, *services: LoadBalancer, key: ServiceKey = WEB
    ) -> Mapping[ServiceKey, Outcome]:
        """Make one pass for the Service of this name or for its absence, and the passes that follow
        it at once to compare the results of its writes."""
        self._wanted[key] = next((each for each in services if each.service == key), None)
        while True:
            desired = self.driver.render({each.service: self.planned(each) for each in services})
            changes = self.driver.diff(desired, await self.driver.read([key]))
            outcomes = await self.driver.apply(changes) if changes else {}
            if not any(each.again_s == AGAIN_S for each in outcomes.values()):
                return outcomes

    async def tried(self, wanted: LoadBalancer) -> str:
        """Make a pass, and return the message to the Service's owner; "" if the Service is done."""
        for _ in range(5):
            try:
                outcomes = await self.once(wanted, key=wanted.service)
            except Conflict:
                continue
            except FairleadError as error:
                return str(error)
            return outcomes[wanted.service].message if outcomes else ""
        raise AssertionError

    async def bring(self, *services: LoadBalancer, key: ServiceKey = WEB) -> list[str]:
        """Make passes until the Service is done. Return the messages of the earlier passes."""
        told: list[str] = []
        for _ in range(MAX_PASSES):
            try:
                outcomes = await self.once(*services, key=key)
            except Conflict as error:
                told.append(str(error))
                continue
            except FairleadError as error:
                told.append(str(error))
                continue
            if not outcomes:
                return told
            told += [outcome.message for outcome in outcomes.values()]
            waits = [each.again_s for each in outcomes.values() if each.state == "waiting"]
            await asyncio.sleep(max(waits, default=0.0))
        raise AssertionError(told)

    async def found(self, key: ServiceKey = WEB) -> Found:
        """Return the state that a driver without memory reads."""
        return (await self._driver().read(None)).get(key, Found(()))

    async def tree(self) -> BalancerState:
        (tree,) = (await self.found()).balancers
        return tree

    async def left(self, *services: LoadBalancer) -> Sequence[Change]:
        """Return the steps that a driver without memory finds necessary."""
        self._wanted[WEB] = next(iter(services), None)
        fresh = self._driver()
        found = (await fresh.read(None)).get(WEB, Found(()))
        desired = {
            each.service: planned(each, self._seen[fresh].get(each.service)) for each in services
        }
        return fresh.diff(fresh.render(desired), {WEB: found})

    async def audit(self, *services: LoadBalancer) -> Sequence[Change]:
        """Return the steps that an audit finds necessary, for a plan with this driver's
        knowledge."""
        found = await self.driver.read(None)
        desired = {each.service: self.planned(each) for each in services}
        return self.driver.diff(self.driver.render(desired), found)

    async def is_whole(self, *services: LoadBalancer) -> bool:
        """Return whether exactly the desired state exists."""
        return not await self.left(*services) and len(self.everything()) == len(services)

    def everything(self) -> list[str]:
        """Return the ids of all load balancers of the project."""
        return [
            each.id
            for each in self.client.load_balancer.load_balancers(project_id=self.front.project)
        ]

    def forget(self) -> None:
        """Count calls from now on."""
        self.front.calls.clear()
        if self.neutron is not None:
            self.neutron.calls.clear()

    @property
    def writes(self) -> list[str]:
        """The writes to Octavia without ids: `PUT pools/_/members`."""
        return [told(each) for each in self.front.writes]

    @property
    def neutron_writes(self) -> list[str]:
        """The writes to Neutron without ids: `PUT floatingips/_`."""
        assert self.neutron is not None
        return [told(each) for each in self.neutron.writes]

    @property
    def reads(self) -> list[str]:
        return [told(each) for each in self.front.calls if not each.writes]


def told(call: Call) -> str:
    """Return method and path of a call, without ids."""
    path = call.path.partition("?")[0]
    parts = path.partition("/lbaas/" if "/lbaas/" in path else "/v2.0/")[2].split("/")
    return f"{call.method} {'/'.join('_' if len(part) == 36 else part for part in parts)}"
