"""The result of a request to a health port. Pure values; `net.httpprobe` sends the requests."""

from typing import Literal

import msgspec


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The result of one request.

    `answered`: an HTTP response, with `status` (0 if the response was not valid HTTP). `refused`:
    the host responds, but no process serves the port, or it closed the connection. `silent`: no
    response in time, or the network reports the host as unreachable."""

    kind: Literal["answered", "refused", "silent"]
    status: int = 0
    weight: int | None = None
    """X-Load-Balancing-Endpoint-Weight; None if it is missing or not a number."""
    empty: bool = True
    """Whether the response had no body."""


REFUSED = Answer("refused")
SILENT = Answer("silent")
