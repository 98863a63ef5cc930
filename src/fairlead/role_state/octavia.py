"""The part of `/state` about the load balancers in OpenStack, and its table. Pure."""

from collections.abc import Iterator, Mapping

from fairlead.model import Value
from fairlead.role_state.part import Part, Table


class MemberHealth(Value, frozen=True):
    """A member of an Octavia load balancer. `operating`: its operating status. `monitored`: whether
    a health monitor checks it."""

    address: str
    port: int
    weight: int
    operating: str
    monitored: bool


class LoadBalancerHealth(Value, frozen=True):
    """One load balancer as Octavia showed it `seen_s_ago` seconds ago. `members`: the members by
    listener (`TCP/80`). `discrepancies`: messages about ready pods that Octavia reports as failed.
    """

    service: str
    id: str
    provider: str
    address: str
    operating: str
    members: Mapping[str, tuple[MemberHealth, ...]]
    discrepancies: tuple[str, ...]
    seen_s_ago: float


class OctaviaState(Part, frozen=True):
    """The part of `/state` about the load balancers in OpenStack."""

    load_balancers: tuple[LoadBalancerHealth, ...] = ()

    def shown(self) -> Iterator[Table | str]:
        if not self.load_balancers:
            return
        rows = []
        for each in self.load_balancers:
            balancer = [
                each.service,
                f"{each.address} ({each.provider})",
                each.operating,
                f"{each.seen_s_ago:.0f} s ago",
            ]
            for listener, members in each.members.items():
                names = (
                    ", ".join(f"{m.address}:{m.port}={m.weight} {m.operating}" for m in members)
                    or "none"
                )
                rows.append((*balancer, listener, names))
                balancer = [""] * len(balancer)
        yield Table(
            (
                "LOAD BALANCER OF",
                "ADDRESS",
                "OCTAVIA STATUS",
                "LAST SEEN",
                "LISTENER",
                "MEMBERS (weight status)",
            ),
            rows,
        )
        for each in self.load_balancers:
            for discrepancy in each.discrepancies:
                yield f"{each.service}: {discrepancy} (load balancer {each.id})"
