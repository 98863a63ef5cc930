"""The exchange between gateways about slots in transition, so that no connection moves when a
gateway is lost, added or restarted.

In: the address to listen on, and the other gateways, which may change at any time. Out: their
tables before this gateway forwards, and their flow entries from then on; our tables and entries for
them. Each gateway follows all others, over TCP. A gateway may follow if its address is known and,
with `tls`, its certificate is accepted (see `tls`). Without `tls`, a host that can take a peer's
address can send connections to a wrong node. A gateway that can reach no peer starts and forwards
like a gateway without peers: no packet waits for a peer.

Gateways that find each other without `tls` accept only hosts on a link with them (`net.own_link`):
nobody has decided that the network of these hosts contains only gateways, and their addresses may
also be those of the pods on these hosts, as far as others can see.
"""

import asyncio
import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Collection, Sequence, Set
from functools import partial
from ipaddress import ip_address

import structlog

from fairlead.backoff import Backoff
from fairlead.drivers import Component
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.peers.exchange import Exchange, parts_of, split
from fairlead.drivers.direct.peers.followers import STALLED_S, Follower
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
from fairlead.drivers.direct.peers.server import Address, PeerServer, serving
from fairlead.drivers.direct.peers.tls import PEER_NAME, PeerTLS, describe
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.errors import Refused, Unavailable
from fairlead.model import Finding
from fairlead.net.address import socket_family, split_host_port
from fairlead.net.bpf import Map
from fairlead.net.own_link import only_own_link
from fairlead.role_state import PeersState, PeerState

log = structlog.get_logger()

NOT_LISTENING = "PeersNotListening"
HELLO_S = 2.0
"""A start waits this long for a connection and a hello, and this long again for each message."""
FOUND_S = 2.0
"""How long a start waits until it is known which other gateways there are."""
ASK_S = 0.1
"""The interval at which a start connects again to a gateway that may not know this one yet."""
LISTEN_S = 5.0
"""The interval at which a gateway tries to listen again on a port that is not free."""
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


class _WithoutHello(Unavailable):
    """The peer has closed the connection at once."""


