"""Several gateways for the same addresses: packets of one connection arrive at different gateways.

Each gateway is the program with its own maps, and an address on the loopback interface, where the
gateways exchange their entries over TCP."""

import asyncio
import contextlib
import math
import socket
import struct
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.drivers.direct.conftest import (
    REDIRECT,
    SERVICE,
    VIP4,
    Forwarder,
    a_forwarder,
    datagram,
    segment,
)

from fairlead.backoff import Backoff
from fairlead.drivers.direct.maps.convergence import CONVERGENCE_S
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.records import CLOSING, INDEX, REPORT_ENTRIES
from fairlead.drivers.direct.peers import peers as peers_module
from fairlead.drivers.direct.peers.exchange import Exchange, split
from fairlead.drivers.direct.peers.followers import Follower
from fairlead.drivers.direct.peers.messages import (
    ENTRY,
    MAX_BYTES,
    CompleteMessage,
    FlowsMessage,
    HelloMessage,
    Message,
    TablesMessage,
    decode,
    frame,
    read_message,
)
from fairlead.drivers.direct.peers.peers import Peers
from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol
from fairlead.errors import Refused, Unavailable
from fairlead.net.transition import NONE, Slots

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("own_loopback")]

PORTS = range(40000, 40300)
WEB = ListenerKey(VIP4, 80, "TCP")
DEADLINE_S = 60.0
OLD, NEW = {"node1": 1, "node2": 1}, {"node2": 1, "node3": 1}
ALL_NODES = {"node1", "node2", "node3"}


def address(number: int) -> str:
    return f"127.0.77.{number}:9445"


class Gateway:
    """A forwarder with its `Peers`. Connections are identified by their source port."""

    def __init__(self, forwarder: Forwarder, peers: Peers) -> None:
        self.forwarder, self.peers = forwarder, peers
        forwarder.set_settings(flags=REPORT_ENTRIES)

    def among_others(self, clock: Callable[[], float]) -> None:
        """Create `ListenerMaps` as the driver does if peers are configured."""
        self.forwarder.tables.close()
        self.forwarder.tables = made = ListenerMaps(self.forwarder.maps, peers=True, clock=clock)
        made.adopt(made.survey(made.baseline()))

    def serve(self, weights: dict[str, int]) -> None:
        self.forwarder.serve(weights, ALL_NODES)

    def open(self, ports: Iterable[int], packet: Callable[..., bytes] = segment) -> dict[int, str]:
        """Open connections from these ports, up to their second packet. Return the node of each."""
        flags = [("S",), ("A",)] if packet is segment else [(), ()]
        answers = {
            port: [self.forwarder.run(packet(*each, port=port)) for each in flags] for port in ports
        }
        assert {each.verdict for pair in answers.values() for each in pair} == {REDIRECT}
        assert all(first.node == second.node for first, second in answers.values())
        return {port: second.node for port, (_, second) in answers.items()}

    def nodes(self, ports: Iterable[int], packet: Callable[..., bytes] = segment) -> dict[int, str]:
        """Return the node to which a packet of each open connection is sent."""
        flags = ("A",) if packet is segment else ()
        return {port: self.forwarder.run(packet(*flags, port=port)).node for port in ports}


class Site:
    """Gateways 1, 2, and so on, which are configured as peers of each other."""

    def __init__(self, stack: AsyncExitStack, count: int) -> None:
        self.stack = stack
        self.addresses = [address(number) for number in range(1, count + 1)]
        self.configured = True
        """False: the gateways are not told their peers; the test calls `Peers.found`."""

    def gateway(self, number: int) -> Gateway:
        """Create a gateway that is not connected yet."""
        made = self.stack.enter_context(a_forwarder(fast=False))
        return Gateway(made, Peers(address(number), self.addresses if self.configured else None))

    async def start(self, number: int) -> Gateway:
        """Create a gateway that starts with the tables and entries of its peers."""
        made = self.gateway(number)
        await self.join(made)
        return made

    async def join(self, gateway: Gateway) -> asyncio.Task[None]:
        await gateway.peers.inherit(gateway.forwarder.tables, gateway.forwarder.maps)
        task = asyncio.ensure_future(gateway.peers.run())
        self.stack.push_async_callback(stop, task)
        await asyncio.sleep(0.05)  # meanwhile the other gateways connect to it
        return task


