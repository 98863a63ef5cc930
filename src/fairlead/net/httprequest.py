"""Small HTTP requests and their answers as bytes. Pure.

In: received bytes. Out: a request with its length, or the status for an invalid one; the bytes of
an answer. Follows RFC 9112 as far as health checks need it: any method, keep-alive, pipelining,
bodies with a length. A request whose body has no length (chunked), or is longer than MAX_BYTES,
is answered without reading its body, and the connection is closed."""

from http import HTTPStatus
from typing import Literal, NamedTuple

MAX_BYTES = 8192
"""Limit of a request: its head, and its body if the body is read."""

END_OF_HEAD = b"\r\n\r\n"


class Request(NamedTuple):
    """The parts of a request that an answer may depend on."""

    method: str
    path: str


class Answer(NamedTuple):
    """An answer in JSON."""

    status: HTTPStatus
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Received(NamedTuple):
    """A complete request of `length` bytes at the beginning of the received data.

    `keep_alive`: whether the connection stays open."""

    request: Request
    length: int
    keep_alive: bool


Incomplete = Literal["incomplete"]


def read_request(received: bytes | bytearray) -> Received | HTTPStatus | Incomplete:
    """Return the first request in these bytes, or the status with which to reject an invalid
    one."""
    end = received.find(END_OF_HEAD)
    if end < 0:
        return (
            "incomplete"
            if len(received) < MAX_BYTES
            else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        )
    first, *rest = received[:end].decode("latin-1").split("\r\n")
    match first.split(" "):
        case [method, target, ("HTTP/1.1" | "HTTP/1.0") as version]:
            request = Request(method, target.partition("?")[0])
        case _:
            return HTTPStatus.BAD_REQUEST
    fields = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in rest)
    }
    length = fields.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()):
        return HTTPStatus.BAD_REQUEST
    head = end + len(END_OF_HEAD)
    # Converting a number with many digits takes long, and such a body exceeds the limit anyway.
    if (
        "transfer-encoding" in fields
        or len(length) > len(str(MAX_BYTES))
        or head + int(length) > MAX_BYTES
    ):
        return Received(request, head, keep_alive=False)
    if len(received) < head + int(length):
        return "incomplete"
    connection = fields.get("connection", "").lower()
    keep_alive = connection == "keep-alive" if version == "HTTP/1.0" else connection != "close"
    return Received(request, head + int(length), keep_alive)


def written(answer: Answer, date: str, *, head_only: bool, keep_alive: bool) -> bytes:
    """Return the bytes of the answer. `date`: the present time in the format of RFC 9110."""
    headers = (
        ("Content-Type", "application/json"),
        ("X-Content-Type-Options", "nosniff"),
        *answer.headers,
        ("Date", date),
        ("Content-Length", str(len(answer.body))),
        ("Connection", "keep-alive" if keep_alive else "close"),
    )
    head = f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n" + "".join(
        f"{k}: {v}\r\n" for k, v in headers
    )
    return head.encode() + b"\r\n" + (b"" if head_only else answer.body)
