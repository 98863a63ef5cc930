"""Gateways tell each other about slots in transition, so that losing, adding or returning one moves
no connection.

In: where to listen, and the other gateways. Out: their tables before this one forwards, their
entries from then on; ours for them. Each follows all others, over TCP. A gateway may follow if its
address is known and, with `tls`, its certificate is accepted (`peer_tls`). Without `tls`, a host
that can take a peer's address can direct connections to a wrong node. A gateway that is alone
starts and works as one without peers; no packet waits for anything here."""

import asyncio
import contextlib
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Sequence, Set
from functools import partial
from ipaddress import ip_address

import structlog

from fairlead.backoff import Backoff
from fairlead.drivers import Component
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.peers.entry import Entry, entered
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
from fairlead.drivers.direct.peers.recent import Recent
from fairlead.drivers.direct.peers.refusals import PERIOD_S, Refusals
from fairlead.drivers.direct.peers.tls import PEER_NAME, PeerTLS, words
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.errors import Unavailable
from fairlead.net.address import split_host_port
from fairlead.net.bpf import Map
from fairlead.role_state import PeersState, PeerState

log = structlog.get_logger()

HELLO_S = 2.0
"""A start waits so long for a peer to answer, and so long again for each thing that one tells."""
TELL_S = 0.002
"""New entries are collected for so long."""
TABLES_S = 0.1
"""TablesMessage that changed are told so often."""
HEED_S = 0.5
"""What peers say of tables is heeded so often: mostly all gateways make the same change in the same
moment, and nothing is left to do by then."""
SILENCE_S = 3.5
"""A peer that says nothing for so long is lost; it says each second that it is alive."""
AWAY_S = 5.0
"""A gateway that heard no peer for so long has been away."""
UNNOTICED_S = 15.0
"""Longer than it takes to notice that a peer hears nothing any more: what it was told within that
time may not have arrived."""
INHERIT_AT_ONCE = 128
"""Number of entries of a peer that are put at once. It takes about half a millisecond."""
SEASONED_S = 30.0
"""The word of a peer that has followed the cluster for less than this never counts against our own
tables. And for so long one that has begun tells each that comes what happened while no process was
there."""


