"""One HTTP exchange with an echo server: the request, and the contents of the answer.

In: bytes. Out: an `Answer`, or None while the answer is incomplete. Pure; RFC 9112 as far as our
own echo server uses it (Content-Length bodies, `Connection: close`)."""

import msgspec

from fairlead.errors import plain

REQUEST_ONCE = b"GET / HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n"
REQUEST_KEEP = b"GET / HTTP/1.1\r\nHost: probe\r\n\r\n"


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The answer of an echo server: which pod it is, and which client address it saw."""

    pod: str
    node: str
    peer: str
    length: int = 0
    """Bytes of the request's body, or of the datagram."""
    proxy_peer: str = ""
    """The client address in a PROXY header."""
    forwarded_for: str = ""
    """The client address in X-Forwarded-For."""
    closing: bool = False
    """The server announced that it will close this connection: an orderly end."""

    @property
    def client(self) -> str:
        """The client address that a server logs if it trusts X-Forwarded-For and PROXY headers."""
        return self.forwarded_for or self.proxy_peer or self.peer


_BODY = msgspec.json.Decoder(Answer)


class Malformed(ValueError):
    """The received bytes are not an answer of an echo server."""


def parse(received: bytes) -> Answer | None:
    """Return a complete answer, or None. Raise Malformed for bytes that cannot become an answer."""
    head, separator, body = received.partition(b"\r\n\r\n")
    if not separator:
        if received and not b"HTTP/1.1 200".startswith(received[:12]):
            raise Malformed(repr(received[:60]))
        return None
    lines = head.lower().split(b"\r\n")
    if not lines[0].startswith(b"http/1.1 200"):
        raise Malformed(repr(lines[0][:60]))
    fields = dict(line.split(b":", 1) for line in lines[1:] if b":" in line)
    if len(body) < int(fields.get(b"content-length", b"0")):
        return None
    try:
        answer = _BODY.decode(body)
    except msgspec.DecodeError as error:
        raise Malformed(plain(error)) from error
    closing = fields.get(b"connection", b"").strip() == b"close"
    return msgspec.structs.replace(answer, closing=closing)
