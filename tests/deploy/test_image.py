"""The Dockerfile, as far as it can be checked without a container engine: the files that it copies
exist and suffice to build the wheel; it installs the same packages as setup.sh."""

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = re.sub(
    r"^#.*\n", "", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE
).replace("\\\n", " ")
BUILD, KEPT = re.split(r"^FROM .*\n", TEXT, flags=re.MULTILINE)[1:]


def installed(stage: str) -> set[str]:
    """Return the Debian packages of a stage."""
    return {
        word
        for command in re.findall(r"apt-get install ([^&\n]*)", stage)
        for word in shlex.split(command)
        if not word.startswith("-")
    }


def packages_of_setup(variable: str) -> set[str]:
    """Return the Debian packages that setup.sh installs if they are missing: those for building, or
    the others."""
    text = (ROOT / "setup.sh").read_text().replace("\\\n", "")
    if variable == "to_build":
        pairs = re.findall(r"^for pair in (.*); do\n    \[ -e", text, flags=re.MULTILINE)
        (tools,) = re.findall(r"^for tool in (.*); do", text, flags=re.MULTILINE)
        return {pair.partition(":")[0] for pair in pairs[0].split()} | set(tools.split())
    return set(re.findall(rf'{variable}="\${variable} ([a-z0-9-]+)"', text))


def copied() -> list[tuple[str, str]]:
    """Return (source, target) of everything that is copied from the tree."""
    lines = [
        line.split() for line in re.findall(r"^COPY (?!--from)(.*)", BUILD, flags=re.MULTILINE)
    ]
    return [(source, words[-1]) for words in lines for source in words[:-1]]


def copy(into: Path) -> None:
    """Copy as the builder does: the content of a folder into the target, a file into the target or
    to its path."""
    for source, target in copied():
        place = into / target
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source,
                place,
                ignore=shutil.ignore_patterns("__pycache__", "objects"),
                dirs_exist_ok=True,
            )
            continue
        folder = place if target.endswith("/") else place.parent
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, place)


def test_files_that_the_dockerfile_copies_exist() -> None:
    sources = [source for source, _ in copied()]
    assert len(sources) > 5
    assert [source for source in sources if not (ROOT / source).exists()] == []
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert [source for source in sources if f"!{source}" not in context] == []
    assert {line.removeprefix("!") for line in context if line.startswith("!")} == set(sources)


def test_the_copied_files_suffice_to_build_the_wheel(tmp_path: Path) -> None:
    """The copied files suffice to build the wheel, and the image does not contain the lab."""
    copy(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"fairlead/objects/{each}" for each in ("direct_tc.o", "maglev.so")} <= names
    assert "fairlead/__main__.py" in names
    assert not [name for name in names if name.startswith("fairlead/lab")]


def test_the_image_is_built_with_the_packages_of_setup_sh() -> None:
    assert installed(BUILD) == packages_of_setup("to_build") | packages_of_setup("basic")


def test_the_final_image_has_no_compiler() -> None:
    run = {"python3", "haproxy", "bird2"}
    assert installed(KEPT) == run | {"libnftables1", "ca-certificates"} & (
        packages_of_setup("more") | packages_of_setup("basic")
    )
    assert {"libnftables1", "ca-certificates"} <= installed(KEPT)
    assert " haproxy:haproxy bird2:bird " in (ROOT / "setup.sh").read_text()


def test_the_image_does_not_run_as_root_by_default() -> None:
    assert re.findall(r"^USER (.*)", TEXT, flags=re.MULTILINE) == ["65532:65532"]


def test_every_python_package_of_the_image_has_a_pinned_version() -> None:
    (base,) = re.findall(r"^ARG BASE=(.*)", TEXT, flags=re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/debian:12\.\d+-slim", base)
    for command in re.findall(r"uv pip install .*|uv build .*", TEXT):
        assert "--require-hashes" in command or "--no-deps /wheel/" in command
    assert re.findall(r"pip install --no-cache-dir '([^']*)'", TEXT)[0].startswith("uv==")
