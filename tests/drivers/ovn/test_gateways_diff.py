"""The rows of Services of class ovn with topology `gateways`, and the steps to them."""

from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.drivers.ovn.rows import (
    DRAIN_S,
    GATEWAYS,
    NOW_S,
    SITE,
    VIP,
    VIP6,
    WEB,
    Table,
    intent,
)

from fairlead.drivers.ovn.changes import AttachRow, Blocked, CreateRow, DeleteRow, UpdateRow
from fairlead.drivers.ovn.checks import NO_ROUTER
from fairlead.drivers.ovn.diff import diff
from fairlead.drivers.ovn.render import specs_of
from fairlead.drivers.ovn.spec import Attachment, Frontend, Row, ServiceRows, backends_of
from fairlead.model import LoadBalancer, Outcome, Protocol

A, B, C, D = "10.244.1.10", "10.244.1.11", "10.244.1.12", "10.244.2.10"
NODES = {A: "n1", B: "n1", C: "n1", D: "n2", "fd00::1": "n1"}
WITH_SWITCH = msgspec.structs.replace(GATEWAYS, switches=("pods",))


def on_nodes(
    *active: str,
    draining: tuple[str, ...] = (),
    nodes: Mapping[str, str] = NODES,
    addresses: tuple[str, ...] = (VIP,),
    protocol: Protocol = "TCP",
) -> LoadBalancer:
    """Return a Service with these pods on their nodes."""
    return intent(active, draining, nodes=nodes, addresses=addresses, protocol=protocol)


def with_late_pods(balancer: LoadBalancer, *addresses: str) -> LoadBalancer:
    """Return the Service whose pods with these addresses drain, and still serve."""
    listeners = [
        msgspec.structs.replace(
            each,
            pods=tuple(
                msgspec.structs.replace(pod, still_serves=pod.address in addresses)
                for pod in each.pods
            ),
        )
        for each in balancer.listeners
    ]
    return msgspec.structs.replace(balancer, listeners=tuple(listeners))


def router(node: str) -> Attachment:
    return Attachment("Logical_Router", f"GR_{node}")


def by_node(table: Table) -> dict[str, Row]:
    """Return the rows by their node."""
    found = {row.frontend.node: row for row in table.rows.values()}
    assert len(found) == len(table.rows)
    return found


def slots(row: Row) -> Counter[str]:
    """Return the number of slots of each backend."""
    return Counter(backends_of(row.columns.vips[row.frontend.vip]))


def test_each_node_with_pods_gets_a_row_with_its_own_pods() -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A, B, C, D))
    rows = by_node(table)
    assert slots(rows["n1"]) == {f"{A}:8080": 43, f"{B}:8080": 43, f"{C}:8080": 42}
    assert slots(rows["n2"]) == {f"{D}:8080": 16}
    assert rows["n1"].attached == {router("n1")}
    assert rows["n2"].columns.name == f"fairlead:c1:default/web:{VIP}:80:tcp:n2"
    assert rows["n2"].columns.external_ids == {
        "fairlead.io/cluster": "c1",
        "fairlead.io/service": "default/web",
        "fairlead.io/port": "80",
        "fairlead.io/vip": f"{VIP}:80",
        "fairlead.io/node": "n2",
    }
    assert table.changes(on_nodes(A, B, C, D)) == []


def test_no_router_answers_arp_and_pods_see_the_client() -> None:
    table = Table(msgspec.structs.replace(GATEWAYS, neighbor_responder="reachable"))
    table.become(on_nodes(A))
    options = {"reject": "true", "neighbor_responder": "none", "skip_snat": "true"}
    assert table.row().columns.options == options


def test_each_family_has_a_row_on_the_nodes_with_pods_of_the_family() -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A, D, "fd00::1", addresses=(VIP, VIP6)))
    found = {(row.frontend.address, row.frontend.node) for row in table.rows.values()}
    assert found == {(VIP, "n1"), (VIP, "n2"), (VIP6, "n1")}


