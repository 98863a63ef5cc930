"""A port of an ingress, the ways of calling it, and what a call came to. Pure values;
`ingress.call` calls."""

from typing import Literal, get_args

import msgspec

Variant = Literal["plain", "v1", "v2", "forwarded-for"]
Outcome = Literal["answered", "rejected", "silent", "unreachable"]

VARIANTS: tuple[Variant, ...] = get_args(Variant)


class EntryPoint(msgspec.Struct, frozen=True):
    """Where to knock. `host`: the name that is asked for, in SNI and in the request; empty: the
    address."""

    address: str
    port: int
    tls: bool
    host: str = ""
    path: str = "/"


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one call. `answered`: HTTP, and not 400; `how` says it in words. `addresses`:
    all that the answer shows, in their shortest form. `own`: our end of the connection, as this
    machine knows it. `claimed`: the address that was forged, of the family that the connection had:
    an entry_point may be a name, which says nothing of it."""

    outcome: Outcome
    how: str
    status: int = 0
    addresses: tuple[str, ...] = ()
    own: str = ""
    claimed: str = ""
