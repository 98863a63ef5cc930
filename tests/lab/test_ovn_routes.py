"""Which gateway routers of a lab serve an address, according to OVN's databases."""

from collections.abc import Mapping

from fairlead.drivers.ovn.marks import NODE, VIP
from fairlead.lab.ovn.routers import routers_of
from fairlead.lab.ovn.routes import Installed
from fairlead.lab.rundir import Ovn, Size
from fairlead.net.ovsdb import Row, Value

ADDRESS, ADDRESS_V6 = "203.0.113.10", "2001:db8:f::10"
POD = "10.244.1.2:8080"
SIZE = Size(nodes=2, gateways=0, default_class="ovn", ovn=Ovn(topology="gateways"))


def installed() -> Installed:
    return Installed(routers_of(SIZE.topology("x")))


def balancer(vip: str = f"{ADDRESS}:80", backends: str = POD, node: str = "node1") -> Row:
    marks = {VIP: vip, NODE: node}
    return Row(vip, {"vips": {vip: backends}, "external_ids": marks})


def routers(**rows: Row) -> Mapping[str, Row]:
    """Return the rows of routers with these load balancers."""
    return {
        name: Row(name, {"name": name, "load_balancer": frozenset([row.uuid])})
        for name, row in rows.items()
    }


def chassis(**numbers: Value) -> Mapping[str, Row]:
    """Return the rows of chassis that have reached these numbers."""
    return {name: Row(name, {"name": name, "nb_cfg": number}) for name, number in numbers.items()}


def table(*rows: Row) -> Mapping[str, Row]:
    return {row.uuid: row for row in rows}


def test_a_router_serves_an_address_when_its_own_chassis_has_the_load_balancer() -> None:
    made, row = installed(), balancer()
    new = made.unknown(table(row), routers(GR_node1=row))
    assert set(new) == {(row.uuid, "GR_node1")}
    made.await_number(new, 8)
    assert made.unknown(table(row), routers(GR_node1=row)) == set()
    assert made.places(table(row), chassis(chassis1=7, chassis2=8)) == set()
    assert made.places(table(row), chassis(chassis1=8, chassis2=7)) == {(ADDRESS, "GR_node1")}


def test_every_load_balancer_of_the_address_must_be_installed() -> None:
    made = installed()
    web, api = balancer(f"[{ADDRESS_V6}]:80"), balancer(f"[{ADDRESS_V6}]:81")
    made.await_number([(web.uuid, "GR_node1")], 8)
    made.await_number([(api.uuid, "GR_node1")], 9)
    assert made.places(table(web, api), chassis(chassis1=8)) == set()
    assert made.places(table(web, api), chassis(chassis1=9)) == {(ADDRESS_V6, "GR_node1")}


def test_a_load_balancer_that_was_empty_is_confirmed_again() -> None:
    made, row = installed(), balancer()
    made.await_number(made.unknown(table(row), routers(GR_node1=row)), 8)
    assert not made.unknown(table(balancer(backends="")), routers(GR_node1=row))
    assert made.places(table(row), chassis(chassis1=9)) == set()
    assert set(made.unknown(table(row), routers(GR_node1=row))) == {(row.uuid, "GR_node1")}


def test_rows_of_other_programs_and_of_other_routers_do_not_count() -> None:
    made, row = installed(), balancer()
    assert not made.unknown(table(row), routers(neutron=row))
    foreign = Row("theirs", {"vips": {f"{ADDRESS}:80": POD}, "external_ids": {}})
    made.await_number(made.unknown(table(foreign), routers(GR_node1=foreign)), 1)
    assert made.places(table(foreign), chassis(chassis1=1)) == set()