class Peers(Component):
    """The connections to and from the other gateways.

    `listen`: the address on which other gateways can connect, `address:port` or `*:port`; empty for
    none. `peers`: the addresses of all gateways; our own may be among them. None: `found` passes
    them. `tls`: mutual TLS on all connections. `stalled_s`: a follower that receives nothing for
    this time is dropped, and begins again when it reconnects. `log_s`: the period in which refused
    connections of one kind are logged once.

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
        self._peers = {each: PeerState(each, False) for each in peers or () if each != listen}
        self._allowed = _addresses(peers or ())
        self._live: frozenset[str] = frozenset(self._peers)
        """The peers that are followed again when their connection ends."""
        self._found = asyncio.Event() if peers is None else None
        """Set when it is known which gateways there are; None if the configuration names them."""
        self._own_link = peers is None and tls is None
        self._changed = asyncio.Event()
        self._server: PeerServer | None = None
        self._not_listening: Finding | None = None
        self.source = "" if listen[:1] in ("", "*") else split_host_port(listen)[0]
        """The address from which this gateway connects to the others, because they know it by this
        address; empty: any."""
        self._received_tables: dict[ListenerKey, TablesMessage] = {}
        self._recent = RecentFlows()
        """Flows whose entries changed here while no process could send them, or while a peer could
        not receive them."""
        self._began_s = self._alone_since_s = time.monotonic()
        self._recent_start_until_s = 0.0
        self.sent = 0
        """The number of new entries that were sent."""

    def found(self, live: Collection[str], known: Collection[str]) -> None:
        """Replace the other gateways. `live`: where to connect to those that are alive. `known`:
        the same for all that have not been removed: they may connect, and one that is followed
        stays a peer until its connection ends, because it may still forward."""
        assert self._found is not None, "the configuration names the peers"
        was_connected = self._connected
        self._live = frozenset(live)
        kept = {each for each in known if each in self._peers and self._peers[each].connected}
        self._peers = {
            each: self._peers.get(each, PeerState(each, False))
            for each in sorted(self._live | kept)
        }
        self._allowed.clear()
        self._allowed.update(_addresses(known))
        if was_connected and not self._connected:
            self._alone_since_s = time.monotonic()
        if self._server is not None:
            self._server.end_unknown()
        self._found.set()
        self._changed.set()

    @property
    def shown(self) -> list[PeerState]:
        """The other gateways."""
        return list(self._peers.values())

    def status(self) -> PeersState:
        """For `/state`. May be called from any thread."""
        return PeersState(tuple(self.shown), self.followers)

    def findings(self) -> Sequence[Finding]:
        return (self._not_listening,) if self._not_listening is not None else ()

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
        until_s = time.monotonic() + HELLO_S
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
                # A gateway that is new is refused until the peer has found it, too.
                refused = self._found is not None and isinstance(problem, _WithoutHello)
                if not refused or time.monotonic() >= until_s:
                    log.info("a peer did not send its state", peer=peer, problem=str(problem))
                    return None
            await asyncio.sleep(ASK_S)

    @contextlib.asynccontextmanager
    async def _following(
        self, peer: str
    ) -> AsyncIterator[tuple[HelloMessage, asyncio.StreamReader]]:
        """Connect to the peer, and receive its hello. Raise Unavailable."""
        host, port = split_host_port(peer)
        source = (self.source, 0) if self.source else None
        try:
            async with asyncio.timeout(HELLO_S):
                reader, writer = await self._connect(host, port, source)
        except TimeoutError:
            raise Unavailable(f"no answer within {HELLO_S:g} s") from None
        except OSError as error:
            raise Unavailable(f"connecting failed: {describe(error)}") from error
        try:
            yield await self._hello_of(host, reader), reader
        finally:
            writer.transport.abort()

    async def _connect(
        self, host: str, port: int, source: tuple[str, int] | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._own_link:
            return await _connect_on_own_link(host, port, source)
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
            raise _WithoutHello(
                f"{problem.message}, without a hello: {hint}; its log shows why"
            ) from problem
        if not isinstance(hello, HelloMessage):
            raise Unavailable(f"the first message of {host} is not a hello")
        return hello

    async def run(self) -> None:
        """Follow the other gateways and serve followers, until cancelled. Raise Refused if
        listening is not possible, unless gateways find each other: then nobody has chosen this host
        or its port, and the gateway works without followers."""
        exchange = self._exchange
        if exchange is None:
            raise RuntimeError("inherit was not called")
        loop = asyncio.get_running_loop()
        self._server = server = PeerServer(
            self._allowed,
            partial(self._follower, exchange),
            self._hello,
            self._followers,
            Refusals(self._log_s),
            self._tls,
            unknown="its address is not in gateway.peers"
            if self._found is None
            else "its address is in no Lease of a gateway",
        )
        self._recent_start_until_s = time.monotonic() + TRUSTED_AFTER_S
        try:
            configured = self._found is None
            listening = serving(server, self._listen) if configured else contextlib.nullcontext()
            async with listening, asyncio.TaskGroup() as group:
                if not configured:
                    group.create_task(self._serve(server))
                group.create_task(self._send_entries(exchange))
                group.create_task(self._send_tables(exchange))
                group.create_task(self._merge_tables(exchange))
                group.create_task(self._follow_all(exchange, group))
        finally:
            self._server = None
            loop.remove_reader(exchange.descriptor)
            exchange.close()
            self._exchange = None

    async def _serve(self, server: PeerServer) -> None:
        """Accept followers, until cancelled. If listening is not possible, try again."""
        while True:
            try:
                async with serving(server, self._listen, own_link=self._own_link):
                    if self._not_listening is not None:
                        log.info("listening for other gateways", address=self._listen)
                    self._not_listening = None
                    await asyncio.get_running_loop().create_future()  # until cancelled
            except Refused as problem:
                finding = Finding(
                    NOT_LISTENING,
                    f"{problem.message}. They do not receive the flow entries of this gateway, so "
                    "connections may break when they move to another gateway",
                    "error",
                    remedy="stop the process that has the port, or set gateway.peerListen to a "
                    "port that is free on all gateways",
                )
                if finding != self._not_listening:
                    log.error("other gateways cannot connect", problem=str(problem))
                self._not_listening = finding
            await asyncio.sleep(LISTEN_S)

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
            for peer in self._peers:
                if peer not in tasks or tasks[peer].done():
                    tasks[peer] = group.create_task(self._follow(peer, exchange))
            await self._changed.wait()

    async def _follow(self, peer: str, exchange: Exchange) -> None:
        """Receive what the peer sends, until cancelled, or until the peer turns out to be this
        gateway or is lost for good."""
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
                if peer not in self._live:
                    self._peers.pop(peer, None)
                    return
            await asyncio.sleep(backoff.next_s())

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
        behind = offline_s >= OFFLINE_S and hello.age_s >= max(TRUSTED_AFTER_S, offline_s)
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


async def _connect_on_own_link(
    host: str, port: int, source: tuple[str, int] | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket(socket_family(host))
    try:
        connection.setblocking(False)
        only_own_link(connection)
        if source is not None:
            connection.bind(source)
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
        return await asyncio.open_connection(sock=connection)
    except BaseException:
        connection.close()
        raise


def _addresses(peers: Collection[str]) -> set[Address]:
    """Return the addresses from which these peers connect."""
    return {ip_address(split_host_port(each)[0].partition("%")[0]) for each in peers}
