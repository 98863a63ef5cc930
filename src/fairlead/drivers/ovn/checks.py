"""What OVN must be like for class ovn: its version, the router, the gateway chassis.

In: the facts that the databases show. Out: a Refused for what cannot work, or a Finding about what
does not work if a chassis fails. Pure."""

import re
from collections.abc import Collection, Mapping, Sequence

from fairlead.drivers.ovn.foreign import KUBERNETES, ForeignRow
from fairlead.drivers.ovn.spec import Attachment
from fairlead.errors import Refused
from fairlead.model import Finding, Outcome

MIN_VERSION = (23, 3)
"""The first version that was tested."""
LAGGING = "OvnChassisLagging"
"""Code of a Finding: a chassis has not installed a load balancer in time."""
NO_FAILOVER = "OvnGatewayNoFailover"
"""Code of a Finding: the gateway port of the router cannot move to another chassis."""
NO_SWITCH = "OvnSwitchMissing"
"""Code of a Finding: a switch of the configuration does not exist."""
NO_ROUTER = "OvnRouterMissing"
"""Reason of an Outcome: the gateway router of a node with pods does not exist."""
MAX_LISTED = 5
"""The maximum number of routers that a message names."""
_KUBERNETES_ROUTER = "ovn_cluster_router"


def version_of(options: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the version of northd by the options of table NB_Global; None if they have none."""
    found = re.match(r"(\d+)\.(\d+)", options.get("northd_internal_version", ""))
    return (int(found[1]), int(found[2])) if found else None


def check_version(options: Mapping[str, str]) -> Refused | None:
    """Return why this version of OVN cannot be used."""
    version = version_of(options)
    if version is None or version >= MIN_VERSION:
        return None
    return Refused(
        f"OVN {version[0]}.{version[1]:02d} is too old for class fairlead.io/ovn",
        fix="upgrade it to 23.03 or later",
    )


def no_router(name: str) -> Refused:
    return Refused(
        f"the northbound database has no router {name}",
        fix="correct ovn.router in the configuration",
    )


def no_gateway_routers(missing: Sequence[tuple[str, str]]) -> Outcome:
    """Return the Outcome of a Service with pods on nodes without a gateway router. `missing`: each
    node, with the name of its router."""
    named = [f"{router} of node {node}" for node, router in missing[:MAX_LISTED]]
    more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
    refusal = Refused(
        f"the northbound database has no router {', '.join(named)}{more}: the pods there get no "
        "connections",
        fix="correct ovn.routers in the configuration, or create the router",
    )
    return Outcome("refused", str(refusal), NO_ROUTER)


def no_switch(name: str) -> Finding:
    return Finding(
        NO_SWITCH,
        f"the northbound database has no switch {name}, so its ports may not reach the address",
        remedy="correct ovn.switches in the configuration, or create the switch",
    )


def check_owner(place: Attachment, rows: Collection[ForeignRow]) -> Refused | None:
    """Return why the router or switch cannot be used: it belongs to OVN-Kubernetes. `rows`: the
    rows of others that are attached to it."""
    marks = (key for row in rows for key in row.external_ids)
    if place.name != _KUBERNETES_ROUTER and not any(key.startswith(KUBERNETES) for key in marks):
        return None
    return Refused(
        f"{place} belongs to OVN-Kubernetes, which serves the addresses of Services itself",
        fix="use class fairlead.io/announce, which announces these addresses",
    )


def lagging(names: Collection[str], deadline_s: float) -> Finding:
    """Return the Finding that chassis have not installed a row in time. It is about all rows, and
    is reported for one of them. `names`: these chassis; empty if they are unknown."""
    who = f"chassis {', '.join(sorted(names))}" if names else "a chassis"
    remedy = "check that ovn-controller runs there; delete a chassis that is gone: ovn-sbctl "
    remedy += "chassis-del NAME"
    if not names:
        remedy += "; with ovn.southbound, this message names the chassis"
    return Finding(
        LAGGING,
        f"{who} did not confirm a load balancer within {deadline_s:g} s; it and further ones are "
        "published nevertheless",
        remedy=remedy,
    )


def check_failover(router: str, gateways: int, chassis: int) -> Finding | None:
    """Return the Finding that the gateway port does not fail over. `gateways`: the number of
    chassis that may have it. `chassis`: the number of all chassis."""
    if gateways != 2 or chassis > 2:
        return None
    return Finding(
        NO_FAILOVER,
        f"the gateway port of router {router} has two chassis, and there is no third one: when one "
        "fails, the other one takes itself for disconnected, and the port does not move",
        remedy="add a third chassis to OVN, which needs no gateway port",
    )
