"""The table of annotations in docs/octavia.md matches the plans of this version. Its other cells
are verified at the real Octavia by the command that writes the table."""

from tests.drivers.octavia import table


def test_the_table_in_the_documents_says_what_is_planned() -> None:
    rows = [
        line.split(" | ") for line in table.written(table.DOCUMENT.read_text()).splitlines()[2:]
    ]
    assert [row[0] for row in rows] == [f"| {table.says(wish)}" for wish in table.WISHES]
    for number, provider in enumerate(table.PROVIDERS, 1):
        planner = table.Planner(provider, "subnet")
        for wish, row in zip(table.WISHES, rows, strict=True):
            cell, told = row[number].removesuffix(" |"), planner.told(wish)
            assert cell == told if told else cell.startswith(table.IN_PLACE), (provider, wish)
