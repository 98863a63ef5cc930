"""The classes of load balancers (`spec.loadBalancerClass`): one value for each, in one table.

A class says where addresses come from, who serves it, what its members are, and what stands in for
the wishes that it cannot meet. Plans, loops and commands choose Services by these properties and
never by a name: a new class is a row of this table and the files of its own that the row names.
Invariant: pure; each name, known or not, is claimed by exactly one loop of the controller."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import LoadBalancer
from fairlead.plan import direct, octavia_terms, proxying
from fairlead.plan.service import CLASS_PREFIX, class_of
from fairlead.plan.terms import TermsOf

Addresses = Literal["pool", "cloud"]
"""Where addresses come from: `pool`, the controller gives them from the pools of the configuration;
`cloud`, they are known once a cloud has made the load balancer."""
Server = Literal["gateways", "octavia"]
"""Who serves a class."""
Members = Literal["probed", "api"]
"""What makes a node a member: `probed`, the API's word, confirmed by the probes of each gateway;
`api`, the API's word alone."""
LoopName = Literal["services", "octavia"]
"""The loops of the controller that claim Services."""


def always_configured(_config: Config) -> Refused | None:
    return None


def all_known(_balancer: LoadBalancer) -> str:
    return ""


class ServiceClass(NamedTuple):
    """A class of load balancers."""

    name: str
    addresses: Addresses
    served_by: Server
    members: Members
    terms: TermsOf
    """What the class makes of one Service: its settings, the ports that it cannot serve."""
    substitutes: Mapping[str, str]
    """What the class does in place of each wish of an annotation that it does not meet."""
    writes_headers: bool = False
    """Whether its load balancers can tell pods the client's address in a PROXY header."""
    loop: LoopName = "services"
    """The loop of the controller that claims and publishes its Services."""
    configured: Callable[[Config], Refused | None] = always_configured
    """Why the configuration does not allow this class; None if it does."""
    known_later: Callable[[LoadBalancer], str] = all_known
    """What a plan cannot know without asking who serves the class, as a sentence; empty: nothing."""


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

CLASSES: Mapping[str, ServiceClass] = MappingProxyType(
    {each.name: each for each in (DIRECT, PROXY, OCTAVIA)}
)
"""The values of loadBalancerClass that this version serves."""


def names() -> str:
    """The classes, for a message."""
    return ", ".join(sorted(CLASSES))


def service_class_of(service: Service, default_class: str | None) -> ServiceClass | None:
    """The class of ours that is to serve this Service; None if there is none."""
    return CLASSES.get(class_of(service, default_class) or "")


def loop_of(name: str) -> LoopName:
    """The loop that claims Services of the class of this name, and lets them go. A name that is in
    no row may be of an older or a newer version."""
    return CLASSES[name].loop if name in CLASSES else "services"


def addresses_of(name: str) -> Addresses:
    """Where the addresses of the class of this name come from, also of one that is in no row."""
    return CLASSES[name].addresses if name in CLASSES else "pool"


def refusal_of(service: Service, config: Config) -> Refused | None:
    """Why no class of ours may serve a Service that asks for one; None if one may, and for Services
    that are another controller's."""
    name = class_of(service, config.default_class)
    if name is None or name in CLASSES:
        return CLASSES[name].configured(config) if name is not None else None
    if not name.startswith(CLASS_PREFIX):
        return None
    return Refused(f"there is no class {name}", fix=f"make the Service anew with one of {names()}")
