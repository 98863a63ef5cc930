"""Who may reach the nodes of a load balancer: rules of one security group that a cluster's nodes
have.

In: a BalancerSpec, the BalancerState that is to be it, the rules that are there. Out: steps;
`security_group` carries them out. Pure. Nodes get the group once, so a change of a Service writes
to no node's port. Through provider ovn clients come to nodes with their own addresses: rules are
for them, or for the Service's source ranges, and for the source of OVN's health checks. Provider
amphora comes from its own networks. No two Services need the same rules: node ports and health
ports belong to one Service. Invariant: on a load balancer that is there rules come before members
that need them, and they go after those. One that is made comes with its members, and its rules are
there before its address is shown."""

from collections.abc import Iterable

import msgspec

from fairlead.drivers.octavia.balancers import BalancerSpec, BalancerState, Found, Rule
from fairlead.drivers.octavia.changes import AddRules, Change, DeleteRules, RemoveSecurityGroup
from fairlead.model import ServiceKey


def rules_to_add(wanted: BalancerSpec, balancer: BalancerState, found: Found) -> list[Change]:
    """What is to be there before members are."""
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
    """What goes when members have gone."""
    needed = _needed(wanted.rules or (), balancer)
    ids = tuple(sorted(each.id for each in found.rules if each.rule not in needed))
    return [DeleteRules(wanted.service, ids)] if ids else []


def groups_to_remove(wanted: BalancerSpec, found: Found) -> list[Change]:
    """For nodes that have left the cluster, or have had no pods of any Service for long."""
    return (
        [RemoveSecurityGroup(wanted.service, found.idle)]
        if found.idle and wanted.rules is not None
        else []
    )


def all_rules_of(key: ServiceKey, found: Found) -> list[Change]:
    """For a Service that goes."""
    return [DeleteRules(key, tuple(sorted(each.id for each in found.rules)))] if found.rules else []


def _needed(rules: Iterable[Rule], balancer: BalancerState) -> set[Rule]:
    """With the load balancer's own addresses where rules are for these."""
    own = [each for each in rules if not each.source]
    said = {each for each in rules if each.source}
    return said | {
        msgspec.structs.replace(each, source=source) for each in own for source in balancer.sources
    }


def is_any_address(source: str) -> bool:
    return source.endswith("/0")
