"""The cache of the set-up holds only what is complete and works, and a download is tried three
times."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.nested import ROOT

PROGRAM = """
. tools/cache.sh
RETRY_AFTER_S=0
fill() {
    echo filled >>"$cache/log"
    printf '#!/bin/sh\\nexit %s\\n' "${code:-0}" >"$1/program"
    chmod +x "$1/program"
}
works() { "$1/program"; }
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (found := tmp_path / "fairlead").mkdir()
    return found


def start(cache: Path, script: str, **more: str) -> "subprocess.Popen[str]":
    """Start a script with `tools/cache.sh`. `cached NAME REQUIREMENTS` makes a program that runs,
    and logs this."""
    return subprocess.Popen(
        ["sh", "-euc", PROGRAM + script],
        cwd=ROOT,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "XDG_CACHE_HOME": str(cache.parent), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def result(running: "subprocess.Popen[str]") -> tuple[int, str]:
    printed, _ = running.communicate(timeout=60)
    return running.returncode, printed


def filled(cache: Path) -> int:
    return (cache / "log").read_text().count("filled")


def test_what_exists_and_works_is_made_once(cache: Path) -> None:
    for _ in range(2):
        assert result(start(cache, "cached thing v1"))[0] == 0
    assert filled(cache) == 1
    assert result(start(cache, "cached thing v2"))[0] == 0
    assert filled(cache) == 2


def test_what_does_not_work_any_more_is_made_again(cache: Path) -> None:
    result(start(cache, "cached thing v1"))
    (cache / "thing" / "program").write_text("")
    (cache / "thing" / "program").chmod(0o644)
    code, printed = result(start(cache, "cached thing v1"))
    assert (code, filled(cache)) == (0, 2)
    assert f"making {cache}/thing again, because it does not work any more" in printed


def test_what_does_not_work_when_it_is_made_is_not_kept(cache: Path) -> None:
    result(start(cache, "cached thing v1"))
    code, printed = result(start(cache, "code=3 cached thing v2"))
    assert code == 1
    assert "remove the cache with 'make clean-cache', then repeat 'make tools'" in printed
    assert (cache / "thing" / ".requirements").read_text() == "v1\n"
    assert sorted(each.name for each in cache.iterdir()) == [".thing.lock", "log", "thing"]


def test_a_set_up_that_was_killed_leaves_nothing_incomplete(cache: Path) -> None:
    begun = start(cache, "works() { echo filled; sleep 987; }; cached thing v1")
    assert begun.stdout is not None
    with begun, begun.stdout:
        while begun.stdout.readline() != "filled\n":
            pass
        os.killpg(begun.pid, signal.SIGKILL)
    assert not (cache / "thing").exists()
    assert result(start(cache, "cached thing v1"))[0] == 0
    assert sorted(each.name for each in cache.iterdir()) == [".thing.lock", "log", "thing"]


def test_only_one_process_at_a_time_makes_it(cache: Path) -> None:
    running = [start(cache, "cached thing v1") for _ in range(8)]
    assert [result(each)[0] for each in running] == [0] * 8
    assert filled(cache) == 1


def test_expected_work_is_reported_and_not_done(cache: Path) -> None:
    assert result(start(cache, "cached thing v1", FAIRLEAD_SETUP="expected"))[0] == 100
    assert list(cache.iterdir()) == []
    result(start(cache, "cached thing v1"))
    assert result(start(cache, "cached thing v1", FAIRLEAD_SETUP="expected"))[0] == 0


@pytest.mark.parametrize(("failures", "code"), [(0, 0), (2, 0), (3, 1)])
def test_a_download_is_tried_three_times(cache: Path, failures: int, code: int) -> None:
    script = f"""
    download() {{ echo filled >>"$cache/log"; [ "$(wc -l <"$cache/log")" -gt {failures} ]; }}
    retry download
    """
    assert result(start(cache, script))[0] == code
    assert filled(cache) == min(failures + 1, 3)
