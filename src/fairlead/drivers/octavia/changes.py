"""The writes of the driver of class octavia; each prints as the request that it stands for. Pure.

Beside them stands `Blocked`: only where wanted and found meet is it known that no write helps, and
a driver has no other way to tell the loop so."""

from collections.abc import Mapping, Sequence

import msgspec

from fairlead.drivers.octavia.balancers import FloatingIp, Rule
from fairlead.drivers.octavia.paths import NETWORK, url_of
from fairlead.model import FloatingWish, Outcome, ServiceKey


class ExpectedListeners(msgspec.Struct, frozen=True):
    """Which listeners were on a load balancer: `own`, the ids of the Service's listeners, and how
    many of `others`."""

    own: tuple[str, ...]
    others: int


class Call(msgspec.Struct, frozen=True):
    """One write. `path`: below /lbaas, or of Neutron's. `words`: what it is about. `balancer_id`:
    the load balancer that it locks; empty: one is made.

    saves: the id of what is made is what `$NAME` stands for in later steps. ends: the load balancer
    is gone after it. leaves: others stay there, and the Service does not. company: the write is
    made only if these listeners are on the load balancer still: the last Service on it takes it
    away. repairs: it is tried because one has failed. revision: the state over which alone it is
    written (Neutron's alone). why: of a load balancer that is made, why it is of its provider.
    """

    service: ServiceKey
    method: str
    path: str
    body: Mapping[str, object] | None
    words: str
    balancer_id: str = ""
    saves: str = ""
    ends: bool = False
    leaves: bool = False
    expected_listeners: ExpectedListeners | None = None
    repairs: bool = False
    revision: int | None = None
    why: str = ""

    def __str__(self) -> str:
        return f"{self.method} {url_of(self.path)} ({self.words}) for Service {self.service}"

    @property
    def at_neutron(self) -> bool:
        return self.path.startswith(NETWORK)

    @property
    def makes(self) -> bool:
        """It makes a load balancer."""
        return self.path == "loadbalancers"


class AttachFloatingIp(msgspec.Struct, frozen=True):
    """Have a floating IP lead to the load balancer `balancer_id` by its port. `unattached_ips`:
    the floating IPs of the Service that lead nowhere. `instead`: the one that leads there now, and
    is to go. `shown`: the addresses that the Service shows and that are not the load balancer's
    own: a floating IP of such an address is taken again if it is free."""

    service: ServiceKey
    balancer_id: str
    port_id: str
    wish: FloatingWish
    unattached_ips: Sequence[FloatingIp] = ()
    instead: FloatingIp | None = None
    shown: tuple[str, ...] = ()

    def __str__(self) -> str:
        which = self.wish.address or f"of network {self.wish.network_id}"
        return (
            f"POST or PUT /floatingips (floating IP {which} for load balancer {self.balancer_id}) "
            f"for Service {self.service}"
        )


class AddRules(msgspec.Struct, frozen=True):
    """Add rules to the cluster's security group, and give the group to these nodes. `mark`: the
    description of the rules. `narrow`: no other client is to reach the nodes."""

    service: ServiceKey
    uid: str
    balancer_id: str
    mark: str
    rules: tuple[Rule, ...]
    nodes: tuple[str, ...]
    narrow: bool = False

    def __str__(self) -> str:
        what = f"{len(self.rules)} rules, and {len(self.nodes)} nodes that are to have them"
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
    """Remove the group from the ports of nodes that have long been members of no load balancer."""

    service: ServiceKey
    nodes: tuple[str, ...]
    balancer_id: str = ""

    def __str__(self) -> str:
        return (
            f"PUT /ports (no group any more for nodes at {', '.join(self.nodes)}), seen to "
            f"for Service {self.service}"
        )


class Blocked(msgspec.Struct, frozen=True):
    """No write brings the Service further now. `outcome` says why, and when to look again."""

    service: ServiceKey
    outcome: Outcome

    def __str__(self) -> str:
        return f"leave Service {self.service} for now: {self.outcome.message}"


Write = Call | AttachFloatingIp | AddRules | DeleteRules | RemoveSecurityGroup
Change = Write | Blocked
