"""Mutual TLS between gateways.

In: three PEM files. Out: the TLS settings for a connection in either direction, and messages that
explain failures. A peer is accepted if its certificate is issued by the CA, has not expired, has
PEER_NAME among its DNS names (RFC 9525) and, if it has an extended key usage, is for clients where
the peer connects and for servers where this gateway connects (RFC 5280, 4.2.1.12). The name
excludes other holders of a certificate of the same CA. TLS 1.3 only.

Invariant: the files are checked for each new connection. If they cannot be used, for example
because they are being replaced, the previous ones remain in use. Open connections stay open.
"""

import ssl
from pathlib import Path

import structlog

from fairlead.config import PeerTLSConfig
from fairlead.errors import Refused, plain

log = structlog.get_logger()

PEER_NAME = "fairlead-gateway"

ALL_OR_NONE = "set gateway.peerTLS on all gateways, or on none"

_ALERT = "alert"
_NO_TLS = frozenset(
    {
        "WRONG_VERSION_NUMBER",
        "RECORD_LAYER_FAILURE",
        "HTTP_REQUEST",
        "UNEXPECTED_MESSAGE",
        "BAD_RECORD_TYPE",
    }
)

Stamp = tuple[tuple[int, int, int], ...]


class PeerTLS:
    """Certificate, key and CA of this gateway, read again when the files change."""

    def __init__(self, files: PeerTLSConfig) -> None:
        self._files = files
        self._made: tuple[Stamp, ssl.SSLContext, ssl.SSLContext] | None = None
        self._problem = ""

    def load(self) -> None:
        """Read the files. Raise Refused if they cannot be used."""
        self._take(self._stamp())

    @property
    def server(self) -> ssl.SSLContext:
        """The context for accepted connections. `identity_problem` checks the name of the peer."""
        return self._latest()[1]

    @property
    def client(self) -> ssl.SSLContext:
        """The context for connections to other gateways, with PEER_NAME as the name of the
        server."""
        return self._latest()[2]

    def _latest(self) -> tuple[Stamp, ssl.SSLContext, ssl.SSLContext]:
        try:
            stamp = self._stamp()
            if self._made is None or stamp != self._made[0]:
                self._take(stamp)
                log.info(
                    "read the certificate for gateway.peers", certificate=self._files.certificate
                )
            self._problem = ""
        except Refused as problem:
            if self._made is None:
                raise
            if str(problem) != self._problem:
                log.warning("the previous certificate remains in use", problem=str(problem))
            self._problem = str(problem)
        assert self._made is not None
        return self._made

    def _stamp(self) -> Stamp:
        """Return a value that changes when a file changes. The files of a mounted Secret are
        symbolic links, which are followed."""
        try:
            found = [
                Path(each).stat()
                for each in (self._files.certificate, self._files.key, self._files.ca)
            ]
        except OSError as error:
            raise self._refused(error) from error
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)

    def _take(self, stamp: Stamp) -> None:
        try:
            server, client = (
                self._context(ssl.PROTOCOL_TLS_SERVER),
                self._context(ssl.PROTOCOL_TLS_CLIENT),
            )
        except (OSError, ValueError) as error:
            raise self._refused(error) from error
        self._made = stamp, server, client

    def _context(self, protocol: "ssl._SSLMethod") -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self._files.certificate, self._files.key, password=_no_password)
        context.load_verify_locations(self._files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _refused(self, error: Exception) -> Refused:
        files = f"{self._files.certificate}, {self._files.key}, {self._files.ca}"
        return Refused(
            f"reading the certificate, key and CA for gateway.peers ({files}) failed: "
            f"{describe(error)}",
            fix="set gateway.peerTLS to a certificate, its key without a password, and the CA, "
            "each as a PEM file",
        )


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def identity_problem(connection: ssl.SSLObject) -> str:
    """Return why the peer of a verified connection is not accepted; empty if it is accepted."""
    entries = (connection.getpeercert() or {}).get("subjectAltName", ())
    names = [str(entry[1]) for entry in entries if entry[0] == "DNS"]
    if PEER_NAME in names:
        return ""
    return (
        "its certificate is not that of a gateway: it names "
        f"{', '.join(names) or 'no DNS name'} and not {PEER_NAME}"
    )


def describe(error: Exception) -> str:
    """Return what went wrong and, if known, what to do."""
    match error:
        case ssl.SSLCertVerificationError(verify_message=message):
            return f"its certificate is not accepted here: {message.rstrip('.')}"
        case ssl.SSLError(reason=reason):
            return _describe_tls(reason or plain(error))
    return plain(error)


def _describe_tls(reason: str) -> str:
    code, words = reason.upper(), reason.lower().replace("_", " ")
    if code == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it presented no certificate"
    if code in _NO_TLS:
        return f"it does not speak TLS: {ALL_OR_NONE}"
    if _ALERT in words:
        return (
            "it does not accept the certificate of this gateway "
            f"({words.partition(_ALERT)[2].strip()})"
        )
    return words
