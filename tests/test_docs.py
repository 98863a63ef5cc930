"""The documents name what there is: every reason of an Event has its line in docs/status.md, and links lead somewhere."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead.plan import pool_status, pools

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "src" / "fairlead" / "plan"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def reasons(call: str) -> Iterator[str]:
    """The first argument of every such call in the plan: a text, or a name of its module."""
    for path in PLAN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == call):
                continue
            first = node.args[0]
            if isinstance(first, ast.Name):
                yield getattr(importlib.import_module(f"fairlead.plan.{path.stem}"), first.id)
            else:
                assert isinstance(first, ast.Constant), ast.unparse(node)
                assert isinstance(first.value, str), ast.unparse(node)
                yield first.value


@pytest.mark.parametrize("reason", sorted({*reasons("Note"), *reasons("Problem"), "AddressesHeld"}))
def test_every_reason_is_in_the_table_of_events(reason: str) -> None:
    assert f"`{reason}`" in (ROOT / "docs" / "status.md").read_text().partition("## Events")[2]


def test_the_reasons_are_found() -> None:
    assert {"AddressStranded", "NodeAddressMissing", "UnAvailableLoadBalancer"} <= set(reasons("Note"))
    assert set(reasons("Problem")) == {pools.INVALID, pools.OVERLAPS, pools.DELETED}
    assert '"AddressesHeld"' in Path(pool_status.__file__).read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