def test_a_pod_that_leaves_is_in_no_key_of_the_row() -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A, B, D))
    table.become(on_nodes(A, D, draining=(B,)))
    row = by_node(table)["n1"]
    assert row.columns.vips.keys() == {f"{VIP}:80"}
    assert slots(row) == {f"{A}:8080": 16}
    assert "fairlead.io/drains" not in row.columns.external_ids


def test_the_last_pods_of_a_node_get_connections_as_long_as_they_serve() -> None:
    """Routers upstream may send to the node for another moment."""
    table = Table(GATEWAYS)
    table.become(on_nodes(A, B, D))
    table.become(with_late_pods(on_nodes(D, draining=(A, B)), A))
    assert slots(by_node(table)["n1"]) == {f"{A}:8080": 16}
    table.become(with_late_pods(on_nodes(B, D, draining=(A,)), A))
    assert slots(by_node(table)["n1"]) == {f"{B}:8080": 16}


def test_callers_inside_reach_active_pods_alone() -> None:
    table = Table(WITH_SWITCH)
    table.become(with_late_pods(on_nodes(D, draining=(A,)), A))
    assert slots(by_node(table)[""]).keys() == {f"{D}:8080"}


def test_a_node_whose_pods_drain_keeps_a_row_that_refuses() -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A, D))
    table.become(on_nodes(D, draining=(A,)))
    row = by_node(table)["n1"]
    assert row.columns.vips == {f"{VIP}:80": ""}
    assert row.columns.options["reject"] == "true"
    assert "fairlead.io/removed" not in row.columns.external_ids
    assert table.changes(on_nodes(D, draining=(A,)), now_s=NOW_S + 9 * DRAIN_S) == []


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_the_row_of_a_node_without_pods_refuses_for_the_drain_timeout_and_is_then_deleted(
    protocol: Protocol,
) -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A, D, protocol=protocol))
    (emptied,) = table.become(on_nodes(D, protocol=protocol))
    assert isinstance(emptied, UpdateRow)
    row = by_node(table)["n1"]
    assert row.columns.vips == {f"{VIP}:80": ""}
    assert row.attached == {router("n1")}
    assert table.changes(on_nodes(D, protocol=protocol), now_s=NOW_S + DRAIN_S - 1) == []
    (deleted,) = table.become(on_nodes(D, protocol=protocol), now_s=NOW_S + DRAIN_S)
    assert isinstance(deleted, DeleteRow)
    assert by_node(table).keys() == {"n2"}


def test_a_node_that_gets_pods_again_takes_its_row_back() -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A, D))
    table.become(on_nodes(D))
    (change,) = table.become(on_nodes(B, D))
    assert isinstance(change, UpdateRow)
    assert slots(by_node(table)["n1"]) == {f"{B}:8080": 16}
    assert "fairlead.io/removed" not in by_node(table)["n1"].columns.external_ids


def test_the_rows_of_a_deleted_service_refuse_on_every_node_before_they_are_deleted() -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A, D))
    assert [type(each) for each in table.become()] == [UpdateRow, UpdateRow]
    assert all(not slots(row) for row in table.rows.values())
    table.become(now_s=NOW_S + DRAIN_S)
    assert not table.rows


def test_pods_of_a_node_without_a_router_are_reported_and_other_nodes_are_served() -> None:
    nodes = {**NODES, "10.244.3.10": "n3"}
    wanted = on_nodes(A, "10.244.3.10", nodes=nodes)
    table = Table(GATEWAYS)
    blocked, create = table.changes(wanted)
    assert isinstance(blocked, Blocked)
    assert (blocked.outcome.state, blocked.outcome.reason) == ("refused", NO_ROUTER)
    assert "no router GR_n3 of node n3" in blocked.outcome.message
    assert not blocked.outcome.in_part
    assert isinstance(create, CreateRow)
    assert create.frontend == Frontend(VIP, 80, "TCP", "n1")
    table.become(on_nodes(A))
    (blocked,) = table.changes(wanted)
    assert isinstance(blocked, Blocked)
    assert blocked.outcome.in_part


