"""The security group of a cluster at Neutron, its rules, and the nodes' ports that have it.

In: a Cloud, the writes that `security` has found necessary. Out: what is there; and the writes are
made. Each rule carries the mark of its Service. What else a port has stays: it is written only over
the state in which it was read. Neutron takes a rule once, whatever its description. Invariant: with
the last rule of a Service goes the group, from ports first; until it is gone that rule is there,
for whichever process ends the work."""

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
"""So many addresses are asked for in one call: longer requests are turned away."""


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
    asked = {"description": owner.network_mark(key), "direction": "ingress"}
    return _by_service(owner, await get_list(cloud, RULES, _Rule, asked))


async def secured_ports(cloud: Cloud, owner: Owner) -> list[frozenset[str]]:
    """The addresses of each port that has the group."""
    ports = [
        each for group in await _groups(cloud, owner) for each in await _with_group(cloud, group.id)
    ]
    return [_addresses(port) for port in ports]


async def sources_of(
    cloud: Cloud, subnets: Iterable[str], provider: str
) -> dict[str, tuple[str, ...]]:
    """By subnet: where a load balancer of it comes from when it speaks to members itself."""
    wanted = sorted({*subnets} - {""})
    if not wanted:
        return {}
    if provider == "ovn":
        asking = {"name": [f"ovn-lb-hm-{each}" for each in wanted]}
        fixed = [
            each for port in await get_list(cloud, PORTS, Port, asking) for each in port.fixed_ips
        ]
        return {
            id_: tuple(sorted(_host(one.ip_address) for one in fixed if one.subnet_id == id_))
            for id_ in wanted
        }
    return {
        each.id: (each.cidr,) for each in await get_list(cloud, SUBNETS, _Subnet, {"id": wanted})
    }


async def add_rules(cloud: Cloud, owner: Owner, step: AddRules) -> str:
    """Raises Conflict where somebody else writes at the same time. A node that has no port here is
    passed over. What makes a narrow step useless; or nothing."""
    group = await _group(cloud, owner)
    if step.rules:
        bodies = [_body(each, group, step.mark) for each in step.rules]
        try:
            await cloud.write("POST", RULES, {"security_group_rules": bodies})
        except RuleExists as error:
            await _delete_conflicting_rules(cloud, owner, group, step, error)
    for start in range(0, len(step.nodes), ADDRESSES_PER_CALL):
        asked = {
            "fixed_ips": [
                f"ip_address={each}" for each in step.nodes[start : start + ADDRESSES_PER_CALL]
            ]
        }
        for port in await get_list(cloud, PORTS, Port, asked):
            if group not in port.security_groups and port.port_security_enabled:
                await _put(cloud, port, [*port.security_groups, group])
    return await _find_open_rule(cloud, group, step.rules) if step.narrow and step.rules else ""


async def _delete_conflicting_rules(
    cloud: Cloud, owner: Owner, group: str, step: AddRules, error: RuleExists
) -> None:
    """Rules like those of the step are there for others. A node port is of one Service: what others
    of this cluster have for it was left behind. Raises Conflict, for they are to be looked at anew;
    or Unavailable if it is no rule of ours."""
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
            f"somebody has made rules in security group {group} that Service "
            f"{step.service} needs: {', '.join(foreign)}"
        )
        raise Unavailable(message, fix="delete them; they are made anew for the Service") from error
    raise Conflict(f"rules of security group {group} have changed") from error


async def _find_open_rule(cloud: Cloud, group: str, rules: Collection[Rule]) -> str:
    """Where other groups of nodes let everybody in to these ports."""
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
        "lets everybody in"
    )


def _allows_any_source(one: _Rule, rule: Rule) -> bool:
    """To the port of the rule."""
    low, high = one.port_range_min or 0, one.port_range_max or 65535
    reaches = one.protocol in (None, rule.protocol) and low <= rule.port <= high
    return (
        reaches and not one.remote_group_id and is_any_address(one.remote_ip_prefix or "0.0.0.0/0")
    )


async def remove_group(cloud: Cloud, owner: Owner, nodes: Collection[str]) -> None:
    """Raises Conflict where somebody else writes at the same time."""
    for group in await _groups(cloud, owner):
        for port in await _with_group(cloud, group.id):
            if _addresses(port) <= set(nodes):
                await _put(cloud, port, [each for each in port.security_groups if each != group.id])


async def delete_rules(cloud: Cloud, owner: Owner, step: DeleteRules) -> bool:
    """Whether the group went, too. It takes its last rules along: while there are ports that have
    it, these tell of whom it is. Raises Conflict where somebody else writes at the same time."""
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
    """For who comes in."""
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
