"""What comes back when a health port is asked. Pure values; `net.httpprobe` asks."""

from typing import Literal

import msgspec


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What came back. `answered`: some HTTP, with `status` (0 if it was none). `refused`: the
    machine is there, nothing serves on the port (or hung up). `silent`: nothing came in time, or
    the network says that it cannot be reached."""

    kind: Literal["answered", "refused", "silent"]
    status: int = 0
    weight: int | None = None
    """X-Load-Balancing-Endpoint-Weight; None if it is not there or no number."""
    empty: bool = True
    """Whether there was no body."""


REFUSED = Answer("refused")
SILENT = Answer("silent")
