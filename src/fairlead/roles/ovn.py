"""The driver of class `fairlead.io/ovn` within the controller.

In: the configuration, the Services. Out: the driver that belongs into the chain of the loop
`services`, between grants and publication."""

from collections.abc import Callable, Collection
from pathlib import Path

from fairlead.config import Config
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.drivers.ovn.absent import NoOvn
from fairlead.drivers.ovn.driver import OvnDriver
from fairlead.drivers.ovn.spec import Site
from fairlead.model import ServiceKey
from fairlead.net.ovsdb import Tls
from fairlead.plan.classes import OVN
from fairlead.plan.service import claimed_class
from fairlead.sections import OvnConfig, OvnTLSConfig
from fairlead.state import State


def site_of(section: OvnConfig) -> Site:
    """Return the configuration of the driver."""
    return Site(
        section.cluster_id,
        section.router or section.routers,
        section.switches,
        section.topology,
        section.slots,
        section.drain_address,
        section.drain_address_v6,
        section.neighbor_responder,
        section.hairpin_address,
    )


def tls_of(section: OvnTLSConfig | None) -> Tls | None:
    """Return the files for connections to the databases; None without TLS."""
    if section is None:
        return None
    paths = (Path(section.ca), Path(section.certificate), Path(section.key))
    return Tls(*paths, check_names=section.check_names)


def ovn_driver(
    config: Config, state: State, service_cache: ServiceCache, *, fence: Callable[[], None]
) -> OvnDriver | NoOvn:
    """Return the driver. Raise Refused if an address of the databases is malformed."""

    def claimed(key: ServiceKey) -> bool:
        service = service_cache.of([key]).get(key)
        return service is not None and claimed_class(service) == OVN.name

    def published(key: ServiceKey) -> Collection[str]:
        service = service_cache.of([key]).get(key)
        return [each.ip for each in service.status.load_balancer.ingress] if service else ()

    section = config.ovn
    if section is None:
        return NoOvn(claimed)
    return OvnDriver(
        site_of(section),
        section.northbound,
        southbound=section.southbound,
        tls=tls_of(section.tls),
        drain_timeout_s=section.drain_timeout_s,
        claimed=claimed,
        published=published,
        requeue=state.subscribers.mark,
        fence=fence,
    )
