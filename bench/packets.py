"""`python -m bench.packets`: the forwarder's time per packet in nanoseconds, by BPF_PROG_TEST_RUN.

In: a number of rounds. Out: a table, or JSON. The kernel runs the program repeatedly on one packet,
on one CPU, with warm caches; the time of a network card's driver and of the wire is not included.
Each figure includes the frame that makes the program repeatable (bench.bpf.c). The frame's own cost
is a line of the table, and so is the empty program. A frame that removes outer headers costs more
than a frame that does not; a column shows each case's time above its frame.

In cases of "1 M flows" each packet has another of 1,048,576 sources, so tables of flow entries and
of slots are accessed in random order; "new connections" come from sources that were not used
before. Each round measures all cases in turn.
"""

import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import msgspec
from bench.options import options, run_benchmark
from bench.plot import Bar, bars
from bench.result import spread
from bench.stand import FIRST_OTHER, FLOWS, OWN_MAC, Kind, Stand, stand

from fairlead.cli.output import draw
from fairlead.errors import Unavailable

KINDS: tuple[Kind, ...] = ("xdp", "tc")
REPEAT = 1_000_000
FRESH = 1 << 26
SMALL, LARGE = (10, 4), (10_000, 1_000)
"""(Services, nodes)."""
SYN, ACK = 0x02, 0x10
CLIENT4, CLIENT6 = "10.0.0.7", "2001:db8:c::7"
PLAIN = {"L2": 1, "IPIP": 2, "VXLAN": 3}
CHANGED, KNOWN, FEW_RANGES, MANY_RANGES, NO_LISTENER = 4, 5, 6, 7, 200
RANGES = 5_000
FRAMES = {
    ("one", False): "frame",
    ("one", True): "undoing",
    ("many", False): "many_frame",
    ("many", True): "many_undoing",
}
ETHERNET = OWN_MAC + bytes((2, 0, 0, 0, 0, 1))


class Case(NamedTuple):
    """A line of the table. `large` chooses the stand; `tunnelled`: the frame removes outer
    headers."""

    name: str
    program: str
    packet: bytes
    large: bool = False
    sources: int = FLOWS
    destination: str = ""
    destinations: int = 1
    forwarded: bool = True
    tunnelled: bool = False
    warm: bytes = b""
    """A packet that is first sent for all flows, so that each has a flow entry."""

    @property
    def frame(self) -> str:
        """The program that consists of this case's frame only."""
        return FRAMES[self.program, self.tunnelled]


class Measured(msgspec.Struct, frozen=True):
    """One case: nanoseconds per packet in each round, and the part above the frame."""

    name: str
    nanoseconds: tuple[int, ...]
    above: tuple[int, ...]


class Report(msgspec.Struct, frozen=True):
    """The cases of each type of program, in order."""

    xdp: tuple[Measured, ...]
    tc: tuple[Measured, ...]


def vip(number: int, *, ipv6: bool = False) -> str:
    """Return the address of a test listener."""
    return f"2001:db8:f::{number}" if ipv6 else f"203.0.113.{number}"


def checksum(header: bytes) -> int:
    total: int = sum(struct.unpack(f">{len(header) // 2}H", header))
    total = (total & 0xFFFF) + (total >> 16)
    return ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF


def packet(destination: str, *, flags: int = ACK, udp: bool = False) -> bytes:
    """Return a frame, of 64 bytes without checksum over IPv4 and of 84 over IPv6; TCP with these
    flags, or UDP."""
    ipv6 = ":" in destination
    ends = ip_address(CLIENT6 if ipv6 else CLIENT4).packed + ip_address(destination).packed
    transport = (
        struct.pack(">4H", 40000, 80, 20, 0)
        if udp
        else struct.pack(">HHIIBBHHH", 40000, 80, 1, 1, 0x50, flags, 512, 0, 0)
    )
    payload = bytes(6) if not udp else bytes(12)
    body, protocol = transport + payload, 17 if udp else 6
    if ipv6:
        return (
            ETHERNET
            + b"\x86\xdd"
            + struct.pack(">IHBB", 6 << 28, len(body), protocol, 64)
            + ends
            + body
        )
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0x4000, 64, protocol, 0) + ends
    return ETHERNET + b"\x08\x00" + head[:10] + struct.pack(">H", checksum(head)) + head[12:] + body


