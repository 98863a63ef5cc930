"""The steps for the rules by which clients and load balancers reach nodes. The rules are in one
security group of the cluster, which all its nodes have.

In: a BalancerSpec, the BalancerState that is to match it, the existing rules. Out: steps;
`security_group` carries them out. Pure. A node gets the group once, so a change of a Service writes
no port of a node. With provider ovn, packets reach nodes with the addresses of the clients: the
rules admit everyone or the Service's source ranges, and the source of OVN's health checks. Provider
amphora connects from its own networks. No two Services need the same rule, because a node port and
a health check node port belong to one Service. Invariant: on an existing load balancer, rules are
created before members that need them, and deleted after them. A new load balancer is created with
its members; its rules exist before its address is published."""

from collections.abc import Iterable

import msgspec

from fairlead.drivers.octavia.balancers import BalancerSpec, BalancerState, Found, Rule
from fairlead.drivers.octavia.changes import AddRules, Change, DeleteRules, RemoveSecurityGroup
from fairlead.model import ServiceKey


def rules_to_add(wanted: BalancerSpec, balancer: BalancerState, found: Found) -> list[Change]:
    """Return the rules and group memberships that members need."""
    if wanted.rules is None:
        return []
    rules = tuple(sorted(_needed(wanted.rules, balancer) - {each.rule for each in found.rules}))
    nodes = tuple(
        sorted(
            {each.address for one in wanted.listeners for each in one.pool.members}
            - found.secured_addresses
        )
    )
    if not (rules or nodes):
        return []
    narrow = wanted.provider == "ovn" and not any(
        is_any_address(each.source) for each in wanted.rules
    )
    return [
        AddRules(
            wanted.service,
            wanted.uid,
            balancer.id,
            wanted.network_mark(False),
            rules,
            nodes,
            narrow,
        )
    ]


def rules_to_delete(wanted: BalancerSpec, balancer: BalancerState, found: Found) -> list[Change]:
    """Return the deletion of rules that no member needs any more."""
    needed = _needed(wanted.rules or (), balancer)
    ids = tuple(sorted(each.id for each in found.rules if each.rule not in needed))
    return [DeleteRules(wanted.service, ids)] if ids else []


def groups_to_remove(wanted: BalancerSpec, found: Found) -> list[Change]:
    """Return the removal of the group from nodes that have left the cluster, or have had no pods of
    any Service for a long time."""
    return (
        [RemoveSecurityGroup(wanted.service, found.idle)]
        if found.idle and wanted.rules is not None
        else []
    )


def all_rules_of(key: ServiceKey, found: Found) -> list[Change]:
    """Return the deletion of all rules of a deleted Service."""
    return [DeleteRules(key, tuple(sorted(each.id for each in found.rules)))] if found.rules else []


def _needed(rules: Iterable[Rule], balancer: BalancerState) -> set[Rule]:
    """Return the rules, with the load balancer's own sources in place of empty sources."""
    own = [each for each in rules if not each.source]
    explicit = {each for each in rules if each.source}
    return explicit | {
        msgspec.structs.replace(each, source=source) for each in own for source in balancer.sources
    }


def is_any_address(source: str) -> bool:
    return source.endswith("/0")
