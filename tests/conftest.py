"""What holds for the whole run: it needs root, quick tests come first, whole labs last."""

import os

import pytest

LAST = ("tests/e2e/", "tests/lab/test_demo.py")
"""Tests that bring up whole labs and take minutes."""


def pytest_configure(config: pytest.Config) -> None:
    if os.geteuid() != 0:
        pytest.exit("the tests send real packets through namespaces that they make: run them as root", returncode=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.nodeid.startswith(LAST))