class Peers(Component):
    """`listen`: `address:port` for others, `*:port` for all addresses, empty for none. `peers`:
    theirs; ours may be among them.

    tls: mutual TLS on all connections. stalled_s: a follower that receives nothing for this time is
    dropped, and begins again when it reconnects. log_s: the period in which refused connections of
    one kind are logged once. Call `inherit` before packets are forwarded, then have `run` running
    until the driver closes."""

    name = "peers"

    def __init__(
        self,
        listen: str,
        peers: Sequence[str],
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
        self._heard = {each: PeerState(each, False) for each in peers if each != listen}
        self._allowed = {ip_address(split_host_port(each)[0].partition("%")[0]) for each in peers}
        self._told: dict[ListenerKey, TablesMessage] = {}
        self._recent = Recent()
        """Flows whose entries changed here while no process was there to tell it, or some peer
        could not be told."""
        self._began_s = self._alone_since_s = time.monotonic()
        self._fresh_until_s = 0.0
        self.sent = 0
        """FlowsMessage that came to be here and were told to others."""

    @property
    def shown(self) -> list[PeerState]:
        """The other gateways."""
        return list(self._heard.values())

    def status(self) -> PeersState:
        """For `/state`. May be called from any thread."""
        return PeersState(tuple(self.shown), self.followers)

    def collectors(self) -> tuple[PeersCollector]:
        return (PeersCollector(self),)

    @property
    def followers(self) -> int:
        """How many others follow this gateway now."""
        return len(self._followers)

    @property
    def received(self) -> int:
        """FlowsMessage of others that were taken over."""
        return self._exchange.received if self._exchange else 0

    async def inherit(self, tables: ListenerMaps, maps: dict[str, Map]) -> None:
        """Begin with what the longest-serving peer has, if one answers. Never fails.

        TablesMessage that are here already are those of a predecessor that has ended, some time ago.
        Others know more by now, unless they have begun just now themselves; but not of flows that
        the program has met since, which nobody told them of."""
        self._exchange = exchange = Exchange(tables, maps)
        patience_s = SEASONED_S if exchange.listeners() else 0.0
        told = [each for each in await self._ask_all() if each[0].age_s >= patience_s]
        self._alone_since_s = time.monotonic()
        self._recent.meet(exchange.unread(), time.monotonic())
        if not told:
            return
        hello, messages = max(told, key=lambda each: each[0].age_s)
        self._began_s = time.monotonic() - hello.age_s
        for message in messages:
            match message:
                case TablesMessage():
                    exchange.begin_with(message)
                case FlowsMessage():
                    # The program forwards meanwhile. A new connection with the ports of an older
                    # one is known only from what the program has reported by then, so few entries
                    # are put at a time.
                    for part in parts_of(message, INHERIT_AT_ONCE):
                        self._recent.meet(exchange.unread(), time.monotonic())
                        exchange.put(part, known=(self._recent.flows,))
        exchange.touched()
        log.info(
            "began with what a peer has",
            listeners=len(exchange.listeners()),
            entries=exchange.received,
        )

    async def _ask_all(self) -> list[tuple[HelloMessage, list[Message]]]:
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(self._ask(each)) for each in self._heard]
        return [answer for task in asking if (answer := task.result()) is not None]

    async def _ask(self, peer: str) -> tuple[HelloMessage, list[Message]] | None:
        messages: list[Message] = []
        try:
            async with self._following(peer) as (hello, reader):
                while not isinstance(
                    message := await read_message(reader, within_s=HELLO_S), CompleteMessage
                ):
                    messages.append(message)
        except Unavailable as problem:
            log.info("a peer did not tell what it has", peer=peer, problem=str(problem))
            return None
        return hello, messages

    @contextlib.asynccontextmanager
    async def _following(
        self, peer: str
    ) -> AsyncIterator[tuple[HelloMessage, asyncio.StreamReader]]:
        """A connection to it, and what it says first. Raises Unavailable."""
        host, port = split_host_port(peer)
        # Others know us by the address at which we listen.
        source = None if self._listen[:1] in ("", "*") else (split_host_port(self._listen)[0], 0)
        try:
            async with asyncio.timeout(HELLO_S):
                reader, writer = await self._connect(host, port, source)
        except TimeoutError:
            raise Unavailable(f"no answer within {HELLO_S:g} s") from None
        except OSError as error:
            raise Unavailable(f"connecting failed: {words(error)}") from error
        try:
            yield await self._hello_of(host, reader), reader
        finally:
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
                raise Unavailable(words(problem.__cause__)) from problem
            # In TLS 1.3 a server may still refuse the client's certificate after the client has
            # finished the handshake.
            hint = (
                "it may not accept the certificate of this gateway"
                if self._tls
                else "it may want TLS, see gateway.peerTLS"
            )
            raise Unavailable(
                f"{problem.message}, without a hello: {hint}; its log says why"
            ) from problem
        if not isinstance(hello, HelloMessage):
            raise Unavailable(f"{host} did not say hello")
        return hello

    async def run(self) -> None:
        """Follow the others and be followed, until cancelled. Raises Refused if listening is not
        possible."""
        exchange = self._exchange
        if exchange is None:
            raise RuntimeError("there is nothing to tell yet")
        loop = asyncio.get_running_loop()
        entry = Entry(
            self._allowed,
            partial(self._follower, exchange),
            self._hello,
            self._followers,
            Refusals(self._log_s),
            self._tls,
        )
        self._fresh_until_s = time.monotonic() + SEASONED_S
        try:
            async with entered(entry, self._listen), asyncio.TaskGroup() as group:
                group.create_task(self._tell_news(exchange))
                group.create_task(self._tell_tables(exchange))
                group.create_task(self._heed(exchange))
                for peer in self._heard:
                    group.create_task(self._follow(peer, exchange))
        finally:
            loop.remove_reader(exchange.descriptor)
            exchange.close()
            self._exchange = None

    @property
    def _fresh(self) -> bool:
        """Whether this process has begun just now. What is here of other flows may be older than
        what peers have."""
        return time.monotonic() <= self._fresh_until_s

    def _follower(self, exchange: Exchange) -> Follower:
        """One more. What it is told of all entries does not count against those that it has: what
        is newer it is told again."""
        return Follower(exchange, lambda: self._again(exchange), stalled_s=self._stalled_s)

    def _again(self, exchange: Exchange) -> list[bytes]:
        return [frame(each) for each in exchange.present(self._recent, time.monotonic())]

    def _hello(self) -> HelloMessage:
        return HelloMessage(self._instance, time.monotonic() - self._began_s)

    async def _tell_news(self, exchange: Exchange) -> None:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        while True:
            news.clear()
            loop.add_reader(exchange.descriptor, news.set)
            await news.wait()
            loop.remove_reader(exchange.descriptor)  # until then it would be readable all the time
            await asyncio.sleep(TELL_S)
            for message in exchange.news():
                self._tell(message)
                await asyncio.sleep(0)  # a flood may make news as fast as they are read

    def _tell(self, news: FlowsMessage) -> None:
        told = frame(news)
        self.sent += news.count
        self._recent.meet((flow for flow, _ in split(news.records)), time.monotonic())
        for follower in self._followers:
            follower.tell((), (told,))

    async def _tell_tables(self, exchange: Exchange) -> None:
        while True:
            await asyncio.sleep(TABLES_S)
            exchange.end_convergence()
            if not self._fresh and all(each.connected for each in self._heard.values()):
                self._recent.forget(time.monotonic() - UNNOTICED_S)
            if touched := exchange.touched():
                for follower in self._followers:
                    follower.tell(touched, ())

    async def _heed(self, exchange: Exchange) -> None:
        while True:
            await asyncio.sleep(HEED_S)
            told, self._told = self._told, {}
            for message in told.values():
                exchange.merge_peer_tables(message, behind=False)
                await asyncio.sleep(
                    0
                )  # after a change of many listeners it would hold up everything else for seconds

    async def _follow(self, peer: str, exchange: Exchange) -> None:
        """Take over what it says, for ever; or until it turns out to be this gateway itself."""
        backoff = Backoff(0.1, 1.0)
        while True:
            try:
                async with self._following(peer) as (hello, reader):
                    if hello.instance == self._instance:
                        del self._heard[peer]
                        return
                    await self._listen_to(peer, hello, reader, exchange, backoff)
            except Unavailable as problem:
                self._lost(peer, str(problem))
            await asyncio.sleep(backoff.next_s())

    async def _listen_to(
        self,
        peer: str,
        hello: HelloMessage,
        reader: asyncio.StreamReader,
        exchange: Exchange,
        backoff: Backoff,
    ) -> None:
        away_s = 0.0 if self._connected else time.monotonic() - self._alone_since_s
        behind = away_s >= AWAY_S and hello.age_s >= max(SEASONED_S, away_s)
        known: tuple[Set[bytes], ...] = (self._recent.flows,)
        if not behind and not self._fresh:
            known += (await asyncio.to_thread(exchange.known),)
        while True:
            match await read_message(reader, within_s=SILENCE_S):
                case TablesMessage() as message if behind:
                    exchange.merge_peer_tables(message, behind=True)
                    await asyncio.sleep(0)
                case TablesMessage() as message:
                    self._told[message.key] = message
                case FlowsMessage() as message:
                    if known or message.ages_s:
                        # What the program has met by now is younger than what the peer has had for
                        # a while.
                        for news in exchange.news():
                            self._tell(news)
                    exchange.put(
                        message, known=(self._younger(message),) if message.ages_s else known
                    )
                case CompleteMessage():
                    behind, known = False, ()
                    self._heard[peer] = PeerState(peer, True)
                    backoff.reset()
                    log.info("following a gateway", peer=peer, away_s=round(away_s, 1))

    def _younger(self, message: FlowsMessage) -> Set[bytes]:
        """Of these flows, those that this gateway has met later than who tells of them."""
        now_s = time.monotonic()
        flows = zip(split(message.records), message.ages_s, strict=True)
        return {flow for (flow, _), age_s in flows if self._recent.met_s(flow) > now_s - age_s}

    @property
    def _connected(self) -> bool:
        return any(each.connected for each in self._heard.values())

    def _lost(self, peer: str, problem: str) -> None:
        if self._heard[peer] != PeerState(peer, False, problem):
            log.warning("not following a gateway", peer=peer, problem=problem)
        was_connected = self._connected
        self._heard[peer] = PeerState(peer, False, problem)
        if was_connected and not self._connected:
            self._alone_since_s = time.monotonic()
