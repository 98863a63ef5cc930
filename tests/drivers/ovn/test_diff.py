"""The rows of Services of class ovn, and the steps to them."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.drivers.ovn.rows import (
    API,
    DRAIN_S,
    NOW_S,
    SITE,
    VIP,
    VIP6,
    WEB,
    Table,
    intent,
    intent_by_node_ports,
)

from fairlead.drivers.ovn.changes import (
    AttachRow,
    AwaitFlows,
    Blocked,
    CreateRow,
    DeleteRow,
    UpdateRow,
)
from fairlead.drivers.ovn.diff import diff
from fairlead.drivers.ovn.marks import due_of
from fairlead.drivers.ovn.render import specs_of
from fairlead.drivers.ovn.spec import (
    Attachment,
    Frontend,
    Row,
    ServiceRows,
    backends_of,
    row_name,
)
from fairlead.model import Outcome

A, B, C, D = (f"10.244.1.{number}" for number in (10, 11, 12, 13))
PODS = [f"10.244.2.{number}" for number in range(10, 18)]


def slots(row: Row) -> Counter[str]:
    """Return the number of slots of each backend."""
    return Counter(backends_of(row.columns.vips[row.frontend.vip]))


def draining(row: Row) -> set[str]:
    """Return the backends of the drain key."""
    return set(backends_of(row.columns.vips.get(row.frontend.drain_vip(SITE), "")))


def test_a_new_service_gets_one_complete_row_for_each_address_port_and_protocol() -> None:
    table = Table()
    changes = table.become(intent((A, B, C, D, "fd00::1"), addresses=(VIP, VIP6)))
    assert [type(each) for each in changes] == [CreateRow, CreateRow]
    first, second = table.rows.values()
    assert first.frontend == Frontend(VIP6, 80, "TCP") or second.frontend == Frontend(
        VIP6, 80, "TCP"
    )
    (row,) = (each for each in table.rows.values() if each.frontend.address == VIP)
    assert slots(row) == {f"{each}:8080": 16 for each in (A, B, C, D)}
    assert row.attached == SITE.attachments()
    assert row.columns.options == {"reject": "true", "neighbor_responder": "reachable"}
    assert row.columns.external_ids == {
        "fairlead.io/cluster": "c1",
        "fairlead.io/service": "default/web",
        "fairlead.io/port": "80",
        "fairlead.io/vip": f"{VIP}:80",
    }
    (other,) = (each for each in table.rows.values() if each.frontend.address == VIP6)
    assert other.columns.vips == {f"[{VIP6}]:80": ",".join(["[fd00::1]:8080"] * 16)}


def test_only_on_a_gateway_router_a_row_excludes_itself_from_source_translation() -> None:
    specs = specs_of(SITE, {WEB: intent((A,))})
    site = msgspec.structs.replace(SITE, gateway_router=True)
    (change,) = diff(site, specs, {}, DRAIN_S, NOW_S)
    assert isinstance(change, CreateRow)
    assert change.columns.options["skip_snat"] == "true"


def test_each_change_prints_as_the_command_that_it_stands_for() -> None:
    table = Table()
    (create,) = table.become(intent((A,), affinity_s=20))
    text = str(create)
    assert text.startswith(f"ovn-nbctl lb-add fairlead:c1:default/web:{VIP}:80:tcp {VIP}:80 {A}:80")
    assert """'options:"affinity_timeout"="20"'""" in text
    assert " -- lr-lb-add dr fairlead:c1:default/web:" in text
    assert " -- ls-lb-add pods fairlead:c1:default/web:" in text
    (update,) = table.become(intent((A, B)))
    assert str(update).startswith("ovn-nbctl remove load_balancer row0 options")
    (attach,) = [AttachRow(WEB, "row0", Attachment("Logical_Router", "dr"))]
    assert str(attach) == "ovn-nbctl lr-lb-add dr row0"
    assert str(DeleteRow(WEB, "row0")) == "ovn-nbctl lb-del row0"


def test_equal_states_give_no_change() -> None:
    table = Table()
    wanted = (intent((A, B, C)), intent((D,), key=API, protocol="UDP"))
    table.become(*wanted)
    assert table.changes(*wanted) == []


def test_a_pod_that_leaves_keeps_its_connections_until_its_deadline() -> None:
    table = Table()
    table.become(intent((A, B)))
    table.become(intent((A,)))
    assert slots(table.row()) == {f"{A}:8080": 16}
    assert draining(table.row()) == {f"{B}:8080"}
    assert due_of(table.row().columns.external_ids) == NOW_S + DRAIN_S
    assert table.changes(intent((A,)), now_s=NOW_S + DRAIN_S - 1) == []
    table.become(intent((A,)), now_s=NOW_S + DRAIN_S)
    assert table.row().columns.vips.keys() == {f"{VIP}:80"}


def test_a_pod_that_terminates_drains_without_a_deadline_while_the_api_shows_it() -> None:
    table = Table()
    table.become(intent((A, B)))
    table.become(intent((A,), (B,)))
    assert draining(table.row()) == {f"{B}:8080"}
    later_s = NOW_S + 10 * DRAIN_S
    assert table.changes(intent((A,), (B,)), now_s=later_s) == []
    table.become(intent((A,)), now_s=later_s)
    assert draining(table.row()) == {f"{B}:8080"}
    assert table.changes(intent((A,)), now_s=later_s + 1) == []


def test_a_pod_that_was_never_ready_does_not_drain() -> None:
    table = Table()
    table.become(intent((A,), (B,)))
    assert table.changes(intent((A,), (B,))) == []
    assert draining(table.row()) == set()


def test_a_pod_that_becomes_ready_again_stops_draining() -> None:
    table = Table()
    table.become(intent((A, B)))
    table.become(intent((A,)))
    table.become(intent((A, B)))
    assert draining(table.row()) == set()
    assert slots(table.row()) == {f"{A}:8080": 8, f"{B}:8080": 8}


def test_udp_flows_leave_a_pod_that_is_gone_at_once() -> None:
    table = Table()
    table.become(intent((A, B), protocol="UDP"))
    assert table.row().columns.options["ct_flush"] == "true"
    table.become(intent((A,), (B,), protocol="UDP"))
    assert draining(table.row()) == set()


def test_without_ready_pods_the_row_stays_and_refuses_connections() -> None:
    table = Table()
    table.become(intent((A,)))
    table.become(intent(()))
    assert table.row().columns.vips[f"{VIP}:80"] == ""
    assert table.row().columns.options["reject"] == "true"
    assert draining(table.row()) == {f"{A}:8080"}


def test_node_ports_get_slots_in_proportion_to_their_ready_pods() -> None:
    table = Table()
    table.become(intent_by_node_ports({"10.0.0.1": 3, "10.0.0.2": 1}))
    assert slots(table.row()) == {"10.0.0.1:30080": 48, "10.0.0.2:30080": 16}
    table.become(intent_by_node_ports({"10.0.0.1": 3, "10.0.0.2": 0}))
    assert slots(table.row()) == {"10.0.0.1:30080": 16}
    assert draining(table.row()) == {"10.0.0.2:30080"}


def test_the_row_of_a_deleted_service_is_emptied_and_deleted_after_the_drain_timeout() -> None:
    table = Table()
    table.become(intent((A, B)))
    (emptied,) = table.become()
    assert isinstance(emptied, UpdateRow)
    assert table.row().columns.vips[f"{VIP}:80"] == ""
    assert draining(table.row()) == {f"{A}:8080", f"{B}:8080"}
    assert table.row().columns.options["neighbor_responder"] == "none"
    assert due_of(table.row().columns.external_ids) == NOW_S + DRAIN_S
    assert table.changes(now_s=NOW_S + DRAIN_S - 1) == []
    (deleted,) = table.become(now_s=NOW_S + DRAIN_S)
    assert isinstance(deleted, DeleteRow)
    assert not table.rows


def test_a_service_that_returns_takes_its_emptied_row_back() -> None:
    table = Table()
    table.become(intent((A, B)))
    table.become()
    (change,) = table.become(intent((A, B)))
    assert isinstance(change, UpdateRow)
    assert "fairlead.io/removed" not in table.row().columns.external_ids
    assert table.changes(intent((A, B)), now_s=NOW_S + DRAIN_S) == []


def test_a_row_without_connections_to_keep_is_deleted_at_once() -> None:
    table = Table()
    table.become(intent((A,), protocol="UDP"))
    (change,) = table.become()
    assert isinstance(change, DeleteRow)


def test_a_service_that_moves_to_another_address_leaves_the_old_row_to_drain() -> None:
    table = Table()
    table.become(intent((A,)))
    update, create = table.become(intent((A,), addresses=("203.0.113.41",)))
    assert isinstance(create, CreateRow)
    assert isinstance(update, UpdateRow)
    assert table.changes(intent((A,), addresses=("203.0.113.41",))) == []


def test_a_router_that_was_recreated_gets_its_rows_again() -> None:
    table = Table()
    table.become(intent((A,)))
    table.rows["row0"] = msgspec.structs.replace(table.row(), attached=frozenset())
    changes = table.become(intent((A,)))
    assert {
        each.attachment for each in changes if isinstance(each, AttachRow)
    } == SITE.attachments()


def test_a_service_waits_until_every_chassis_has_its_rows() -> None:
    table = Table()
    table.become(intent((A,)))
    table.rows["row0"] = msgspec.structs.replace(table.row(), installed=False)
    assert table.changes(intent((A,))) == [AwaitFlows(WEB)]


def test_a_blocked_service_is_not_written() -> None:
    refused = Outcome("refused", "the address belongs to another row")
    found = {WEB: ServiceRows((), refused)}
    changes = diff(SITE, specs_of(SITE, {WEB: intent((A,))}), found, DRAIN_S, NOW_S)
    assert changes == [Blocked(WEB, refused)]


def test_the_rows_of_a_refused_service_follow_its_pods() -> None:
    refused = Outcome("refused", "the router does not exist")
    table = Table()
    table.become(intent((A, B)))
    row = msgspec.structs.replace(table.row(), attached=frozenset())
    found = {WEB: ServiceRows((row,), refused)}
    blocked, update = diff(SITE, specs_of(SITE, {WEB: intent((A,))}), found, DRAIN_S, NOW_S)
    assert blocked == Blocked(WEB, msgspec.structs.replace(refused, in_part=True))
    assert isinstance(update, UpdateRow)
    assert set(backends_of(update.columns.vips[f"{VIP}:80"])) == {f"{A}:8080"}


def test_a_refused_service_with_a_new_address_is_not_served_in_part() -> None:
    refused = Outcome("refused", "the router does not exist")
    table = Table()
    table.become(intent((A,)))
    found = {WEB: ServiceRows((table.row(),), refused)}
    wanted = specs_of(SITE, {WEB: intent((A,), addresses=("203.0.113.41",))})
    blocked, update = diff(SITE, wanted, found, DRAIN_S, NOW_S)
    assert blocked == Blocked(WEB, refused)
    assert isinstance(update, UpdateRow)


def test_nothing_is_written_while_the_database_is_not_connected() -> None:
    unavailable = Outcome("unavailable", "not connected")
    table = Table()
    table.become(intent((A, B)))
    found = {WEB: ServiceRows((table.row(),), unavailable)}
    changes = diff(SITE, specs_of(SITE, {WEB: intent((A,))}), found, DRAIN_S, NOW_S)
    assert changes == [Blocked(WEB, unavailable)]


@pytest.mark.parametrize(
    "broken",
    [Frontend("", 0, "TCP"), Frontend(VIP, 80, "UDP"), Frontend("203.0.113.99", 80, "TCP")],
)
def test_a_row_whose_marks_were_changed_is_replaced_in_one_transaction(broken: Frontend) -> None:
    table = Table()
    table.become(intent((A,)))
    table.rows["row0"] = msgspec.structs.replace(table.row(), frontend=broken)
    first, second = table.become(intent((A,)))
    assert first == DeleteRow(WEB, "row0")
    assert isinstance(second, CreateRow)


def test_the_unreadable_row_of_a_deleted_service_is_deleted() -> None:
    table = Table()
    table.become(intent((A,)))
    broken = Frontend("", 0, "TCP")
    table.rows["row0"] = msgspec.structs.replace(table.row(), frontend=broken)
    assert table.become() == [DeleteRow(WEB, "row0")]


def test_after_the_clock_was_set_back_drains_end_within_the_timeout() -> None:
    early_s = NOW_S - 1e6
    table = Table()
    table.become(intent((A, B)))
    table.become(intent((A,)))
    table.become(intent((A,)), now_s=early_s)
    table.become(intent((A,)), now_s=early_s + DRAIN_S)
    assert draining(table.row()) == set()
    table.become(now_s=NOW_S)
    table.become(now_s=early_s)
    assert table.changes(now_s=early_s) == []
    table.become(now_s=early_s + DRAIN_S)
    assert not table.rows


@pytest.mark.parametrize("mark", ["fairlead.io/drains", "fairlead.io/removed"])
def test_a_time_of_any_length_is_survived(mark: str) -> None:
    digits = "9" * 400
    table = Table()
    table.become(intent((A, B)))
    table.become(intent((A,)))
    text = f"{B}:8080={digits}" if mark == "fairlead.io/drains" else digits
    row = table.row()
    marks = {**row.columns.external_ids, mark: text}
    columns = msgspec.structs.replace(row.columns, external_ids=marks)
    table.rows["row0"] = msgspec.structs.replace(row, columns=columns)
    table.become(intent((A,)))
    assert due_of(table.row().columns.external_ids) == NOW_S + DRAIN_S


def test_a_draining_row_with_the_mark_of_another_service_gives_up_its_name() -> None:
    table = Table()
    table.become(intent((A, B)))
    table.become()
    row = table.row()
    marks = {**row.columns.external_ids, "fairlead.io/service": str(API)}
    columns = msgspec.structs.replace(row.columns, external_ids=marks)
    table.rows["row0"] = msgspec.structs.replace(row, columns=columns)
    (change,) = table.become()
    assert isinstance(change, UpdateRow)
    expected = msgspec.structs.replace(columns, name=row_name(SITE.cluster, API, row.frontend))
    assert table.row().columns == expected
    assert table.changes() == []


def test_duplicates_of_a_row_are_removed() -> None:
    table = Table()
    table.become(intent((A,)))
    table.rows["copy"] = msgspec.structs.replace(table.row(), uuid="copy")
    table.become(intent((A,)))
    table.become(intent((A,)), now_s=NOW_S + DRAIN_S)
    assert list(table.rows) == ["row0"]


@given(st.lists(st.sets(st.sampled_from(PODS), max_size=6), min_size=1, max_size=12))
def test_after_each_history_the_row_is_as_desired_and_only_its_deadlines_pass(
    history: list[set[str]],
) -> None:
    table, now_s = Table(), NOW_S
    for active in history:
        now_s += DRAIN_S / 3
        wanted = intent(sorted(active))
        table.become(wanted, now_s=now_s)
        assert table.changes(wanted, now_s=now_s) == []
        counts = slots(table.row())
        assert counts.keys() == {f"{each}:8080" for each in active}
        assert not draining(table.row()) & counts.keys()
        if active:
            assert max(counts.values()) - min(counts.values()) <= 1
    table.become(intent(sorted(history[-1])), now_s=now_s + DRAIN_S)
    assert draining(table.row()) == set()


@pytest.mark.parametrize("text", ["", "b=x", "=", "a=1,,b=2"])
def test_an_unreadable_deadline_is_replaced(text: str) -> None:
    table = Table()
    table.become(intent((A, B)))
    table.become(intent((A,)))
    row = table.row()
    marks = {**row.columns.external_ids, "fairlead.io/drains": text}
    columns = msgspec.structs.replace(row.columns, external_ids=marks)
    table.rows["row0"] = msgspec.structs.replace(row, columns=columns)
    table.become(intent((A,)), now_s=NOW_S + 1)
    assert draining(table.row()) == {f"{B}:8080"}
    assert table.changes(intent((A,)), now_s=NOW_S + 1) == []
