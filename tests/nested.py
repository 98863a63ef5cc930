"""Nested test runs: other tests with the settings and the conftest of the project, in a process of
their own."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def start(
    folder: Path,
    tests: dict[str, str],
    *,
    processes: int | str,
    retried: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    **popen: Any,
) -> "subprocess.Popen[str]":
    """Start a run of `tests` (path below `folder`/tests: source) in `processes` processes; 0 means
    that the run's own process runs the tests. `retried` replaces RETRIED of the conftest. `options`
    are options of pytest, `popen` those of Popen. Of pytest's plugins only xdist is loaded, and the
    one for second attempts if `retried` has any: all plugins take longer to load than the run."""
    # The nested run does not load the plugins with fixtures.
    conftest = (ROOT / "tests/conftest.py").read_text().replace("pytest_plugins = ", "unused = ")
    conftest += f"\nRETRIED.clear()\nRETRIED.update({dict(retried or {})!r})\n"
    names = ("machine.py", "needs.py", "priority.py")
    modules = {name: (ROOT / "tests" / name).read_text() for name in names}
    for path, text in {"conftest.py": conftest, **modules, **tests}.items():
        file = folder / "tests" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    # The settings of a plugin that is not loaded would be errors.
    known = (ROOT / "pyproject.toml").read_text().splitlines(keepends=True)
    configuration = folder / "pyproject.toml"
    configuration.write_text("".join(line for line in known if not line.startswith("asyncio_")))
    settings = (
        "-c",
        str(configuration),
        *("-p", "xdist"),
        *(("-p", "pytest_rerunfailures") if retried else ()),
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
        "-n",
        str(processes),
    )
    command = [sys.executable, "-m", "pytest", *settings, *options, str(folder / "tests")]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=folder,
        text=True,
        **popen,
    )