def add_listeners(made: Stand) -> None:
    """Create the listeners of the cases."""
    for ipv6 in (False, True):
        for method, number in PLAIN.items():
            made.serve(vip(number, ipv6=ipv6), [f"{method}-{node}" for node in range(4)])
        before, after = ["L2-0", "L2-1"], ["L2-2", "L2-3"]
        for number in (CHANGED, KNOWN):
            made.serve(vip(number, ipv6=ipv6), before)
            made.serve(vip(number, ipv6=ipv6), after, retained_nodes=before)
        clients = "2001:db8:c::/64" if ipv6 else "10.0.0.0/8"
        others = [
            f"2001:db8:a:{n:x}::/64"
            if ipv6
            else f"172.{16 + n // 4096}.{n // 16 % 256}.{n % 16 * 16}/28"
            for n in range(RANGES - 1)
        ]
        made.serve(vip(FEW_RANGES, ipv6=ipv6), ["L2-0", "L2-1"], ranges=[clients])
        made.serve(vip(MANY_RANGES, ipv6=ipv6), ["L2-0", "L2-1"], ranges=[clients, *others])


def cases(large: tuple[int, int], flows: int) -> list[Case]:
    """Return the cases in the order of the table. `flows`: see `run`."""
    found = [
        Case("empty program", "empty", packet(vip(1)), forwarded=False),
        Case("the frame alone", "frame", packet(vip(1)), forwarded=False),
        Case("the frame, removing outer headers", "undoing", packet(vip(1)), forwarded=False),
        Case(
            "the frame, adding and removing room for an IPv4 header",
            "room",
            packet(vip(1)),
            forwarded=False,
        ),
    ]
    found.append(Case("not for a listener", "one", packet(vip(NO_LISTENER)), forwarded=False))
    for ipv6 in (False, True):
        family = "IPv6" if ipv6 else "IPv4"
        for method, number in PLAIN.items():
            to = vip(number, ipv6=ipv6)
            found.append(
                Case(
                    f"established, {method}, {family}", "one", packet(to), tunnelled=method != "L2"
                )
            )
            if method == "L2":
                found.append(Case(f"SYN, {method}, {family}", "one", packet(to, flags=SYN)))
                found.append(
                    Case(f"UDP, known flow, {method}, {family}", "one", packet(to, udp=True))
                )
        changed = vip(CHANGED, ipv6=ipv6)
        found.append(Case(f"changed slot, older connection, {family}", "one", packet(changed)))
        for count, number in ((1, FEW_RANGES), (RANGES, MANY_RANGES)):
            found.append(
                Case(
                    f"with {count:,} source ranges, {family}", "one", packet(vip(number, ipv6=ipv6))
                )
            )
    return found + [
        case if case.sources == FRESH else case._replace(sources=flows)
        for case in many_cases(large)
    ]


def many_cases(large: tuple[int, int]) -> list[Case]:
    """Return the cases with a million flows."""
    link, changed, known = vip(1), vip(CHANGED), vip(KNOWN)
    found = [
        Case(
            "the frame alone, 1 M flows",
            "many_frame",
            packet(link),
            destination=link,
            forwarded=False,
        ),
        Case(
            "the frame, removing outer headers, 1 M flows",
            "many_undoing",
            packet(link),
            destination=link,
            forwarded=False,
        ),
    ]
    for method, number in PLAIN.items():
        to, tunnelled = vip(number), method != "L2"
        found.append(
            Case(
                f"established, {method}, 1 M flows",
                "many",
                packet(to),
                destination=to,
                tunnelled=tunnelled,
            )
        )
    found.append(
        Case(
            "changed slot, new connections",
            "many",
            packet(changed, flags=SYN),
            sources=FRESH,
            destination=changed,
        )
    )
    opening, going_on = packet(known, flags=SYN), packet(known)
    found.append(
        Case(
            "changed slot, 1 M known connections", "many", going_on, destination=known, warm=opening
        )
    )
    for is_large, (services, nodes) in ((False, SMALL), (True, large)):
        size = f"{services:,} Services, {nodes:,} nodes"
        found.append(Case(f"established, L2, {size}", "one", packet(link), is_large))
        first = str(FIRST_OTHER)
        name = f"established, L2, 1 M flows to {size}"
        found.append(
            Case(name, "many", packet(first), is_large, destination=first, destinations=services)
        )
    return found


def measure(made: Stand, case: Case, repeat: int) -> int:
    """Return nanoseconds per packet of one run."""
    if case.program.startswith("many"):
        made.vary(case.sources, case.destination, case.destinations)
    return (
        made.programs[case.program]
        .test_run(case.packet, repeat=repeat, with_context=False)
        .duration_ns
    )


