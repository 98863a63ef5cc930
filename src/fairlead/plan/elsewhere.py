"""Whether a Service is to be on a load balancer of OpenStack that was not made for it by us.

In: a Service, the configuration. Out: which one that is. Pure. cloud-provider-openstack writes
`load-balancer-id` on every Service that it serves, and users write it to have several Services on
one load balancer; by the load balancer's name the one is told from the other. Names:
`GetLoadBalancerName` and `GetLoadBalancerLegacyName` of cloud-provider-openstack 1.34, which cuts
them at 255 characters."""

import uuid

from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import SharedOrAdopted
from fairlead.plan.annotations import LOAD_BALANCER_ID, found, names_of, quoted
from fairlead.sections import OctaviaConfig

_LONGEST = 255
_LEGACY = 32


def elsewhere_of(service: Service, config: OctaviaConfig) -> SharedOrAdopted | None:
    """None: it gets one of its own. Raises Refused for an id that is none."""
    name, text = found(service.metadata.annotations, names_of(LOAD_BALANCER_ID))
    names = names_of_occm(service, config.adopt_from) if config.adopt_from else ()
    if not name:
        return SharedOrAdopted(names=names) if names else None
    try:
        id_ = str(uuid.UUID(text))
    except ValueError:
        raise Refused(
            f"{name} is {quoted(text)}, which is no id of a load balancer",
            fix="see openstack loadbalancer list",
        ) from None
    return SharedOrAdopted(id_, names)


def names_of_occm(service: Service, cluster: str) -> tuple[str, ...]:
    """How it calls, and once called, the load balancer that it makes for the Service."""
    name = f"kube_service_{cluster}_{service.metadata.namespace}_{service.metadata.name}"
    return name[:_LONGEST], f"a{service.metadata.uid.replace('-', '')}"[:_LEGACY]
