"""The cache of listeners of each CPU is valid until a listener changes."""

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
    """Run the test on one CPU, because each CPU has its own cache."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def cached(forwarder: Forwarder) -> list[bytes]:
    """Return the records of the listener in the caches of all CPUs, valid or not."""
    size = LISTENER_KEY.size + 8
    values = (
        forwarder.maps["listener_cache"].per_cpu(INDEX.pack(number)) for number in range(4096)
    )
    return [value[size:] for each in values for value in each if value[: LISTENER_KEY.size] == KEY]


def record(forwarder: Forwarder) -> bytes:
    found = forwarder.maps["listeners"].lookup(KEY)
    assert found
    return found


def test_a_listener_is_cached_and_the_cached_record_is_used(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    assert forwarder.run(tcp("A")).node == "node1"
    assert record(forwarder) in cached(forwarder)
    # As if the process ended before it invalidated the caches.
    forwarder.maps["listeners"].update(KEY, LISTENER.pack(*[0] * 8))
    assert forwarder.run(tcp("A")).node == "node1"


def test_a_new_process_invalidates_the_caches(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    assert forwarder.run(tcp("A")).node == "node1"
    forwarder.maps["listeners"].update(KEY, LISTENER.pack(*[0] * 8))
    ListenerMaps(forwarder.maps).close()
    assert forwarder.run(tcp("A")).verdict == DROP


def test_an_audit_invalidates_the_caches(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    assert forwarder.run(tcp("A")).node == "node1"
    forwarder.maps["listeners"].update(KEY, LISTENER.pack(*[0] * 8))
    forwarder.tables.adopt(forwarder.tables.survey(forwarder.tables.baseline()))
    assert forwarder.run(tcp("A")).verdict == DROP


def test_a_removed_listener_is_not_used_from_a_cache(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    before = forwarder.run(tcp("A"))
    assert before.node == "node1"
    # A new `Listeners` invalidates the caches, so one more packet fills the cache before the
    # removal.
    listeners = Listeners(forwarder.maps)
    assert forwarder.run(tcp("A")).node == "node1"
    listeners.remove(KEY)
    # Without a listener the packet is passed to the kernel.
    assert forwarder.run(tcp("A")).verdict not in (before.verdict, DROP)


def test_listeners_in_the_same_cache_slot_are_not_confused(forwarder: Forwarder) -> None:
    """Of 300 listeners some share one of the 4,096 slots of a cache. The latest one has the slot,
    the others are looked up."""
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


def test_nothing_is_cached_on_a_kernel_where_programs_of_a_cpu_interrupt_each_other(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1})
    generation = forwarder.maps["generation"].lookup(INDEX.pack(0))
    assert generation
    Listeners(forwarder.maps, kernel="#1 SMP PREEMPT_RT").close()
    try:
        assert forwarder.run(tcp("A")).node == "node1"
        forwarder.maps["listeners"].update(KEY, LISTENER.pack(*[0] * 8))
        assert forwarder.run(tcp("A")).verdict == DROP
    finally:
        # Other tests use these maps, and a generation number must not be used twice. In reality a
        # running kernel does not become another one.
        forwarder.maps["generation"].update(INDEX.pack(0), generation)
