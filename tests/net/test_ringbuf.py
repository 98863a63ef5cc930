"""The reader of ring buffers, with a program that writes into one."""

import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatch_build import bpf_compiler

from fairlead.net.bpf import create_maps
from fairlead.net.elf import read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, Program
from fairlead.net.ringbuf import RingBuffer

pytestmark = pytest.mark.root

RING_BYTES = 4096
SOURCE = """
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} ring SEC(".maps");

/* Write the first octet of the packet as often as its second octet says; discard the records if
 * its third octet is not 0. */
SEC("tc")
int write_records(struct __sk_buff *skb)
{
	unsigned char head[3];
	if (bpf_skb_load_bytes(skb, 0, head, sizeof(head)))
		return 1;
	int kept = 0;
	for (int i = 0; i < 255 && i < head[1]; i++) {
		unsigned char *record = bpf_ringbuf_reserve(&ring, 13, 0);
		if (!record)
			break;
		record[0] = head[0];
		record[12] = i;
		if (head[2])
			bpf_ringbuf_discard(record, 0);
		else
			bpf_ringbuf_submit(record, 0);
		kept++;
	}
	return kept;
}

char _license[] SEC("license") = "GPL";
"""


class Writer:
    """A program that writes records, and the reader of its ring buffer."""

    def __init__(self, program: Program, ring: RingBuffer) -> None:
        self.program, self.ring = program, ring

    def write(self, octet: int, times: int, *, discard: bool = False) -> int:
        """Write records. Return how many the ring had space for."""
        return self.program.test_run(bytes((octet, times, discard)) + bytes(20)).verdict

    def read(self, max_records: int = 1000) -> list[tuple[int, int]]:
        return [(record[0], record[12]) for record in self.ring.read(max_records)]

    def readable(self) -> bool:
        with select.epoll() as epoll:
            epoll.register(self.ring.descriptor, select.EPOLLIN)
            return bool(epoll.poll(0))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ring")
    (folder / "ring.c").write_text(SOURCE)
    subprocess.run(
        [*bpf_compiler(), "-c", str(folder / "ring.c"), "-o", str(folder / "ring.o")], check=True
    )
    return folder / "ring.o"


@pytest.fixture
def writer(built: Path) -> Iterator[Writer]:
    object_file = read_object(built)
    maps = create_maps(list(object_file.maps.values()))
    program = Program.load(
        object_file.programs["write_records"], maps, program_type=PROGRAM_TYPE_SCHED_CLS
    )
    ring = RingBuffer(maps["ring"])
    yield Writer(program, ring)
    ring.close()
    program.close()
    maps["ring"].close()


def test_records_are_read_once_and_in_order(writer: Writer) -> None:
    assert writer.read() == []
    writer.write(1, 2)
    writer.write(2, 1)
    assert writer.readable()
    assert writer.read() == [(1, 0), (1, 1), (2, 0)]
    assert writer.read() == []
    assert not writer.readable()


def test_a_read_returns_no_more_than_requested(writer: Writer) -> None:
    writer.write(1, 5)
    assert writer.read(2) == [(1, 0), (1, 1)]
    assert writer.readable()
    assert writer.read() == [(1, 2), (1, 3), (1, 4)]


def test_discarded_records_are_skipped(writer: Writer) -> None:
    writer.write(1, 3, discard=True)
    writer.write(2, 1)
    assert writer.read() == [(2, 0)]


def test_a_full_ring_accepts_records_again_after_a_read(writer: Writer) -> None:
    room = writer.write(1, 255)
    assert room == RING_BYTES // 24 < 255
    assert writer.write(2, 1) == 0
    assert len(writer.read()) == room
    assert writer.write(3, 1) == 1
    assert writer.read() == [(3, 0)]


def test_records_that_wrap_round_are_whole(writer: Writer) -> None:
    for turn in range(100):
        writer.write(turn, 97)
        assert writer.read() == [(turn, i) for i in range(97)]
