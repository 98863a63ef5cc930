"""Sections of the configuration file that are of one class of Services, and what all sections have
in common.

In: YAML. Out: frozen values, each within its limits. `config` reads the file.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec


class Section(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Base: camelCase in the file, unknown fields refused."""


class OctaviaMonitorConfig(Section, frozen=True):
    """How Octavia asks members, where a Service does not say it itself."""

    enabled: bool = True
    delay_s: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 5
    timeout_s: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 3
    max_retries: Annotated[int, msgspec.Meta(ge=1, le=10)] = 1
    max_retries_down: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3


class OctaviaClassConfig(Section, frozen=True):
    """Where load balancers are of Services that name this class by the annotation `class`. Empty:
    as in general."""

    subnet_id: str = ""
    subnet_id_v6: str = ""
    network_id: str = ""
    member_subnet_id: str = ""
    floating_network_id: str = ""
    floating_subnet_id: str = ""
    floating_subnet: str = ""
    floating_subnet_tags: str = ""


class OctaviaConfig(Section, frozen=True):
    """The cloud whose Octavia serves class fairlead.io/octavia. Absent: nobody serves it."""

    cloud: str = ""
    """The name of the cloud in clouds.yaml. Empty: the one of the environment, OS_CLOUD or
    OS_AUTH_URL and so on."""
    clouds_file: str = ""
    """The path of clouds.yaml. Empty: where the openstack command looks too."""
    cluster_name: Annotated[str, msgspec.Meta(min_length=1, max_length=60)] = "kubernetes"
    """How people tell this cluster's load balancers from others; what is whose does not depend on
    it."""
    provider: Literal["auto", "amphora", "ovn"] = "auto"
    """`auto`: by what a Service asks for, in a cloud that has both."""
    subnet_id: str = ""
    network_id: str = ""
    """Where load balancers have their addresses: one of the two is needed, unless every Service
    says it."""
    subnet_id_v6: str = ""
    """Where Services of IPv6 have theirs, and those of both families a second one; of the same
    network as `subnet_id`. Empty: they have none."""
    member_subnet_id: str = ""
    """Where Octavia reaches the nodes. Empty: as it finds its way."""
    flavor_id: str = ""
    availability_zone: str = ""
    lb_method: Literal["", "ROUND_ROBIN", "LEAST_CONNECTIONS", "SOURCE_IP", "SOURCE_IP_PORT"] = ""
    """How nodes are chosen where a Service does not say it and the provider can. Empty: as suits
    the provider."""
    node_selector: Annotated[str, msgspec.Meta(pattern=r"^([\w./-]+(=[\w.-]*)?(,|$))*$")] = ""
    """Labels that nodes must have: `zone=a,disk`."""
    members: Literal["ready", "all"] = "ready"
    """`all` nodes: where Octavia has to find out which have ready pods."""
    floating_network_id: str = ""
    """The external network of which load balancers have floating IPs. Empty: they have none, and
    Neutron is not asked."""
    floating_subnet_id: str = ""
    floating_subnet: str = ""
    floating_subnet_tags: str = ""
    """Which subnet of it; empty: any. By its id, by a pattern of its name, by its tags."""
    manage_security_groups: bool = False
    """Nodes' ports get a security group by which they are reached through load balancers."""
    internal: bool = False
    """Whether load balancers have no floating IP where a Service does not say it itself."""
    classes: Mapping[str, OctaviaClassConfig] = msgspec.field(default_factory=dict)
    monitor: OctaviaMonitorConfig = msgspec.field(default_factory=OctaviaMonitorConfig)
    ip_mode: Literal["auto", "Proxy"] = "auto"
    """`Proxy`: calls from inside the cluster go out through every load balancer of provider
    amphora. `auto`: only where pods expect a header that it writes."""
    adopt_from: str = ""
    """The --cluster-name of cloud-provider-openstack: what it made for Services is taken over as it
    is. Empty: nothing is."""
    calls_per_s: Annotated[float, msgspec.Meta(gt=0)] = 20.0
    """So many calls the cloud gets at most, whatever the number of Services."""

    @property
    def floats(self) -> bool:
        """Whether any load balancer has a floating IP."""
        return bool(self.floating_network_id) or any(
            each.floating_network_id for each in self.classes.values()
        )
