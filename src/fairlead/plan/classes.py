"""The classes of load balancers (`spec.loadBalancerClass`): one value for each, in one table.

A class defines where addresses come from, which kind of load balancer serves it, how its members
are chosen, and what it does instead of requests that it does not support. Plans, loops and commands
select Services by these properties and never by the name of the class. A new class is therefore a
row of this table and a module with its terms; docs/architecture.md lists what a class with a driver
of its own needs besides. Invariant: pure; exactly one loop of the controller claims the Services of
a class, even if the class has no row."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import LoadBalancer
from fairlead.plan import announced, direct, octavia_terms, ovn, proxying
from fairlead.plan.addresses import Place
from fairlead.plan.service import CLASS_PREFIX, class_of
from fairlead.plan.terms import TermsOf

Addresses = Literal["pool", "cloud"]
"""Where addresses come from. `pool`: the controller gives them from its pools. `cloud`: a cloud
assigns them when it creates the load balancer."""
Members = Literal["probed", "api"]
"""What makes a node a member. `api`: its pods are ready, according to the Kubernetes API. `probed`:
each gateway also has to confirm the node by its own probes."""
LoopName = Literal["services", "octavia"]
"""A loop of the controller that claims Services."""


def always_configured(_config: Config) -> Refused | None:
    """Return None: the class needs no configuration."""
    return None


def all_known(_balancer: LoadBalancer) -> str:
    """Return an empty string: the plan of the class is complete."""
    return ""


class ServiceClass(NamedTuple):
    """A class of load balancers."""

    name: str
    addresses: Addresses
    served_by: Place
    members: Members
    terms: TermsOf
    """Return how the class serves one Service: its settings, and the ports that it cannot serve."""
    substitutes: Mapping[str, str]
    """By short name of each annotation that has no effect, what the class does instead."""
    writes_headers: bool = False
    """Whether its load balancers can write a PROXY header with the client's address."""
    loop: LoopName = "services"
    """The loop of the controller that claims and publishes its Services."""
    configured: Callable[[Config], Refused | None] = always_configured
    """Return why the class is unavailable with this configuration; None if it is available."""
    known_later: Callable[[LoadBalancer], str] = all_known
    """Return which part of the plan is unknown until the load balancer exists; empty: none."""


DIRECT = ServiceClass(
    direct.DIRECT,
    addresses="pool",
    served_by="gateways",
    members="probed",
    terms=direct.direct_terms,
    substitutes=direct.SUBSTITUTES,
)
PROXY = ServiceClass(
    proxying.PROXY,
    addresses="pool",
    served_by="gateways",
    members="probed",
    terms=proxying.proxy_terms,
    substitutes=proxying.SUBSTITUTES,
    writes_headers=True,
)
OCTAVIA = ServiceClass(
    octavia_terms.OCTAVIA,
    addresses="cloud",
    served_by="octavia",
    members="api",
    terms=octavia_terms.octavia_terms,
    substitutes=octavia_terms.SUBSTITUTES,
    writes_headers=True,
    loop="octavia",
    configured=octavia_terms.configured,
    known_later=octavia_terms.known_later,
)
ANNOUNCE = ServiceClass(
    announced.ANNOUNCE,
    addresses="pool",
    served_by="nodes",
    members="api",
    terms=announced.announced_terms,
    substitutes=announced.SUBSTITUTES,
    configured=announced.configured,
)

OVN = ServiceClass(
    ovn.OVN,
    addresses="pool",
    served_by="ovn",
    members="api",
    terms=ovn.ovn_terms,
    substitutes=ovn.SUBSTITUTES,
    configured=ovn.configured,
)

CLASSES: Mapping[str, ServiceClass] = MappingProxyType(
    {each.name: each for each in (DIRECT, PROXY, OCTAVIA, ANNOUNCE, OVN)}
)
"""The values of loadBalancerClass that this version serves."""


def names() -> str:
    """List the names of all classes, for a message."""
    return ", ".join(sorted(CLASSES))


def service_class_of(service: Service, default_class: str | None) -> ServiceClass | None:
    """Return the class that is to serve this Service; None if it is not in the table."""
    return CLASSES.get(class_of(service, default_class) or "")


def loop_of(name: str) -> LoopName:
    """Return the loop that claims and releases Services of the class of this name. For a class
    without a row, which another version of Fairlead may have claimed, it is loop `services`."""
    return CLASSES[name].loop if name in CLASSES else "services"


def addresses_of(name: str) -> Addresses:
    """Return where the addresses of the class of this name come from; `pool` if it has no row."""
    return CLASSES[name].addresses if name in CLASSES else "pool"


def refusal_of(service: Service, config: Config) -> Refused | None:
    """Return why a Service that requests a class of Fairlead cannot be served: the class is unknown
    or not configured. None if it can be served, or belongs to another controller."""
    name = class_of(service, config.default_class)
    if name is None or name in CLASSES:
        return CLASSES[name].configured(config) if name is not None else None
    if not name.startswith(CLASS_PREFIX):
        return None
    return Refused(f"there is no class {name}", fix=f"recreate the Service with one of {names()}")
