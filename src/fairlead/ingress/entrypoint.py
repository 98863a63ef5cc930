"""An entry point of an ingress, the variants of a request to it, and the answer to one request.

Pure values; `ingress.call` sends the requests."""

from typing import Literal, get_args

import msgspec

Variant = Literal["plain", "v1", "v2", "forwarded-for"]
"""What a request carries: nothing (as a client's request), a forged PROXY header of version 1 or 2,
or a forged X-Forwarded-For."""
Outcome = Literal["answered", "rejected", "silent", "unreachable"]

NOT_HTTP = "answered, but not with HTTP"
"""How a server answers that speaks another protocol."""
VARIANTS: tuple[Variant, ...] = get_args(Variant)


class EntryPoint(msgspec.Struct, frozen=True):
    """An address (or a DNS name) and a port that accept connections for an ingress.

    `host` is the server name in SNI and the value of the Host header. If it is empty, SNI is left
    out and the Host header contains the address."""

    address: str
    port: int
    tls: bool
    host: str = ""
    path: str = "/"


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one request.

    The outcome `answered` means an HTTP response with a status other than 400. `how` describes the
    result in words. `addresses` are all IP addresses in the response, in their shortest form. `own`
    is the local address of the connection. `claimed` is the forged source address that the request
    contained. It has the family of the connection, which the entry point alone does not show if its
    address is a DNS name."""

    outcome: Outcome
    how: str
    status: int = 0
    addresses: tuple[str, ...] = ()
    own: str = ""
    claimed: str = ""