def test_the_row_of_a_node_whose_router_returns_is_attached_to_it() -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A))
    table.rows["row0"] = msgspec.structs.replace(table.row(), attached=frozenset())
    table.site = msgspec.structs.replace(GATEWAYS, routers=frozenset())
    (blocked, update) = table.changes(on_nodes(A, B))
    assert isinstance(blocked, Blocked)
    assert isinstance(update, UpdateRow)
    table.site = GATEWAYS
    assert [each for each in table.changes(on_nodes(A)) if isinstance(each, AttachRow)] == [
        AttachRow(WEB, "row0", router("n1"))
    ]


def test_pods_without_a_node_are_in_no_row_of_a_node() -> None:
    table = Table(WITH_SWITCH)
    table.become(on_nodes(A, "10.244.9.9"))
    assert by_node(table).keys() == {"", "n1"}
    assert slots(by_node(table)["n1"]) == {f"{A}:8080": 16}


def test_switches_get_a_row_with_the_pods_of_all_nodes() -> None:
    table = Table(WITH_SWITCH)
    table.become(on_nodes(A, D))
    rows = by_node(table)
    assert rows[""].attached == {Attachment("Logical_Switch", "pods")}
    assert slots(rows[""]) == {f"{A}:8080": 8, f"{D}:8080": 8}
    assert rows["n1"].attached == {router("n1")}


def test_rows_of_topology_router_are_emptied_when_each_node_gets_its_own() -> None:
    table = Table(SITE)
    table.become(on_nodes(A, D))
    table.site = GATEWAYS
    # The driver does not look at the router of the other topology.
    table.rows["row0"] = msgspec.structs.replace(table.row(), attached=frozenset())
    table.become(on_nodes(A, D))
    rows = by_node(table)
    assert not slots(rows[""])
    assert rows[""].columns.external_ids["fairlead.io/removed"]
    assert rows.keys() == {"", "n1", "n2"}
    assert table.changes(on_nodes(A, D)) == []


def test_a_row_of_the_other_topology_does_not_stay_on_the_same_router() -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A, D))
    table.site = msgspec.structs.replace(SITE, router="GR_n1")
    for uuid, row in table.rows.items():
        attached = row.attached & {router("n1")}
        table.rows[uuid] = msgspec.structs.replace(row, attached=attached)
    changes = table.become(on_nodes(A, D))
    assert [type(each) for each in changes].count(DeleteRow) == 1
    assert by_node(table).keys() == {"", "n2"}
    assert not slots(by_node(table)["n2"])


def test_a_row_whose_node_another_program_has_removed_is_replaced() -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A))
    row = table.row()
    marks = dict(row.columns.external_ids)
    del marks["fairlead.io/node"]
    table.rows["row0"] = msgspec.structs.replace(
        row,
        frontend=row.frontend._replace(node=""),
        columns=msgspec.structs.replace(row.columns, external_ids=marks),
    )
    changes = table.become(on_nodes(A))
    assert [type(each) for each in changes] == [DeleteRow, CreateRow]


def test_a_refused_service_keeps_its_rows_up_to_date() -> None:
    table = Table(GATEWAYS)
    table.become(on_nodes(A))
    refused = on_nodes(A, B)
    found = {WEB: ServiceRows((table.row(),), Outcome("refused", "OVN 22.12 is too old"))}
    (change,) = diff(GATEWAYS, specs_of(GATEWAYS, {WEB: refused}), found, DRAIN_S, NOW_S)
    assert isinstance(change, UpdateRow)


@given(st.lists(st.dictionaries(st.sampled_from([A, B, C, D]), st.booleans()), max_size=6))
def test_every_pod_is_in_the_row_of_its_node_alone(history: list[dict[str, bool]]) -> None:
    table = Table(GATEWAYS)
    for states in history:
        active = [pod for pod, ready in states.items() if ready]
        draining = tuple(pod for pod, ready in states.items() if not ready)
        wanted = on_nodes(*active, draining=draining)
        table.become(wanted)
        assert table.changes(wanted) == []
        for node, row in by_node(table).items():
            assert set(slots(row)) == {f"{pod}:8080" for pod in active if NODES[pod] == node}
            assert row.columns.vips.keys() == {f"{VIP}:80"}
            assert row.attached == {router(node)}
