"""The kernel memory of the maps, compared with docs/gateway.md, for maps of the default sizes."""

import re
from collections.abc import Sequence
from math import ceil
from pathlib import Path

import pytest
from tests.deploy.chart import CHART, Manifest, pod_spec, render

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


def test_the_chart_requests_the_documented_memory_and_has_no_other_figures(helm: Path) -> None:
    given = render(helm, "--set", "gateway.enabled=true,config.gateway.interfaces={eth0}")
    process = documented(r"The process takes some (\d+) MiB")
    assert requested_mib(given) >= documented(r"take (\d+) MiB on two CPUs") + process
    small = render(helm, "--set", "announce=l2,pool={192.0.2.224-192.0.2.250}")
    # During an upgrade both sets of maps exist.
    assert requested_mib(small) >= 2 * documented(r"on all nodes, they take (\d+) MiB")
    chosen = "announce=l2,pool={192.0.2.224-192.0.2.250},gateway.resources.requests.memory=96Mi"
    assert requested_mib(render(helm, "--set", chosen)) == 96
    lines = (CHART / "values.yaml").read_text().splitlines()
    comments = [line for line in lines if line.lstrip().startswith("#")]
    assert not [line for line in comments if re.search(r"\d+(\.\d+)? [MG]iB", line)]


def requested_mib(objects: Sequence[Manifest]) -> int:
    """Return the memory that the pods of gateways request."""
    resources = pod_spec(objects, "gateway")["containers"][0]["resources"]
    assert resources["requests"]["cpu"] == "50m"
    return int(resources["requests"]["memory"].removesuffix("Mi"))
