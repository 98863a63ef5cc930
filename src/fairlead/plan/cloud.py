"""The plan of the classes whose addresses come from a cloud.

In: a view of the cluster with the load balancers that the driver has seen in the cloud, the
configuration. Out: for each Service its LoadBalancer, or the reason why it gets none. Pure.
`LoadBalancer.addresses` are the addresses of the existing load balancer. The addresses that the
Service shows are in the settings (`held`): if the load balancer is lost, a new one requests them
again."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.model import (
    ExistingLoadBalancer,
    Family,
    FloatingIpRequest,
    LoadBalancer,
    OctaviaSettings,
    ServiceKey,
    SharedOrAdopted,
)
from fairlead.net.address import family_of
from fairlead.plan.addresses import held_by
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import service_class_of
from fairlead.plan.shared_or_adopted import SHARED_OR_ADOPTED_ID, shared_or_adopted_of
from fairlead.plan.understood import in_force
from fairlead.plan.view import CloudCluster, Cluster


class Claimant(NamedTuple):
    """A Service that is to get a load balancer in the cloud, with the data that the driver needs to
    find an existing one. `held`: the addresses that the Service shows. `shared_or_adopted`: the
    load balancer that the Service shares or adopts; None: the Service gets one of its own."""

    uid: str
    held: tuple[str, ...] = ()
    shared_or_adopted: SharedOrAdopted | None = None


def plan_cloud(
    cluster: CloudCluster, config: Config, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """Return the plan of the Services of classes whose addresses come from a cloud. A Service of a
    class that is not configured is left out; `plan_controller` returns the reason."""
    planned: dict[ServiceKey, LoadBalancer | Refused] = {}
    for key in keys:
        if (service := cluster.services.get(key)) is None:
            continue
        class_ = service_class_of(service, config.default_class)
        if class_ is None or class_.addresses != "cloud" or class_.configured(config):
            continue
        existing = cluster.load_balancers.get(key)
        if existing is not None and existing.uid != service.metadata.uid:
            existing = None  # it belongs to a deleted Service of the same name
        try:
            balancer = plan_load_balancer(
                service,
                cluster.slices_of(key),
                cluster.nodes,
                held_by(service),
                class_,
                config=config,
                existing=existing,
            )
        except Refused as error:
            planned[key] = error
        else:
            planned[key] = with_existing(balancer, existing)
    return planned


def claimant_of(cluster: Cluster, config: Config, key: ServiceKey) -> Claimant | None:
    """Return the data about this Service that the driver of Octavia needs. None: the Service does
    not exist, or its class is not served by Octavia."""
    service = cluster.services.get(key)
    if service is None or config.octavia is None:
        return None
    class_ = service_class_of(service, config.default_class)
    if class_ is None or class_.served_by != "octavia":
        return None
    try:
        in_force_now, _ = in_force(service, (SHARED_OR_ADOPTED_ID,))
        shared_or_adopted = shared_or_adopted_of(in_force_now, config.octavia)
    except Refused:
        shared_or_adopted = None  # the plan of the Service reports the error to the user
    return Claimant(service.metadata.uid, tuple(held_by(service)), shared_or_adopted)


def with_existing(balancer: LoadBalancer, existing: ExistingLoadBalancer | None) -> LoadBalancer:
    """Return the plan completed with this existing load balancer and the addresses at which clients
    reach it. While the load balancer has no such address, the plan has the addresses that the
    Service shows, so they stay published. A LoadBalancer that Octavia does not serve is returned
    unchanged."""
    settings = balancer.settings
    if not isinstance(settings, OctaviaSettings):
        return balancer
    families = {each.family for each in balancer.listeners}
    addresses = _addresses(existing, settings.floating, families) if existing is not None else ()
    return msgspec.structs.replace(
        balancer,
        settings=msgspec.structs.replace(settings, existing=existing),
        addresses=addresses or settings.held,
    )


def _addresses(
    existing: ExistingLoadBalancer, request: FloatingIpRequest | None, families: Collection[Family]
) -> tuple[str, ...]:
    """Return the addresses at which clients reach the load balancer. Empty: the VIP is unknown, or
    the requested floating IP, which has to be the first address, is not attached yet."""
    # A Service on a shared load balancer takes the floating IP that is attached to it, because
    # another Service may have requested it.
    vip = existing.addresses[0] if existing.addresses else ""
    if existing.shared:
        first = next(iter(existing.floating), vip)
    elif request is None:
        first = vip
    else:
        first = next((each for each in existing.floating if request.address in ("", each)), "")
    if not (vip and first):
        return ()
    # An address of a family without listeners is not published if there is another address.
    further = [each for each in existing.addresses[1:] if family_of(each) in families]
    return tuple([first, *further] if family_of(first) in families or not further else further)
