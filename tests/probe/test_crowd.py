"""The crowd detects failures: a server that dies, a server that is silent, a server that ends
gracefully, and another server in its place."""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from fairlead.lab import namespace
from fairlead.lab.pod import ECHO
from fairlead.probe import crowd as crowd_module
from fairlead.probe.crowd import MOVED_AWAY, Count, Crowd
from fairlead.probe.flow import Target

pytestmark = pytest.mark.root

NAME = f"flt-{os.getpid()}-crowd"
DEADLINE_S = 60.0
TARGETS = (
    Target("tcp", "127.0.0.1", 80, 40),
    Target("udp", "::1", 53, 20),
    Target("quic", "127.0.0.1", 443, 20),
)
TCP, UDP, QUIC = map(str, TARGETS)

Pod = subprocess.Popen[bytes]


def start(pod: str, node: str) -> Pod:
    """Start an echo server in the namespace; its ports are open when this returns."""
    reader, writer = os.pipe()
    argv = [
        sys.executable,
        "-I",
        "-S",
        str(ECHO),
        "--pod",
        pod,
        "--node",
        node,
        "--ready-fd",
        str(writer),
    ]
    argv += [
        "--address",
        "127.0.0.1",
        "--address",
        "::1",
        "--tcp",
        "80",
        "--udp",
        "53",
        "--udp",
        "443",
    ]
    with namespace.inside(NAME):
        child = subprocess.Popen(argv, pass_fds=(writer,))
    os.close(writer)
    with selectors.DefaultSelector() as selector, open(reader, "rb") as ready:
        selector.register(ready, selectors.EVENT_READ)
        assert selector.select(DEADLINE_S)
        assert ready.read(1)
    return child


@pytest.fixture
def pod() -> Iterator[Pod]:
    namespace.create(NAME)
    try:
        subprocess.run(["ip", "-n", NAME, "link", "set", "lo", "up"], check=True)
        child = start("a", "node1")
        yield child
        child.kill()
        child.wait()
    finally:
        namespace.delete(NAME)


@pytest.fixture
def crowd(pod: Pod) -> Crowd:
    """A crowd with a long time limit: on a machine that stalls for a second, answers are late, and
    nothing has failed."""
    return Crowd(TARGETS, new_per_s=100, interval_s=0.2, patience_s=DEADLINE_S)


def run(crowd: Crowd, until: Callable[[dict[str, Count]], bool]) -> dict[str, Count]:
    """Run the crowd until its periods, added up, satisfy the condition. Return them."""
    end_s = time.monotonic() + DEADLINE_S
    crowd.take()
    with namespace.inside(NAME):
        while not until({str(target): count for target, count in crowd.counts.items()}):
            crowd.step()
            assert time.monotonic() < end_s, crowd.counts
    return crowd.take()


def fill(crowd: Crowd) -> None:
    run(crowd, lambda _: crowd.complete)


def test_a_healthy_server_causes_no_failures(crowd: Crowd) -> None:
    fill(crowd)
    seen = run(
        crowd, lambda seen: len(seen) == 3 and all(count.answered > 20 for count in seen.values())
    )
    assert {name: count.open for name, count in seen.items()} == {TCP: 40, UDP: 20, QUIC: 20}
    for count in seen.values():
        assert (count.failed, count.broken, count.lost, count.late, count.ended) == (
            {},
            {},
            {},
            0,
            0,
        )
        assert count.by_pod.keys() == {"a"}


def test_a_server_that_dies_breaks_open_flows(crowd: Crowd, pod: Pod) -> None:
    fill(crowd)
    pod.kill()
    pod.wait()
    seen = run(
        crowd,
        lambda seen: (
            TCP in seen
            and sum(seen[TCP].broken.get("a", {}).values()) >= 40
            and UDP in seen
            and bool(seen[UDP].broken)
        ),
    )
    # The error is a reset: the kernel of the dead server had already accepted the request.
    assert (
        "ConnectionRefusedError"
        in seen[TCP].failed.keys()
        <= {"ConnectionRefusedError", "ConnectionResetError"}
    )
    assert len(seen[TCP].problems) == sum(seen[TCP].failed.values()) < 1000
    assert seen[UDP].broken["a"].keys() == {"ConnectionRefusedError"}


