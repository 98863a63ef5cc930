"""The terms of class `fairlead.io/direct`: gateways forward packets to nodes unmodified.

In: a Service. Out: `Terms`. The class serves every port of every protocol. Pure."""

from collections.abc import Sequence

from fairlead.model import DirectSettings
from fairlead.plan.annotation_reader import DRAINED_AFTER, Values
from fairlead.plan.annotations import drain_timeout_s
from fairlead.plan.terms import ServiceContext, Terms

DIRECT = "fairlead.io/direct"

_HEADER = "pods see the client's own address and must not expect a header"
_FORWARDED = "packets are forwarded unmodified, so only the pods can do this"
_PROBED = "nodes are weighted by the number of their ready pods, and their health is always probed"
_BY_POOL = "addresses come from pools; choose one with fairlead.io/address-pool"

SUBSTITUTES = {
    "proxy-protocol": _HEADER,
    "x-forwarded-for": _HEADER,
    "timeout-client-data": _FORWARDED,
    "timeout-member-connect": _FORWARDED,
    "timeout-member-data": _FORWARDED,
    "timeout-tcp-inspect": _FORWARDED,
    "connection-limit": _FORWARDED,
    "default-tls-container-ref": _FORWARDED,
    "lb-method": (
        "every ready pod gets the same share; for one pod per client, set spec.sessionAffinity"
    ),
    "enable-health-monitor": _PROBED,
    "health-monitor-delay": _PROBED,
    "health-monitor-timeout": _PROBED,
    "health-monitor-max-retries": _PROBED,
    "health-monitor-max-retries-down": _PROBED,
    "node-selector": (
        "to exclude nodes, label them node.kubernetes.io/exclude-from-external-load-balancers"
    ),
    "hostname": "the address itself is published",
    "class": _BY_POOL,
    "floating-network-id": _BY_POOL,
    "floating-subnet": _BY_POOL,
    "floating-subnet-id": _BY_POOL,
    "floating-subnet-tags": _BY_POOL,
    "subnet-id": _BY_POOL,
    "network-id": _BY_POOL,
    "port-id": _BY_POOL,
    "member-subnet-id": _BY_POOL,
    "octavia-provider": "no OpenStack load balancer serves this Service",
    "members": "nodes with ready pods are members",
    "load-balancer-id": (
        "no OpenStack load balancer serves this Service; if the one with this id is unused, "
        "delete it"
    ),
    "flavor-id": "no OpenStack load balancer serves this Service",
    "availability-zone": "no OpenStack load balancer serves this Service",
    "internal": _BY_POOL,
}
"""By short name of each annotation without effect, what class direct does instead.
`load-balancer-address` is not here: it reports an address and requests nothing."""

VALUES: Sequence[Values[object]] = (DRAINED_AFTER,)
"""The values of the annotations that this class reads, besides those about addresses."""


def direct_terms(context: ServiceContext) -> Terms:
    """Return the terms of class direct."""
    return Terms(DirectSettings(drain_timeout_s(context.service.metadata.annotations)))
