"""What CPUs keep of listeners counts until a listener changes, and no longer."""

import os
from collections.abc import Iterator

import pytest
from scapy.layers.inet import TCP
from tests.drivers.direct.conftest import DROP, VIP4, Forwarder, tcp

from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.listeners import Listeners
from fairlead.drivers.direct.maps.records import INDEX, LISTENER, LISTENER_KEY, pack_listener_key
from fairlead.drivers.direct.spec import ListenerKey

pytestmark = pytest.mark.root

KEY = pack_listener_key(ListenerKey(VIP4, 80, "TCP"))


@pytest.fixture(autouse=True)
def on_one_cpu() -> Iterator[None]:
    """Each keeps what it has found itself."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def kept(forwarder: Forwarder) -> list[bytes]:
    """The records that some CPU keeps of the listener, whether they still count or not."""
    size = LISTENER_KEY.size + 8
    values = (
        forwarder.maps["listener_cache"].per_cpu(INDEX.pack(number)) for number in range(4096)
    )
    return [value[size:] for each in values for value in each if value[: LISTENER_KEY.size] == KEY]


def record(forwarder: Forwarder) -> bytes:
    found = forwarder.maps["listeners"].lookup(KEY)
    assert found
    return found


def test_a_listener_is_kept_and_what_is_kept_is_what_counts(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    assert forwarder.run(tcp("A")).node == "node1"
    assert record(forwarder) in kept(forwarder)
    forwarder.maps["listeners"].update(
        KEY, LISTENER.pack(*[0] * 7)
    )  # the process ends before it has told
    assert forwarder.run(tcp("A")).node == "node1"


def test_the_next_process_begins_with_what_the_last_has_written(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    assert forwarder.run(tcp("A")).node == "node1"
    forwarder.maps["listeners"].update(KEY, LISTENER.pack(*[0] * 7))
    ListenerMaps(forwarder.maps).close()
    assert forwarder.run(tcp("A")).verdict == DROP


def test_an_audit_makes_packets_find_what_somebody_else_has_written(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    assert forwarder.run(tcp("A")).node == "node1"
    forwarder.maps["listeners"].update(KEY, LISTENER.pack(*[0] * 7))
    forwarder.tables.adopt(forwarder.tables.survey(forwarder.tables.baseline()))
    assert forwarder.run(tcp("A")).verdict == DROP


def test_a_listener_that_is_gone_is_not_kept(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    before = forwarder.run(tcp("A"))
    assert before.node == "node1"
    listeners = Listeners(
        forwarder.maps
    )  # which makes every CPU look again, so a packet goes through before the removal
    assert forwarder.run(tcp("A")).node == "node1"
    listeners.remove(KEY)
    assert forwarder.run(tcp("A")).verdict not in (
        before.verdict,
        DROP,
    )  # no listener has it: it goes on to the kernel


def test_listeners_that_share_a_place_keep_their_own(forwarder: Forwarder) -> None:
    """Of 300 in 4,096 places some do: whoever came last has it, and the other is looked up."""
    ports = range(80, 380)
    for port in ports:
        forwarder.serve({f"node{port % 3 + 1}": 1}, port=port)
    packets = [tcp("A") for _ in ports]
    for port, packet in zip(ports, packets, strict=True):
        packet[TCP].dport = port
    for _ in range(2):
        assert [forwarder.run(packet).node for packet in packets] == [
            f"node{port % 3 + 1}" for port in ports
        ]


def test_where_programs_of_one_cpu_interrupt_each_other_nothing_is_kept(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1})
    generation = forwarder.maps["generation"].lookup(INDEX.pack(0))
    assert generation
    Listeners(forwarder.maps, kernel="#1 SMP PREEMPT_RT").close()
    try:
        assert forwarder.run(tcp("A")).node == "node1"
        forwarder.maps["listeners"].update(KEY, LISTENER.pack(*[0] * 7))
        assert forwarder.run(tcp("A")).verdict == DROP
    finally:
        # No kernel turns into another. Numbers that have been are not to come again: the maps serve
        # other tests.
        forwarder.maps["generation"].update(INDEX.pack(0), generation)
