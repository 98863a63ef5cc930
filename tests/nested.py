"""Nested test runs: other tests with the settings and the conftest of the project, in a process of
their own."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def start(
    folder: Path,
    tests: dict[str, str],
    *options: str,
    program: Sequence[str] = ("-m", "pytest"),
    **popen: Any,
) -> "subprocess.Popen[str]":
    """Start a run of `tests` (path below `folder`/tests: source) with these options of pytest.
    `program`: what Python runs, pytest itself or a program that starts it. `popen`: arguments of
    Popen. Of pytest's plugins only xdist is loaded: all plugins take longer to load than the
    run."""
    # The nested run does not load the plugins with fixtures.
    conftest = (ROOT / "tests/conftest.py").read_text().replace("pytest_plugins = ", "unused = ")
    own = {name: (ROOT / "tests" / name).read_text() for name in ("machine.py", "needs.py")}
    for path, text in {"conftest.py": conftest, **own, **tests}.items():
        file = folder / "tests" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    # The settings of a plugin that is not loaded would be errors.
    known = (ROOT / "pyproject.toml").read_text().splitlines(keepends=True)
    configuration = folder / "pyproject.toml"
    configuration.write_text("".join(line for line in known if not line.startswith("asyncio_")))
    settings = ("-c", str(configuration), "--rootdir", str(folder), "-p", "xdist")
    environment = os.environ | {"FAIRLEAD_LABS": ""} | popen.pop("env", {})
    return subprocess.Popen(
        [sys.executable, *program, *options],
        env={
            **environment,
            "PYTHONPATH": str(ROOT),
            "PYTEST_ADDOPTS": shlex.join((*settings, "-p", "no:cacheprovider")),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        cwd=folder,
        text=True,
        **popen,
    )