def test_a_server_that_hangs_is_silent(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd_module, "SILENCE_S", 3.0)
    crowd = Crowd(TARGETS, new_per_s=100, interval_s=0.2, patience_s=2.0)
    fill(crowd)
    pod.send_signal(signal.SIGSTOP)
    seen = run(
        crowd,
        lambda seen: (
            len(seen) == 3
            and "a" in seen[TCP].broken
            and bool(seen[QUIC].lost)
            and bool(seen[UDP].failed)
        ),
    )
    assert seen[TCP].broken["a"].keys() == {"TimeoutError"}
    for each in seen[TCP].breaks:
        assert (each.client, each.pod, each.node, each.why) == (
            "127.0.0.1",
            "a",
            "node1",
            "TimeoutError",
        )
        assert each.client_port
        assert each.begun_s < each.broken_s
    assert len(seen[TCP].breaks) == seen[TCP].broken["a"]["TimeoutError"]
    assert seen[QUIC].lost.keys() == {"a"}
    assert seen[UDP].failed.keys() == {"TimeoutError"}


def test_a_late_answer_is_not_a_loss_and_a_lost_datagram_is(pod: Pod) -> None:
    crowd = Crowd(TARGETS, new_per_s=100, interval_s=0.2, patience_s=DEADLINE_S)
    fill(crowd)
    crowd.take()
    pod.send_signal(signal.SIGSTOP)
    run(crowd, lambda seen: TCP in seen and seen[TCP].new > 50)  # one and a half seconds
    pod.send_signal(signal.SIGCONT)
    seen = run(crowd, answered_late)
    assert [count.late for count in seen.values()] == [0, 0, 0]

    in_namespace(
        "add table inet lose", "add chain inet lose in { type filter hook input priority 0; }"
    )
    in_namespace("add rule inet lose in udp dport { 53, 443 } drop")
    run(crowd, lambda seen: UDP in seen and seen[UDP].new > 10)
    in_namespace("delete table inet lose")
    seen = run(crowd, answered_late)
    assert seen[UDP].late > 5 < seen[QUIC].late


def answered_late(seen: dict[str, Count]) -> bool:
    """Return whether new flows that began before this period have been answered."""
    return len(seen) == 3 and all(
        count.answered > count.new + 5 for count in (seen[UDP], seen[QUIC])
    )


def in_namespace(*commands: str) -> None:
    """Run nft in the namespace."""
    for command in commands:
        subprocess.run(["ip", "netns", "exec", NAME, "nft", command], check=True)


def test_a_graceful_end_breaks_no_connection(crowd: Crowd, pod: Pod) -> None:
    fill(crowd)
    pod.send_signal(signal.SIGTERM)
    seen = run(crowd, lambda seen: TCP in seen and seen[TCP].ended >= 40)
    assert seen[TCP].broken == {}


def test_a_datagram_flow_that_another_pod_answers_is_broken(crowd: Crowd, pod: Pod) -> None:
    fill(crowd)
    pod.kill()
    pod.wait()
    other = start("b", "node2")
    try:
        # Fewer than twenty flows break: after a stall, new flows arrive all at once and replace
        # some of them before their next request.
        seen = run(
            crowd,
            lambda seen: UDP in seen and seen[UDP].broken.get("a", {}).get(MOVED_AWAY, 0) >= 5,
        )
    finally:
        other.kill()
        other.wait()
    assert seen[UDP].broken.keys() == {"a"}
    assert seen[UDP].broken["a"].keys() == {MOVED_AWAY}
    assert {(each.node, each.answered_by) for each in seen[UDP].breaks} == {("node1", "b")}
    assert seen[UDP].by_pod.keys() <= {"a", "b"}
