"""The one write that changes a pool's members to the desired ones, with as few members in it as
possible.

In: an existing pool of a load balancer, its desired members. Out: a Call, or None. Pure. Octavia
identifies a member by its address and port. A batch costs Octavia's worker as much for each
unchanged member of the pool as for a changed one. `additive_only` does not help, because it also
rewrites members that are not listed. Therefore a change of one member is a write to that member."""

from collections.abc import Sequence

from fairlead.drivers.octavia import bodies
from fairlead.drivers.octavia.balancers import ERROR, BalancerState, FoundPool, Member
from fairlead.drivers.octavia.changes import Call
from fairlead.model import ServiceKey


def members_step(
    key: ServiceKey, balancer: BalancerState, found: FoundPool, wanted: Sequence[Member]
) -> Call | None:
    """Return the write, or None if the members are as desired and no member is in ERROR. It is
    unknown whether the provider has a member that is in ERROR; a batch creates it in both cases. If
    a member exists twice, with two spellings of its address, a batch leaves one of them. An empty
    pool is filled by a batch, as a new pool is."""
    present = {_place(each.member): each for each in found.members}
    places = {_place(each) for each in wanted}
    gone = [each for each in found.members if _place(each.member) not in places]
    new = [each for each in wanted if _place(each) not in present]
    both = [(each, present[_place(each)].member) for each in wanted if _place(each) in present]
    changed = [each for each, old in both if _mutable_settings(each) != _mutable_settings(old)]
    broken = len(present) < len(found.members) or any(
        each.status == ERROR for each in found.members
    )
    path, subject = f"pools/{found.id}/members", f"of pool {found.name}"
    match new, changed, gone, broken:
        case [], [], [], False:
            return None
        case [one], [], [], False if present:
            return Call(
                key,
                "POST",
                path,
                {"member": bodies.member(one)},
                f"member {one.address} {subject}",
                balancer.id,
            )
        case [], [one], [], False:
            path = f"{path}/{present[_place(one)].id}"
            return Call(
                key,
                "PUT",
                path,
                {"member": bodies.member_settings(one)},
                f"member {one.address} {subject}",
                balancer.id,
            )
        case [], [], [old], False:
            return Call(
                key,
                "DELETE",
                f"{path}/{old.id}",
                None,
                f"member {old.member.address} {subject}",
                balancer.id,
            )
    return Call(key, "PUT", path, bodies.members(wanted), f"members {subject}", balancer.id)


def _place(member: Member) -> tuple[str, int]:
    return member.address, member.port


def _mutable_settings(member: Member) -> tuple[int, int | None]:
    """Return the settings of a member that can be changed. Its subnet, which Octavia may have
    determined itself, cannot."""
    return member.weight, member.monitor_port