async def stop(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def site(count: int = 2) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        yield Site(stack, count)


class Cable:
    """A proxy for the connections between two gateways, which can be interrupted and restored."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._whole = True
        self._writers = set[asyncio.StreamWriter]()

    async def end(self, there: int, here: int) -> str:
        """Return the address at which gateway `here` reaches gateway `there` through the cable."""
        at, _, port = address(there).rpartition(":")

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)
            if not self._whole:
                writer.transport.abort()
                return
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(
                    at, int(port), local_addr=(f"127.0.77.{here}", 0)
                )
                self._writers.add(far_writer)
                while data := await far_reader.read(1 << 16):
                    writer.write(data)
            writer.transport.abort()

        server = await asyncio.start_server(answer, f"127.0.77.{there + 100}", int(port))
        self._stack.callback(server.close)
        self._stack.callback(self.cut)
        return f"127.0.77.{there + 100}:{port}"

    def cut(self) -> None:
        self._whole = False
        for each in self._writers:
            each.transport.abort()
        self._writers.clear()

    def mend(self) -> None:
        self._whole = True


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.01)


def connected_to(gateway: Gateway, count: int) -> bool:
    """Return whether the gateway is connected to this number of peers."""
    return sum(peer.connected for peer in gateway.peers.shown) == count


async def await_connected(*gateways: Gateway) -> None:
    """Wait until each gateway follows all others."""
    for each in gateways:
        await until(partial(connected_to, each, len(gateways) - 1))


async def have_received(count: int, *gateways: Gateway) -> None:
    """Wait until each gateway has merged at least this number of entries."""
    for each in gateways:
        await until(lambda each=each: each.peers.received >= count)  # type: ignore[misc]


def entries(gateway: Gateway, table: str = "connections") -> dict[bytes, str]:
    names = gateway.forwarder.tables.nodes.names()
    return {
        key: names[int.from_bytes(value[:4], "little")]
        for key, value in gateway.forwarder.maps[table].items()
    }


def slots(gateway: Gateway) -> Slots:
    installed = gateway.forwarder.tables.installed(WEB)
    return installed.slots if installed else Slots()


async def test_gateways_with_equal_plans_agree_without_a_connection() -> None:
    """While no slot is in transition, all gateways send a packet to the same node."""
    async with site() as made:
        one, two = made.gateway(1), made.gateway(2)
        for each in (one, two):
            each.serve(OLD)
        assert two.nodes(PORTS) == one.open(PORTS)


@pytest.mark.parametrize("packet", [segment, datagram], ids=["tcp", "udp"])
async def test_only_connected_gateways_keep_connections_opened_in_transition(
    packet: Callable[..., bytes],
) -> None:
    async with site() as made:
        one, two = made.gateway(1), made.gateway(2)
        protocol: ListenerProtocol = "TCP" if packet is segment else "UDP"
        for each in (one, two):
            for weights in (OLD, NEW):
                each.forwarder.serve(weights, ALL_NODES, protocol=protocol)
        opened = one.open(PORTS, packet)
        if packet is segment:  # a new UDP flow goes to the current node at any gateway
            lost = {port for port, node in two.nodes(PORTS).items() if node != opened[port]}
            assert len(lost) > len(PORTS) / 4  # all connections in slots that changed
        for each in (one, two):
            await made.join(each)
        await await_connected(one, two)
        assert two.nodes(PORTS, packet) == opened
        later = one.open(range(41000, 41300), packet)
        await have_received(1, two)
        await until(
            lambda: (
                one.forwarder.maps["connections"].count()
                == two.forwarder.maps["connections"].count()
            )
        )
        assert two.nodes(later, packet) == later


async def test_a_later_gateway_starts_with_the_tables_and_entries_of_the_others() -> None:
    async with site(3) as made:
        one, two = await made.start(1), await made.start(2)
        for each in (one, two):
            each.serve(OLD)
        before = one.open(PORTS)
        for each in (one, two):
            each.serve(NEW)
        during = two.open(range(41000, 41300))
        await await_connected(one, two)
        await have_received(1, one)
        three = await made.start(3)
        (inherited,) = three.forwarder.tables.actual(None)[SERVICE].listeners
        assert inherited.used  # although no packet has arrived at this gateway
        three.serve(NEW)
        assert three.nodes(before) == before
        assert three.nodes(during) == during
        assert slots(three) == slots(one) != Slots()


async def test_gateways_that_find_each_other_follow_and_forget_without_a_restart() -> None:
    """A gateway that starts is refused until the others have found it, too. A gateway that is not
    alive for the cluster stays a peer as long as it is connected: it may still forward."""
    async with site(2) as made:
        made.configured = False
        addresses, nobody = made.addresses, frozenset[str]()
        one, two = made.gateway(1), made.gateway(2)
        one.peers.found(nobody, nobody)
        await made.join(one)
        for weights in (OLD, NEW):
            one.serve(weights)
        opened = one.open(PORTS)
        joining = asyncio.ensure_future(made.join(two))
        two.peers.found({addresses[0]}, {addresses[0]})
        await asyncio.sleep(0.2)
        assert not joining.done()
        assert one.peers.followers == 0
        one.peers.found({addresses[1]}, {addresses[1]})
        await joining
        two.serve(NEW)
        assert two.nodes(PORTS) == opened
        await await_connected(one, two)
        one.peers.found(nobody, {addresses[1]})
        later = two.open(range(41000, 41300))
        await until(lambda: len(entries(one)) == len(entries(two)))
        assert one.nodes(later) == later
        one.peers.found(nobody, nobody)
        assert one.peers.shown == []
        await until(lambda: one.peers.followers == 0)
        await until(partial(connected_to, two, 0))


async def test_nobody_behind_a_router_follows_gateways_that_find_each_other() -> None:
    """The packets of a pod may leave its node with the address of a gateway."""
    async with site(2) as made:
        made.configured = False
        one = made.gateway(1)
        one.peers.found({made.addresses[1]}, {made.addresses[1]})
        await made.join(one)
        for hop_limit, answered in ((254, False), (255, True)):
            with socket.socket() as caller:
                caller.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hop_limit)
                caller.bind(("127.0.77.2", 0))
                caller.setblocking(False)
                connecting = asyncio.get_running_loop().sock_connect(caller, ("127.0.77.1", 9445))
                if answered:
                    await connecting
                    await until(lambda: one.peers.followers == 1)
                else:
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(connecting, 0.3)
                    assert one.peers.followers == 0


async def test_a_gateway_whose_port_is_taken_follows_the_others() -> None:
    """Where gateways find each other, nobody has chosen the port for this host."""
    async with site(2) as made:
        made.configured = False
        addresses = made.addresses
        one, two = made.gateway(1), made.gateway(2)
        for each, other in ((one, addresses[1]), (two, addresses[0])):
            each.peers.found({other}, {other})
        with socket.create_server(("127.0.77.2", 9445)) as taken:
            await made.join(one)
            await made.join(two)
            await until(lambda: bool(two.peers.findings()))
            (finding,) = two.peers.findings()
            assert finding.code == "PeersNotListening"
            assert "127.0.77.2:9445" in finding.message
            await until(partial(connected_to, two, 1))
            taken.close()
        await await_connected(one, two)
        assert not two.peers.findings()


async def test_a_connection_that_closes_at_one_gateway_closes_at_all_on_its_node() -> None:
    """Closed connections must not fill the tables of open connections of other gateways. All
    gateways learn of a new connection with the same ports."""

    def moved(*gateways: Gateway) -> bool:
        return all(
            (
                each.forwarder.maps["connections"].count(),
                each.forwarder.maps["closing_connections"].count(),
            )
            == (0, count)
            for each in gateways
        )

    async with site(3) as made:
        one, two = await made.start(1), await made.start(2)
        for each in (one, two):
            each.serve(OLD)
            each.serve(NEW)
        await await_connected(one, two)
        opened = one.open(PORTS)
        await until(lambda: len(entries(two)) == len(entries(one)))
        count = len(entries(one))
        for port in PORTS:
            one.forwarder.run(segment("FA", port=port))
        await until(lambda: moved(one, two))
        three = await made.start(3)
        three.serve(NEW)
        assert moved(three)
        for each in (one, two, three):
            assert each.nodes(PORTS) == opened
        again = two.open(PORTS)
        await until(lambda: len(entries(one)) == len(entries(two)) == count)
        assert one.nodes(PORTS) == again


async def test_the_end_of_an_older_connection_with_the_same_ports_closes_no_open_one() -> None:
    async with site(1) as made:
        one = made.gateway(1)
        for weights in (OLD, NEW):
            one.serve(weights)
        opened = one.open(PORTS)
        there = entries(one)
        exchange = Exchange(one.forwarder.tables, one.forwarder.maps)
        numbers = one.forwarder.tables.nodes.numbers
        key, node = next((key, node) for key, node in there.items() if node == "node3")
        for name, left in (
            ("node1", there),
            (node, {each: there[each] for each in there.keys() - {key}}),
        ):
            number = numbers[name]
            exchange.merge_flows(FlowsMessage({number: name}, key + INDEX.pack(number | CLOSING)))
            assert entries(one) == left
        assert entries(one, "closing_connections") == {key: node}
        assert one.nodes(PORTS) == opened
        exchange.close()


async def test_a_gateway_that_missed_a_change_knows_the_connections_opened_meanwhile() -> None:
    """The first gateway changes from OLD to NEW and back. The second one does not learn of NEW, so
    its slots are never in transition."""
    async with site() as made:
        one, two = await made.start(1), await made.start(2)
        for each in (one, two):
            each.serve(OLD)
        await await_connected(one, two)
        own = two.open(range(42000, 42300))
        one.serve(NEW)
        meanwhile = one.open(PORTS)
        assert "node3" in meanwhile.values()
        one.serve(OLD)
        await until(lambda: two.nodes(PORTS) == meanwhile)
        assert two.nodes(own) == own


@pytest.mark.parametrize("packet", [segment, datagram], ids=["tcp", "udp"])
async def test_no_connection_moves_between_gateways_that_learn_of_nodes_in_different_orders(
    packet: Callable[..., bytes],
) -> None:
    """Each gateway learns of another node first, and sends it all connections that arrive then. The
    listener is converging: its connections get entries although no slot is in transition. After the
    convergence new connections need no entries."""
    all_nodes = dict.fromkeys(ALL_NODES, 1)
    key = ListenerKey(VIP4, 80, "TCP" if packet is segment else "UDP")
    async with site() as made:
        one, two = made.gateway(1), made.gateway(2)
        now_s = 1000.0
        for each in (one, two):
            each.among_others(lambda: now_s)
            await made.join(each)
        await await_connected(one, two)
        for each, node in ((one, "node1"), (two, "node3")):
            each.forwarder.serve({node: 1}, ALL_NODES, protocol=key.protocol)
        opened = [one.open(range(40000, 40100), packet), two.open(range(41000, 41100), packet)]
        assert {node for each in opened for node in each.values()} == {"node1", "node3"}
        for each in (one, two):
            each.forwarder.serve(all_nodes, ALL_NODES, protocol=key.protocol)
        opened.append(two.open(range(42000, 42100), packet))
        table = "connections" if packet is segment else "datagrams"
        await until(lambda: len(entries(one, table)) == len(entries(two, table)) == 300)
        for each in (one, two):
            assert [each.nodes(ports, packet) for ports in opened] == opened
        # Long before the convergence ends, each gateway has received the earlier tables of the
        # other one. In these every slot had another node at one of the gateways.
        await until(lambda: not any(untracked(each, key) for each in (one, two)))
        # A table that arrives late makes the listener converge again.
        while converging(one, key) or converging(two, key):
            now_s += CONVERGENCE_S
            await asyncio.sleep(0.1)
        for each in (one, two):
            assert [each.nodes(ports, packet) for ports in opened] == opened


async def test_the_convergence_of_an_unchanged_listener_leaves_no_state() -> None:
    async with site() as made:
        one = made.gateway(1)
        now_s = 1000.0
        one.among_others(lambda: now_s)
        one.serve(OLD)
        await made.join(one)
        opened = one.open(PORTS)
        assert len(entries(one)) == len(PORTS)
        now_s += CONVERGENCE_S
        await until(lambda: not converging(one, WEB))
        assert slots(one).previous == b""
        assert not one.forwarder.maps["retained_nodes"].count()
        one.forwarder.maps["connections"].delete_all(list(entries(one)))
        assert one.nodes(PORTS) == opened, "the connections do not need their entries"
        one.open(range(41000, 41300))
        assert not entries(one)


def converging(gateway: Gateway, key: ListenerKey) -> bool:
    installed = gateway.forwarder.tables.installed(key)
    return installed is not None and installed.record.converging


def untracked(gateway: Gateway, key: ListenerKey) -> bool:
    """Return whether some slot of the listener has had only one node, as far as the gateway
    knows."""
    installed = gateway.forwarder.tables.installed(key)
    return installed is not None and NONE in array("H", installed.slots.previous)


async def test_a_gateway_without_packets_takes_over_the_slots_of_one_with_packets() -> None:
    """Changes of a listener before its first packet leave no slot in transition, but packets of
    other gateways' connections may arrive."""
    async with site() as made:
        one, two = await made.start(1), await made.start(2)
        await await_connected(one, two)
        one.serve(OLD)
        opened = one.open(PORTS)
        two.serve(NEW)
        one.serve(NEW)
        await until(lambda: slots(two) == slots(one))
        assert two.nodes(PORTS) == opened


@pytest.mark.parametrize("before", ["no packet", "packets"])
async def test_tables_of_a_new_service_before_its_first_packet_cause_no_transition(
    before: str,
) -> None:
    """A gateway to which a node has not answered yet sends its peers tables without the node. If a
    slot of these tables were a previous slot, the second packet of a connection could reach
    another node than the first packet, through another gateway. If the gateway has forwarded
    packets by these tables, its peers do have to know them."""
    async with site() as made:
        one, two = made.gateway(1), made.gateway(2)
        for each in (one, two):
            each.among_others(lambda: 1000.0)
        one.serve(OLD)
        if before == "packets":
            one.open(PORTS)
        sender = Exchange(one.forwarder.tables, one.forwarder.maps)
        message = sender.tables(WEB)
        assert message is not None
        assert message.used == (before == "packets")
        two.serve(NEW)
        receiver = Exchange(two.forwarder.tables, two.forwarder.maps)
        receiver.merge_peer_tables(message, behind=False)
        assert bool(slots(two).previous) == (before == "packets")
        for exchange in (sender, receiver):
            exchange.close()


async def test_other_tasks_run_while_many_tables_are_merged() -> None:
    ports = range(80, 100)
    async with site() as made:
        one, two = made.gateway(1), made.gateway(2)
        for port in ports:
            for weights in (OLD, NEW):
                one.forwarder.serve(weights, ALL_NODES, port=port)
            two.forwarder.serve(NEW, ALL_NODES, port=port)
        theirs, exchange = (
            Exchange(each.forwarder.tables, each.forwarder.maps) for each in (one, two)
        )
        two.peers._received_tables = {
            key: tables for key in theirs.listeners() if (tables := theirs.tables(key))
        }
        exchange.take_changed_listeners()
        merging = asyncio.create_task(two.peers._merge_tables(exchange))
        turns = list[int]()
        while sum(turns) < len(ports):
            await asyncio.sleep(0)
            turns.append(len(exchange.take_changed_listeners()))
        await stop(merging)
        assert max(turns) == 1
        for each in (theirs, exchange):
            each.close()


async def two_in_transition(made: Site) -> tuple[Gateway, Gateway]:
    """Return two connected gateways with slots in transition. Connections were opened at the first
    gateway, and both have their entries."""
    one, two = await made.start(1), await made.start(2)
    await open_with_both_peers(one, two)
    return one, two


async def one_without_a_process(made: Site) -> tuple[Gateway, Gateway]:
    """Return two gateways as `two_in_transition` does. Then the weights are OLD again, and the
    process of the first gateway ends, while its program keeps forwarding."""
    one, two = made.gateway(1), await made.start(2)
    process = await made.join(one)
    await open_with_both_peers(one, two)
    for each in (one, two):
        each.serve(OLD)
    await stop(process)
    return one, two


async def open_with_both_peers(one: Gateway, two: Gateway) -> None:
    for each in (one, two):
        each.serve(OLD)
        each.serve(NEW)
    await await_connected(one, two)
    one.open(PORTS)
    await until(lambda: len(entries(two)) == len(entries(one)) > 0)


async def test_the_latest_of_several_connections_with_the_same_ports_wins_everywhere() -> None:
    async with site() as made:
        one, two = await two_in_transition(made)
        for each in (one, two):
            each.serve(OLD)  # the slots have their first nodes again
        again = two.open(PORTS)
        await until(lambda: entries(one) == entries(two))
        assert one.nodes(PORTS) == again


async def test_a_syn_deletes_an_entry_that_is_no_longer_needed_on_all_gateways() -> None:
    """While the slot is in transition the SYN might be forged, and deletes nothing."""
    async with site() as made:
        one, two = await two_in_transition(made)
        port = next(iter(PORTS))
        its = {key for key in entries(two) if struct.unpack_from("!H", key, 32)[0] == port}
        assert its
        one.forwarder.run(segment("S", port=port, seq=1 << 31))
        assert its <= entries(one).keys()
        for each in (one, two):
            each.forwarder.serve({"node3": 1}, {"node3"})
        one.forwarder.run(segment("S", port=port, seq=1 << 31))
        await until(lambda: not its & (entries(one).keys() | entries(two).keys()))


@pytest.mark.parametrize("pinned", [False, True])
async def test_a_gateway_that_was_offline_takes_over_the_connections_of_its_peer(
    pinned: bool,
) -> None:
    """The gateway has no tables, or old ones. The peer has served alone since, and its slots are no
    longer in transition."""
    async with site() as made:
        one, two = await made.start(1), made.gateway(2)
        for each in (one, two) if pinned else (one,):
            each.serve(OLD)
            each.open(range(43000, 43010))
        # node1 and node2 disappear with their connections, and return.
        one.forwarder.serve({"node3": 1}, {"node3"})
        alone = one.open(PORTS)
        one.serve(OLD)
        one.peers._began_s -= peers_module.TRUSTED_AFTER_S
        await made.join(two)
        two.serve(OLD)
        assert two.nodes(PORTS) == alone


async def test_entries_made_while_no_process_ran_win_everywhere_after_a_restart() -> None:
    """The program of the gateway keeps forwarding without its process: connections with the ports
    of older connections go to other nodes."""
    async with site() as made:
        one, two = await one_without_a_process(made)
        again = one.open(PORTS)
        assert entries(one) != entries(two)
        two.peers._began_s -= peers_module.TRUSTED_AFTER_S
        one.peers = Peers(address(1), made.addresses)
        await made.join(one)
        assert one.nodes(PORTS) == again
        await until(lambda: entries(two) == entries(one))
        assert two.nodes(PORTS) == again


async def test_a_gateway_that_restarts_learns_the_entries_that_peers_made_meanwhile() -> None:
    """This holds also for a peer that has just started, from which the gateway inherits nothing."""
    async with site() as made:
        one, two = await one_without_a_process(made)
        again = two.open(PORTS)
        one.peers = Peers(address(1), made.addresses)
        await made.join(one)
        await until(lambda: entries(one) == entries(two))
        assert one.nodes(PORTS) == two.nodes(PORTS) == again


@pytest.mark.parametrize("stored", [True, False], ids=["same entry here", "no entry here"])
async def test_an_older_entry_of_a_peer_does_not_take_a_connection_that_is_being_opened(
    stored: bool,
) -> None:
    """The peer's entry is about an older connection with the same ports. It arrives between the SYN
    and the next packet of the new connection."""
    async with site() as made:
        one, two = await two_in_transition(made)
        for each in (one, two):
            each.serve(OLD)
        older = {port: one.forwarder.run(segment("A", port=port)).node for port in PORTS}
        if not stored:
            one.forwarder.maps["connections"].delete_all(list(entries(one)))
        opened = {port: one.forwarder.run(segment("S", port=port)).node for port in PORTS}
        assert opened != older
        mine, theirs = (Exchange(each.forwarder.tables, each.forwarder.maps) for each in (one, two))
        for message in map(theirs.entries, theirs.all_entries()):
            mine.merge_flows(message)
        assert one.nodes(PORTS) == opened
        for exchange in (mine, theirs):
            exchange.close()


async def test_flows_that_begin_while_a_gateway_inherits_are_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program forwards while the entries of a peer are stored. A connection that begins in the
    meantime with the ports of an older connection stays on its node, unless its entry is one of
    the few that are stored at the same moment."""
    async with site() as made:
        one, two = await one_without_a_process(made)
        two.peers._began_s -= peers_module.TRUSTED_AFTER_S
        one.peers = Peers(address(1), made.addresses)
        before = {port: one.forwarder.run(segment("A", port=port)).node for port in PORTS}
        opened = dict[int, str]()

        def merge(exchange: Exchange, message: FlowsMessage, **ignored: Any) -> None:
            if not opened:
                first = list(split(message.records))[: peers_module.MERGE_BATCH]
                now = {struct.unpack_from("!H", flow, 32)[0] for flow, _ in first}
                opened.update(one.open(sorted(set(PORTS) - now)))
            real(exchange, message, **ignored)

        real = Exchange.merge_flows
        monkeypatch.setattr(Exchange, "merge_flows", merge)
        await one.peers.inherit(one.forwarder.tables, one.forwarder.maps)
        monkeypatch.undo()
        assert any(node != before[port] for port, node in opened.items())
        assert one.nodes(opened) == opened
        await stop(asyncio.ensure_future(one.peers.run()))


@pytest.mark.parametrize("fresh", [False, True], ids=["has run for long", "has just begun"])
async def test_an_entry_made_while_a_peer_sends_its_entries_is_younger(fresh: bool) -> None:
    """This holds also before the process has read the report of the new entry."""
    async with site() as made:
        one, two = made.gateway(1), made.gateway(2)
        for each in (one, two):
            each.serve(OLD)
            each.serve(NEW)
        two.open(PORTS)
        for each in (one, two):
            each.serve(OLD)
            await each.peers.inherit(each.forwarder.tables, each.forwarder.maps)
        if fresh:
            one.peers._recent_start_until_s = math.inf
        mine, theirs = one.peers._exchange, two.peers._exchange
        assert mine
        assert theirs
        (stored,) = map(theirs.entries, theirs.all_entries())
        reader, peer = asyncio.StreamReader(), address(2)
        listening = asyncio.create_task(
            one.peers._receive(peer, HelloMessage("two", 0.0), reader, mine, Backoff(0.1, 1.0))
        )
        made.stack.push_async_callback(stop, listening)
        reader.feed_data(
            frame(msgspec.structs.replace(stored, records=stored.records[: ENTRY.size]))
        )
        await have_received(1, one)
        again = one.open(PORTS)
        assert entries(one) != entries(two)
        reader.feed_data(frame(stored) + frame(CompleteMessage()))
        await until(lambda: one.peers.shown[0].connected)
        assert one.nodes(PORTS) == again
        mine.close()
        theirs.close()


async def test_a_gateway_that_was_disconnected_for_long_learns_the_connections_of_its_peer() -> (
    None
):
    """The gateway has run all the time, but without a connection to any peer."""
    async with site() as made:
        one, two = made.gateway(1), await made.start(2)
        for each in (one, two):
            each.serve(OLD)
            each.open(range(43000, 43010))
        one.forwarder.serve({"node3": 1}, {"node3"})
        alone = one.open(PORTS)
        one.serve(OLD)
        two.peers._alone_since_s -= 100
        one.peers._began_s -= 200
        await made.join(one)
        await until(lambda: two.nodes(PORTS) == alone)


async def test_of_two_gateways_that_were_cut_off_the_later_entry_of_a_flow_wins() -> None:
    """Both gateways have run and forwarded all the time. They were disconnected for so long that
    each regards the other as offline."""
    mine, others, both = PORTS[:100], PORTS[100:200], PORTS[200:]
    async with site() as made:
        cable = Cable(made.stack)
        ends = await cable.end(2, 1), await cable.end(1, 2)
        one, two = made.gateway(1), made.gateway(2)
        for each, number, end in zip((one, two), (1, 2), ends, strict=True):
            each.peers = Peers(address(number), [end, f"127.0.77.{3 - number}:1"])
            await made.join(each)
        await until(lambda: all(each.peers.shown[0].connected for each in (one, two)))
        for each in (one, two):
            each.serve(OLD)
            each.serve(NEW)
        one.open(PORTS)
        await until(lambda: len(entries(two)) == len(entries(one)) > 0)
        cable.cut()
        await until(lambda: not any(each.peers.shown[0].connected for each in (one, two)))
        for each in (one, two):
            each.peers._alone_since_s -= 2 * peers_module.OFFLINE_S
            each.peers._began_s -= 2 * peers_module.TRUSTED_AFTER_S
            each.serve(OLD)
        right = one.open([*mine, *both])
        two.serve(NEW)
        await asyncio.sleep(0.1)  # the time of an entry is the time at which its report is read
        right |= two.open([*others, *both])
        cable.mend()
        await until(lambda: all(each.peers.shown[0].connected for each in (one, two)))
        await until(lambda: entries(one) == entries(two))
        assert one.nodes(PORTS) == two.nodes(PORTS) == right


async def test_unknown_callers_get_nothing() -> None:
    async with site() as made:
        one = await made.start(1)
        one.serve(OLD)
        reader, writer = await asyncio.open_connection(
            "127.0.77.1", 9445, local_addr=("127.0.77.9", 0)
        )
        with pytest.raises(Unavailable):
            await read_message(reader, within_s=DEADLINE_S)
        writer.close()
        reader, writer = await asyncio.open_connection(
            "127.0.77.1", 9445, local_addr=("127.0.77.2", 0)
        )
        assert isinstance(await read_message(reader, within_s=DEADLINE_S), HelloMessage)
        writer.close()


async def test_a_follower_that_reads_nothing_is_disconnected() -> None:
    async with site() as made:
        forwarder = made.stack.enter_context(a_forwarder(fast=False))
        one = Gateway(forwarder, Peers(address(1), made.addresses, stalled_s=0.3))
        await made.join(one)
        one.serve(OLD)
        one.serve(NEW)
        _, writer = await asyncio.open_connection(
            "127.0.77.1", 9445, local_addr=("127.0.77.2", 0), limit=1024
        )
        await until(lambda: one.peers.followers == 1)
        for round_ in range(100):
            # Each table has 64 KiB.
            one.forwarder.serve({"node1": 1 + round_ % 2, "node2": 1, "node3": 300}, ALL_NODES)
            await asyncio.sleep(0.11)
            if not one.peers.followers:
                break
        assert one.peers.followers == 0
        writer.close()


async def test_a_gateway_that_is_its_only_peer_shows_no_peers() -> None:
    async with site(1) as made:
        own = await made.start(1)
        own.serve(OLD)
        assert own.peers.shown == []


async def test_a_gateway_that_connects_to_itself_does_not_follow_itself() -> None:
    async with AsyncExitStack() as stack:
        forwarder = stack.enter_context(a_forwarder(fast=False))
        own = Gateway(forwarder, Peers("*:9446", ["127.0.0.1:9446"]))
        await Site(stack, 1).join(own)
        await until(lambda: own.peers.shown == [])


async def test_every_notation_of_an_address_is_accepted() -> None:
    async with AsyncExitStack() as stack:
        forwarder = stack.enter_context(a_forwarder(fast=False))
        await Site(stack, 1).join(Gateway(forwarder, Peers("[::1]:9447", ["[0:0:0::0001]:9448"])))
        reader, writer = await asyncio.open_connection("::1", 9447)
        assert isinstance(await read_message(reader, within_s=DEADLINE_S), HelloMessage)
        writer.close()


async def test_news_during_a_transfer_does_not_wait_for_the_next_keepalive() -> None:
    async with AsyncExitStack() as stack:
        forwarder = stack.enter_context(a_forwarder(fast=False))
        one = Gateway(forwarder, Peers("", []))
        one.serve(OLD)
        exchange = Exchange(forwarder.tables, forwarder.maps)
        stack.callback(exchange.close)
        (key,) = exchange.listeners()
        follower, hello = Follower(exchange), HelloMessage("long" * 10_000, 0.0)
        reader, writer = await _connected(stack, follower, hello)
        while not isinstance(await read_message(reader, within_s=DEADLINE_S), CompleteMessage):
            pass
        much = 100  # more than the connection buffers
        follower.enqueue((), [frame(hello) * much])
        await until(lambda: not follower._entries)
        follower.enqueue([key], ())
        for _ in range(much):
            assert await read_message(reader, within_s=DEADLINE_S) == hello
        assert isinstance(await read_message(reader, within_s=DEADLINE_S), TablesMessage)
        writer.close()


async def _connected(
    stack: AsyncExitStack, follower: Follower, hello: HelloMessage
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Serve the follower on a connection, and return the other end of the connection."""
    here, there = socket.socketpair()
    _, serving = await asyncio.open_connection(sock=here)
    reader, writer = await asyncio.open_connection(sock=there)
    stack.push_async_callback(stop, asyncio.create_task(follower.serve(hello, serving)))
    stack.callback(serving.transport.abort)
    return reader, writer


async def test_an_address_on_which_it_cannot_listen_is_refused() -> None:
    async with AsyncExitStack() as stack:
        forwarder = stack.enter_context(a_forwarder(fast=False))
        peers = Peers("203.0.113.99:9445", [])
        await peers.inherit(forwarder.tables, forwarder.maps)
        with pytest.raises(
            Refused, match=r"listening on 203\.0\.113\.99:9445 for other gateways failed"
        ):
            await peers.run()


SLOTS = Slots(("a", "b"), bytes((0, 0, 1, 0) * 510 + (0, 0)), b"")


def tables(slots: Slots) -> TablesMessage:
    return TablesMessage(
        VIP4,
        80,
        "TCP",
        ("default", "web"),
        "uid",
        *slots,
        nodes_with_connections=(),
        restricted=False,
        used=True,
    )


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (HelloMessage("x", 1.0, version=2), "version 2"),
        (tables(SLOTS._replace(nodes=("a",))), "invalid"),
        (tables(SLOTS._replace(nodes=("a", ""))), "invalid"),
        (tables(SLOTS._replace(current=SLOTS.current[:-2])), "invalid"),
        (tables(SLOTS._replace(current=b"\xfe\xff" * 1021)), "invalid"),
        (FlowsMessage({}, b"x" * 43), "invalid"),
        (FlowsMessage({}, bytes(44 * 4097)), "invalid"),
        (FlowsMessage({}, bytes(44), (1.0, 2.0)), "invalid"),
    ],
)
def test_invalid_messages_are_refused(message: Message, problem: str) -> None:
    with pytest.raises(Unavailable, match=problem):
        decode(msgspec.msgpack.encode(message))