def verify(made: Stand, case: Case, repeat: int) -> None:
    """Check that the program does for every packet what the case's name says. Raise Unavailable if
    it does not."""
    if case.warm:
        for packet_ in (case.warm, case.packet):
            made.vary(case.sources, case.destination, case.destinations)
            made.programs[case.program].test_run(packet_, repeat=case.sources, with_context=False)
        if (entries := made.entries()) < case.sources:
            raise Unavailable(
                f"{made.kind}: {case.name}: {entries} of {case.sources} connections have an entry"
            )
    else:
        measure(made, case, 2)
    before, dropped = made.forwarded(), made.dropped()
    if case.program.startswith("many"):
        made.vary(case.sources, case.destination, case.destinations)
    trial = made.programs[case.program].test_run(case.packet, repeat=repeat, with_context=False)
    forwarded = made.forwarded() - before
    if forwarded != repeat * case.forwarded:
        raise Unavailable(
            f"{made.kind}: {case.name}: {forwarded} of {repeat} packets were forwarded, verdict "
            f"{trial.verdict}"
        )
    # A packet is counted for its node before it is sent.
    if dropped := made.dropped() - dropped:
        raise Unavailable(
            f"{made.kind}: {case.name}: {dropped} of {repeat} packets were dropped, verdict "
            f"{trial.verdict}"
        )
    if trial.packet[:12] + trial.packet[14:26] != case.packet[:12] + case.packet[14:26] or len(
        trial.packet
    ) != len(case.packet):
        raise Unavailable(f"{made.kind}: {case.name}: the frame did not restore the packet")


def run(
    kind: Kind, rounds: int, repeat: int, large: tuple[int, int], *, flows: int = FLOWS
) -> tuple[Measured, ...]:
    """Measure all cases of one type of program. `flows`: the number of flows, a power of two, in
    cases of "1 M flows"."""
    with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder, ExitStack() as stack:
        sizes = {False: SMALL, True: large}
        stands = {
            each: stack.enter_context(
                stand(kind, Path(folder), services=services, nodes=nodes, flows=flows)
            )
            for each, (services, nodes) in sizes.items()
        }
        for made in stands.values():
            add_listeners(made)
        todo = cases(large, flows)
        for case in todo:
            verify(stands[case.large], case, min(repeat, 1000))
        columns = [
            [measure(stands[case.large], case, repeat) for case in todo] for _ in range(rounds)
        ]
        return tuple(compared(todo, tuple(zip(*columns, strict=True))))


def compared(todo: Sequence[Case], nanoseconds: Sequence[tuple[int, ...]]) -> Iterator[Measured]:
    """Yield each case with its time above its frame, which was measured in the same rounds. Frames
    have no such time."""
    frames = {case.program: each for case, each in zip(todo, nanoseconds, strict=True)}
    for case, each in zip(todo, nanoseconds, strict=True):
        above = (
            tuple(a - b for a, b in zip(each, frames[case.frame], strict=True))
            if case.program in ("one", "many")
            else ()
        )
        yield Measured(case.name, each, above)


def rows(measured: Sequence[Measured]) -> list[tuple[str, str, str]]:
    return [
        (each.name, spread(each.nanoseconds), spread(each.above) if each.above else "")
        for each in measured
    ]


def plots(report: Report) -> dict[str, str]:
    """Return the plot of the cases of both programs."""
    kinds = {"XDP": report.xdp, "tc": report.tc}
    groups = {
        name: [Bar(each.name, each.nanoseconds, colour) for each in cases]
        for colour, (name, cases) in enumerate(kinds.items())
    }
    return {"packets": bars("Nanoseconds per packet, BPF_PROG_TEST_RUN", "ns", groups)}


def show(report: Report) -> None:
    """Print the report as tables."""
    for kind in KINDS:
        draw(
            (f"{kind.upper()}, NS PER PACKET", "MEDIAN (MIN-MAX)", "ABOVE ITS FRAME"),
            rows(getattr(report, kind)),
        )


def main() -> None:
    arguments = options(
        "bench.packets", __doc__, rounds=9, quick="one round, 100,000 packets of each case"
    ).parse_args()
    rounds, repeat = (1, REPEAT // 10) if arguments.quick else (arguments.rounds, REPEAT)
    run_benchmark(
        arguments,
        lambda: Report(*(run(kind, rounds, repeat, LARGE) for kind in KINDS)),
        show,
        plots,
    )


if __name__ == "__main__":
    main()
