"""Credentials: how they are read, sent to a server and renewed. TLS with a real TLS server."""

import asyncio
import json
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from fairlead.errors import Refused
from fairlead.kube.access import Access, ExecPlugin, Impersonation
from fairlead.kube.answers import ServerUnavailable, Unauthenticated
from fairlead.kube.client import Client
from fairlead.kube.objects import NODES

V1 = "client.authentication.k8s.io/v1"
NODE = {"metadata": {"name": "one"}}


class Certificates:
    """A certificate authority, a server and a client, as PEM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._openssl(
            "req",
            "-x509",
            *self._new_key("ca"),
            "-subj",
            "/CN=authority",
            "-days",
            "2",
            "-out",
            "ca.crt",
        )
        for name, subject in (("server", "/CN=server"), ("client", "/O=system:masters/CN=client")):
            self._openssl("req", *self._new_key(name), "-subj", subject, "-out", f"{name}.csr")
            (folder / "extensions").write_text("subjectAltName=DNS:api.example,DNS:localhost\n")
            sign = [
                "-CA",
                "ca.crt",
                "-CAkey",
                "ca.key",
                "-CAcreateserial",
                "-days",
                "2",
                "-extfile",
                "extensions",
            ]
            self._openssl("x509", "-req", "-in", f"{name}.csr", *sign, "-out", f"{name}.crt")

    def __getitem__(self, name: str) -> str:
        return (self.folder / name).read_text()

    @staticmethod
    def _new_key(name: str) -> list[str]:
        return [
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-keyout",
            f"{name}.key",
        ]

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def tls_server(certificates: Certificates) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve one node over TLS and record the name in each client's certificate ("" without one)."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        authorizations = request.transport.get_extra_info("peercert") or {}
        seen.append(
            dict(pair[0] for pair in authorizations.get("subject", ())).get("commonName", "")
        )
        return web.json_response(NODE)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.folder / "server.crt", certificates.folder / "server.key")
    context.load_verify_locations(certificates.folder / "ca.crt")
    context.verify_mode = ssl.CERT_OPTIONAL
    runner = web.ServerRunner(web.Server(answer))  # type: ignore[arg-type] # BaseRequest suffices
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://localhost:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


async def get_node(access: Access) -> None:
    async with Client(access, timeout_s=10) as client:
        assert (await client.get(NODES, ("", "one"))).metadata.name == "one"


async def test_tls_with_and_without_a_client_certificate(certificates: Certificates) -> None:
    async with tls_server(certificates) as (url, seen):
        await get_node(Access(url, authority_pem=certificates["ca.crt"]))
        certificate, key = certificates["client.crt"], certificates["client.key"]
        await get_node(
            Access(
                url, authority_pem=certificates["ca.crt"], certificate_pem=certificate, key_pem=key
            )
        )
        assert seen == ["", "client"]


async def test_an_untrusted_server_gets_no_credentials(certificates: Certificates) -> None:
    async with tls_server(certificates) as (url, seen):
        with pytest.raises(ServerUnavailable, match="certificate authority"):
            await get_node(Access(url, token="secret"))
        assert seen == []
        await get_node(Access(url, insecure=True))
        assert seen == [""]


async def test_the_name_of_the_server_must_be_in_its_certificate(
    certificates: Certificates,
) -> None:
    async with tls_server(certificates) as (url, _):
        by_address = url.replace("localhost", "127.0.0.1")
        with pytest.raises(ServerUnavailable):
            await get_node(Access(by_address, authority_pem=certificates["ca.crt"]))
        await get_node(
            Access(by_address, authority_pem=certificates["ca.crt"], server_name="api.example")
        )


async def test_invalid_certificates_are_rejected(certificates: Certificates) -> None:
    with pytest.raises(Refused, match="certificate authority of"):
        await get_node(Access("https://localhost:1", authority_pem="nonsense"))
    with pytest.raises(Refused, match="client certificate of"):
        await get_node(
            Access(
                "https://localhost:1",
                certificate_pem=certificates["client.crt"],
                key_pem=certificates["ca.key"],
            )
        )


def authorizations(server: Any) -> list[str | None]:
    """Return the Authorization header of each request."""
    return [request[5].get("Authorization") for request in server.requests]


async def test_a_token_file_is_read_again_when_the_token_is_rejected(
    tmp_path: Path, scripted: Any, replies: Any
) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    async with scripted(replies.json(NODE), replies.failure(401), replies.json(NODE)) as (
        server,
        _,
    ):
        async with Client(Access(server.url, token_file=str(file))) as client:
            await client.get(NODES, ("", "one"))
            file.write_text("new\n")
            await client.get(NODES, ("", "one"))
        assert authorizations(server) == ["Bearer old", "Bearer old", "Bearer new"]


async def test_a_watch_also_reads_its_token_file_again(
    tmp_path: Path, scripted: Any, replies: Any
) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    async with scripted(
        replies.json(NODE), replies.failure(401), replies.watch(b'{"line": 1}\n', then="end")
    ) as (server, _):
        async with Client(Access(server.url, token_file=str(file))) as client:
            await client.get(NODES, ("", "one"))
            file.write_text("new")
            assert [batch async for batch in client.stream(NODES, parameters={})] == [
                [],
                [b'{"line": 1}'],
            ]
        assert authorizations(server)[-1] == "Bearer new"


async def test_rejected_credentials_are_sent_once(scripted: Any, replies: Any) -> None:
    async with scripted(replies.failure(401)) as (server, client):
        for _ in range(5):
            with pytest.raises(Unauthenticated, match="renew the credentials"):
                await client.get(NODES, ("", "one"))
        assert len(server.requests) == 1, "the other four requests would get the same response"


async def test_a_missing_token_file_is_refused() -> None:
    with pytest.raises(Refused, match="/no/such/token"):
        await Access("http://localhost", token_file="/no/such/token").credentials()


async def test_requests_contain_the_headers_of_impersonation(scripted: Any, replies: Any) -> None:
    access = Impersonation("jane", "1", ("a", "b"))
    async with scripted(replies.json(NODE)) as (server, _):
        async with Client(Access(server.url, impersonation=access)) as client:
            await client.get(NODES, ("", "one"))
        assert server.requests[0][5]["Impersonate-User"] == "jane"
        assert server.requests[0][5]["Impersonate-Uid"] == "1"


def plugin(folder: Path, body: str, **options: Any) -> ExecPlugin:
    script = folder / "plugin"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return ExecPlugin(str(script), V1, **options)


def credential(**status: str) -> str:
    return json.dumps({"apiVersion": V1, "kind": "ExecCredential", "status": status})


async def test_an_exec_plugin_runs_once_while_its_token_is_valid(
    tmp_path: Path, scripted: Any, replies: Any
) -> None:
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    body = (
        f"echo x >> {tmp_path}/runs; echo "
        f"'{credential(token='from-plugin', expirationTimestamp=later)}'"
    )
    async with scripted(replies.json(NODE)) as (server, _):
        async with Client(Access(server.url, exec_plugin=plugin(tmp_path, body))) as client:
            await asyncio.gather(*(client.get(NODES, ("", "one")) for _ in range(3)))
        assert authorizations(server) == ["Bearer from-plugin"] * 3
    assert (tmp_path / "runs").read_text() == "x\n"


async def test_an_exec_plugin_runs_again_when_its_token_has_expired(
    tmp_path: Path, scripted: Any, replies: Any
) -> None:
    past = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    body = f"echo x >> {tmp_path}/runs; echo '{credential(token='t', expirationTimestamp=past)}'"
    async with scripted(replies.json(NODE)) as (server, _):
        async with Client(Access(server.url, exec_plugin=plugin(tmp_path, body))) as client:
            for _ in range(2):
                await client.get(NODES, ("", "one"))
        assert authorizations(server) == ["Bearer t"] * 2
    assert (tmp_path / "runs").read_text() == "x\nx\n"


async def test_an_exec_plugin_gets_arguments_environment_and_cluster(tmp_path: Path) -> None:
    body = (
        f"""printf '%s\\n' "$1" "$REGION" "$KUBERNETES_EXEC_INFO" > {tmp_path}/info; """
        f"""echo '{credential(token="t")}'"""
    )
    made = plugin(
        tmp_path,
        body,
        arguments=("login",),
        environment=(("REGION", "north"),),
        provide_cluster_info=True,
    )
    await Access("https://api.example", authority_pem="PEM", exec_plugin=made).credentials()
    argument, region, info_text = (tmp_path / "info").read_text().splitlines()
    assert (argument, region) == ("login", "north")
    info = json.loads(info_text)
    assert (info["apiVersion"], info["spec"]["interactive"]) == (V1, False)
    assert info["spec"]["cluster"]["server"] == "https://api.example"
    assert info["spec"]["cluster"]["certificate-authority-data"] == "UEVN"


async def test_a_client_certificate_of_an_exec_plugin_is_used(
    tmp_path: Path, certificates: Certificates
) -> None:
    pair = {
        "clientCertificateData": certificates["client.crt"],
        "clientKeyData": certificates["client.key"],
    }
    (tmp_path / "answer").write_text(credential(**pair))
    async with tls_server(certificates) as (url, seen):
        made = plugin(tmp_path, f"cat {tmp_path}/answer")
        await get_node(Access(url, authority_pem=certificates["ca.crt"], exec_plugin=made))
        assert seen == ["client"]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("echo please log in >&2; exit 3", "ended with 3: please log in"),
        ("echo nonsense", "did not print an ExecCredential"),
        (f"echo '{credential()}'", "neither a token nor"),
        (
            f"echo '{credential(token='t').replace('/v1', '/v1beta1')}'",
            "use the same apiVersion in both",
        ),
    ],
)
async def test_a_failing_exec_plugin_is_refused_with_the_cause(
    body: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=complaint):
        await Access("https://api.example", exec_plugin=plugin(tmp_path, body)).credentials()


async def test_the_error_for_a_missing_exec_plugin_contains_its_install_hint() -> None:
    missing = ExecPlugin("no-such-plugin", V1, install_hint="get it from the vendor")
    with pytest.raises(Refused, match="get it from the vendor"):
        await Access("https://api.example", exec_plugin=missing).credentials()


async def test_new_credentials_are_sent_at_once_and_rejected_ones_after_a_wait(
    tmp_path: Path, scripted: Any, replies: Any
) -> None:
    file = tmp_path / "token"
    file.write_text("wrong")
    with capture_logs() as logs:
        async with (
            scripted(replies.failure(401), replies.json(NODE)) as (server, _),
            Client(Access(server.url, token_file=str(file))) as client,
        ):
            for _ in range(20):
                with pytest.raises(Unauthenticated):
                    await client.get(NODES, ("", "one"))
            assert authorizations(server) == ["Bearer wrong"]
            file.write_text("right")
            await client.get(NODES, ("", "one"))
            assert authorizations(server) == ["Bearer wrong", "Bearer right"]
    assert [entry["event"] for entry in logs] == [
        "API server rejects the credentials, retrying",
        "API server accepts the credentials again",
    ]


async def test_a_token_file_that_is_created_later_is_used(
    tmp_path: Path, scripted: Any, replies: Any
) -> None:
    file = tmp_path / "token"
    async with scripted(replies.json(NODE)) as (server, _):
        async with Client(Access(server.url, token_file=str(file))) as client:
            with pytest.raises(Unauthenticated, match="cannot be read"):
                await client.get(NODES, ("", "one"))
            file.write_text("here")
            await client.get(NODES, ("", "one"))
        assert authorizations(server) == ["Bearer here"]


async def test_a_failing_exec_plugin_is_not_run_for_every_request(
    tmp_path: Path, scripted: Any, replies: Any
) -> None:
    body = f"echo x >> {tmp_path}/runs; echo log in first >&2; exit 1"
    async with scripted(replies.json(NODE)) as (server, _):
        async with Client(Access(server.url, exec_plugin=plugin(tmp_path, body))) as client:
            for _ in range(10):
                with pytest.raises(Unauthenticated, match="log in first"):
                    await client.get(NODES, ("", "one"))
        assert authorizations(server) == []
    assert (tmp_path / "runs").read_text() == "x\n"
