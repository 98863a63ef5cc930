"""What the databases of a lab's OVN contain: its chassis, its routers and its load balancers.

In: the databases of a running lab. Out: an `OvnView`. The rows are read from the databases, and not
from the controller, so that both can be compared."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from fairlead.drivers.ovn.marks import SERVICE, VIP
from fairlead.lab.ovn.central import Central
from fairlead.lab.ovn.edge import central
from fairlead.lab.ovn.routers import OvnRouter, routers_of
from fairlead.lab.topology import Topology


class ChassisView(msgspec.Struct, frozen=True):
    """A chassis. `router`: the router whose port is here, with its addresses; empty: none.
    `confirmed`: it handles packets by the present northbound database."""

    name: str
    router: str
    addresses: tuple[str, ...]
    confirmed: bool


class BalancerView(msgspec.Struct, frozen=True):
    """A key in column `vips` of a load balancer. `owner`: the Service, or the name of a row that
    Fairlead has not written. `backends`: the number of positions of each backend in the list.
    `draining`: the backends only keep their connections. `routers`: the routers that have the load
    balancer."""

    owner: str
    protocol: str
    address: str
    backends: Mapping[str, int]
    draining: bool
    routers: tuple[str, ...]

    @property
    def state(self) -> str:
        if not self.routers:
            return "not attached"
        if self.draining:
            return "draining"
        return "serving" if self.backends else "refusing"


class OvnView(msgspec.Struct, frozen=True):
    """The OVN of a lab."""

    chassis: tuple[ChassisView, ...]
    balancers: tuple[BalancerView, ...]


async def view(topology: Topology) -> OvnView:
    """Return what the databases contain. Raise Unavailable if they do not answer."""
    made = central(topology)
    (state,) = await made.rows("NB_Global")
    routers = routers_of(topology)
    names = {each.name for each in routers}
    found = [row for row in await made.rows("Logical_Router") if row["name"] in names]
    balancers = await made.rows("Load_Balancer")
    return OvnView(await _chassis(made, routers, state["nb_cfg"]), rows_of(found, balancers))


async def _chassis(
    made: Central, routers: Sequence[OvnRouter], number: int
) -> tuple[ChassisView, ...]:
    """Return the chassis. `number`: that of the last change of the northbound database."""
    names = {row["_uuid"]: row["name"] for row in await made.rows("Chassis", "sb")}
    ports = {row["logical_port"]: row for row in await made.rows("Port_Binding", "sb")}
    places = {
        names.get(each): router
        for router in routers
        # A port is on no chassis while it moves.
        for each in _set(ports[router.placed_port]["chassis"])
    }
    return tuple(
        ChassisView(
            row["name"],
            router.name if router else "",
            router.addresses if router else (),
            row["nb_cfg"] >= number,
        )
        for row in sorted(
            await made.rows("Chassis_Private", "sb"), key=lambda each: str(each["name"])
        )
        for router in [places.get(row["name"])]
    )


def rows_of(
    routers: Collection[Mapping[str, Any]], rows: Collection[Mapping[str, Any]]
) -> tuple[BalancerView, ...]:
    """Return a view of each key of these rows of table Load_Balancer. `routers`: rows of table
    Logical_Router. Pure."""
    attached = {router["name"]: set(_set(router["load_balancer"])) for router in routers}
    found = [
        BalancerView(
            row["external_ids"].get(SERVICE, row["name"]),
            "".join(_set(row["protocol"])) or "tcp",
            key,
            dict(sorted(Counter(backends.split(",")).items())) if backends else {},
            key != row["external_ids"].get(VIP, key),
            tuple(sorted(name for name, rows in attached.items() if row["_uuid"] in rows)),
        )
        for row in rows
        for key, backends in row["vips"].items()
    ]
    return tuple(
        sorted(found, key=lambda each: (each.owner, each.draining, each.address, each.routers))
    )


def _set(value: Any) -> Sequence[Any]:
    """Return the members of a set. A set of one member is shown as the member (RFC 7047)."""
    return value if isinstance(value, list) else [value]
