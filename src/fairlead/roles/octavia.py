"""The loop of class `fairlead.io/octavia` within the controller: claim, load balancer, publication.

In: the cluster, the cloud of the configuration. Out: a loop that serves many Services at once. So a
load balancer that takes minutes does not delay other load balancers, and an unreachable cloud does
not delay other classes."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fairlead.config import Config
from fairlead.drivers.claim import ClaimDriver
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.driver import OctaviaDriver
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.publish import PublishDriver
from fairlead.drivers.service_status import ServiceWriter
from fairlead.errors import Conflict, Refused
from fairlead.kube.events import Recorder
from fairlead.kube.objects import LoadBalancerIngress
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.classes import OCTAVIA, loop_of
from fairlead.plan.cloud import claimant_of, plan_cloud
from fairlead.plan.service import claimed_class, class_of
from fairlead.reconcile import Loop, Pace, Report
from fairlead.state import State, Subscribers
from fairlead.web import View

AT_ONCE = 32
"""The number of load balancers that are processed in parallel."""
AUDIT_INTERVAL_S = 300.0
"""An audit costs an API call for each pool, so it is less frequent than in other loops."""
SYSTEM = "kube-system"
"""A namespace that exists in every cluster from its creation; its uid identifies the cluster."""


class OctaviaServices:
    """The Services of a cluster that class octavia concerns: the source of the loop. Other Services
    must not wait for a cloud."""

    def __init__(
        self, state: State, config: Config, has_objects: Callable[[ServiceKey], bool]
    ) -> None:
        self.has_synced: asyncio.Event = state.has_synced
        self.subscribers = Subscribers[ServiceKey]()
        self._state = state
        self._config = config
        self._has_objects = has_objects

    @property
    def services(self) -> Collection[ServiceKey]:
        return [key for key in self._state.services if self._concerned(key)]

    def mark(self, keys: Iterable[ServiceKey]) -> None:
        """Mark the Services among these that class octavia concerns."""
        self.subscribers.mark([key for key in keys if self._concerned(key)])

    def _concerned(self, key: ServiceKey) -> bool:
        service = self._state.services.get(key)
        if service is None or self._has_objects(key):
            return self._has_objects(key)
        named = claimed_class(service), class_of(service, self._config.default_class)
        return any(name and loop_of(name) == OCTAVIA.loop for name in named)


def _without_cloud(
    state: State, config: Config, keys: Iterable[ServiceKey]
) -> dict[ServiceKey, LoadBalancer | Refused]:
    """Return a refusal for each Service that Octavia served and that is to be released while no
    cloud is configured. The Service keeps its finalizer, because its load balancer may still exist.
    Services of class octavia are refused by the plan of all classes."""
    planned: dict[ServiceKey, LoadBalancer | Refused] = {}
    for key in keys:
        service = state.services.get(key)
        if service is None or class_of(service, config.default_class) == OCTAVIA.name:
            continue
        message = (
            f"this Service may still have a load balancer of class {OCTAVIA.name}, and "
            "section `octavia` is not in the configuration"
        )
        fix = (
            "restore the section until the load balancer is deleted; or delete the load balancer "
            "yourself, and then remove this Service's finalizer"
        )
        planned[key] = Refused(message, fix=fix)
    return planned


@contextmanager
def octavia_loop(
    config: Config,
    state: State,
    writer: ServiceWriter,
    service_cache: ServiceCache,
    recorder: Recorder,
    report: Report[ServiceKey, LoadBalancer],
    view: View,
    *,
    fence: Callable[[], None],
) -> Iterator[Loop[ServiceKey, LoadBalancer]]:
    """Yield the loop, which must be run during the block. `view` shows the state of the load
    balancers."""
    if config.octavia is None:
        # Without drivers, the loop can only report refusals.
        source = OctaviaServices(state, config, lambda _: False)
        with state.subscribers.subscribed(source):
            yield Loop(
                "octavia",
                source,
                lambda keys: _without_cloud(state, config, keys),
                (),
                report,
            )
        return
    if not (uid := state.namespace_uid(SYSTEM)):
        raise Refused(
            f"namespace {SYSTEM} is missing, and its uid identifies the owner of load balancers",
            fix=f"create namespace {SYSTEM}, which every cluster has",
        )
    cloud = Cloud(config.octavia)

    driver = OctaviaDriver(
        cloud,
        Owner(uid, config.octavia.cluster_name),
        recorder,
        claimant_of=lambda key: claimant_of(state, config, key),
        observe=state.observe_load_balancer,
        clock=time.monotonic,
        fence=fence,
        manage_floating_ips=config.octavia.uses_floating_ips,
        manage_security_group=config.octavia.manage_security_groups,
    )

    def plan(keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        return plan_cloud(state, config, keys)

    def publish_precondition(
        key: ServiceKey, uid: str, ingress: Sequence[LoadBalancerIngress]
    ) -> str:
        """Return the resource version on which the write of the addresses is conditional: any
        version of the Service with this uid, because the addresses are assigned by the cloud. Raise
        Conflict if the Service is gone or was recreated."""
        service = service_cache.of([key]).get(key)
        if service is None or service.metadata.uid != uid:
            raise Conflict(f"Service {key} was deleted or recreated")
        return service.metadata.resource_version

    claim = ClaimDriver(writer, service_cache, recorder, loop=OCTAVIA.loop, may_keep=False)
    publish = PublishDriver(
        writer,
        service_cache,
        recorder,
        publish_precondition,
        driver.addresses,
        loop=OCTAVIA.loop,
    )
    source = OctaviaServices(state, config, driver.has_objects)
    try:
        with state.subscribers.subscribed(source), view.showing(driver):
            yield Loop(
                "octavia",
                source,
                plan,
                [claim, driver, publish],
                report,
                pace=Pace(parallel=AT_ONCE, audit_interval_s=AUDIT_INTERVAL_S),
            )
    finally:
        cloud.close()
