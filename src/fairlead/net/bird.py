"""A client of the control socket of BIRD, the routing daemon.

In: commands. Out: replies, and the values that `bird_replies` parses from them. Each command uses a
connection of its own, so a reply always belongs to its command. Codes from 8000 on are errors
(BIRD's doc/reply_codes). Invariant: an error or a malformed answer becomes an error that contains
BIRD's text."""

import asyncio
import re
from pathlib import Path

from fairlead.errors import Refused, Unavailable
from fairlead.net.bird_replies import (
    BfdSession,
    Line,
    Protocol,
    TableRoute,
    bfd_sessions_of,
    protocols_of,
    routes_of,
)

TIMEOUT_S = 10.0
"""The time within which BIRD must answer a command."""
_WELCOME, _RUNTIME_ERROR = 1, 8000
_RECONFIGURED = (3, 4, 5)
"""The codes of a configuration that is in effect, of one that takes effect as soon as some
protocols have restarted, and of one that takes effect after the previous one."""
_CODE = re.compile(r"(\d{4})([ -])(.*)")
_LIMIT_BYTES = 1 << 26
"""The maximum length of a line."""


class Bird:
    """The control socket at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def query(self, command: str) -> tuple[Line, ...]:
        """Return the reply to the command. Raise Refused if BIRD rejects it, and Unavailable if
        BIRD does not answer."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                lines = await self._exchange(command)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            reason = str(error) or "no answer in time"
            raise Unavailable(f"asking BIRD at {self.path} for '{command}': {reason}") from error
        if lines[-1].code >= _RUNTIME_ERROR:
            raise Refused(f"BIRD rejected '{command}': {lines[-1].text}")
        return lines

    async def version(self) -> str:
        """Return the version, such as `2.0.12`."""
        return (await self.query("show status"))[0].text.removeprefix("BIRD ").strip()

    async def router_id(self) -> str:
        """Return the router id with which BIRD runs."""
        for line in await self.query("show status"):
            if line.text.startswith("Router ID is "):
                return line.text.removeprefix("Router ID is ").strip()
        return ""

    async def protocols(self) -> tuple[Protocol, ...]:
        """Return all protocols with their details."""
        return protocols_of(await self.query("show protocols all"))

    async def bfd_sessions(self) -> tuple[BfdSession, ...]:
        """Return all BFD sessions; none if BFD is not configured."""
        try:
            return bfd_sessions_of(await self.query("show bfd sessions"))
        except Refused:  # there is no BFD protocol
            return ()

    async def routes(self, protocol: str) -> tuple[TableRoute, ...]:
        """Return the routes that the protocol has put into tables."""
        return routes_of(await self.query(f"show route all protocol {quoted(protocol)}"))

    async def exported(self, protocol: str) -> tuple[TableRoute, ...]:
        """Return the routes that the protocol exports, as they are in the tables. Raise Refused if
        there is no such protocol."""
        return routes_of(await self.query(f"show route all export {quoted(protocol)}"))

    async def check(self, file: Path) -> None:
        """Check a configuration without using it. Raise Refused with BIRD's text if it is
        invalid."""
        await self.query(f'configure check "{file}"')

    async def configure(self) -> None:
        """Have BIRD read its configuration file again. Raise Refused if it is invalid; BIRD then
        continues with the previous one."""
        reply = await self.query("configure")
        if reply[-1].code not in _RECONFIGURED:
            raise Unavailable(f"BIRD did not read its configuration: {reply[-1].text}")

    async def prepare_graceful_restart(self) -> None:
        """Stop BIRD so that its neighbors keep the routes until it is started again."""
        await self.query("graceful restart")

    async def shut_down(self) -> None:
        """Stop BIRD. It withdraws its routes."""
        await self.query("down")

    async def _exchange(self, command: str) -> tuple[Line, ...]:
        reader, writer = await asyncio.open_unix_connection(self.path, limit=_LIMIT_BYTES)
        try:
            if (welcome := await _reply(reader))[-1].code != _WELCOME:
                raise ValueError(f"unexpected greeting '{welcome[-1].text}'")
            writer.write(f"{command}\n".encode())
            return await _reply(reader)
        finally:
            writer.close()


def quoted(name: str) -> str:
    """Return the name as a symbol of BIRD's configuration language."""
    return f"'{name}'"


async def _reply(reader: asyncio.StreamReader) -> tuple[Line, ...]:
    lines: list[Line] = []
    while True:
        data = await reader.readuntil(b"\n")
        text = data.decode(errors="replace").rstrip("\n")
        if text.startswith("+"):  # an asynchronous message, which belongs to no reply
            continue
        if text.startswith(" ") and lines:
            lines.append(Line(lines[-1].code, text[1:]))
            continue
        if (found := _CODE.fullmatch(text)) is None:
            raise ValueError(f"malformed answer '{text[:200]}'")
        lines.append(Line(int(found[1]), found[3]))
        if found[2] == " ":
            return tuple(lines)
