"""The Dockerfile, as far as it can be checked without a container engine: what it copies is there, what it installs is what
set-up installs, the program starts from what it copies.
"""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"^#.*\n", "", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
BUILD, KEPT = re.split(r"^FROM .*\n", TEXT, flags=re.MULTILINE)[1:]


def installed(stage: str) -> set[str]:
    """The Debian packages of a stage."""
    return {
        word
        for command in re.findall(r"apt-get install ([^&\n]*)", stage)
        for word in shlex.split(command)
        if not word.startswith("-")
    }


def set_up(variable: str) -> set[str]:
    """The Debian packages that setup.sh installs if need be: those that it names for building, or others."""
    text = (ROOT / "setup.sh").read_text()
    if variable == "to_build":
        pairs = re.findall(r"^for pair in (.*); do\n    \[ -e", text, flags=re.MULTILINE)
        (tools,) = re.findall(r"^for tool in (.*); do", text, flags=re.MULTILINE)
        return {pair.partition(":")[0] for pair in pairs[0].split()} | set(tools.split())
    return set(re.findall(rf'{variable}="\${variable} ([a-z0-9-]+)"', text))


def test_what_is_copied_is_there() -> None:
    sources = [word for line in re.findall(r"^COPY (?!--from)(.*)", TEXT, flags=re.MULTILINE) for word in line.split()[:-1]]
    assert len(sources) > 5
    assert [source for source in sources if not (ROOT / source).exists()] == []
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert [source for source in sources if f"!{source}" not in context] == []


def test_the_wheel_is_built_with_what_set_up_installs() -> None:
    assert installed(BUILD) == set_up("to_build") | set_up("basic")


def test_the_image_that_is_kept_has_no_compiler() -> None:
    assert installed(KEPT) == {"python3"} | {"libnftables1", "ca-certificates"} & (set_up("more") | set_up("basic"))
    assert {"libnftables1", "ca-certificates"} <= installed(KEPT)


def test_nobody_is_root_unless_asked() -> None:
    assert re.findall(r"^USER (.*)", TEXT, flags=re.MULTILINE) == ["65532:65532"]


def test_everything_has_a_version() -> None:
    (base,) = re.findall(r"^ARG BASE=(.*)", TEXT, flags=re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/debian:12\.\d+-slim", base)
    for command in re.findall(r"uv pip install .*|uv build .*", TEXT):
        assert "--require-hashes" in command or "--no-deps /wheel/" in command
    assert re.findall(r"pip install --no-cache-dir '([^']*)'", TEXT)[0].startswith("uv==")
