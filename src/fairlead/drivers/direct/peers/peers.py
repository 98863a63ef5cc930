"""The exchange between gateways about slots in transition, so that no connection moves when a
gateway is lost, added or restarted.

In: the address to listen on, and the other gateways, which may change at any time. Out: their
tables before this gateway forwards, and their flow entries from then on; our tables and entries for
them. Each gateway follows all others, over TCP. A gateway may follow if its address is known and,
with `tls`, its certificate is accepted (see `tls`). Without `tls`, a host that can take a peer's
address can send connections to a wrong node. A gateway that can reach no peer starts and forwards
like a gateway without peers: no packet waits for a peer. Neither does it need its port.
"""

import asyncio
import contextlib
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence, Set
from functools import partial
from ipaddress import ip_address

import structlog

from fairlead.backoff import Backoff
from fairlead.drivers import Component
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.peers.exchange import Exchange, parts_of, split
from fairlead.drivers.direct.peers.followers import STALLED_S, Follower
from fairlead.drivers.direct.peers.listening import serve_at
from fairlead.drivers.direct.peers.messages import (
    CompleteMessage,
    FlowsMessage,
    HelloMessage,
    Message,
    TablesMessage,
    frame,
    read_message,
)
from fairlead.drivers.direct.peers.metrics import PeersCollector
from fairlead.drivers.direct.peers.recent import RecentFlows
from fairlead.drivers.direct.peers.refusals import PERIOD_S, Refusals
from fairlead.drivers.direct.peers.server import Address, PeerServer
from fairlead.drivers.direct.peers.tls import PEER_NAME, PeerTLS, describe
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.errors import Unavailable
from fairlead.model import Finding
from fairlead.net.address import split_host_port
from fairlead.net.bpf import Map
from fairlead.role_state import PeersState, PeerState

log = structlog.get_logger()

FOUND_S = 5.0
"""A start waits this long for the list of the other gateways, if it is found in the cluster."""
HELLO_S = 2.0
"""A start waits this long for a connection and a hello, and this long again for each message."""
RETURN_HELLO_S, RETURN_PAUSE_S = 0.5, 0.1
"""A gateway that was cut off waits this long for a connection, and this long until it tries again,
so that it finds its peers soon after its return."""
RETRY_S = 0.2
"""The interval at which a start connects again to a gateway that may not know this one yet."""
COLLECT_S = 0.002
"""New entries are collected for this time before they are sent."""
TABLES_S = 0.1
"""Period in which changed tables are sent."""
MERGE_S = 0.5
"""Period in which tables of peers are merged. Usually all gateways make the same change at the same
moment, and nothing is left to merge after this time."""
SILENCE_S = 3.5
"""A peer that sends nothing for this time is lost. A peer without changes sends an AliveMessage
each second."""
OFFLINE_S = 5.0
"""A gateway that had no connection to a peer for this time was offline."""
UNDELIVERED_S = 15.0
"""Longer than it takes to notice that a peer receives nothing any more. Entries that were sent
within this time may not have arrived."""
MERGE_BATCH = 128
"""Number of entries of a peer that are stored at once. It takes about half a millisecond. The
program forwards in the meantime: the entry of a connection that begins within this time with the
ports of an older connection may be replaced."""
TRUSTED_AFTER_S = 30.0
"""Tables of a peer that has followed the cluster for less than this time never replace our own. For
this time after its start, a gateway also sends the entries that changed while no process was there
to every follower that connects."""


