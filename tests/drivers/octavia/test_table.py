"""The table of annotations in docs/octavia.md matches the plans of this version. Its other cells
are verified at the real Octavia by the command that writes the table."""

from tests.drivers.octavia import table


def test_the_documented_table_matches_the_plans() -> None:
    rows = [
        line.split(" | ") for line in table.written(table.DOCUMENT.read_text()).splitlines()[2:]
    ]
    assert [row[0] for row in rows] == [f"| {table.label(request)}" for request in table.REQUESTS]
    for number, provider in enumerate(table.PROVIDERS, 1):
        planner = table.Planner(provider, "subnet")
        for request, row in zip(table.REQUESTS, rows, strict=True):
            cell, message = row[number].removesuffix(" |"), planner.message(request)
            assert cell == message if message else cell.startswith(table.IN_PLACE), (
                provider,
                request,
            )
