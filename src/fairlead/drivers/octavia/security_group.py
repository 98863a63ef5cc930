"""The security group of a cluster at Neutron, its rules, and the ports of nodes that have it.

In: a Cloud, the writes of `security`. Out: the existing rules and ports; and the writes are made.
Each rule carries the mark of its Service. Other security groups of a port stay: a port is written
only at the revision that was read. Neutron rejects an equal rule even if its description differs.
Invariant: the group is deleted with the last rule of a Service, after it is removed from ports.
Until then the rule exists, so that any process can finish the work."""

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from fairlead.drivers.octavia.answers import get_list
from fairlead.drivers.octavia.balancers import FoundRule, Rule
from fairlead.drivers.octavia.changes import AddRules, DeleteRules
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.failures import RuleExists
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.paths import GROUPS, PORTS, RULES, SUBNETS
from fairlead.drivers.octavia.security import is_any_address
from fairlead.errors import Conflict, Unavailable
from fairlead.model import ServiceKey

ADDRESSES_PER_CALL = 50
"""The number of addresses in one query; longer requests are rejected."""


class _Fixed(msgspec.Struct):
    ip_address: str
    subnet_id: str = ""


class Port(msgspec.Struct):
    id: str
    fixed_ips: tuple[_Fixed, ...] = ()
    security_groups: tuple[str, ...] = ()
    revision_number: int = 0
    port_security_enabled: bool = True


class _Rule(msgspec.Struct):
    id: str
    direction: str = "ingress"
    protocol: str | None = None
    port_range_min: int | None = None
    port_range_max: int | None = None
    remote_ip_prefix: str | None = None
    remote_group_id: str | None = None
    description: str | None = None
    security_group_id: str = ""


class _Group(msgspec.Struct):
    id: str


class _Subnet(msgspec.Struct):
    id: str
    cidr: str = ""


Rules = Mapping[ServiceKey, Sequence[FoundRule]]


async def all_rules(cloud: Cloud, owner: Owner) -> Rules:
    whole = [
        each for group in await _groups(cloud, owner) for each in await _rules(cloud, [group.id])
    ]
    return _by_service(owner, whole)


async def has_group(cloud: Cloud, owner: Owner) -> bool:
    return bool(await _groups(cloud, owner))


async def rules_of(cloud: Cloud, owner: Owner, key: ServiceKey) -> Rules:
    query = {"description": owner.network_mark(key), "direction": "ingress"}
    return _by_service(owner, await get_list(cloud, RULES, _Rule, query))


async def secured_ports(cloud: Cloud, owner: Owner) -> list[frozenset[str]]:
    """Return the addresses of each port that has the group."""
    ports = [
        each for group in await _groups(cloud, owner) for each in await _with_group(cloud, group.id)
    ]
    return [_addresses(port) for port in ports]


async def sources_of(
    cloud: Cloud, subnets: Iterable[str], provider: str
) -> dict[str, tuple[str, ...]]:
    """Return the addresses from which a load balancer itself connects to members, by subnet."""
    wanted = sorted({*subnets} - {""})
    if not wanted:
        return {}
    if provider == "ovn":
        query = {"name": [f"ovn-lb-hm-{each}" for each in wanted]}
        fixed = [
            each for port in await get_list(cloud, PORTS, Port, query) for each in port.fixed_ips
        ]
        return {
            id_: tuple(sorted(_host(one.ip_address) for one in fixed if one.subnet_id == id_))
            for id_ in wanted
        }
    return {
        each.id: (each.cidr,) for each in await get_list(cloud, SUBNETS, _Subnet, {"id": wanted})
    }


async def add_rules(cloud: Cloud, owner: Owner, step: AddRules) -> str:
    """Add the rules, and assign the group to the nodes. A node without a port in this project is
    skipped. Return the reason why a narrow step has no effect, or "". Raise Conflict if another
    client writes at the same time."""
    group = await _group(cloud, owner)
    if step.rules:
        bodies = [_body(each, group, step.mark) for each in step.rules]
        try:
            await cloud.write("POST", RULES, {"security_group_rules": bodies})
        except RuleExists as error:
            await _delete_conflicting_rules(cloud, owner, group, step, error)
    for start in range(0, len(step.nodes), ADDRESSES_PER_CALL):
        query = {
            "fixed_ips": [
                f"ip_address={each}" for each in step.nodes[start : start + ADDRESSES_PER_CALL]
            ]
        }
        for port in await get_list(cloud, PORTS, Port, query):
            if group not in port.security_groups and port.port_security_enabled:
                await _put(cloud, port, [*port.security_groups, group])
    return await _find_open_rule(cloud, group, step.rules) if step.narrow and step.rules else ""


