"""The eBPF loader with a real kernel: maps, pins, programs, and the verifier's messages."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead.errors import Refused, Unavailable
from fairlead.net import bpffs
from fairlead.net.bpf import Map, create_maps, possible_cpus, runs
from fairlead.net.elf import MapSpec, ProgramSpec, read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, Program

pytestmark = pytest.mark.root

OBJECT = Path(bpffs.__file__).resolve().parents[1] / "objects" / "direct_tc.o"
HASH, ARRAY, PERCPU_ARRAY, LRU_HASH, LPM_TRIE, MMAPABLE, NO_PREALLOC = 1, 2, 6, 9, 11, 1 << 10, 1


@pytest.fixture
def directory() -> Iterator[Path]:
    path = bpffs.ROOT / f"flt-{os.getpid()}-bpf"
    bpffs.prepare(path)
    yield path
    bpffs.remove(path)


def test_reads_maps_and_programs_from_the_object() -> None:
    object_file = read_object(OBJECT)
    assert object_file.license == "GPL"
    assert object_file.maps["arena"] == MapSpec("arena", ARRAY, 4, 64, 262144, MMAPABLE)
    assert object_file.maps["connections"].type == LRU_HASH
    program = object_file.programs["direct"]
    assert program.section == "tc"
    assert len(program.instructions) % 8 == 0
    assert {name for _, name in program.map_references} <= object_file.maps.keys()


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01" + bytes(58), b"no object at all" * 8])
def test_an_invalid_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.o"
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"broken\.o"):
        read_object(path)
    with pytest.raises(Refused, match="hatch_build"):
        read_object(tmp_path / "missing.o")


def test_elements_of_a_hash_are_written_and_deleted() -> None:
    with Map.create(MapSpec("table", HASH, 4, 8, 10_000)) as table:
        for i in range(9_000):
            table.update(struct.pack("=I", i), struct.pack("=Q", i * i))
        assert table.lookup(struct.pack("=I", 5)) == struct.pack("=Q", 25)
        assert dict(table.items()) == {
            struct.pack("=I", i): struct.pack("=Q", i * i) for i in range(9_000)
        }
        assert [table.delete(struct.pack("=I", 5)), table.delete(struct.pack("=I", 5))] == [
            True,
            False,
        ]
        assert table.lookup(struct.pack("=I", 5)) is None


@pytest.mark.parametrize("kind", [HASH, LPM_TRIE])
def test_many_elements_are_written_and_deleted_in_batches(kind: int) -> None:
    flags = NO_PREALLOC if kind == LPM_TRIE else 0
    # A trie interprets the first four bytes as a prefix length in bits.
    rows = {struct.pack("=IQ", 64, i): struct.pack("=I", i) for i in range(5_000)}
    with Map.create(MapSpec("many", kind, 12, 4, 6_000, flags)) as many:
        many.update_all(rows)
        assert dict(many.items()) == rows
        assert {key: value for _, key, value in many._one_by_one()} == rows
        gone = list(rows)[::2]
        many.delete(gone[7])  # by another process
        many.delete_all(gone)
        assert dict(many.items()) == {
            key: value for key, value in rows.items() if key not in set(gone)
        }
        many.update_all({})
        many.delete_all([])
        more = {struct.pack("=IQ", 64, i): bytes(4) for i in range(10_000, 14_000)}
        with pytest.raises(Refused, match="full"):
            many.update_all(more)
        assert many.count() == 6_000


def test_errors_name_a_full_map_and_wrong_sizes() -> None:
    with Map.create(MapSpec("small", HASH, 4, 8, 1)) as table:
        table.update(bytes(4), bytes(8))
        with pytest.raises(Refused, match=r"writing to map small.*the map is full"):
            table.update(b"\1\0\0\0", bytes(8))
        with pytest.raises(ValueError, match="values of 8 bytes"):
            table.update(bytes(4), bytes(4))
        with pytest.raises(ValueError, match="values of 8 bytes"):
            table.update_all({bytes(4): bytes(4), b"\1\0\0\0": bytes(8)})
        with pytest.raises(ValueError, match="keys of 4"):
            table.delete_all([bytes(4), bytes(3)])


def test_values_of_each_cpu() -> None:
    with Map.create(MapSpec("each", PERCPU_ARRAY, 4, 12, 1)) as table:
        assert table.per_cpu(bytes(4)) == (bytes(12),) * possible_cpus()
        table.update(bytes(4), (b"x" * 12 + bytes(4)) * possible_cpus())
        assert table.per_cpu(bytes(4)) == (b"x" * 12,) * possible_cpus()
        table.clear_values(bytes(4))
        assert table.per_cpu(bytes(4)) == (bytes(12),) * possible_cpus()


@pytest.mark.parametrize("kind", [ARRAY, PERCPU_ARRAY])
def test_rows_of_an_array_are_read_in_any_order(kind: int) -> None:
    wanted = [0, 1, 2, 7, 5000, 5001, 9998, 9999]
    with Map.create(MapSpec("table", kind, 4, 8, 10_000)) as table:
        for i in range(10_000):
            table.update(
                struct.pack("=I", i),
                struct.pack("=Q", i) * (possible_cpus() if kind == PERCPU_ARRAY else 1),
            )
        found = dict(table.rows(reversed(wanted)))
        assert found == {i: table.lookup(struct.pack("=I", i)) for i in wanted}
        assert dict(table.rows(range(10_000))) == {
            i: table.lookup(struct.pack("=I", i)) for i in range(10_000)
        }
        assert dict(table.rows([])) == {}


def test_consecutive_runs_do_not_exceed_their_limit() -> None:
    assert list(runs([], 4)) == []
    assert list(runs([3, 4, 5, 9, 10, 12], 2)) == [(3, 2), (5, 1), (9, 2), (12, 1)]


def test_mapped_memory_of_an_array_shows_its_content() -> None:
    with (
        Map.create(MapSpec("seen", ARRAY, 4, 64, 100, MMAPABLE)) as table,
        table.memory() as memory,
    ):
        memory[64 * 7 : 64 * 8] = b"z" * 64
        assert table.lookup(struct.pack("=I", 7)) == b"z" * 64


def test_pins_outlive_their_creators(directory: Path) -> None:
    spec = MapSpec("kept", HASH, 4, 8, 16)
    with Map.create(spec) as table:
        table.update(bytes(4), b"12345678")
        table.pin(directory / "kept")
    with Map.open(directory / "kept") as again:
        assert again.spec == spec
        assert again.lookup(bytes(4)) == b"12345678"


def test_the_error_about_a_rejected_program_contains_the_verifier_log() -> None:
    returns_a_pointer = (
        struct.pack("<BBhi", 0xBF, 0x10, 0, 0)
        + struct.pack("<BBhi", 0x79, 0x11, 4096, 0)
        + struct.pack("<BBhi", 0x95, 0, 0, 0)
    )
    with pytest.raises(Refused) as refusal:
        Program.load(
            ProgramSpec("wrong", "tc", returns_a_pointer, ()),
            {},
            program_type=PROGRAM_TYPE_SCHED_CLS,
        )
    assert "invalid bpf_context access off=4096" in refusal.value.message


def test_all_maps_are_created_or_none() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match="creating map wrong"):
        create_maps([MapSpec("right", HASH, 4, 8, 16), MapSpec("wrong", 9999, 4, 8, 16)])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_path_outside_a_bpffs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is not on a bpffs"):
        bpffs.prepare(tmp_path / "pins")
