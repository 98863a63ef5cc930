"""Build what is not Python: the eBPF objects and the Maglev fill.

In: `bpf/*.c`. Out: `src/fairlead/objects/`, shipped inside the wheel, so that an installed Fairlead
needs no compiler. Runs by hand (`python hatch_build.py`, as setup.sh does) and as hatchling's hook
when a wheel is packed; a file newer than its sources is left alone. An editable install packs
nothing, so it builds nothing: it must be possible where no compiler is, for `fairlead plan` works
without these files."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, without hatchling
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
OBJECTS = ROOT / "src" / "fairlead" / "objects"


def _multiarch_include() -> list[str]:
    """Debian keeps asm/types.h in a per-architecture folder that clang does not search for the bpf
    target."""
    triple = subprocess.run(
        ["gcc", "-print-multiarch"], check=True, capture_output=True, text=True
    ).stdout.strip()
    return [f"-I/usr/include/{triple}"] if triple else []


def bpf_compiler() -> list[str]:
    """The compiler for what runs in the kernel, with its options."""
    options = ["-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3"]
    # Packets are read and written by other words than their headers are declared with.
    return ["clang", *options, "-fno-strict-aliasing", *_multiarch_include()]


def _commands() -> dict[Path, list[str]]:
    bpf = bpf_compiler()
    shared = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
    return {
        OBJECTS / "direct_tc.o": [*bpf, "-c", str(ROOT / "bpf" / "direct.bpf.c"), "-o"],
        OBJECTS / "direct_xdp.o": [*bpf, "-DXDP", "-c", str(ROOT / "bpf" / "direct.bpf.c"), "-o"],
        OBJECTS / "node_tc.o": [*bpf, "-c", str(ROOT / "bpf" / "node.bpf.c"), "-o"],
        OBJECTS / "probe_tc.o": [*bpf, "-c", str(ROOT / "bpf" / "probe.bpf.c"), "-o"],
        OBJECTS / "neighbor_tc.o": [*bpf, "-c", str(ROOT / "bpf" / "neighbor.bpf.c"), "-o"],
        OBJECTS / "maglev.so": [
            *shared,
            str(ROOT / "bpf" / "maglev.c"),
            str(ROOT / "bpf" / "transition.c"),
            "-o",
        ],
    }


def build() -> None:
    """Bring every object up to date. Says what is missing and how to get it when a compiler is not
    there."""
    missing = [tool for tool in ("clang", "gcc") if shutil.which(tool) is None]
    if missing:
        install = f"apt-get install {' '.join(missing)} libbpf-dev"
        sys.exit(
            f"cannot build the eBPF objects: {' and '.join(missing)} not found; on Debian: "
            f"{install}"
        )
    OBJECTS.mkdir(parents=True, exist_ok=True)
    newest = max(source.stat().st_mtime for source in (ROOT / "bpf").iterdir())
    for target, command in _commands().items():
        if target.exists() and target.stat().st_mtime >= newest:
            continue
        print(f"building {target.relative_to(ROOT)}", flush=True)
        subprocess.run([*command, str(target)], check=True)


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc, unused-ignore]
    """Hatchling's entry: build before a wheel is packed. `version` is "standard" then, "editable"
    for an install in place."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build()


if __name__ == "__main__":
    build()
