"""The writes of the driver of class octavia; each prints as the request that it stands for. Pure.

`Blocked` is a change too, although it writes nothing: only the comparison of desired and actual
state shows that no write helps, and a driver reports to the loop through changes."""

from collections.abc import Mapping, Sequence

import msgspec

from fairlead.drivers.octavia.balancers import FloatingIp, Rule
from fairlead.drivers.octavia.paths import NETWORK, url_of
from fairlead.model import FloatingIpRequest, Outcome, ServiceKey


class ExpectedListeners(msgspec.Struct, frozen=True):
    """The listeners on a load balancer when the change was computed: `own`, the ids of the
    Service's listeners, and the number of `others`."""

    own: tuple[str, ...]
    others: int


class Call(msgspec.Struct, frozen=True):
    """One write. `path`: below /lbaas, or a path of Neutron. `what`: the object, for messages.
    `balancer_id`: the load balancer that the write locks; empty: the write creates one.

    saves: the name that stands for the id of the created object in later steps, as `$NAME`.
    ends: the load balancer is deleted by this write.
    leaves: the load balancer stays for other Services, and this Service leaves it.
    expected_listeners: the write is made only if the load balancer still has these listeners; the
      last Service on a load balancer deletes it.
    repairs: the write is an attempt to repair a failed load balancer.
    revision: the write is made only if the object has this revision (Neutron only).
    why: if a load balancer is created, the reason for its provider."""

    service: ServiceKey
    method: str
    path: str
    body: Mapping[str, object] | None
    what: str
    balancer_id: str = ""
    saves: str = ""
    ends: bool = False
    leaves: bool = False
    expected_listeners: ExpectedListeners | None = None
    repairs: bool = False
    revision: int | None = None
    why: str = ""

    def __str__(self) -> str:
        return f"{self.method} {url_of(self.path)} ({self.what}) for Service {self.service}"

    @property
    def at_neutron(self) -> bool:
        return self.path.startswith(NETWORK)

    @property
    def makes(self) -> bool:
        """True if this call creates a load balancer."""
        return self.path == "loadbalancers"


class AttachFloatingIp(msgspec.Struct, frozen=True):
    """Attach a floating IP to the port of the load balancer `balancer_id`. `unattached_ips`:
    floating IPs of the Service that are attached to no port. `instead`: the floating IP that is
    attached now and is to be replaced. `shown`: addresses that the Service shows and that are not
    the load balancer's own: a floating IP with such an address is attached again if it is free."""

    service: ServiceKey
    balancer_id: str
    port_id: str
    request: FloatingIpRequest
    unattached_ips: Sequence[FloatingIp] = ()
    instead: FloatingIp | None = None
    shown: tuple[str, ...] = ()

    def __str__(self) -> str:
        which = self.request.address or f"of network {self.request.network_id}"
        return (
            f"POST or PUT /floatingips (floating IP {which} for load balancer {self.balancer_id}) "
            f"for Service {self.service}"
        )


class AddRules(msgspec.Struct, frozen=True):
    """Add rules to the cluster's security group, and assign the group to the ports of these nodes.
    `mark`: the description of the rules. `narrow`: the Service restricts its clients, so that other
    security groups of the nodes should not admit everyone."""

    service: ServiceKey
    uid: str
    balancer_id: str
    mark: str
    rules: tuple[Rule, ...]
    nodes: tuple[str, ...]
    narrow: bool = False

    def __str__(self) -> str:
        what = f"{len(self.rules)} rules, the group for {len(self.nodes)} nodes"
        return f"POST /security-group-rules, PUT /ports ({what}) for Service {self.service}"


class DeleteRules(msgspec.Struct, frozen=True):
    """Delete rules of the cluster's security group, by their ids."""

    service: ServiceKey
    rules: tuple[str, ...]
    balancer_id: str = ""

    def __str__(self) -> str:
        return (
            f"DELETE /security-group-rules ({len(self.rules)} of them) for Service {self.service}"
        )


class RemoveSecurityGroup(msgspec.Struct, frozen=True):
    """Remove the group from the ports of nodes that have not been members of any load balancer for
    a long time."""

    service: ServiceKey
    nodes: tuple[str, ...]
    balancer_id: str = ""

    def __str__(self) -> str:
        return (
            f"PUT /ports (remove the group from nodes at {', '.join(self.nodes)}) in the pass of "
            f"Service {self.service}"
        )


class Blocked(msgspec.Struct, frozen=True):
    """No write helps the Service at present. `outcome` has the reason, and the delay until the next
    read."""

    service: ServiceKey
    outcome: Outcome

    def __str__(self) -> str:
        return f"no write for Service {self.service}: {self.outcome.message}"


Write = Call | AttachFloatingIp | AddRules | DeleteRules | RemoveSecurityGroup
Change = Write | Blocked
