"""Each part of the program imports only parts before it in a list. Pure code reaches neither a
clock nor I/O through its imports."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Set
from pathlib import Path

import fairlead

ROOT = Path(fairlead.__file__).parent

RANKS = [
    {"backoff", "errors", "invocation", "mistakes", "model", "sections", "strict_yaml", "turns"},
    {"net", "config", "role_state"},
    {"kube"},
    {"plan"},
    {"state"},
    {"drivers"},
    {"reconcile", "telemetry"},
    {"web"},
    {"roles"},
    {"probe"},
    {"ingress", "doctor", "reach", "routers"},
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
PURE = ["model.py", "role_state/", "errors.py", "plan/", "kube/objects.py"]
"""Packages whose modules are all pure; every module whose docstring says "Pure" is pure too."""


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in ROOT.rglob("*.py")}


def is_for_types_only(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imports(path: Path, *, for_types: bool = False) -> set[str]:
    """Return the modules that a module imports, including imports for type checkers only with
    `for_types`. A package counts if a name of the package itself is imported, but not if only its
    submodules are."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and is_for_types_only(node) and not for_types:
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys()
            if names - MODULES.keys():
                found.add(node.module)
        waiting += ast.iter_child_nodes(node)
    return found


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_each_part_imports_only_parts_before_it() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        if (part := part_of(path)) in {"__init__", "__main__"}:
            continue
        for name in imports(path, for_types=True):
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


def path_to_forbidden(module: str, named: Mapping[str, Set[str]]) -> tuple[str, ...]:
    """Return the shortest chain of imports from the module to a module that pure code must not use;
    empty if there is none."""
    paths: list[tuple[str, ...]] = [(module,)]
    seen = {module}
    # The list grows during the iteration.
    for chain in paths:
        for name in sorted(named[chain[-1]]):
            if name.split(".")[0] in FORBIDDEN_IN_PURE_CODE:
                return (*chain, name)
            if name in named and name not in seen:
                seen.add(name)
                paths.append((*chain, name))
    return ()


def test_pure_code_reaches_no_clock_and_no_io_through_any_import() -> None:
    """The packages that contain a pure module do not count as reached unless the module imports a
    name of them, because the `__init__` of a driver's package imports the driver."""
    named = {module: imports(path) for module, path in MODULES.items()}
    pure = [module for module, path in MODULES.items() if is_pure(path)]
    assert len(pure) > 20
    paths = {
        module.removeprefix("fairlead."): chain
        for module in pure
        if (chain := path_to_forbidden(module, named))
    }
    assert not paths, [" > ".join(chain) for chain in paths.values()]


def test_the_wheel_imports_only_modules_that_it_contains() -> None:
    settings = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())
    excluded = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    absent = {
        module
        for module, path in MODULES.items()
        if f"/{path.relative_to(ROOT.parents[1])}".startswith(tuple(excluded))
    }
    assert {"fairlead.lab", "fairlead.lab.site", "fairlead.cli.lab"} <= absent
    wrong = {
        module: names
        for module, path in MODULES.items()
        if module not in absent and (names := imports(path, for_types=True) & absent)
    }
    assert not wrong


def test_a_node_starts_without_pyroute2() -> None:
    """pyroute2 takes a tenth of a second to load, and most nodes never need it."""
    code = "import sys, fairlead.roles.node; sys.exit('pyroute2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
