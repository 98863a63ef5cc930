"""Resources that tests create on the machine have names that neither a user's lab nor another test
run has.

Namespaces of labs begin with `fl-NAME-`, and `fairlead lab` lists every lab that has a namespace.
So the name of a resource that a test creates outside of a lab begins with `flt-`, and the name of a
lab contains the number of the process."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WITHOUT_A_MACHINE = ("test_topology.py", "test_names.py")
"""Files that compute names without creating a resource of that name."""


def sources() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(TESTS.rglob("*.py")):
        if path.name not in WITHOUT_A_MACHINE:
            yield path, ast.parse(path.read_text())


def wrong_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names in this source that a user's lab, or another test run, may have as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and node.values:
            first, *rest = node.values
            text = first.value if isinstance(first, ast.Constant) else ""
            # The part after `fl-` is the name of a lab, which another test checks.
            if str(text).startswith("fl-") and (text not in ("fl-", "fl-bench") or not rest):
                yield ast.unparse(node)
        if isinstance(node, ast.Call):
            yield from _named_by(node)


def _named_by(call: ast.Call) -> Iterator[str]:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    of_site = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "Site"
    given = [
        *(call.args[:1] if name == "create" and of_site else ()),
        *(each.value for each in call.keywords if name == "KubeApiServer" and each.arg == "lab"),
    ]
    yield from (ast.unparse(each) for each in given if isinstance(each, ast.Constant))


def test_no_name_in_the_tests_may_belong_to_a_lab_of_a_user() -> None:
    found = [f"{path}: {name}" for path, tree in sources() for name in wrong_in(tree)]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        'Site.create("demo", nodes=2)',
        'KubeApiServer(folder, lab="demo")',
        'name = f"fl-ovn{pid}-outside"',
    ],
)
def test_a_name_that_may_belong_to_a_lab_of_a_user_is_found(text: str) -> None:
    assert len(list(wrong_in(ast.parse(text)))) == 1
