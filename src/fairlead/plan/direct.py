"""The terms of class `fairlead.io/direct`: gateways forward packets to nodes as they are.

In: a Service. Out: `Terms`. The class serves every port, in every protocol. Pure."""

from fairlead.model import DirectSettings
from fairlead.plan.annotations import drain_timeout_s
from fairlead.plan.terms import Asked, Terms

DIRECT = "fairlead.io/direct"

_HEADER = "pods see the client's own address without any header; make them expect none"
_PASSED_ON = "packets are passed on as they are, so it is for the pods to decide"
_BY_PLAN = (
    "nodes with ready pods get their share by the number of these pods, and are watched "
    "without asking"
)
_BY_POOL = "addresses come from pools; choose one by fairlead.io/address-pool"

SUBSTITUTES = {
    "proxy-protocol": _HEADER,
    "x-forwarded-for": _HEADER,
    "timeout-client-data": _PASSED_ON,
    "timeout-member-connect": _PASSED_ON,
    "timeout-member-data": _PASSED_ON,
    "timeout-tcp-inspect": _PASSED_ON,
    "connection-limit": _PASSED_ON,
    "default-tls-container-ref": _PASSED_ON,
    "lb-method": (
        "every ready pod gets the same share; for one pod per client use spec.sessionAffinity"
    ),
    "enable-health-monitor": _BY_PLAN,
    "health-monitor-delay": _BY_PLAN,
    "health-monitor-timeout": _BY_PLAN,
    "health-monitor-max-retries": _BY_PLAN,
    "health-monitor-max-retries-down": _BY_PLAN,
    "node-selector": (
        "to keep nodes out, label them node.kubernetes.io/exclude-from-external-load-balancers"
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
    "octavia-provider": "no load balancer of OpenStack serves this Service",
    "members": "nodes with ready pods are members",
    "load-balancer-id": (
        "no load balancer of OpenStack serves this Service; delete that one "
        "there if nobody needs it"
    ),
    "flavor-id": "no load balancer of OpenStack serves this Service",
    "availability-zone": "no load balancer of OpenStack serves this Service",
    "internal": _BY_POOL,
}
"""By annotation, what class direct does instead. `load-balancer-address` is not here: it reports
an address, and asks for nothing."""


def direct_terms(asked: Asked) -> Terms:
    """Return the terms of class direct."""
    return Terms(DirectSettings(drain_timeout_s(asked.service.metadata.annotations)))
