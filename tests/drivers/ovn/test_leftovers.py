"""Rows that no Service needs."""

from tests.drivers.ovn.rows import API, DRAIN_S, NOW_S, WEB, Table, intent

from fairlead.drivers.ovn.leftovers import find_leftovers

A = "10.244.1.10"


def test_rows_of_services_that_are_gone_are_leftovers() -> None:
    table = Table()
    table.become(intent((A,)), intent((A,), key=API, addresses=("203.0.113.41",)))
    rows = [(key, row) for key, each in table.actual().items() for row in each.rows]
    (found,) = find_leftovers(rows, [API], NOW_S)
    assert (found.service, found.draining_until) == (str(WEB), None)


def test_a_row_whose_connections_continue_is_no_leftover_yet() -> None:
    table = Table()
    table.become(intent((A,)))
    table.become()
    rows = [(WEB, table.row())]
    assert not find_leftovers(rows, (), NOW_S + DRAIN_S - 1)
    assert len(find_leftovers(rows, (), NOW_S + DRAIN_S)) == 1
