"""What the driver of class octavia does, step by step; each prints as the request that it stands for. Pure."""

from collections.abc import Mapping

import msgspec

from fairlead.drivers.octavia.tree import Tree
from fairlead.model import ServiceKey


class Call(msgspec.Struct, frozen=True):
    """One write. `path`: below /lbaas. `words`: what it is about. `tree`: the load balancer that it locks; empty: one is made.

    saves: the id of what is made is what `$NAME` stands for in later steps. ends: the load balancer is gone after it.
    repairs: it is tried because one has failed.
    """

    service: ServiceKey
    method: str
    path: str
    body: Mapping[str, object] | None
    words: str
    tree: str = ""
    saves: str = ""
    ends: bool = False
    repairs: bool = False

    def __str__(self) -> str:
        return f"{self.method} /lbaas/{self.path} ({self.words}) for Service {self.service}"


class Await(msgspec.Struct, frozen=True):
    """Octavia is working on it."""

    service: ServiceKey
    tree: str
    status: str

    def __str__(self) -> str:
        return f"wait for load balancer {self.tree}, which is in {self.status}, for Service {self.service}"


class Replan(msgspec.Struct, frozen=True):
    """It was planned for another provider than it has: when that was not known."""

    service: ServiceKey
    tree: str
    provider: str

    def __str__(self) -> str:
        return f"plan Service {self.service} anew: its load balancer {self.tree} is of provider {self.provider}"


class GiveUp(msgspec.Struct, frozen=True):
    """It fails again and again."""

    service: ServiceKey
    tree: str
    attempts: int

    def __str__(self) -> str:
        return f"leave load balancer {self.tree} of Service {self.service} in ERROR for now, after {self.attempts} attempts"


class Verify(msgspec.Struct, frozen=True):
    """Look whether it is as wanted after other steps. Octavia may call a load balancer ACTIVE with a part of it in ERROR, and
    provider ovn may forget a wish that came while it was at another."""

    service: ServiceKey
    wanted: Tree

    def __str__(self) -> str:
        return f"look at the load balancer of Service {self.service}"


Change = Call | Await | Replan | GiveUp | Verify
