"""Connect to a server of OVSDB by the address that OVN's tools use: `unix:PATH`, `tcp:HOST:PORT` or
`ssl:HOST:PORT` (ovsdb(7), "Connection Methods").

In: the address, certificates. Out: a stream. Invariant: every failure is a FairleadError that names
the address."""

import asyncio
import ssl
from pathlib import Path

import msgspec

from fairlead.errors import FairleadError, Refused, Unavailable

CHUNK_BYTES = 1 << 18
"""How much is read at once."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Tls(msgspec.Struct, frozen=True):
    """Files in PEM format: the CA of the servers, and the certificate and key of this client.

    `check_names`: whether the certificate of a server must be valid for the host in its address.
    Certificates of OVN usually have no such names, and the CA signs certificates of the databases
    alone (ovs-pki(8))."""

    ca: Path
    certificate: Path
    key: Path
    check_names: bool = False


class Remote(msgspec.Struct, frozen=True):
    """The address of a server. `path` is set for `unix`, the other fields for `tcp` and `ssl`."""

    kind: str
    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.kind}:{host}:{self.port}"


def read_remote(text: str) -> Remote:
    """Return the address. Raise Refused if it is malformed."""
    kind, _, rest = text.strip().partition(":")
    if kind == "unix" and rest:
        return Remote(kind, path=rest)
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if kind in ("tcp", "ssl") and host and port.isdecimal() and 0 < int(port) < 1 << 16:
        return Remote(kind, host=host, port=int(port))
    raise Refused(
        f"'{text}' is not the address of an OVSDB server",
        fix="use unix:PATH, tcp:HOST:PORT or ssl:HOST:PORT",
    )


async def connect(remote: Remote, tls: Tls | None, timeout_s: float) -> Stream:
    """Open a connection. Raise Refused if a certificate is wrong, and Unavailable if the server is
    not reachable."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _open(remote, tls)
    except TimeoutError as error:
        raise Unavailable(f"connecting to {remote}: no answer within {timeout_s:g} s") from error
    except ssl.SSLCertVerificationError as error:
        raise Refused(
            f"connecting to {remote}: the certificate of the server was not accepted: "
            f"{error.verify_message or error.reason}",
            fix="check the CA, or the address if names are checked",
        ) from error
    except OSError as error:  # also ssl.SSLError
        raise Unavailable(f"connecting to {remote}: {error.strerror or error}") from error


async def _open(remote: Remote, tls: Tls | None) -> Stream:
    if remote.kind == "unix":
        return await asyncio.open_unix_connection(remote.path, limit=CHUNK_BYTES)
    if remote.kind == "tcp":
        return await asyncio.open_connection(remote.host, remote.port, limit=CHUNK_BYTES)
    if tls is None:
        raise Refused(
            f"connecting to {remote}: ssl needs certificates",
            fix="configure the CA, and the certificate and key of this client",
        )
    return await asyncio.open_connection(
        remote.host,
        remote.port,
        ssl=_context(tls),
        server_hostname=remote.host if tls.check_names else "",
        limit=CHUNK_BYTES,
    )


def _context(tls: Tls) -> ssl.SSLContext:
    """Read the files at each connection, because they are replaced before they expire."""
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        context.check_hostname = tls.check_names
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ValueError) as error:
        raise _unreadable(tls, error) from error
    return context


def _unreadable(tls: Tls, error: Exception) -> FairleadError:
    for file in (tls.ca, tls.certificate, tls.key):
        if not file.is_file():
            return Refused(f"there is no file {file}", fix="check the paths of the certificates")
    return Refused(f"the certificates {tls.ca}, {tls.certificate} or {tls.key}: {error}")