def test_messages_survive_encoding() -> None:
    some, aged = FlowsMessage({7: "a"}, bytes(88)), FlowsMessage({7: "a"}, bytes(44), (1.5,))
    for message in (HelloMessage("x", 1.0), tables(SLOTS), some, aged, CompleteMessage()):
        assert decode(frame(message)[4:]) == message


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0\0\0",
        struct.pack("!I", MAX_BYTES + 1),
        b"\0\0\0\x04spam",
        b"\0\0\0\x02\xc1\xc1",
    ],
)
async def test_malformed_input_is_refused(sent: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(sent)
    reader.feed_eof()
    with pytest.raises(Unavailable):
        await read_message(reader, within_s=DEADLINE_S)


async def test_an_entry_without_the_name_of_its_node_is_ignored() -> None:
    async with site() as made:
        one = made.gateway(1)
        await one.peers.inherit(one.forwarder.tables, one.forwarder.maps)
        exchange = one.peers._exchange
        assert exchange is not None
        table = "excess_flows"  # a flow without a listener here has no share
        key = bytes(36) + b"\x06" + bytes(3)
        exchange.merge_flows(FlowsMessage({}, key + struct.pack("=I", 3)))
        assert entries(one, table) == {}
        exchange.merge_flows(FlowsMessage({3: "node9"}, key + struct.pack("=I", 3)))
        assert entries(one, table) == {key: "node9"}
        exchange.merge_flows(
            FlowsMessage({3: "node1"}, key + struct.pack("=I", 3)), ignored=({key},)
        )
        assert entries(one, table) == {key: "node9"}
        exchange.merge_flows(FlowsMessage({}, key + struct.pack("=I", NONE)))
        assert entries(one, table) == {}
        exchange.close()
