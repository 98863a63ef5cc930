"""Messages for users contain no Python representations of values; the mypy plugin
`tools/readable.py` checks this."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fairlead.drivers.publish import Publish
from fairlead.kube.objects import LoadBalancerIngress
from fairlead.model import ServiceKey

ROOT = Path(__file__).parents[1]
SAMPLE = """
from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Literal, NamedTuple

from fairlead.errors import plain


class Pair(NamedTuple):
    one: str


class Named(Pair):
    def __str__(self) -> str:
        return self.one


def told(
    text: str, number: int, several: Sequence[str], maybe: str | None, found: Pair, raw: bytes,
    error: OSError, wrong: ValueError, address: IPv4Address, path: Path, kind: Literal["a", "b"],
) -> None:
    print(f"{text} {text!r} {number} {number:.1f} {address} {path} {kind}")
    print(f"{wrong} {plain(error)} {error.strerror}", Named("x"), str(wrong), str(number))
    print(f"{', '.join(several)} {maybe or 'none'} {Named('x')} {found.one} {raw.decode()}")
    print(f"{several}")
    print(f"{maybe}")
    print(f"{found}")
    print(f"{raw!r}")
    print(f"{error!r}")
    print(f"{(text, number)}")
    print(f"{error}")
    print(str(error))
    print(f"{error or 'unknown'}")
"""
UNREADABLE_TYPES = [
    "Sequence",
    "None",
    "Pair",
    "bytes",
    "OSError",
    "tuple",
    "OSError",
    "OSError",
    "OSError",
]
"""The types that the errors about the last lines of the sample name, in order."""


def test_mypy_finds_python_representations_in_texts(tmp_path: Path) -> None:
    package = tmp_path / "src" / "fairlead"
    package.mkdir(parents=True)
    (package / "sample.py").write_text(SAMPLE)
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nplugins = {ROOT / 'tools' / 'readable.py'}\ncache_dir = {tmp_path}\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "src/fairlead/sample.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    found = [
        line
        for line in done.stdout.splitlines()
        if "error" in line and line.endswith("[unreadable]")
    ]
    last = len(SAMPLE.splitlines()) - len(UNREADABLE_TYPES)
    assert [int(line.split(":")[1]) for line in found] == list(
        range(last + 1, last + 1 + len(UNREADABLE_TYPES))
    )
    assert all(what in line for what, line in zip(UNREADABLE_TYPES, found, strict=True))


def test_mypy_checks_the_sources_with_the_plugin() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert "tools/readable.py" in settings["plugins"]
    assert "src" in settings["files"]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (LoadBalancerIngress(ip="192.0.2.1"), "192.0.2.1"),
        (LoadBalancerIngress(ip="192.0.2.1", ip_mode="VIP"), "192.0.2.1 (VIP)"),
        (LoadBalancerIngress(hostname="a.example.com"), "a.example.com"),
    ],
)
def test_an_address_without_a_mode_is_shown_without_one(
    entry: LoadBalancerIngress, text: str
) -> None:
    assert text in str(Publish(ServiceKey("default", "web"), "uid", (entry,)))
    assert "None" not in str(Publish(ServiceKey("default", "web"), "uid", (entry,)))
