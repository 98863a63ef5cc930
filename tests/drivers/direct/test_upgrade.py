"""Programs with different map layouts replace each other: the content of the maps is copied, and no
packet is lost."""

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hatch_build import bpf_compiler
from tests.drivers.direct.conftest import (
    NODE1,
    WEB,
    Run,
    add_cable,
    driver,
    load_balancer,
    reconcile,
)
from tests.drivers.direct.conftest import PINS as PINS_HERE
from tests.drivers.direct.gateway import Options
from tests.drivers.direct.site import (
    PINS,
    Conversation,
    Gateway,
    made_site,  # noqa: F401
    pods,
    request_by_udp,
    running_gateway,
)

from fairlead.config import AttachKind
from fairlead.drivers.direct import remove_pins
from fairlead.drivers.direct.host_network.attach import Attachments, Programs
from fairlead.drivers.direct.maps import pins, upgrade
from fairlead.drivers.direct.maps.pins import OBJECT, OBJECTS
from fairlead.drivers.direct.maps.records import (
    CHUNK_BYTES,
    INDEX,
    LISTENER,
    RETAINED_NODE,
    ListenerRecord,
)
from fairlead.errors import Refused
from fairlead.model import Member
from fairlead.net import bpffs, tc, xdp
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import ObjectFile, read_object
from fairlead.net.program import Program
from fairlead.net.routing import Routing

pytestmark = [pytest.mark.long, pytest.mark.root]

SOURCES = Path(__file__).parents[3] / "bpf"
FAMILIES = (socket.AF_INET, socket.AF_INET6)
BEGIN_S, ASKED_S = 0.02, 0.03
"""The interval at which connections are opened, and the interval at which each sends a request."""


def build(folder: Path, *edits: tuple[str, str, str]) -> Path:
    """Compile both programs from edited sources. `edits`: (file, text in the file, replacement)."""
    shutil.copytree(SOURCES, folder / "bpf")
    for file, before, after in edits:
        text = (folder / "bpf" / file).read_text()
        assert text.count(before) == 1, f"{file} has changed: {before}"
        (folder / "bpf" / file).write_text(text.replace(before, after))
    for target, flags in (("direct_tc.o", []), ("direct_xdp.o", ["-DXDP"])):
        source = str(folder / "bpf" / "direct.bpf.c")
        subprocess.run(
            [*bpf_compiler(), *flags, "-c", source, "-o", str(folder / target)], check=True
        )
    return folder


