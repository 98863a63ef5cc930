"""Imports go one way. Each part may import those that stand before it, never one behind it."""

import ast
import subprocess
import sys
from pathlib import Path

import fairlead

ROOT = Path(fairlead.__file__).parent

RANKS = [
    {"errors", "model", "sections", "turns"},
    {"net", "config", "role_state"},
    {"kube"},
    {"plan"},
    {"state"},
    {"drivers"},
    {"reconcile", "telemetry"},
    {"web"},
    {"roles"},
    {"probe"},
    {"ingress"},
    {"lab"},
    {"cli"},
]
RANK_OF = {part: rank for rank, parts in enumerate(RANKS) for part in parts}
FORBIDDEN_IN_PURE_CODE = {
    "asyncio",
    "aiohttp",
    "structlog",
    "logging",
    "time",
    "random",
    "pyroute2",
    "subprocess",
}
PURE = ["model.py", "role_state.py", "errors.py", "plan/", "kube/objects.py"]
"""Pure by their place; beside them every module whose docstring says "Pure."."""


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_go_one_way() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        if (part := part_of(path)) in {"__init__", "__main__"}:
            continue
        for name in imports(path):
            if name.startswith("fairlead."):
                other = name.split(".")[1]
                if RANK_OF[other] > RANK_OF[part] or (
                    part == "net" and other not in {"net", "errors"}
                ):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def is_pure(path: Path) -> bool:
    name = str(path.relative_to(ROOT))
    return name.startswith(tuple(PURE)) or "Pure" in (
        ast.get_docstring(ast.parse(path.read_text())) or ""
    )


def test_pure_code_has_no_clock_and_no_io() -> None:
    pure = [path for path in ROOT.rglob("*.py") if is_pure(path)]
    assert len(pure) > 20
    wrong = []
    for path in pure:
        wrong += [
            f"{path.relative_to(ROOT)} imports {m}"
            for m in imports(path)
            if m.split(".")[0] in FORBIDDEN_IN_PURE_CODE
        ]
    assert not wrong


def test_a_node_starts_without_pyroute2() -> None:
    """It takes a tenth of a second to load, and most nodes never need it."""
    code = "import sys, fairlead.roles.node; sys.exit('pyroute2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
