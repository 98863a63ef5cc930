"""Gateways that authenticate each other by certificates, with real certificates from openssl and
real connections."""

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping
from functools import partial
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.drivers.direct.conftest import a_forwarder
from tests.drivers.direct.test_peers import (
    ALL_NODES,
    DEADLINE_S,
    NEW,
    OLD,
    PORTS,
    Gateway,
    Site,
    await_connected,
    entries,
    site,
    until,
)

from fairlead.config import PeerTLSConfig, parse
from fairlead.drivers.direct.peers.messages import HelloMessage, read_message
from fairlead.drivers.direct.peers.peers import Peers
from fairlead.drivers.direct.peers.refusals import Refusals
from fairlead.drivers.direct.peers.tls import PEER_NAME, PeerTLS
from fairlead.errors import Refused, Unavailable
from fairlead.plan.classes import CLASSES
from fairlead.roles.data_plane import peers_of

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("own_loopback")]

Lines = list[MutableMapping[str, Any]]
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
STRANGERS = 300


def address(number: int) -> str:
    return f"127.0.79.{number}:9445"


class Authority:
    """A CA that issues certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._openssl(
            "req",
            "-x509",
            *NEW_KEY,
            "-subj",
            f"/CN={name}",
            "-days",
            "2",
            "-keyout",
            "@.key",
            "-out",
            "@.crt",
        )
        self.certificate = folder / f"{name}.crt"

    def issue(
        self, gateway: str, *, dns: str = PEER_NAME, days: int = 1, purpose: str = ""
    ) -> PeerTLSConfig:
        """Write certificate, key and CA of this gateway to files, and replace existing files."""
        options = [
            "-addext",
            f"subjectAltName=DNS:{dns}",
            *(("-addext", f"extendedKeyUsage={purpose}") if purpose else ()),
        ]
        made = self._folder / gateway
        self._openssl(
            "req",
            *NEW_KEY,
            "-subj",
            f"/CN={gateway}",
            *options,
            "-keyout",
            f"{made}.key",
            "-out",
            f"{made}.csr",
        )
        issuer = ("-CA", "@.crt", "-CAkey", "@.key", "-days", str(days), "-copy_extensions", "copy")
        self._openssl("x509", "-req", "-in", f"{made}.csr", *issuer, "-out", f"{made}.crt")
        Path(f"{made}.ca").write_bytes(self.certificate.read_bytes())
        return PeerTLSConfig(f"{made}.crt", f"{made}.key", f"{made}.ca")

    def _openssl(self, *arguments: str) -> None:
        own = [each.replace("@", str(self._folder / self._name)) for each in arguments]
        subprocess.run(["openssl", *own], check=True, capture_output=True, timeout=60)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def lines() -> Iterable[Lines]:
    with capture_logs() as captured:
        yield captured


@contextlib.asynccontextmanager
async def gateways(
    one: PeerTLSConfig | None, two: PeerTLSConfig | None
) -> AsyncIterator[tuple[Site, Gateway, Gateway]]:
    async with site() as made:
        made.addresses = [address(1), address(2)]
        both = []
        for number, files in ((1, one), (2, two)):
            tls = PeerTLS(files) if files is not None else None
            forwarder = made.stack.enter_context(a_forwarder(fast=False))
            both.append(Gateway(forwarder, Peers(address(number), made.addresses, tls=tls)))
            await made.join(both[-1])
        yield made, both[0], both[1]


def refusals(lines: Lines) -> list[str]:
    return [
        line["why"]
        for line in lines
        if line["event"] == "refused a connection to gateway.peerListen"
    ]


async def test_gateways_of_one_ca_exchange_entries(authority: Authority) -> None:
    purpose = "clientAuth,serverAuth"
    async with gateways(authority.issue("one"), authority.issue("two", purpose=purpose)) as (
        _,
        one,
        two,
    ):
        await await_connected(one, two)
        for each in (one, two):
            for weights in (OLD, NEW):
                each.forwarder.serve(weights, ALL_NODES)
        opened = one.open(PORTS)
        await until(lambda: len(entries(one)) == len(entries(two)) > 0)
        assert two.nodes(PORTS) == opened


async def problems(*gateways: Gateway, matches: Callable[[str], bool]) -> list[str]:
    """Wait until `matches` holds for the problem that each gateway shows for its peer, and return
    these problems."""
    for each in gateways:
        await until(lambda each=each: matches(each.peers.shown[0].problem))  # type: ignore[misc]
    assert not any(each.peers.shown[0].connected or each.peers.followers for each in gateways)
    return [each.peers.shown[0].problem for each in gateways]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"days": -1}, "its certificate is not accepted here: certificate has expired"),
        ({"dns": "web.example.com"}, "web.example.com"),
        (
            {"purpose": "codeSigning"},
            "its certificate is not accepted here: unsuitable certificate purpose",
        ),
        (None, "its certificate is not accepted here: unable to get local issuer certificate"),
    ],
    ids=["expired", "not a gateway", "for something else", "of another CA"],
)
async def test_a_wrong_certificate_is_refused_with_the_reason(
    authority: Authority, tmp_path: Path, lines: Lines, wrong: dict[str, Any] | None, why: str
) -> None:
    """The second gateway has the wrong certificate. The first gateway neither follows it nor
    accepts it as a follower."""
    if wrong is None:
        files = Authority(tmp_path, "other").issue("two")
        copy(authority.certificate, files.ca)  # the second gateway would accept the first
    else:
        files = authority.issue("two", **wrong)
    async with gateways(authority.issue("one"), files) as (_, one, two):
        (here,) = await problems(one, matches=lambda problem: "certificate" in problem)
        assert (
            why in here or f"Hostname mismatch, certificate is not valid for '{PEER_NAME}'" in here
        )
        (there,) = await problems(two, matches=lambda problem: "certificate" in problem)
        assert "it may not accept the certificate of this gateway; its log shows why" in there
        await until(lambda: any(why in each for each in refusals(lines)))


async def test_a_caller_without_a_certificate_gets_nothing(
    authority: Authority, lines: Lines
) -> None:
    async with gateways(authority.issue("one"), authority.issue("two")):
        context = ssl.create_default_context(cafile=str(authority.certificate))
        reader, writer = await asyncio.open_connection(
            *("127.0.79.1", 9445),
            local_addr=("127.0.79.2", 0),
            ssl=context,
            server_hostname=PEER_NAME,
        )
        with pytest.raises(Unavailable):
            await read_message(reader, within_s=DEADLINE_S)
        writer.close()
        await until(lambda: "it presented no certificate" in refusals(lines))


async def test_a_gateway_with_and_one_without_tls_report_the_mismatch(
    authority: Authority, lines: Lines
) -> None:
    async with gateways(authority.issue("one"), None) as (_, one, two):
        (with_tls,) = await problems(one, matches=lambda problem: "does not speak TLS" in problem)
        assert with_tls == (
            "connecting failed: it does not speak TLS: set gateway.peerTLS on all gateways, "
            "or on none"
        )
        (without,) = await problems(two, matches=lambda problem: "TLS" in problem)
        assert "it may require TLS, see gateway.peerTLS" in without
        # Each gateway also logs it for the connection that the other one opens.
        await until(lambda: any("did not begin TLS" in each for each in refusals(lines)))
        ended = "it speaks TLS: set gateway.peerTLS on all gateways, or on none"
        await until(lambda: any(line.get("why") == ended for line in lines))


def serial(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("ssl_object").getpeercert()["serialNumber"])


async def shown_by(number: int, files: PeerTLSConfig) -> str:
    """Return the serial number of the certificate that the gateway presents to a new connection."""
    host, _, port = address(number).rpartition(":")
    reader, writer = await asyncio.open_connection(
        host,
        int(port),
        local_addr=("127.0.79.2", 0),
        ssl=PeerTLS(files).client,
        server_hostname=PEER_NAME,
    )
    assert isinstance(await read_message(reader, within_s=DEADLINE_S), HelloMessage)
    found = serial(writer)
    writer.close()
    return found


async def test_changed_files_apply_to_new_connections_and_open_connections_stay(
    authority: Authority, lines: Lines
) -> None:
    files, other = authority.issue("one"), authority.issue("two")
    async with gateways(files, other) as (_, one, two):
        await await_connected(one, two)
        await until(lambda: one.peers.followers == two.peers.followers == 1)
        first = await shown_by(1, other)
        authority.issue("one")
        second = await shown_by(1, other)
        assert second != first
        # While a file is incomplete or missing, the previous certificate is used.
        os.truncate(files.certificate, 100)
        assert await shown_by(1, other) == second
        os.unlink(files.certificate)
        assert await shown_by(1, other) == second
        assert (
            sum(line["event"] == "the previous certificate remains in use" for line in lines) == 2
        )
        authority.issue("one")
        assert await shown_by(1, other) not in (first, second)
        await until(lambda: one.peers.followers == two.peers.followers == 1)
        # Each gateway has connected to the other one exactly once.
        assert sum(line["event"] == "following a gateway" for line in lines) == 2


async def test_files_that_cannot_be_used_are_refused_at_the_start(authority: Authority) -> None:
    good, other = authority.issue("one"), authority.issue("two")
    for files in (
        PeerTLSConfig(good.certificate, other.key, good.ca),
        PeerTLSConfig(good.certificate, good.key, "/nowhere"),
        PeerTLSConfig(good.ca, good.certificate, good.ca),
    ):
        with pytest.raises(Refused, match="reading the certificate, key and CA"):
            PeerTLS(files).load()


async def test_a_role_uses_the_files_that_the_configuration_names(authority: Authority) -> None:
    files = authority.issue("one")
    text = (
        "gateway: {peerListen: '*:9445', peers: ['192.0.2.11:9445'], "
        f"peerTLS: {{certificate: {files.certificate}, key: {files.key}, ca: {files.ca}}}}}"
    )
    assert peers_of(parse(text, "a test", CLASSES)) is not None
    os.unlink(files.ca)
    with pytest.raises(Refused, match="No such file"):
        peers_of(parse(text, "a test", CLASSES))


async def test_hundreds_of_unknown_callers_cause_two_log_lines(lines: Lines) -> None:
    async with gateways(None, None) as (_, one, two):
        await until(lambda: one.peers.followers == two.peers.followers == 1)
        for number in range(STRANGERS):
            with socket.socket() as stranger:
                stranger.bind((str(ipaddress.ip_address("127.0.80.1") + number), 0))
                stranger.connect(("127.0.79.1", 9445))
                # The gateway closes the connection before it reads anything.
                stranger.setblocking(False)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
        assert one.peers.followers == 1
    assert refusals(lines) == ["its address is not in gateway.peers"]
    more = [
        line["count"]
        for line in lines
        if line["event"] == "refused more connections to gateway.peerListen"
    ]
    assert more == [STRANGERS - 1]


async def test_further_refusals_are_summed_up_at_the_end_of_each_period(lines: Lines) -> None:
    refused = Refusals(period_s=0.05)

    def summed_up() -> list[tuple[int, str]]:
        return [(line["count"], line["last"]) for line in lines if "more" in line["event"]]

    def is_summed_up(last: str) -> bool:
        return last in [each for _, each in summed_up()]

    for count in (100, 50):
        for number in range(count):
            refused.add("", f"192.0.2.{number}", "its address is not in gateway.peers")
        await until(partial(is_summed_up, f"192.0.2.{count - 1}"))
    assert summed_up() == [(99, "192.0.2.99"), (50, "192.0.2.49")]
    assert len(refusals(lines)) == 1
    refused.add("full", "192.0.2.200", "it has 4 connections already")
    refused.close()
    assert (refused.count, len(summed_up()), len(refusals(lines))) == (151, 2, 2)


async def test_the_connections_of_one_peer_are_limited(authority: Authority, lines: Lines) -> None:
    """Connections before their TLS handshake count too."""
    async with gateways(authority.issue("one"), None):
        callers = [
            await asyncio.open_connection("127.0.79.1", 9445, local_addr=("127.0.79.2", 0))
            for _ in range(20)
        ]
        await until(lambda: "it has 4 connections already" in refusals(lines))
        for _, writer in callers:
            writer.close()
