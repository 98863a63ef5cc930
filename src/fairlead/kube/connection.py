"""Carry requests to one API server over HTTP: credentials, TLS, deadlines, and the lines of a
watch.

In: an `Access`; method, path, parameters, body. Out: the body of a successful response, or an error
of `fairlead.errors` that describes the request. Invariants: every wait has a deadline. No request
is repeated, because only the caller knows how long it may wait; the exception is a request that was
answered 401, which is repeated once if there are newer credentials. Rejected credentials are
reported once and not sent again too soon (`credential_gate`). Redirections are not followed,
because a redirected request would carry the token to another server."""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from yarl import URL

from fairlead.errors import FairleadError, Refused, plain
from fairlead.kube.access import Access, Credentials, tls_context
from fairlead.kube.answers import NoConnection, ServerUnavailable, Unauthenticated, failure
from fairlead.kube.credential_gate import CredentialGate

READ_BUFFER_BYTES = 1 << 20
REACH = "check that an API server runs at this address, and that this host can reach it"

Body = Mapping[str, object] | list[object] | msgspec.Struct
"""A request body: anything that msgspec encodes as JSON."""


class Connection:
    """The HTTP session with one API server. Use it as an async context manager.

    `timeout_s` is the deadline of each call. A stream must begin within it."""

    def __init__(
        self, access: Access, *, timeout_s: float = 15.0, user_agent: str = "fairlead"
    ) -> None:
        self.access = access
        self._timeout_s = timeout_s
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._credentials: Credentials | None = None
        self._hold_until_s = 0.0
        self._tls: ssl.SSLContext | None = None
        self._renewing = asyncio.Lock()
        self._gate = CredentialGate(access.source)
        self.answered_s = time.monotonic()
        """The time of the last response with a status other than 401, 429 or >= 500, on the
        monotonic clock; initially the time of construction."""

    async def __aenter__(self) -> Self:
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": self._user_agent,
        }
        self._session = aiohttp.ClientSession(headers=headers, read_bufsize=READ_BUFFER_BYTES)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        parameters: Mapping[str, str] | None = None,
        body: Body | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        """Send one request and return the body of a successful response."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": content_type}
        try:
            async with asyncio.timeout(self._timeout_s):
                # The second attempt follows only a 401 for which there are newer credentials.
                for attempt in (1, 2):
                    response, used = await self._send(
                        method, path, parameters or {}, headers, data, None
                    )
                    async with response:
                        answer = await response.read()
                    if response.status == 401 and attempt == 1 and await self._has_newer(used):
                        continue
                    break
        except TimeoutError:
            raise ServerUnavailable(
                f"{method} {self.access.server}{path} was not answered in {self._timeout_s:g} s",
                fix=REACH,
            ) from None
        except (aiohttp.ClientError, OSError) as problem:
            raise no_connection(method, self.access.server + path, problem) from None
        if not 200 <= response.status < 300:
            raise self._failure(method, path, response, answer, used)
        return answer

    async def stream(
        self, path: str, *, parameters: Mapping[str, str], idle_s: float
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the lines of a watch as they arrive, in batches, until the server ends the watch.

        The first batch is empty: it shows that the server has accepted the watch, because the first
        line may take minutes. Raise Unavailable if nothing arrives for `idle_s` seconds, and if the
        connection ends within a line; the incomplete line is discarded. To end the watch early,
        close the generator (`aclosing`)."""
        try:
            async with (
                await self._open(path, parameters, idle_s) as response,
                aclosing(lines(response.content)) as batches,
            ):
                yield []
                async for batch in batches:
                    yield batch
        except TimeoutError:
            raise ServerUnavailable(
                f"watch of {self.access.server}{path} was silent for {idle_s:g} s", fix=REACH
            ) from None
        except (aiohttp.ClientError, OSError) as problem:
            raise no_connection("watch of", self.access.server + path, problem) from None

    async def _open(
        self, path: str, parameters: Mapping[str, str], idle_s: float
    ) -> aiohttp.ClientResponse:
        """Start a stream and return the response once its head shows success."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for attempt in (1, 2):
                    response, used = await self._send("GET", path, parameters, {}, None, idle_s)
                    if response.status == 200:
                        return response
                    async with response:
                        answer = await response.read()
                    if not (
                        response.status == 401 and attempt == 1 and await self._has_newer(used)
                    ):
                        break
        except TimeoutError:
            what = f"watch of {self.access.server}{path} did not begin within {self._timeout_s:g} s"
            raise ServerUnavailable(what, fix=REACH) from None
        raise self._failure("watch of", path, response, answer, used)

    async def _send(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        headers: Mapping[str, str],
        data: bytes | None,
        idle_s: float | None,
    ) -> tuple[aiohttp.ClientResponse, Credentials]:
        """Send a request. Return the response, without its body, and the credentials that were
        sent."""
        if self._session is None:
            raise RuntimeError("the Client is used outside of its context manager")
        credentials, tls = await self._current_credentials()
        self._gate.check(credentials)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s, sock_read=idle_s)
        response = await self._session.request(
            method,
            URL(self.access.server.rstrip("/") + path),
            params=parameters,
            data=data,
            headers=[*headers.items(), *identity_headers(self.access, credentials)],
            timeout=timeout,
            allow_redirects=False,
            ssl=tls or True,
            server_hostname=self.access.server_name or None,
            proxy=self.access.proxy or None,
        )
        # A status of 429, or of 500 and above, may come from a proxy in front of the server.
        if response.status < 500 and response.status not in (401, 429):
            self._gate.accept()
            self.answered_s = time.monotonic()
        return response, credentials

    async def _current_credentials(self) -> tuple[Credentials, ssl.SSLContext | None]:
        """Return the credentials to use now and their TLS settings. Obtain new credentials if the
        old ones have expired."""
        now_s = asyncio.get_running_loop().time()
        async with self._renewing:
            # Reading a token file is cheap, so after a rejection a new token is found by the next
            # attempt, not after a minute.
            replaced = bool(self.access.token_file) and self._gate.is_rejected(self._credentials)
            if self._credentials is None or now_s >= self._hold_until_s or replaced:
                fresh = await self._obtain_credentials()
                secure = self.access.server.startswith("https:")
                # A new context causes a new TLS session and a new connection, which a new token
                # alone does not need.
                if secure and (
                    self._tls is None or certificate_of(fresh) != certificate_of(self._credentials)
                ):
                    self._tls = await asyncio.to_thread(tls_context, self.access, fresh)
                self._credentials = fresh
                self._hold_until_s = (
                    float("inf") if fresh.holds_s is None else now_s + fresh.holds_s
                )
            return self._credentials, self._tls

    async def _obtain_credentials(self) -> Credentials:
        """Obtain new credentials. Raise Unauthenticated if there are none: that is handled like a
        rejection by the server."""
        if self.access.exec_plugin is not None:
            self._gate.check(None)
        try:
            return await self.access.credentials()
        except Refused as problem:
            rejection = Unauthenticated(problem.message, status=0, fix=problem.fix)
            self._gate.reject(None, rejection)
            raise rejection from problem

    async def _has_newer(self, refused: Credentials) -> bool:
        """Return whether there are other credentials than the ones just rejected (401).

        Another request may have obtained them in the meantime."""
        if self._credentials == refused:
            self._hold_until_s = 0.0
        return (await self._current_credentials())[0] != refused

    def _failure(
        self,
        method: str,
        path: str,
        response: aiohttp.ClientResponse,
        answer: bytes,
        used: Credentials,
    ) -> FairleadError:
        attempt = f"{method} {self.access.server}{path}"
        problem = failure(attempt, response.status, answer, response.headers.get("Retry-After"))
        if isinstance(problem, Unauthenticated):
            self._gate.reject(used, problem)
        return problem


def certificate_of(credentials: Credentials | None) -> tuple[str, str] | None:
    return None if credentials is None else (credentials.certificate_pem, credentials.key_pem)


def identity_headers(access: Access, credentials: Credentials) -> list[tuple[str, str]]:
    """Return the headers that authenticate a request."""
    headers = [("Authorization", f"Bearer {credentials.token}")] if credentials.token else []
    if access.impersonation is not None:
        headers.append(("Impersonate-User", access.impersonation.user))
        headers += [("Impersonate-Group", group) for group in access.impersonation.groups]
        if access.impersonation.uid:
            headers.append(("Impersonate-Uid", access.impersonation.uid))
    return headers


def no_connection(method: str, url: str, problem: BaseException) -> NoConnection:
    """Return the error for a connection that failed or broke.

    An untrusted certificate is retried too, although waiting alone does not help: the server may
    get a new certificate. The message states the remedy."""
    fix = REACH
    if isinstance(problem, aiohttp.ClientConnectorCertificateError):
        fix = "give the server's certificate authority in the kubeconfig"
    return NoConnection(f"{method} {url} failed: {plain(problem)}", fix=fix)


async def lines(content: aiohttp.StreamReader) -> AsyncGenerator[list[bytes], None]:
    """Yield the complete lines of a stream, of any length.

    aiohttp's own readline has a length limit, which a large Service may exceed."""
    begun: list[bytes] = []
    async for chunk in content.iter_any():
        if b"\n" not in chunk:
            begun.append(chunk)
            continue
        *whole, rest = b"".join((*begun, chunk)).split(b"\n")
        begun = [rest] if rest else []
        yield [line for line in whole if line.strip()]
    if begun:
        raise aiohttp.ClientPayloadError(
            f"the connection ended within a line, after {sum(map(len, begun))} bytes of the line"
        )
