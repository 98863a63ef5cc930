"""The OpenStack load balancer that a Service shares with other Services, or adopts.

In: a Service, the configuration. Out: the load balancer that the Service shares or adopts. Pure.
cloud-provider-openstack writes `load-balancer-id` on every Service that it serves, and users write
it to share one load balancer among several Services; the name of the load balancer distinguishes
the two cases. The names follow `GetLoadBalancerName` and `GetLoadBalancerLegacyName` of
cloud-provider-openstack 1.34, which truncates them to 255 characters."""

import uuid

from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import SharedOrAdopted
from fairlead.plan.annotation_reader import Values
from fairlead.plan.annotations import LOAD_BALANCER_ID, found, names_of, quoted
from fairlead.sections import OctaviaConfig

_MAX_NAME_LENGTH = 255
"""Maximum length of a name."""
_MAX_OLD_NAME_LENGTH = 32
"""Maximum length of a name in the format of old versions."""


def read_id(text: str) -> str | None:
    """Return the id in its usual form; None if the text is not an id."""
    try:
        return str(uuid.UUID(text))
    except ValueError:
        return None


SHARED_OR_ADOPTED_ID = Values(names_of(LOAD_BALANCER_ID), read_id, "the id of a load balancer")


def shared_or_adopted_of(service: Service, config: OctaviaConfig) -> SharedOrAdopted | None:
    """Return the load balancer that the Service shares or adopts; None: it gets one of its own.
    Raise Refused for an invalid id."""
    name, text = found(service.metadata.annotations, SHARED_OR_ADOPTED_ID.names)
    names = names_of_occm(service, config.adopt_from) if config.adopt_from else ()
    if not name:
        return SharedOrAdopted(names=names) if names else None
    if (id_ := SHARED_OR_ADOPTED_ID.read(text)) is None:
        raise Refused(
            f"{name} is {quoted(text)}, which is not the id of a load balancer",
            fix="see openstack loadbalancer list",
        )
    return SharedOrAdopted(id_, names)


def names_of_occm(service: Service, cluster: str) -> tuple[str, ...]:
    """Return the names that cloud-provider-openstack gives to the load balancer of a Service: the
    current one, and the one of old versions. `cluster`: the cluster name that it is configured
    with."""
    name = f"kube_service_{cluster}_{service.metadata.namespace}_{service.metadata.name}"
    return name[:_MAX_NAME_LENGTH], f"a{service.metadata.uid.replace('-', '')}"[
        :_MAX_OLD_NAME_LENGTH
    ]
