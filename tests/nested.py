"""Tests of a test run: other tests under our settings and conftest, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def start(folder: Path, tests: dict[str, str], *, processes: int, **options: Any) -> "subprocess.Popen[str]":
    """Begin to run these modules, below `folder`/tests, in so many processes (0: one alone). `options`: of Popen."""
    ours = (ROOT / "tests/conftest.py").read_text().replace("pytest_plugins = ", "needless = ")  # the fixtures of our own tests
    for path, text in {"conftest.py": ours, **tests}.items():
        file = folder / "tests" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider", "-n", str(processes))
    command = [sys.executable, "-m", "pytest", *settings, str(folder / "tests")]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=folder, text=True, **options)
