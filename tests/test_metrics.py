"""Every metric of a module `metrics` has a row in docs/metrics.md; alerts use existing metrics."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fairlead

ROOT = Path(fairlead.__file__).parent
OWNERS = sorted(ROOT.rglob("metrics.py"))
"""The name of the modules in which each part of the program declares its metrics."""
TEXT = (ROOT.parents[1] / "docs" / "metrics.md").read_text()
SUFFIXES = {"CounterMetricFamily": "_total", "GaugeMetricFamily": "", "InfoMetricFamily": "_info"}
COUNTED = ("packets_total", "bytes_total", "flows_total")
"""The suffixes that the function `_traffic_families` appends to a prefix."""


def declared() -> Iterator[str]:
    """Return the names of all metrics, as Prometheus shows them."""
    for function in (each for path in OWNERS for each in ast.walk(ast.parse(path.read_text()))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            if call.func.id == "_traffic_families":
                yield from (f"{text_of(call)}_{name}" for name in COUNTED)
            elif call.func.id == "_labelled_family":
                yield f"{text_of(call)}_total"
            elif call.func.id in SUFFIXES and function.name not in (
                "_traffic_families",
                "_labelled_family",
            ):
                yield text_of(call) + SUFFIXES[call.func.id]


def text_of(call: ast.Call) -> str:
    """Return the first argument of the call. It must be a literal, because otherwise this test
    could miss a metric."""
    name = ast.literal_eval(call.args[0])
    assert isinstance(name, str)
    return name


def test_metrics_are_declared_once_in_modules_named_metrics() -> None:
    found = sorted(path for path in ROOT.rglob("*.py") if "MetricFamily" in path.read_text())
    assert found == OWNERS
    names = list(declared())
    assert len(names) == len(set(names))


def test_every_metric_has_a_documented_row_and_every_row_a_metric() -> None:
    rows = re.findall(r"^\| `(fairlead_\w+)` \|", TEXT, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == set(declared())


def test_alerts_use_existing_metrics() -> None:
    table = TEXT.partition("## Alerts")[2].partition("\n## ")[0]
    named = set(re.findall(r"\bfairlead_\w+", table))
    assert named
    assert named <= set(declared())