class Peers(Component):
    """The connections to and from the other gateways.

    `listen`: the address on which other gateways can connect, `address:port` or `*:port`; empty for
    none. `peers`: the addresses of all gateways; our own may be among them. None: `set_peers` gives
    them later, and may change them at any time. `tls`: mutual TLS on all connections. `stalled_s`:
    a follower that receives nothing for this time is dropped, and begins again when it reconnects.
    `log_s`: the period in which refused connections of one kind are logged once.

    Call `inherit` before packets are forwarded, then keep `run` running until the driver closes.
    """

    name = "peers"

    def __init__(
        self,
        listen: str,
        peers: Sequence[str] | None,
        *,
        tls: PeerTLS | None = None,
        stalled_s: float = STALLED_S,
        log_s: float = PERIOD_S,
    ) -> None:
        self._listen = listen
        self._tls = tls
        self._log_s = log_s
        self._stalled_s = stalled_s
        self._instance = secrets.token_hex(8)
        self._exchange: Exchange | None = None
        self._followers: set[Follower] = set()
        self._peers: dict[str, PeerState] = {}
        self._allowed = set[Address]()
        self._found = None if peers is not None else asyncio.Event()
        """Set when `set_peers` has been called; None if the peers are fixed."""
        self._changed = asyncio.Event()
        self._server: PeerServer | None = None
        self._finding: Finding | None = None
        """Why this gateway does not listen, if it should."""
        self.listening = False
        """Whether other gateways can connect."""
        self.unknown: Callable[[], None] = lambda: None
        """Called when an address connects that is not that of a peer."""
        if peers is not None:
            self._set(peers, (split_host_port(each)[0] for each in peers))
        self._received_tables: dict[ListenerKey, TablesMessage] = {}
        self._recent = RecentFlows()
        """Flows whose entries changed here while no process could send them, or while a peer could
        not receive them."""
        self._began_s = self._alone_since_s = time.monotonic()
        self._recent_start_until_s = 0.0
        self._awaited: set[str] = set()
        """The peers whose state is needed again, because this host was cut off."""
        self._was_cut_off = False
        self._writers: dict[str, asyncio.StreamWriter] = {}
        """The connections to the peers that this gateway follows."""
        self.sent = 0
        """The number of new entries that were sent."""

    def set_peers(self, peers: Sequence[str], addresses: Iterable[str]) -> None:
        """Replace the other gateways. `peers`: where to connect to each. `addresses`: the addresses
        from which they may connect. Connections of other gateways end."""
        self._set(peers, addresses)
        if self._found is not None:
            self._found.set()

    def _set(self, peers: Sequence[str], addresses: Iterable[str]) -> None:
        was_connected = self._connected
        self._allowed.clear()
        self._allowed.update(ip_address(each.partition("%")[0]) for each in addresses)
        others = [each for each in peers if each != self._listen]
        self._peers = {each: self._peers.get(each, PeerState(each, False)) for each in others}
        if was_connected and not self._connected:
            self._alone_since_s = time.monotonic()
        self._changed.set()
        if self._server is not None:
            self._server.end_unknown()

    def _on_unknown(self) -> None:
        self.unknown()

    @property
    def shown(self) -> list[PeerState]:
        """The other gateways."""
        return list(self._peers.values())

    def status(self) -> PeersState:
        """For `/state`. May be called from any thread."""
        finding = self._finding
        findings = (finding,) if finding is not None else ()
        return PeersState(tuple(self.shown), self.followers, findings)

    def _on_listening(self, finding: Finding | None) -> None:
        self._finding, self.listening = finding, finding is None

    def collectors(self) -> tuple[PeersCollector]:
        return (PeersCollector(self),)

    @property
    def followers(self) -> int:
        """The number of gateways that follow this gateway now."""
        return len(self._followers)

    @property
    def received(self) -> int:
        """The number of entries that were received from peers and stored."""
        return self._exchange.received if self._exchange else 0

    def begin_again(self) -> None:
        """End the connections to all peers, because this host is cut off, and follow them again. It
        then takes over what the peers know about the connections of the meantime."""
        self._awaited |= {name for name, each in self._peers.items() if each.connected}
        self._was_cut_off = bool(self._awaited)
        for peer in self._awaited:
            self._lost(peer, "this host is cut off")
            if peer in self._writers:
                self._writers[peer].transport.abort()

    def await_missing(self) -> None:
        """Take over what the peers that are not connected know, because this process has started
        while its host was cut off."""
        self._awaited |= {name for name, each in self._peers.items() if not each.connected}
        self._was_cut_off = bool(self._awaited)

    @property
    def caught_up(self) -> bool:
        """Whether all peers have sent their state that `begin_again` and `await_missing` found."""
        return self._awaited.isdisjoint(self._peers)

    def stop_waiting(self) -> None:
        """Treat the peers that have not sent their state yet as lost."""
        self._awaited.clear()

    async def inherit(self, tables: ListenerMaps, maps: dict[str, Map]) -> None:
        """Begin with the state of the peer that has run for longest, if a peer answers. Never
        fails.

        Tables that are in the maps already are of a previous process, which ended some time ago.
        Peers know more by now, unless they have just started themselves. Peers do not know,
        however, the flows that the program has recorded since that process ended.
        """
        self._exchange = exchange = Exchange(tables, maps)
        if self._found is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FOUND_S):
                    await self._found.wait()
        min_age_s = TRUSTED_AFTER_S if exchange.listeners() else 0.0
        answers = [each for each in await self._fetch_all() if each[0].age_s >= min_age_s]
        self._alone_since_s = time.monotonic()
        self._recent.record(exchange.drain_unread(), time.monotonic())
        if not answers:
            return
        hello, messages = max(answers, key=lambda each: each[0].age_s)
        self._began_s = time.monotonic() - hello.age_s
        for message in messages:
            match message:
                case TablesMessage():
                    exchange.inherit_tables(message)
                case FlowsMessage():
                    # The program forwards meanwhile. A new connection with the ports of an older
                    # one is known only from the entries that the program has reported so far, so
                    # few inherited entries are stored at a time.
                    for part in parts_of(message, MERGE_BATCH):
                        self._recent.record(exchange.drain_unread(), time.monotonic())
                        exchange.merge_flows(part, ignored=(self._recent.flows,))
        exchange.take_changed_listeners()
        log.info(
            "inherited the state of a peer",
            listeners=len(exchange.listeners()),
            entries=exchange.received,
        )

    async def _fetch_all(self) -> list[tuple[HelloMessage, list[Message]]]:
        async with asyncio.TaskGroup() as group:
            fetching = [group.create_task(self._fetch(each)) for each in self._peers]
        return [answer for task in fetching if (answer := task.result()) is not None]

    async def _fetch(self, peer: str) -> tuple[HelloMessage, list[Message]] | None:
        """Return the hello and the whole state of the peer; None if it does not answer."""
        until_s = time.monotonic() + (HELLO_S if self._found is not None else 0.0)
        while True:
            messages: list[Message] = []
            try:
                async with self._following(peer) as (hello, reader):
                    while not isinstance(
                        message := await read_message(reader, within_s=HELLO_S), CompleteMessage
                    ):
                        messages.append(message)
                return hello, messages
            except Unavailable as problem:
                # A gateway that is new is refused until the peer has found it in the cluster.
                if time.monotonic() >= until_s:
                    log.info("a peer did not send its state", peer=peer, problem=str(problem))
                    return None
            await asyncio.sleep(RETRY_S)

    @contextlib.asynccontextmanager
    async def _following(
        self, peer: str
    ) -> AsyncIterator[tuple[HelloMessage, asyncio.StreamReader]]:
        """Connect to the peer, and receive its hello. Raise Unavailable."""
        host, port = split_host_port(peer)
        # Peers know this gateway by the address at which it listens.
        source = None if self._listen[:1] in ("", "*") else (split_host_port(self._listen)[0], 0)
        within_s = RETURN_HELLO_S if peer in self._awaited else HELLO_S
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await self._connect(host, port, source)
        except TimeoutError:
            raise Unavailable(f"no answer within {within_s:g} s") from None
        except OSError as error:
            raise Unavailable(f"connecting failed: {describe(error)}") from error
        self._writers[peer] = writer
        try:
            yield await self._hello_of(host, reader), reader
        finally:
            if self._writers.get(peer) is writer:
                del self._writers[peer]
            writer.transport.abort()

    async def _connect(
        self, host: str, port: int, source: tuple[str, int] | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._tls is None:
            return await asyncio.open_connection(host, port, local_addr=source)
        return await asyncio.open_connection(
            host,
            port,
            local_addr=source,
            ssl=self._tls.client,
            server_hostname=PEER_NAME,
            ssl_handshake_timeout=HELLO_S,
        )

    async def _hello_of(self, host: str, reader: asyncio.StreamReader) -> HelloMessage:
        try:
            hello = await read_message(reader, within_s=HELLO_S)
        except Unavailable as problem:
            if isinstance(problem.__cause__, ssl.SSLError):
                raise Unavailable(describe(problem.__cause__)) from problem
            # In TLS 1.3 a server may still refuse the client's certificate after the client has
            # finished the handshake.
            hint = (
                "it may not accept the certificate of this gateway"
                if self._tls
                else "it may require TLS, see gateway.peerTLS"
            )
            raise Unavailable(
                f"{problem.message}, without a hello: {hint}; its log shows why"
            ) from problem
        if not isinstance(hello, HelloMessage):
            raise Unavailable(f"the first message of {host} is not a hello")
        return hello

    async def run(self) -> None:
        """Follow the other gateways and serve followers, until cancelled."""
        exchange = self._exchange
        if exchange is None:
            raise RuntimeError("inherit was not called")
        loop = asyncio.get_running_loop()
        server = PeerServer(
            self._allowed,
            self._on_unknown,
            partial(self._follower, exchange),
            self._hello,
            self._followers,
            Refusals(self._log_s),
            self._tls,
        )
        self._recent_start_until_s = time.monotonic() + TRUSTED_AFTER_S
        self._server = server
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(serve_at(self._listen, server, self._on_listening))
                group.create_task(self._send_entries(exchange))
                group.create_task(self._send_tables(exchange))
                group.create_task(self._merge_tables(exchange))
                group.create_task(self._follow_all(exchange, group))
        finally:
            self._server, self.listening = None, False
            loop.remove_reader(exchange.descriptor)
            exchange.close()
            self._exchange = None

    @property
    def _recently_started(self) -> bool:
        """Whether this process started recently. The entries in its maps may be older than those of
        peers."""
        return time.monotonic() <= self._recent_start_until_s

    def _follower(self, exchange: Exchange) -> Follower:
        """Return a new follower. It ignores entries of the whole state for flows that it knows
        already, so recently changed entries are sent to it again at the end."""
        return Follower(exchange, lambda: self._recent_entries(exchange), stalled_s=self._stalled_s)

    def _recent_entries(self, exchange: Exchange) -> list[bytes]:
        return [frame(each) for each in exchange.current_entries(self._recent, time.monotonic())]

    def _hello(self) -> HelloMessage:
        return HelloMessage(self._instance, time.monotonic() - self._began_s)

    async def _send_entries(self, exchange: Exchange) -> None:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        while True:
            readable.clear()
            loop.add_reader(exchange.descriptor, readable.set)
            await readable.wait()
            loop.remove_reader(exchange.descriptor)  # otherwise it would be readable all the time
            await asyncio.sleep(COLLECT_S)
            for message in exchange.new_entries():
                self._send(message)
                # A flood may produce entries as fast as they are read, so other tasks get a turn.
                await asyncio.sleep(0)

    def _send(self, message: FlowsMessage) -> None:
        data = frame(message)
        self.sent += message.count
        self._recent.record((flow for flow, _ in split(message.records)), time.monotonic())
        for follower in self._followers:
            follower.enqueue((), (data,))

    async def _send_tables(self, exchange: Exchange) -> None:
        while True:
            await asyncio.sleep(TABLES_S)
            exchange.end_convergence()
            if not self._recently_started and all(each.connected for each in self._peers.values()):
                self._recent.forget_before(time.monotonic() - UNDELIVERED_S)
            if changed := exchange.take_changed_listeners():
                for follower in self._followers:
                    follower.enqueue(changed, ())

    async def _merge_tables(self, exchange: Exchange) -> None:
        while True:
            await asyncio.sleep(MERGE_S)
            await self._merge_received(exchange)

    async def _merge_received(self, exchange: Exchange) -> None:
        received, self._received_tables = self._received_tables, {}
        for message in received.values():
            exchange.merge_peer_tables(message, behind=False)
            # After a change of many listeners this takes seconds, so other tasks get a turn.
            await asyncio.sleep(0)

    async def _follow_all(self, exchange: Exchange, group: asyncio.TaskGroup) -> None:
        """Follow each peer in a task of its own, and end the tasks of former peers."""
        tasks: dict[str, asyncio.Task[None]] = {}
        while True:
            self._changed.clear()
            for peer in tasks.keys() - self._peers.keys():
                tasks.pop(peer).cancel()
            for peer in self._peers.keys() - tasks.keys():
                tasks[peer] = group.create_task(self._follow(peer, exchange))
            await self._changed.wait()

    async def _follow(self, peer: str, exchange: Exchange) -> None:
        """Receive what the peer sends, until cancelled or until the peer turns out to be this
        gateway."""
        backoff = Backoff(0.1, 1.0)
        while True:
            try:
                async with self._following(peer) as (hello, reader):
                    if hello.instance == self._instance:
                        self._peers.pop(peer, None)
                        return
                    await self._receive(peer, hello, reader, exchange, backoff)
            except Unavailable as problem:
                self._lost(peer, str(problem))
            pause_s = backoff.next_s()
            await asyncio.sleep(RETURN_PAUSE_S if peer in self._awaited else pause_s)

    async def _receive(
        self,
        peer: str,
        hello: HelloMessage,
        reader: asyncio.StreamReader,
        exchange: Exchange,
        backoff: Backoff,
    ) -> None:
        """Apply the messages of the peer. Raise Unavailable when the connection ends."""
        offline_s = 0.0 if self._connected else time.monotonic() - self._alone_since_s
        # Only a peer that ran for the whole outage knows the connections of that time.
        offline = offline_s >= OFFLINE_S or (offline_s > 0 and self._was_cut_off)
        behind = offline and hello.age_s >= max(TRUSTED_AFTER_S, offline_s)
        # Until CompleteMessage the peer sends its whole state. Its entries of flows in `own` are
        # ignored, because ours have precedence; newer entries of the peer follow with their ages.
        own: tuple[Set[bytes], ...] = (self._recent.flows,)
        if not behind and not self._recently_started:
            own += (await asyncio.to_thread(exchange.present_flows),)
        while True:
            match await read_message(reader, within_s=SILENCE_S):
                case TablesMessage() as message if behind:
                    exchange.merge_peer_tables(message, behind=True)
                    await asyncio.sleep(0)
                case TablesMessage() as message:
                    self._received_tables[message.key] = message
                case FlowsMessage() as message:
                    for part in parts_of(message, MERGE_BATCH):
                        if own or part.ages_s:
                            # Flows that the program has reported so far are newer than entries
                            # that the peer has had for a while.
                            for new in exchange.new_entries():
                                self._send(new)
                        exchange.merge_flows(
                            part, ignored=(self._newer_here(part),) if part.ages_s else own
                        )
                case CompleteMessage():
                    behind, own = False, ()
                    if peer in self._awaited:
                        await self._merge_received(exchange)
                        self._awaited.discard(peer)
                    self._was_cut_off = False
                    if peer in self._peers:
                        self._peers[peer] = PeerState(peer, True)
                    backoff.reset()
                    log.info("following a gateway", peer=peer, offline_s=round(offline_s, 1))

    def _newer_here(self, message: FlowsMessage) -> Set[bytes]:
        """Return the flows of the message that changed here later than at the sender."""
        now_s = time.monotonic()
        flows = zip(split(message.records), message.ages_s, strict=True)
        return {flow for (flow, _), age_s in flows if self._recent.changed_s(flow) > now_s - age_s}

    @property
    def _connected(self) -> bool:
        return any(each.connected for each in self._peers.values())

    def _lost(self, peer: str, problem: str) -> None:
        if peer not in self._peers:
            return
        if self._peers[peer] != PeerState(peer, False, problem):
            log.warning("not following a gateway", peer=peer, problem=problem)
        was_connected = self._connected
        self._peers[peer] = PeerState(peer, False, problem)
        if was_connected and not self._connected:
            self._alone_since_s = time.monotonic()