async def _delete_conflicting_rules(
    cloud: Cloud, owner: Owner, group: str, step: AddRules, error: RuleExists
) -> None:
    """Delete equal rules of other Services of this cluster. A node port belongs to one Service, so
    rules of another Service for this port are leftovers. Always raise an error: Conflict, because
    the rules must be read again, or Unavailable if an equal rule is not Fairlead's."""
    foreign: list[str] = []
    for each in await _rules(cloud, [group]):
        own = each.description == step.mark
        if own or each.port_range_max != each.port_range_min or _found(each).rule not in step.rules:
            continue
        if owner.marked(each.description or "") is None:
            foreign.append(each.id)
        else:
            await cloud.write("DELETE", f"{RULES}/{each.id}", None)
    if foreign:
        message = (
            f"another client has created rules in security group {group} that Service "
            f"{step.service} needs: {', '.join(foreign)}"
        )
        raise Unavailable(
            message, fix="delete them; Fairlead creates them again for the Service"
        ) from error
    raise Conflict(f"rules of security group {group} have changed") from error


async def _find_open_rule(cloud: Cloud, group: str, rules: Collection[Rule]) -> str:
    """Describe a rule of another group of the nodes that admits every source to one of these ports;
    "" if there is none."""
    others = {id_ for port in await _with_group(cloud, group) for id_ in port.security_groups} - {
        group
    }
    found = [
        each
        for each in await _rules(cloud, sorted(others))
        if any(_allows_any_source(each, rule) for rule in rules)
    ]
    if not found:
        return ""
    one = found[0]
    return (
        f"rule {one.id} of security group {one.security_group_id}, which nodes have as well, "
        "admits every source"
    )


def _allows_any_source(one: _Rule, rule: Rule) -> bool:
    """Return whether the existing rule admits every source to the port of `rule`."""
    low, high = one.port_range_min or 0, one.port_range_max or 65535
    reaches = one.protocol in (None, rule.protocol) and low <= rule.port <= high
    return (
        reaches and not one.remote_group_id and is_any_address(one.remote_ip_prefix or "0.0.0.0/0")
    )


async def remove_group(cloud: Cloud, owner: Owner, nodes: Collection[str]) -> None:
    """Remove the group from the ports of these nodes. Raise Conflict if another client writes at
    the same time."""
    for group in await _groups(cloud, owner):
        for port in await _with_group(cloud, group.id):
            if _addresses(port) <= set(nodes):
                await _put(cloud, port, [each for each in port.security_groups if each != group.id])


async def delete_rules(cloud: Cloud, owner: Owner, step: DeleteRules) -> bool:
    """Delete the rules. Return whether the group was deleted too. The last rules are deleted
    together with the group: while ports have the group, its rules identify the Service. Raise
    Conflict if another client writes at the same time."""
    left = False
    gone: set[str] = set()
    for group in await _groups(cloud, owner):
        rules = {each.id for each in await _rules(cloud, [group.id])}
        if not rules <= set(step.rules):
            left = True
            continue
        for port in await _with_group(cloud, group.id):
            await _put(cloud, port, [each for each in port.security_groups if each != group.id])
        await cloud.write("DELETE", f"{GROUPS}/{group.id}", None)
        gone |= rules
    for each in step.rules:
        if each not in gone:
            await cloud.write("DELETE", f"{RULES}/{each}", None)
    return not left


async def _rules(cloud: Cloud, groups: Sequence[str]) -> list[_Rule]:
    """Return the ingress rules of these groups."""
    return (
        await get_list(cloud, RULES, _Rule, {"security_group_id": groups, "direction": "ingress"})
        if groups
        else []
    )


def _by_service(owner: Owner, rules: Iterable[_Rule]) -> Rules:
    found: dict[ServiceKey, list[FoundRule]] = {}
    for each in rules:
        if (key := owner.marked(each.description or "")) is not None:
            found.setdefault(key, []).append(_found(each))
    return found


def _addresses(port: Port) -> frozenset[str]:
    return frozenset(fixed.ip_address for fixed in port.fixed_ips)


async def _put(cloud: Cloud, port: Port, groups: Sequence[str]) -> None:
    await cloud.write(
        "PUT",
        f"{PORTS}/{port.id}",
        {"port": {"security_groups": list(groups)}},
        port.revision_number,
    )


async def _groups(cloud: Cloud, owner: Owner) -> list[_Group]:
    return await get_list(cloud, GROUPS, _Group, {"description": owner.tag})


async def _with_group(cloud: Cloud, group: str) -> list[Port]:
    return await get_list(cloud, PORTS, Port, {"security_groups": group})


async def _group(cloud: Cloud, owner: Owner) -> str:
    if found := await _groups(cloud, owner):
        return min(each.id for each in found)
    body = {"security_group": {"name": f"fairlead_{owner.name}", "description": owner.tag}}
    await cloud.write("POST", GROUPS, body)
    if not (made := await _groups(cloud, owner)):
        raise Conflict("the security group of the cluster has vanished")
    return min(each.id for each in made)


def _body(rule: Rule, group: str, mark: str) -> dict[str, object]:
    return {
        "security_group_id": group,
        "direction": "ingress",
        "ethertype": "IPv6" if ":" in rule.source else "IPv4",
        "protocol": rule.protocol,
        "port_range_min": rule.port,
        "port_range_max": rule.port,
        "remote_ip_prefix": rule.source,
        "description": mark,
    }


def _found(one: _Rule) -> FoundRule:
    source = one.remote_ip_prefix or ""
    return FoundRule(one.id, Rule(one.protocol or "", one.port_range_min or 0, source))


def _host(address: str) -> str:
    return str(ipaddress.ip_network(address))