GROWN_FLOW = (
    "structs.h",
    "struct flow {\n\t__u32 node;\n",
    "struct flow {\n\t__u32 node;\n\t__u32 extra[3];\n",
)
MORE_MAPS = (
    "maps.h",
    "/* The node of the first fragment of a datagram. */",
    "struct {\n\t__uint(type, BPF_MAP_TYPE_ARRAY);\n\t__uint(max_entries, 1);\n\t__type(key, "
    "__u32);\n\t__type(value, __u32);\n"
    '} another SEC(".maps");\n',
)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory with the programs of a newer version that exists only in this test."""
    return build(tmp_path_factory.mktemp("newer"), GROWN_FLOW, MORE_MAPS)


def layouts() -> list[str]:
    return [name for name in os.listdir(PINS) if name.startswith("layout-")]


async def only_delayed(gateway: Gateway) -> bool:
    """Return whether the gateway has dropped no packets except packets whose entries might not have
    been copied yet."""
    drops: dict[str, int] = (await gateway.send(""))["drops"]
    return not any(number for reason, number in drops.items() if reason != "upgrading")


@pytest.mark.parametrize("attach", ["tc", pytest.param("xdp-generic", marks=pytest.mark.soak)])
async def test_no_packet_is_lost_when_the_layout_changes_and_changes_back(
    site: None, newer: Path, attach: AttachKind
) -> None:
    versions = [Options(attach, str(folder)) for folder in (OBJECTS, newer, OBJECTS, newer)]
    talks: list[tuple[Conversation, str]] = []
    asked, over = [0], asyncio.Event()

    async def start_some() -> None:
        new = [await Conversation.start(family) for family in FAMILIES for _ in range(15)]
        talks.extend([(talk, (await talk.ask())[0]) for talk in new])

    async def send_continuously() -> None:
        """Send each datagram once, so that a lost datagram ends the test."""
        while not over.is_set():
            for family in FAMILIES:
                await request_by_udp(family)
                asked[0] += 1
            talk, node = talks[asked[0] % len(talks)]
            assert (await talk.ask())[0] == node

    async with pods():
        async with running_gateway(versions[0]) as gateway:
            await gateway.serve({"node1": 1, "node2": 1})
            await start_some()
            await gateway.serve({"node1": 1, "node2": 1, "node3": 30})
            await start_some()  # these get entries, because their slots are in transition
            seen = layouts()
            gateway.kill()
        asking = asyncio.create_task(send_continuously())
        for version in versions[1:]:
            before = asked[0]
            async with running_gateway(version) as gateway:
                assert set(layouts()) != set(seen)
                (seen,) = [layouts()]
                assert len(seen) == 1
                await gateway.serve({"node1": 1, "node2": 40, "node3": 1})
                await start_some()
                await gateway.serve({"node1": 1, "node2": 1, "node3": 30})
                await start_some()
                gateway.kill()
            while asked[0] < before + 20:
                if asking.done():
                    await asking
                await asyncio.sleep(0.01)
        over.set()
        await asking
        assert [(await talk.ask())[0] for talk, _ in talks] == [node for _, node in talks]
        async with running_gateway(versions[-1]) as gateway:
            assert await only_delayed(gateway)
            await gateway.send("remove")


@pytest.mark.parametrize("attach", ["tc", "xdp-generic"])
async def test_connections_that_begin_while_programs_replace_each_other_stay_on_one_node(
    site: None, newer: Path, attach: AttachKind
) -> None:
    """Connections are opened and used continuously, so some are opened through the older program
    and continue through the newer one, in slots whose node has changed. Each connection is answered
    by one node only."""
    versions = [Options(attach, str(folder)) for folder in (OBJECTS, newer, OBJECTS, newer)]
    over, broken = asyncio.Event(), list[str]()

    async def talk(family: int) -> None:
        conversation, nodes = await Conversation.start(family), set[str]()
        try:
            while not over.is_set():
                nodes.add((await conversation.ask())[0])
                await asyncio.sleep(ASKED_S)
        except (OSError, ValueError) as error:  # a reset may appear as the end of the stream
            broken.append(f"connection of {nodes}: {error!r}")
        assert len(nodes) <= 1
        conversation.writer.close()

    async def begin() -> int:
        async with asyncio.TaskGroup() as group:
            for begun in count(1):
                group.create_task(talk(FAMILIES[begun % 2]))
                await asyncio.sleep(BEGIN_S)
                if over.is_set():
                    return begun
        raise AssertionError

    async with pods():
        async with running_gateway(versions[0]) as gateway:
            await gateway.serve({"node1": 1, "node2": 1})
            await (await Conversation.start(socket.AF_INET)).ask()
            await gateway.serve({"node1": 1, "node2": 1, "node3": 30})
            gateway.kill()
        for version in versions[1:]:
            over.clear()
            beginning = asyncio.create_task(begin())
            async with running_gateway(version) as gateway:
                gateway.kill()
            await asyncio.sleep(2 * ASKED_S)
            over.set()
            assert await beginning > 10
            assert not broken
        async with running_gateway(versions[-1]) as gateway:
            assert await only_delayed(gateway)
            await gateway.send("remove")


async def test_no_packet_is_lost_when_the_maps_are_resized(site: None) -> None:
    """The maps grow, shrink, and the table memory keeps its size if the tables would not fit.
    Connections stay, and no datagram is lost."""
    talks: list[tuple[Conversation, str]] = []
    asked, over = [0], asyncio.Event()

    async def send_continuously() -> None:
        """Send each datagram once, so that a lost datagram ends the test."""
        while not over.is_set():
            for family in FAMILIES:
                await request_by_udp(family)
                asked[0] += 1

    def sizes() -> tuple[float, int]:
        """Return the MiB of the table memory, and the entries of the tables of flows."""
        (layout,) = PINS.glob("layout-*")
        with Map.open(layout / "arena") as arena, Map.open(layout / "connections") as connections:
            mib = arena.spec.max_entries * CHUNK_BYTES / (1 << 20)
            return mib, connections.spec.max_entries

    async with pods():
        asking = None
        for configured, size in ((4, 4), (8, 8), (2, 2), (4, 4), (0, 4)):
            before = asked[0]
            async with running_gateway(Options(size_mib=configured)) as gateway:
                assert sizes() == (size, max(configured, 1) << 12)
                await gateway.serve({"node1": 1, "node2": 40, "node3": 1})
                talks += [
                    (talk, (await talk.ask())[0])
                    for talk in [await Conversation.start(each) for each in FAMILIES * 10]
                ]
                await gateway.serve({"node1": 1, "node2": 1, "node3": 30})
                gateway.kill()
            asking = asking or asyncio.create_task(send_continuously())
            while asked[0] < before + 20:
                if asking.done():
                    await asking
                await asyncio.sleep(0.01)
        over.set()
        await asyncio.gather(*filter(None, [asking]))
        assert [(await talk.ask())[0] for talk, _ in talks] == [node for _, node in talks]
        async with running_gateway(Options()) as gateway:
            assert await only_delayed(gateway)
            await gateway.send("remove")


def test_all_programs_are_loaded_before_the_first_is_replaced(run: Run, newer: Path) -> None:
    """Loading a program takes most of a second. Flows that begin in that time get entries only in
    the tables of the older program. So these tables are copied for the last time after all programs
    are loaded, and then every older program is replaced at once."""

    async def scenario() -> None:
        add_cable("eth1", "198.51.100.10/24")
        links = [PINS_HERE / f"xdp-{socket.if_nametoindex(each)}" for each in ("eth0", "eth1")]

        async def running() -> list[int]:
            found = [link.program_id for pin in links if (link := xdp.read_link(pin))]
            return found + [each.program for each in await tc.filters(f"fairlead:{PINS_HERE}")]

        first = driver(attach_kind="xdp-generic", interfaces=("eth0", "eth1"))
        await first.open()
        await reconcile(first, load_balancer(NODE1))
        await first.close()
        older, steps = await running(), list[str]()
        assert len(older) == 4
        opened = pins.open_pins(PINS_HERE, pins.Sizes(), newer)

        def load(what: str, make: Callable[[], Program]) -> Program:
            steps.append(what)
            return make()

        def copy() -> None:
            steps.append("copy")
            assert [link.program_id for pin in links if (link := xdp.read_link(pin))] == older[:2]

        programs = Programs(partial(load, "tc", opened.tc), partial(load, "xdp", opened.xdp), copy)
        with closing(Routing()) as routing:
            present = {each.name: each for each in routing.interfaces().values()}
        attachments = Attachments(("eth0", "eth1"), "xdp-generic", PINS_HERE, 100)
        await attachments.attach(programs, opened.maps["tags"], present)
        assert sorted(steps[:2]) == ["tc", "xdp"]
        assert steps[2:] == ["copy"]
        assert not set(await running()) & set(older)
        opened.close()
        await remove_pins(PINS_HERE)

    run(scenario)


@pytest.mark.parametrize(
    "whole", [False, True], ids=["half carried over", "carried over but not attached"]
)
@pytest.mark.parametrize("back", [False, True], ids=["continues", "goes back"])
def test_an_interrupted_upgrade_is_continued_or_reverted(
    run: Run, newer: Path, whole: bool, back: bool
) -> None:
    """The version that starts next, older or newer, has the installed state, and removes the maps
    of the other version."""

    async def scenario() -> None:
        first = driver()
        await first.open()
        await reconcile(first, load_balancer(NODE1))
        there = await first.read(None)
        await first.close()
        # As `open` of the newer version does before it attaches programs.
        interrupted = pins.open_pins(PINS_HERE, pins.Sizes(), newer)
        interrupted.close()
        assert len(list(PINS_HERE.glob("layout-*"))) == 2
        if not whole:
            ours = max(
                PINS_HERE.glob("layout-*/settings"), key=lambda path: path.stat().st_mtime_ns
            )
            ours.unlink()
        second = driver(object_dir=OBJECTS if back else newer)
        await second.open()
        assert len(await tc.filters(f"fairlead:{PINS_HERE}")) == 1
        assert {
            key: [each.slots for each in one.listeners]
            for key, one in (await second.read(None)).items()
        } == {key: [each.slots for each in one.listeners] for key, one in there.items()}
        assert len(list(PINS_HERE.glob("layout-*"))) == 1
        await second.close(remove=True)
        assert not PINS_HERE.exists()

    run(scenario)


@pytest.mark.parametrize(
    "whole", [False, True], ids=["half carried over", "carried over but not attached"]
)
@pytest.mark.parametrize("size_mib", [1, 2], ids=["goes back", "continues"])
def test_an_interrupted_resize_of_the_maps_is_continued_or_reverted(
    run: Run, whole: bool, size_mib: int
) -> None:
    async def scenario() -> None:
        first = driver()
        await first.open()
        await reconcile(first, load_balancer(NODE1))
        there = await first.read(None)
        await first.close()
        flows = add_flows(100)
        interrupted = pins.open_pins(PINS_HERE, pins.Sizes(2 << 20, 2048, 2048))
        interrupted.close()
        assert len(list(PINS_HERE.glob("layout-*"))) == 2
        if not whole:
            max(
                PINS_HERE.glob("layout-*/settings"), key=lambda path: path.stat().st_mtime_ns
            ).unlink()
        second = driver(arena_bytes=size_mib << 20, entries=size_mib << 10)
        await second.open()
        assert flows_found() == (size_mib << 10, flows)
        assert {
            key: [each.slots for each in one.listeners]
            for key, one in (await second.read(None)).items()
        } == {key: [each.slots for each in one.listeners] for key, one in there.items()}
        (layout,) = PINS_HERE.glob("layout-*")
        with Map.open(layout / "arena") as arena:
            assert arena.spec.max_entries * CHUNK_BYTES == size_mib << 20
        assert await reconcile(second, load_balancer(NODE1, Member("node2", "192.0.2.22", 1)))
        await second.close(remove=True)

    run(scenario)


FLOWS = ("connections", "closing_connections", "new_datagrams")


def add_flows(number: int) -> dict[str, dict[bytes, bytes]]:
    """Add this number of entries to each of these tables of the only layout, and return them."""
    (layout,) = PINS_HERE.glob("layout-*")
    made = {}
    for name in FLOWS:
        entries = {pack_flow(each): each.to_bytes(8, "little") for each in range(number)}
        with Map.open(layout / name) as table:
            table.update_all(entries)
        made[name] = entries
    return made


def pack_flow(number: int) -> bytes:
    """Return the key of a flow that belongs to no listener."""
    return number.to_bytes(4, "little") + bytes(32) + bytes([socket.IPPROTO_TCP, 0, 0, 0])


def flows_found() -> tuple[int, dict[str, dict[bytes, bytes]]]:
    """Return the size of `connections` in the only layout, and the content of the tables."""
    (layout,) = PINS_HERE.glob("layout-*")
    found = {}
    for name in FLOWS:
        with Map.open(layout / name) as table:
            found[name] = dict(table.items())
    with Map.open(layout / "connections") as table:
        return table.spec.max_entries, found


@pytest.mark.parametrize(
    ("number", "entries"), [(100, 1024), (200, 1024), (1000, 4096)], ids=["few", "some", "many"]
)
def test_no_flow_entry_is_lost_when_tables_of_flows_shrink(
    run: Run, number: int, entries: int
) -> None:
    """A table whose entries would displace each other in a smaller one keeps its size."""

    async def scenario() -> None:
        first = driver(arena_bytes=16 << 20, entries=4096)
        await first.open()
        await first.close()
        flows = add_flows(number)
        second = driver(entries=1024)
        await second.open()
        assert flows_found() == (entries, flows)
        await second.close(remove=True)

    run(scenario)


def test_listeners_keep_their_counters_and_their_nodes_when_there_is_room_for_fewer(
    run: Run,
) -> None:
    """The counters of listeners are in the last elements of their map, which a smaller map does not
    have."""
    two = Member("node2", "192.0.2.22", 1)

    async def scenario() -> None:
        first = driver(arena_bytes=16 << 20)
        await first.open()
        await reconcile(first, load_balancer(NODE1))
        (layout,) = PINS_HERE.glob("layout-*")
        with Map.open(layout / "statistics") as counters, Map.open(layout / "listeners") as table:
            assert counters.spec.max_entries == 4096
            [(_, record)] = table.items()
            index = INDEX.pack(ListenerRecord(*LISTENER.unpack(record)).statistics)
            counters.update(
                index, len(counters.lookup(index) or b"") // 8 * (7).to_bytes(8, "little")
            )
        await reconcile(first, load_balancer(NODE1, two))
        there, counts = await first.read(None), first.counters.services()
        assert counts[WEB].packets >= 7
        retained = retained_nodes()
        assert retained
        await first.close()
        second = driver()
        await second.open()
        assert {
            key: [(each.key, each.slots, each.retained_nodes) for each in one.listeners]
            for key, one in (await second.read(None)).items()
        } == {
            key: [(each.key, each.slots, each.retained_nodes) for each in one.listeners]
            for key, one in there.items()
        }
        assert second.counters.services() == counts
        assert retained_nodes() == retained
        (layout,) = PINS_HERE.glob("layout-*")
        for name in ("listeners", "owners", "addresses", "statistics"):
            with Map.open(layout / name) as each:
                assert each.spec.max_entries == 1024
        assert second.status().resources["listeners"].limit == 1024
        assert await reconcile(second, load_balancer(two))
        await second.close(remove=True)

    run(scenario)


def retained_nodes() -> set[tuple[bytes, int]]:
    """Return the listener and the node of each element of `retained_nodes` in the only layout."""
    (layout,) = PINS_HERE.glob("layout-*")
    with Map.open(layout / "listeners") as table, Map.open(layout / "retained_nodes") as retained:
        keys = {
            ListenerRecord(*LISTENER.unpack(value)).statistics: key for key, value in table.items()
        }
        elements = [RETAINED_NODE.unpack(key) for key, _ in retained.items()]
    return {(keys[index], node) for index, node in elements}


def test_a_layout_of_a_version_that_did_not_note_the_sizes_is_shared(run: Run) -> None:
    """Until now descriptions contained the sizes of arrays only. A start of this version with the
    same sizes shares all maps but the cache, so that no entry has to be copied."""

    async def scenario() -> None:
        first = driver()
        await first.open()
        await first.close()
        (layout,) = PINS_HERE.glob("layout-*")
        description = upgrade.read(layout)
        assert description is not None
        maps = {
            name: msgspec.structs.replace(each, entries=0) if each.type not in (2, 6) else each
            for name, each in description.maps.items()
        }
        (layout / upgrade.DESCRIPTION).unlink()
        upgrade.write(msgspec.structs.replace(description, maps=maps), layout)
        numbers = {name: number_of(layout / name) for name in maps}
        layout.rename(layout.with_name("layout-older"))
        opened = pins.open_pins(PINS_HERE, pins.Sizes(1 << 20, 1024, 1024))
        assert not opened.copied
        changed = {name for name, each in opened.maps.items() if each.number != numbers[name]}
        assert changed == {"listener_cache"}
        opened.close()
        bpffs.remove(PINS_HERE)

    run(scenario)


def number_of(path: Path) -> int:
    with Map.open(path) as opened:
        return opened.number


def by_field(object_file: ObjectFile, name: str, record: bytes) -> dict[str, bytes]:
    _, fields = object_file.types.records(name)
    return {
        field: record[offset : offset + size] for field, offset, size in fields if field != "pad"
    }


def test_records_are_copied_by_the_names_of_their_fields(tmp_path: Path) -> None:
    before = read_object(OBJECT)
    edits = (
        ("structs.h", "struct listener {\n", "struct listener {\n\t__u64 first;\n"),
        ("structs.h", "\tNO_NEXT_HOP, ", "\tANOTHER_REASON,\n\tNO_NEXT_HOP, "),
    )
    after = read_object(build(tmp_path / "moved", *edits) / OBJECT.name)
    folder = bpffs.ROOT / f"flt-{os.getpid()}-moved"
    bpffs.prepare(folder)
    try:
        old = create_maps(
            [
                spec._replace(max_entries=min(spec.max_entries, 4096))
                for spec in before.maps.values()
            ]
        )
        key = bytes(range(19)) + bytes(5)
        listener = bytes(range(1, 21)) + bytes(4) + bytes(range(25, 33))
        old["listeners"].update(key, listener)
        (traffic,) = old["statistics"].per_cpu(bytes(4))[:1]
        cpus = len(old["statistics"].per_cpu(bytes(4)))
        old["statistics"].update(bytes(4), bytes(range(len(traffic))) * cpus)
        old["events"].update((1).to_bytes(4, "little"), (7).to_bytes(8, "little") * cpus)
        for name, each in old.items():
            each.pin(folder / name)
        descriptions = upgrade.describe(before), upgrade.describe(after)
        upgrade.check(*descriptions)
        new, _ = upgrade.carry_over(folder, *descriptions, after.maps)
        record = by_field(after, "listeners", new["listeners"].lookup(key) or b"")
        assert record.pop("first") == bytes(8)
        assert record == by_field(before, "listeners", listener)
        same = {
            name
            for name in old
            if Map.information(new[name], 8)[4:8] == Map.information(old[name], 8)[4:8]
        }
        assert same == before.maps.keys() - {"events", "listeners", "listener_cache", "statistics"}
        drops = by_field(after, "statistics", new["statistics"].per_cpu(bytes(4))[-1])["drops"]
        present = by_field(before, "statistics", bytes(range(len(traffic))))["drops"]
        assert drops == present[:8] + bytes(8) + present[8:]
        counted = [
            int.from_bytes(new["events"].per_cpu(number.to_bytes(4, "little"))[0], "little")
            for number in range(4)
        ]
        assert counted == [0, 0, 7, 0]
    finally:
        bpffs.remove(folder)


def test_flows_that_change_while_they_are_copied_are_copied_again(newer: Path) -> None:
    """Until it is replaced, the older program adds entries, changes their nodes and deletes
    them."""
    before, after = read_object(OBJECT), read_object(newer / OBJECT.name)
    folder = bpffs.ROOT / f"flt-{os.getpid()}-flows"
    bpffs.prepare(folder)

    def flow(number: int) -> bytes:
        return number.to_bytes(before.maps["connections"].key_size, "little")

    def entry(node: int, size: int = 8) -> bytes:
        return node.to_bytes(4, "little").ljust(size, b"\0")

    def nodes(table: Map) -> dict[bytes, int]:
        return {key: int.from_bytes(value[:4], "little") for key, value in table.items()}

    same, moved, removed, added, seen, later = map(flow, range(6))
    try:
        old = create_maps(
            [
                spec._replace(max_entries=min(spec.max_entries, 4096))
                for spec in before.maps.values()
            ]
        )
        for name, each in old.items():
            each.pin(folder / name)
        old["connections"].update_all({each: entry(1) for each in (same, moved, removed, seen)})
        descriptions = upgrade.describe(before), upgrade.describe(after)
        new, copied = upgrade.carry_over(folder, *descriptions, after.maps)
        assert nodes(new["connections"]) == {same: 1, moved: 1, removed: 1, seen: 1}

        old["connections"].update_all({moved: entry(2), added: entry(3)})
        old["connections"].delete_all([removed])
        upgrade.copy_changes(folder, *descriptions, new, copied, forwarding=False)
        assert nodes(new["connections"]) == {same: 1, moved: 2, seen: 1, added: 3}

        old["connections"].update_all({moved: entry(4), seen: entry(5), later: entry(6)})
        old["connections"].delete_all([same, added])
        # The new program forwards now, and has made entries of its own for these flows.
        new["connections"].update_all({seen: entry(7, size=20), added: entry(8, size=20)})
        upgrade.copy_changes(folder, *descriptions, new, copied, forwarding=True)
        assert nodes(new["connections"]) == {moved: 4, seen: 7, added: 8, later: 6}
    finally:
        bpffs.remove(folder)


def test_an_array_to_which_the_program_adds_elements_is_recreated(tmp_path: Path) -> None:
    """A lookup beyond the end of an array that is too short fails. Here the program would then
    never create the packets whose limit is the new element."""
    edit = ("structs.h", "\tCLOSED_CONNECTIONS,\n", "\tCLOSED_CONNECTIONS,\n\tANOTHER_LIMIT,\n")
    before, after = read_object(OBJECT), read_object(build(tmp_path / "longer", edit) / OBJECT.name)
    descriptions = upgrade.describe(before), upgrade.describe(after)
    assert descriptions[0] != descriptions[1]
    folder = bpffs.ROOT / f"flt-{os.getpid()}-longer"
    bpffs.prepare(folder)
    try:
        old = create_maps(
            [
                spec._replace(max_entries=min(spec.max_entries, 4096))
                for spec in before.maps.values()
            ]
        )
        for name, each in old.items():
            each.pin(folder / name)
        upgrade.check(*descriptions)
        new, _ = upgrade.carry_over(folder, *descriptions, after.maps)
        assert (
            new["allowances"].lookup(old["allowances"].spec.max_entries.to_bytes(4, "little"))
            is not None
        )
    finally:
        bpffs.remove(folder)


def test_records_with_a_smaller_field_are_not_copied(tmp_path: Path) -> None:
    edit = ("structs.h", "\tchar name[256];", "\tchar name[128];")
    shrunk = read_object(build(tmp_path / "shrunk", edit) / OBJECT.name)
    with pytest.raises(
        Refused,
        match="the content of map node_names cannot be copied to this version: "
        "its name has become smaller",
    ):
        upgrade.check(upgrade.describe(read_object(OBJECT)), upgrade.describe(shrunk))
