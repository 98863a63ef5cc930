"""The loop of class `fairlead.io/octavia` within the controller: claim, load balancer, publication.

In: the cluster, the cloud of the configuration. Out: a loop that serves many Services at once, so
that a load balancer that takes minutes holds up no other, and a cloud that is away no other class.
"""

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
"""So many load balancers are worked on at once."""
AUDIT_INTERVAL_S = 300.0
"""A look at everything costs a call for each pool."""
SYSTEM = "kube-system"
"""The namespace that every cluster has from its first day; its uid stands for the cluster."""


class OctaviaServices:
    """Of a cluster's Services those that Octavia has to do with: the source of the loop. Others
    must not wait for a cloud."""

    def __init__(self, state: State, config: Config, knows: Callable[[ServiceKey], bool]) -> None:
        self.whole: asyncio.Event = state.whole
        self.subscribers = Subscribers[ServiceKey]()
        self._state = state
        self._config = config
        self._knows = knows

    @property
    def services(self) -> Collection[ServiceKey]:
        return [key for key in self._state.services if self._concerned(key)]

    def mark(self, keys: Iterable[ServiceKey]) -> None:
        """Something about these has changed."""
        self.subscribers.mark([key for key in keys if self._concerned(key)])

    def _concerned(self, key: ServiceKey) -> bool:
        service = self._state.services.get(key)
        if service is None or self._knows(key):
            return self._knows(key)
        named = claimed_class(service), class_of(service, self._config.default_class)
        return any(name and loop_of(name) == OCTAVIA.loop for name in named)


def _without_cloud(
    state: State, config: Config, keys: Iterable[ServiceKey]
) -> dict[ServiceKey, LoadBalancer | Refused]:
    """Those to be let go, which keep their finalizer, as a load balancer may be there still. Others
    are told by the plan of all classes that there is no cloud."""
    planned: dict[ServiceKey, LoadBalancer | Refused] = {}
    for key in keys:
        service = state.services.get(key)
        if service is None or class_of(service, config.default_class) == OCTAVIA.name:
            continue
        message = (
            f"this Service may still have a load balancer of class {OCTAVIA.name}, and "
            "`octavia` is not in the configuration"
        )
        fix = (
            "restore it until that is deleted; or delete it yourself, and then this Service's "
            "finalizer"
        )
        planned[key] = Refused(message, fix=fix)
    return planned


@contextmanager
def octavia_loop(
    config: Config,
    state: State,
    writer: ServiceWriter,
    newest: ServiceCache,
    recorder: Recorder,
    report: Report[ServiceKey, LoadBalancer],
    view: View,
    *,
    fence: Callable[[], None],
) -> Iterator[Loop[ServiceKey, LoadBalancer]]:
    """The loop, to be run within the block. `view` shows how load balancers are."""
    if config.octavia is None:
        # Without drivers: all that it can do is say so.
        source = OctaviaServices(state, config, lambda _: False)
        with state.subscribers.telling(source):
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
            f"there is no namespace {SYSTEM}: nothing says whose load balancers are whose"
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
        network=config.octavia.floats,
        secured=config.octavia.manage_security_groups,
    )

    def plan(keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        return plan_cloud(state, config, keys)

    def publish_precondition(
        key: ServiceKey, uid: str, ingress: Sequence[LoadBalancerIngress]
    ) -> str:
        """Addresses are the cloud's, so over any version of this very Service."""
        service = newest.of([key]).get(key)
        if service is None or service.metadata.uid != uid:
            raise Conflict(f"Service {key} is another one now")
        return service.metadata.resource_version

    claim = ClaimDriver(writer, newest, recorder, loop=OCTAVIA.loop, may_keep=False)
    publish = PublishDriver(
        writer,
        newest,
        recorder,
        publish_precondition,
        driver.addresses,
        loop=OCTAVIA.loop,
    )
    source = OctaviaServices(state, config, driver.knows)
    try:
        with state.subscribers.telling(source), view.showing(driver):
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
