"""The one write that brings a pool's members to what is wanted, with as few of them in it as can
be.

In: a pool as it was found on a load balancer, the members that it is to have. Out: a Call, or none.
Pure. Octavia knows a member by its address and port. A batch costs its worker as much for each
member of the pool as a change of that would, be it the same as before, and so it does with
`additive_only`, where those that are not listed are written again, too: a change of one member is
therefore a write about that one."""

from collections.abc import Sequence

from fairlead.drivers.octavia import bodies
from fairlead.drivers.octavia.balancers import ERROR, BalancerState, FoundPool, Member
from fairlead.drivers.octavia.changes import Call
from fairlead.model import ServiceKey


def members_step(
    key: ServiceKey, balancer: BalancerState, found: FoundPool, wanted: Sequence[Member]
) -> Call | None:
    """None: they are as wanted, and none of them is in ERROR. One that is in ERROR the provider may
    know or not: a batch makes it either way. Of one that is there twice, as it was written in two
    ways, a batch leaves one. An empty pool is filled as a new one is."""
    there = {_place(each.member): each for each in found.members}
    places = {_place(each) for each in wanted}
    gone = [each for each in found.members if _place(each.member) not in places]
    new = [each for each in wanted if _place(each) not in there]
    both = [(each, there[_place(each)].member) for each in wanted if _place(each) in there]
    changed = [each for each, old in both if _mutable_settings(each) != _mutable_settings(old)]
    broken = len(there) < len(found.members) or any(each.status == ERROR for each in found.members)
    path, words = f"pools/{found.id}/members", f"of pool {found.name}"
    match new, changed, gone, broken:
        case [], [], [], False:
            return None
        case [one], [], [], False if there:
            return Call(
                key,
                "POST",
                path,
                {"member": bodies.member(one)},
                f"member {one.address} {words}",
                balancer.id,
            )
        case [], [one], [], False:
            path = f"{path}/{there[_place(one)].id}"
            return Call(
                key,
                "PUT",
                path,
                {"member": bodies.member_settings(one)},
                f"member {one.address} {words}",
                balancer.id,
            )
        case [], [], [old], False:
            return Call(
                key,
                "DELETE",
                f"{path}/{old.id}",
                None,
                f"member {old.member.address} {words}",
                balancer.id,
            )
    return Call(key, "PUT", path, bodies.members(wanted), f"members {words}", balancer.id)


def _place(member: Member) -> tuple[str, int]:
    return member.address, member.port


def _mutable_settings(member: Member) -> tuple[int, int | None]:
    """Where a member is, Octavia may have found by itself, and nobody can change."""
    return member.weight, member.monitor_port
