"""A driver of class octavia connected to the real Octavia, without Kubernetes: tests pass Services
as planned values.

In: a FaultProxy in front of Octavia. Out: Services that the driver serves, with passes as the loop
would make them, and the resulting state at Octavia."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import yaml
from tests.openstack import clients
from tests.openstack.fault_proxy import Call, FaultProxy

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
QUICK = Pace(first_s=0.1, last_s=1.0, timeout_s=300.0)
"""The interval between polls. A poll costs Octavia a tenth of the work that is waited for."""
CHECKS = OctaviaChecks()
MAX_PASSES = 60
Observed = dict[ServiceKey, ExistingLoadBalancer | None]


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
    """Return the plan of the Service. The `addresses` of `wanted` are the addresses in the status
    of the Service."""
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
    """One cluster, with a name of its own, and its driver."""

    def __init__(
        self, proxy: FaultProxy, folder: Path, recorder: Recorder, neutron: FaultProxy | None = None
    ) -> None:
        """Create the site. `neutron`: the proxy in front of Neutron; if it is given, the driver
        manages floating IPs and security groups."""
        self.proxy, self.neutron = proxy, neutron
        self.owner = Owner(proxy.project, "test")
        file = clouds_file(folder, proxy.url, neutron.url if neutron is not None else "")
        self.config = OctaviaConfig(cloud="test", clouds_file=str(file), calls_per_s=1000.0)
        self._recorder = recorder
        self.cloud = Cloud(self.config)
        self.client = clients.without_auth(octavia=proxy.url)
        """A client for the test itself."""
        self.clock_offset_s = 0.0
        """Seconds that are added to the real time."""
        self._wanted: dict[ServiceKey, LoadBalancer | None] = {}
        self._observed: dict[OctaviaDriver, Observed] = {}
        self.driver = self.restart()

    def restart(self) -> OctaviaDriver:
        """Replace the driver by a new one without memory, as a restart does, and return it."""
        self.driver = self._driver()
        return self.driver

    def _driver(self) -> OctaviaDriver:
        observed: Observed = {}
        driver = OctaviaDriver(
            self.cloud,
            self.owner,
            self._recorder,
            claimant_of=self._claimant_of,
            observe=observed.__setitem__,
            clock=self._clock,
            pace=QUICK,
            manage_floating_ips=bool(self.neutron),
            manage_security_group=bool(self.neutron),
        )
        self._observed[driver] = observed
        return driver

    @property
    def observed(self) -> Mapping[ServiceKey, ExistingLoadBalancer | None]:
        """The load balancers that the driver has reported to the plan."""
        return self._observed[self.driver]

    def planned(self, wanted: LoadBalancer) -> LoadBalancer:
        """Return the plan of the Service with the load balancer that the driver has observed."""
        return planned(wanted, self.observed.get(wanted.service))

    def _claimant_of(self, key: ServiceKey) -> Claimant | None:
        wanted = self._wanted.get(key)
        if wanted is None:
            return None
        asked = wanted.settings
        shared_or_adopted = asked.shared_or_adopted if isinstance(asked, OctaviaSettings) else None
        return Claimant(wanted.uid, wanted.addresses, shared_or_adopted)

    def _clock(self) -> float:
        return time.monotonic() + self.clock_offset_s

    async def run_pass(
        self, *services: LoadBalancer, key: ServiceKey = WEB
    ) -> Mapping[ServiceKey, Outcome]:
        """Make one pass for this key: `services` contains its Service, unless the Service is
        deleted. Also make the passes that follow at once to check the effect of the writes."""
        self._wanted[key] = next((each for each in services if each.service == key), None)
        while True:
            desired = self.driver.render({each.service: self.planned(each) for each in services})
            changes = self.driver.diff(desired, await self.driver.read([key]))
            outcomes = await self.driver.apply(changes) if changes else {}
            if not any(each.again_s == AGAIN_S for each in outcomes.values()):
                return outcomes

    async def try_pass(self, wanted: LoadBalancer) -> str:
        """Make a pass, repeated after a Conflict. Return the message to the owner of the Service;
        "" if the Service is done."""
        for _ in range(5):
            try:
                outcomes = await self.run_pass(wanted, key=wanted.service)
            except Conflict:
                continue
            except FairleadError as error:
                return str(error)
            return outcomes[wanted.service].message if outcomes else ""
        raise AssertionError

    async def reconcile(self, *services: LoadBalancer, key: ServiceKey = WEB) -> list[str]:
        """Make passes until the Service is done. Return the messages of the previous passes."""
        messages: list[str] = []
        for _ in range(MAX_PASSES):
            try:
                outcomes = await self.run_pass(*services, key=key)
            except Conflict as error:
                messages.append(str(error))
                continue
            except FairleadError as error:
                messages.append(str(error))
                continue
            if not outcomes:
                return messages
            messages += [outcome.message for outcome in outcomes.values()]
            waits = [each.again_s for each in outcomes.values() if each.state == "waiting"]
            await asyncio.sleep(max(waits, default=0.0))
        raise AssertionError(messages)

    async def found(self, key: ServiceKey = WEB) -> Found:
        """Return the state that a driver without memory reads."""
        return (await self._driver().read(None)).get(key, Found(()))

    async def tree(self) -> BalancerState:
        (tree,) = (await self.found()).balancers
        return tree

    async def remaining_steps(self, *services: LoadBalancer) -> Sequence[Change]:
        """Return the steps that a driver without memory would take."""
        self._wanted[WEB] = next(iter(services), None)
        fresh = self._driver()
        found = (await fresh.read(None)).get(WEB, Found(()))
        desired = {
            each.service: planned(each, self._observed[fresh].get(each.service))
            for each in services
        }
        return fresh.diff(fresh.render(desired), {WEB: found})

    async def audit(self, *services: LoadBalancer) -> Sequence[Change]:
        """Return the steps that an audit of this driver would take."""
        found = await self.driver.read(None)
        desired = {each.service: self.planned(each) for each in services}
        return self.driver.diff(self.driver.render(desired), found)

    async def is_complete(self, *services: LoadBalancer) -> bool:
        """Return whether nothing but the desired state exists."""
        return not await self.remaining_steps(*services) and len(self.balancer_ids()) == len(
            services
        )

    def balancer_ids(self) -> list[str]:
        """Return the ids of all load balancers of the project."""
        return [
            each.id
            for each in self.client.load_balancer.load_balancers(project_id=self.proxy.project)
        ]

    def clear_calls(self) -> None:
        """Forget the calls so far, so that only later calls are counted."""
        self.proxy.calls.clear()
        if self.neutron is not None:
            self.neutron.calls.clear()

    @property
    def writes(self) -> list[str]:
        """The writes to Octavia, such as `PUT pools/_/members`."""
        return [summary(each) for each in self.proxy.writes]

    @property
    def neutron_writes(self) -> list[str]:
        """The writes to Neutron, such as `PUT floatingips/_`."""
        assert self.neutron is not None
        return [summary(each) for each in self.neutron.writes]

    @property
    def reads(self) -> list[str]:
        return [summary(each) for each in self.proxy.calls if not each.writes]


def summary(call: Call) -> str:
    """Return the method and the path of a call. Each id is replaced by `_`."""
    path = call.path.partition("?")[0]
    parts = path.partition("/lbaas/" if "/lbaas/" in path else "/v2.0/")[2].split("/")
    return f"{call.method} {'/'.join('_' if len(part) == 36 else part for part in parts)}"
