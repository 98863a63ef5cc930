"""The documentation is complete: every reason of an Event has a row in docs/status.md, every field
of the configuration has a row in docs/configuration.md, and all links have a target."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from fairlead import config
from fairlead.plan import migration, pool_status, pools
from fairlead.plan.classes import CLASSES
from fairlead.sections import Section

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "src" / "fairlead" / "plan"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "tests" / "README.md"]


def codes(*excluded: str) -> Iterator[str]:
    """Return the code of every Finding of the plan, without those of the excluded modules. A code
    is a literal or a constant of the module."""
    for path in PLAN.glob("*.py"):
        if path.stem in excluded:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "Finding"
            ):
                continue
            first = node.args[0]
            if isinstance(first, ast.Name):
                yield getattr(importlib.import_module(f"fairlead.plan.{path.stem}"), first.id)
            else:
                assert isinstance(first, ast.Constant), ast.unparse(node)
                assert isinstance(first.value, str), ast.unparse(node)
                yield first.value


@pytest.mark.parametrize(
    "reason", sorted({*codes("migration"), "AddressesHeld", "AddressesExcluded"})
)
def test_every_reason_has_a_row_in_the_table_of_events(reason: str) -> None:
    assert f"`{reason}`" in (ROOT / "docs" / "status.md").read_text().partition("## Events")[2]


def test_the_search_finds_the_reasons_of_every_kind() -> None:
    assert {"AddressStranded", "NodeAddressMissing", "UnAvailableLoadBalancer"} <= set(codes())
    assert {pools.INVALID, pools.OVERLAPS, pools.DELETED, migration.NO_CLASS} <= set(codes())
    for reason in ("AddressesHeld", "AddressesExcluded"):
        assert f'"{reason}"' in Path(pool_status.__file__).read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each.name)
def test_links_have_targets(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings of a document, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ +(.*?) *#*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


@pytest.mark.parametrize("document", [*DOCUMENTS, *OTHERS], ids=lambda each: each.name)
def test_links_into_documents_have_targets(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", document.read_text())
    targets = [(document.parent / path if path else document, anchor) for path, anchor in links]
    assert [
        f"{path.name}#{anchor}"
        for path, anchor in targets
        if path.suffix == ".md" and anchor not in anchors(path)
    ] == []


def test_links_in_the_sources_have_targets() -> None:
    """Messages and comments name sections of documents too."""
    wrong = []
    for path in (ROOT / "src").rglob("*.py"):
        for name, anchor in re.findall(r"\b(docs/[\w-]+\.md)#([\w-]+)", path.read_text()):
            if anchor not in anchors(ROOT / name):
                wrong.append(f"{path.name}: {name}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("document", [*DOCUMENTS, *OTHERS], ids=lambda each: each.name)
def test_commands_in_documents_call_the_program_by_its_name(document: Path) -> None:
    """A reader of the source tree puts its folder on the PATH once, as the README says."""
    assert not re.findall(r"^\W*\.venv/bin/fairlead .*", document.read_text(), re.MULTILINE)


def test_every_field_of_the_configuration_has_a_row() -> None:
    """A field that several sections have has a row for each of them."""
    rows = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE
    )
    sections = Section.__subclasses__()
    assert Counter(rows) == Counter(
        each.encode_name for section in sections for each in msgspec.structs.fields(section)
    )


def test_every_option_of_cloud_conf_is_documented() -> None:
    table = (
        (ROOT / "docs" / "octavia.md")
        .read_text()
        .partition("| cloud.conf |")[2]
        .partition("\n\n")[0]
    )
    places = re.findall(r"^\| `[^`]+` \| (?:`([\w.]+)`|-) \|", table, re.MULTILINE)
    assert len(places) == table.count("\n") - 1
    for place in filter(None, places):
        section: object = config.Config
        for name in place.split("."):
            assert isinstance(section, type)
            fields = {each.encode_name: each.type for each in msgspec.structs.fields(section)}
            assert name in fields, place
            kinds = get_args(fields[name]) or (fields[name],)
            section = next(
                (each for each in kinds if isinstance(each, type) and issubclass(each, Section)),
                None,
            )


def test_the_documented_example_of_a_configuration_is_valid() -> None:
    (example,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL
    )
    assert config.parse(example, "docs/configuration.md", CLASSES).tunnel.kind == "ipip"


def test_make_test_runs_the_tests_of_every_promise(request: pytest.FixtureRequest) -> None:
    """The tests that this run has not collected are collected as `make test` does."""
    table = (ROOT / "tests/README.md").read_text().partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    named = [re.findall(r"`([\w/]+\.py::\w+)`", row) for row in rows]
    assert all(named)
    collected_here = {
        item.nodeid.partition("[")[0]
        for item in request.session.items
        if item.get_closest_marker("soak") is None
    }
    tests = [
        test for row in named for each in row if (test := f"tests/{each}") not in collected_here
    ]
    if not tests:
        return
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-m", "not soak", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = collected.stdout.splitlines()
    missing = [
        test for test in tests if not any(re.match(rf"{test}(\[|$)", each) for each in lines)
    ]
    assert missing == [], collected.stdout + collected.stderr
