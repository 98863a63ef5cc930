"""The kernel memory of the maps, compared with docs/gateway.md, for maps of the default sizes."""

import re
from math import ceil
from pathlib import Path

import pytest
import yaml
from tests.deploy.chart import CHART

from fairlead.drivers.direct.maps.pins import OBJECT, Sizes
from fairlead.lab.settings import L2_SIZES
from fairlead.net.bpf import create_maps
from fairlead.net.elf import MapSpec, read_object

pytestmark = pytest.mark.root

MEMORY = (
    (Path(__file__).parents[3] / "docs" / "gateway.md")
    .read_text()
    .partition("\n## Memory\n")[2]
    .partition("\n## ")[0]
)
PER_CPU = (5, 6, 10, 21)
"""Map types with one value for each CPU (linux/bpf.h)."""
MIB = 1 << 20


def documented(pattern: str) -> int:
    found = re.search(pattern, MEMORY.replace("\n", " "))
    assert found, pattern
    return int(found[1])


def for_each_cpu(spec: MapSpec) -> int:
    """Return the bytes that each CPU adds to the map."""
    return ceil(spec.value_size / 8) * 8 * spec.max_entries if spec.type in PER_CPU else 0


def locked(descriptor: int) -> int:
    """Return the bytes that the kernel accounts for the map."""
    fields = dict(
        line.split(":\t")
        for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    )
    return int(fields["memlock"])


def measured(sizes: Sizes) -> tuple[int, int, int]:
    """Return the bytes of all maps on two CPUs, of what each CPU adds, and of the tables."""
    entries = sizes.entries()
    specs = [
        spec._replace(max_entries=entries.get(spec.name, spec.max_entries))
        for spec in read_object(OBJECT).maps.values()
    ]
    maps = create_maps(specs)
    taken = sum(locked(each.descriptor) for each in maps.values())
    arena = locked(maps["arena"].descriptor)
    for each in maps.values():
        each.close()
    each_cpu = sum(map(for_each_cpu, specs))
    possible = Path("/sys/devices/system/cpu/possible").read_text().strip().rpartition("-")[2]
    return taken - (int(possible) + 1 - 2) * each_cpu, each_cpu, arena


def test_the_maps_take_the_documented_memory() -> None:
    on_two, each_cpu, arena = measured(Sizes())
    assert round(on_two / MIB) == documented(r"take (\d+) MiB on two CPUs")
    assert ceil(each_cpu / MIB) == documented(r"each further CPU takes (\d+) MiB")
    assert round(arena / MIB) == documented(r"(\d+) MiB of these are tables")


def test_on_every_node_the_maps_take_the_documented_memory() -> None:
    mib, connections, datagrams = L2_SIZES.values()
    on_two, _, _ = measured(Sizes(mib << 20, connections, datagrams))
    assert round(on_two / MIB) == documented(r"on all nodes, they take (\d+) MiB")


def test_the_chart_requests_the_documented_memory_and_has_no_other_figures() -> None:
    text = (CHART / "values.yaml").read_text()
    gateway = yaml.safe_load(text)["gateway"]
    needed = documented(r"take (\d+) MiB on two CPUs") + documented(
        r"The process takes some (\d+) MiB"
    )
    assert int(gateway["resources"]["requests"]["memory"].removesuffix("Mi")) >= needed
    comments = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    assert not [line for line in comments if re.search(r"\d+(\.\d+)? [MG]iB", line)]
