"""Carry requests to one API server over HTTP: credentials, TLS, deadlines, and whole lines of a
stream.

In: an `Access`; method, path, parameters, body. Out: the body of a success, or a failure of
`fairlead.errors` that says what was tried on what. Invariants: every wait has a deadline; nothing
is retried (whoever calls knows how long it may wait) but a request that was refused (401) with
credentials for which there are newer ones; credentials that were refused are told of once and not
shown again too soon (`standing`); redirections are not followed, for they would carry the token
elsewhere."""

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

from fairlead.errors import FairleadError, Refused
from fairlead.kube.access import Access, Credentials, tls_context
from fairlead.kube.answers import NoConnection, ServerUnavailable, Unauthenticated, failure
from fairlead.kube.standing import Standing

READ_BUFFER_BYTES = 1 << 20

Body = Mapping[str, object] | list[object] | msgspec.Struct
"""What is sent: anything that msgspec writes as JSON."""


class Connection:
    """The HTTP session with one API server. Use as an async context manager. `timeout_s` is the
    deadline of each call; a stream must begin within it."""

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
        self._standing = Standing(access.source)
        self.answered_s = time.monotonic()
        """When the server last answered a request, not with status 401, 429 or >= 500; at first:
        when this was made."""

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
        """One call by its path, for what has no method above. Answers the body of a success."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": content_type}
        try:
            async with asyncio.timeout(self._timeout_s):
                for attempt in (1, 2):
                    response, shown = await self._send(
                        method, path, parameters or {}, headers, data, None
                    )
                    async with response:
                        answer = await response.read()
                    if response.status == 401 and attempt == 1 and await self._renewed(shown):
                        continue
                    break
        except TimeoutError:
            raise ServerUnavailable(
                f"{method} {self.access.server}{path} was not answered in {self._timeout_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as problem:
            raise no_connection(method, self.access.server + path, problem) from None
        if not 200 <= response.status < 300:
            raise self._failure(method, path, response, answer, shown)
        return answer

    async def stream(
        self, path: str, *, parameters: Mapping[str, str], idle_s: float
    ) -> AsyncGenerator[list[bytes], None]:
        """The lines of a watch as they come, a batch at a time; ends when the server ends it. The
        first batch is empty: it tells that the server has agreed, for it may have nothing to say
        for minutes.

        Raises Unavailable if nothing comes for `idle_s`, and if the connection ends within a line:
        what is there of that line is not given out. Close it (`aclosing`) to end it early."""
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
                f"watch of {self.access.server}{path} was silent for {idle_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as problem:
            raise no_connection("watch of", self.access.server + path, problem) from None

    async def _open(
        self, path: str, parameters: Mapping[str, str], idle_s: float
    ) -> aiohttp.ClientResponse:
        """Begin a stream: the head of the answer, which says whether there will be one."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for attempt in (1, 2):
                    response, shown = await self._send("GET", path, parameters, {}, None, idle_s)
                    if response.status == 200:
                        return response
                    async with response:
                        answer = await response.read()
                    if not (response.status == 401 and attempt == 1 and await self._renewed(shown)):
                        break
        except TimeoutError:
            what = f"watch of {self.access.server}{path} did not begin within {self._timeout_s:g} s"
            raise ServerUnavailable(what) from None
        raise self._failure("watch of", path, response, answer, shown)

    async def _send(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        headers: Mapping[str, str],
        data: bytes | None,
        idle_s: float | None,
    ) -> tuple[aiohttp.ClientResponse, Credentials]:
        """The head of the answer, and what was shown to get it."""
        if self._session is None:
            raise RuntimeError("the Client is used outside of its context manager")
        credentials, tls = await self._prove()
        self._standing.check(credentials)
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
        # Answers of 500 and more, and 429, may come from something in front of the server.
        if response.status < 500 and response.status not in (401, 429):
            self._standing.accepted()
            self.answered_s = time.monotonic()
        return response, credentials

    async def _prove(self) -> tuple[Credentials, ssl.SSLContext | None]:
        """The credentials to use now and the TLS settings they make; asks for new ones when the old
        no longer hold."""
        now_s = asyncio.get_running_loop().time()
        async with self._renewing:
            # A token file costs nothing to look at, so a new token is found at the next try, not a
            # minute later.
            replaced = bool(self.access.token_file) and self._standing.is_refused(self._credentials)
            if self._credentials is None or now_s >= self._hold_until_s or replaced:
                fresh = await self._fresh_credentials()
                secure = self.access.server.startswith("https:")
                # A new context is a new TLS session and a new connection; a token alone needs
                # neither.
                if secure and (
                    self._tls is None or certificate_of(fresh) != certificate_of(self._credentials)
                ):
                    self._tls = await asyncio.to_thread(tls_context, self.access, fresh)
                self._credentials = fresh
                self._hold_until_s = (
                    float("inf") if fresh.holds_s is None else now_s + fresh.holds_s
                )
            return self._credentials, self._tls

    async def _fresh_credentials(self) -> Credentials:
        """Raises Unauthenticated if they cannot be had: they are as good as refused then, until
        they can."""
        if self.access.exec_plugin is not None:
            self._standing.check(None)
        try:
            return await self.access.credentials()
        except Refused as problem:
            refusal = Unauthenticated(problem.message, status=0, fix=problem.fix)
            self._standing.refused(None, refusal)
            raise refusal from problem

    async def _renewed(self, refused: Credentials) -> bool:
        """After a 401 for these: True if there are others now. Somebody else may have seen to that
        meanwhile."""
        if self._credentials == refused:
            self._hold_until_s = 0.0
        return (await self._prove())[0] != refused

    def _failure(
        self,
        method: str,
        path: str,
        response: aiohttp.ClientResponse,
        answer: bytes,
        shown: Credentials,
    ) -> FairleadError:
        attempt = f"{method} {self.access.server}{path}"
        problem = failure(attempt, response.status, answer, response.headers.get("Retry-After"))
        if isinstance(problem, Unauthenticated):
            self._standing.refused(shown, problem)
        return problem


def certificate_of(credentials: Credentials | None) -> tuple[str, str] | None:
    return None if credentials is None else (credentials.certificate_pem, credentials.key_pem)


def identity_headers(access: Access, credentials: Credentials) -> list[tuple[str, str]]:
    """The headers that say who asks."""
    headers = [("Authorization", f"Bearer {credentials.token}")] if credentials.token else []
    if access.impersonation is not None:
        headers.append(("Impersonate-User", access.impersonation.user))
        headers += [("Impersonate-Group", group) for group in access.impersonation.groups]
        if access.impersonation.uid:
            headers.append(("Impersonate-Uid", access.impersonation.uid))
    return headers


def no_connection(method: str, url: str, problem: BaseException) -> NoConnection:
    """What a failed or broken connection means. A certificate that is not trusted will not become
    so by waiting, but certificates are renewed on the other side, so this too is tried again; the
    message says what to do."""
    fix = ""
    if isinstance(problem, aiohttp.ClientConnectorCertificateError):
        fix = "give the server's certificate authority in the kubeconfig"
    return NoConnection(f"{method} {url} failed: {str(problem) or type(problem).__name__}", fix=fix)


async def lines(content: aiohttp.StreamReader) -> AsyncGenerator[list[bytes], None]:
    """Cut a stream into whole lines, of any length: aiohttp's own readline has a limit that a large
    Service may pass."""
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
            f"the connection ended within a line, after {sum(map(len, begun))} bytes of it"
        )
