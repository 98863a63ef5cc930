"""What the driver of class octavia does, step by step; each prints as the request that it stands
for. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from fairlead.drivers.octavia.cloud import NETWORK, url_of
from fairlead.drivers.octavia.tree import FloatingIp, Rule, Tree
from fairlead.model import Family, FloatingWish, OctaviaElsewhere, ServiceKey

MONITORS = "healthmonitors"


class Call(msgspec.Struct, frozen=True):
    """One write. `path`: below /lbaas, or of Neutron's. `words`: what it is about. `tree`: the load
    balancer that it locks; empty: one is made.

    saves: the id of what is made is what `$NAME` stands for in later steps. ends: the load balancer
    is gone after it. leaves: others stay there, and the Service does not. repairs: it is tried
    because one has failed. revision: the state over which alone it is written (Neutron's alone).
    """

    service: ServiceKey
    method: str
    path: str
    body: Mapping[str, object] | None
    words: str
    tree: str = ""
    saves: str = ""
    ends: bool = False
    leaves: bool = False
    repairs: bool = False
    revision: int | None = None

    def __str__(self) -> str:
        return f"{self.method} {url_of(self.path)} ({self.words}) for Service {self.service}"

    @property
    def at_neutron(self) -> bool:
        return self.path.startswith(NETWORK)

    @property
    def makes(self) -> bool:
        """It makes a load balancer."""
        return self.path == "loadbalancers"


class Expose(msgspec.Struct, frozen=True):
    """Have a floating IP lead to the load balancer `tree` by its port. `loose`: those of the
    Service that lead nowhere; `instead`: the one that leads there now, and is to go. `shown`: what
    the Service shows and is not the load balancer's own: a floating IP of that address is had again
    if it is free."""

    service: ServiceKey
    tree: str
    port_id: str
    wish: FloatingWish
    loose: Sequence[FloatingIp] = ()
    instead: FloatingIp | None = None
    shown: tuple[str, ...] = ()

    def __str__(self) -> str:
        which = self.wish.address or f"of network {self.wish.network_id}"
        return (
            f"POST or PUT /floatingips (floating IP {which} for load balancer {self.tree}) "
            f"for Service {self.service}"
        )


class Open(msgspec.Struct, frozen=True):
    """Let in who is to reach these nodes. `mark`: the description of the rules. `narrow`: nobody
    else is to reach them."""

    service: ServiceKey
    uid: str
    tree: str
    mark: str
    rules: tuple[Rule, ...]
    nodes: tuple[str, ...]
    narrow: bool = False

    def __str__(self) -> str:
        what = f"{len(self.rules)} rules, and {len(self.nodes)} nodes that are to have them"
        return f"POST /security-group-rules, PUT /ports ({what}) for Service {self.service}"


class Close(msgspec.Struct, frozen=True):
    """Take rules back, by their ids."""

    service: ServiceKey
    rules: tuple[str, ...]
    tree: str = ""

    def __str__(self) -> str:
        return (
            f"DELETE /security-group-rules ({len(self.rules)} of them) for Service {self.service}"
        )


class Loosen(msgspec.Struct, frozen=True):
    """Take the group from nodes that have been nobody's members for long, by their addresses."""

    service: ServiceKey
    nodes: tuple[str, ...]
    tree: str = ""

    def __str__(self) -> str:
        return (
            f"PUT /ports (no group any more for nodes at {', '.join(self.nodes)}), seen to "
            f"for Service {self.service}"
        )


class Await(msgspec.Struct, frozen=True):
    """Octavia is working on it."""

    service: ServiceKey
    tree: str
    status: str

    def __str__(self) -> str:
        return (
            f"wait for load balancer {self.tree}, which is in {self.status}, for Service "
            f"{self.service}"
        )


class Replan(msgspec.Struct, frozen=True):
    """It was planned for another provider than it has, or for addresses of more families: when that
    was not known."""

    service: ServiceKey
    tree: str
    provider: str
    families: tuple[Family, ...]

    def __str__(self) -> str:
        what = f"of provider {self.provider}, with addresses of {' and '.join(self.families)}"
        return f"plan Service {self.service} anew: its load balancer {self.tree} is {what}"


class GiveUp(msgspec.Struct, frozen=True):
    """It fails again and again. `tree`: empty if none has come of it."""

    service: ServiceKey
    tree: str
    attempts: int

    @property
    def problem(self) -> str:
        if self.tree:
            return (
                f"load balancer {self.tree} is in ERROR, {self.attempts} attempts to repair "
                "it failed"
            )
        return f"Octavia has failed {self.attempts} times to make a load balancer"

    def __str__(self) -> str:
        return f"leave the load balancer of Service {self.service} for now: {self.problem}"


class Forget(msgspec.Struct, frozen=True):
    """What failed for a Service that is gone."""

    service: ServiceKey

    def __str__(self) -> str:
        return f"forget that no load balancer could be made for Service {self.service}"


class Verify(msgspec.Struct, frozen=True):
    """Look whether it is as wanted after other steps. Octavia may call a load balancer ACTIVE with
    a part of it in ERROR, and provider ovn may forget a wish that came while it was at another."""

    service: ServiceKey
    wanted: Tree

    def __str__(self) -> str:
        return f"look at the load balancer of Service {self.service}"


class Seek(msgspec.Struct, frozen=True):
    """Look for the load balancer that the Service is to be on; None: for none any more."""

    service: ServiceKey
    uid: str
    wish: OctaviaElsewhere | None

    def __str__(self) -> str:
        what = (
            "none any more" if self.wish is None else self.wish.id or " or ".join(self.wish.names)
        )
        return f"look for the load balancer that Service {self.service} is to be on: {what}"


class Obstacle(msgspec.Struct, frozen=True):
    """On a load balancer of others it cannot be had now; most likely somebody must change
    something."""

    service: ServiceKey
    message: str
    fix: str

    def __str__(self) -> str:
        return f"leave Service {self.service}: {self.message}"


Step = Call | Expose | Open | Close | Loosen
Change = Step | Await | Replan | GiveUp | Forget | Verify | Seek | Obstacle
