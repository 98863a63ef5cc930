"""A client of the control socket of BIRD, the routing daemon.

In: the path of the socket, and commands. Out: replies (`bird_replies`). Each command has a
connection of its own, so a reply always belongs to its command, and BIRD gets one command at a
time. A reply is a sequence of lines with a code of four digits. A minus after the code says that
more lines follow, and a space that this line is the last one. A line without a code continues the
line before it. Lines that begin with a plus are messages outside of replies. Codes from 8000 on are
errors (doc/reply_codes of BIRD). Invariant: the reply is complete and is no error, or the call
raises an error with BIRD's words."""

import asyncio
import re
from pathlib import Path

from fairlead.errors import Refused, Unavailable, plain
from fairlead.net.bird_replies import (
    BfdSession,
    Line,
    Protocol,
    Route,
    bfd_sessions_of,
    protocols_of,
    routes_of,
)

TIMEOUT_S = 10.0
"""The time within which BIRD must answer a command."""
MAX_REPLY_BYTES = 1 << 26
"""The maximum length of a reply: more than 100,000 routes with all their attributes."""
TOO_LONG = f"the answer is longer than {MAX_REPLY_BYTES >> 20} MiB"
_WELCOME, _FIRST_ERROR = 1, 8000
_CONFIGURED = (3, 4, 5)
"""The codes of a configuration that is in effect, of one that takes effect as soon as some
protocols have restarted, and of one that takes effect after the previous one."""
_CODE = re.compile(r"(\d{4})([ -])(.*)")


class Bird:
    """The BIRD whose control socket is `path`. `timeout_s`: how long it may take to answer."""

    def __init__(self, path: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self.path = path
        self._timeout_s = timeout_s

    async def query(self, command: str) -> tuple[Line, ...]:
        """Return the complete reply to one command. Raise Refused if BIRD rejects the command, and
        Unavailable if it does not answer, or not in time, or not completely."""
        if "\n" in command:
            raise ValueError("a command is one line")
        try:
            async with asyncio.timeout(self._timeout_s):
                lines = await self._exchange(command)
        except TimeoutError as error:
            raise self._unavailable(command, "there was no answer in time") from error
        except (OSError, ValueError) as error:
            raise self._unavailable(command, plain(error)) from error
        if lines[-1].code >= _FIRST_ERROR:
            raise Refused(f"BIRD at {self.path} rejected '{command}': {lines[-1].text}")
        return lines

    async def version(self) -> str:
        """Return the version, such as `2.0.12`."""
        return (await self.query("show status"))[0].text.removeprefix("BIRD ").strip()

    async def protocols(self) -> tuple[Protocol, ...]:
        """Return all protocols with their details."""
        return protocols_of(await self.query("show protocols all"))

    async def bfd_sessions(self) -> tuple[BfdSession, ...]:
        """Return all BFD sessions; none if BIRD runs without BFD."""
        try:
            return bfd_sessions_of(await self.query("show bfd sessions"))
        except Refused as error:
            if "no BFD protocol" in error.message:
                return ()
            raise

    async def routes(self) -> tuple[Route, ...]:
        """Return the routes of all tables, with their attributes."""
        return routes_of(await self.query("show route table all all"))

    async def exported(self, protocol: str) -> tuple[Route, ...]:
        """Return the routes that a protocol exports, as they are in its tables. Raise Refused if
        there is no protocol of this name."""
        return routes_of(await self.query(f"show route all export '{protocol}'"))

    async def configure(self) -> None:
        """Let BIRD read its configuration file again. Raise Refused if the file is invalid; BIRD
        goes on with the previous configuration then."""
        reply = await self.query("configure")
        if reply[-1].code not in _CONFIGURED:
            raise self._unavailable("configure", reply[-1].text)

    async def _exchange(self, command: str) -> tuple[Line, ...]:
        reader, writer = await asyncio.open_unix_connection(self.path, limit=MAX_REPLY_BYTES)
        try:
            welcome = await _reply(reader)
            if welcome[-1].code != _WELCOME:
                raise ValueError(f"the greeting is '{welcome[-1].text}'")
            writer.write(f"{command}\n".encode())
            return await _reply(reader)
        finally:
            writer.close()

    def _unavailable(self, command: str, reason: str) -> Unavailable:
        return Unavailable(f"asking BIRD at {self.path} for '{command}': {reason}")


async def _reply(reader: asyncio.StreamReader) -> tuple[Line, ...]:
    """Return the next reply. Raise ValueError if it is malformed, too long or cut off."""
    lines: list[Line] = []
    length = 0
    while True:
        try:
            data = await reader.readline()
        except ValueError:  # the line is longer than the limit of the reader
            raise ValueError(TOO_LONG) from None
        length += len(data)
        if not data.endswith(b"\n"):
            raise ValueError(f"the answer ended after {length} bytes, before its last line")
        if length > MAX_REPLY_BYTES:
            raise ValueError(TOO_LONG)
        text = data.decode(errors="replace").rstrip("\r\n")
        if text.startswith("+"):
            continue
        if text.startswith(" ") and lines:
            lines.append(Line(lines[-1].code, text[1:]))
            continue
        if (found := _CODE.fullmatch(text)) is None:
            raise ValueError(f"the line '{text[:200]}' of the answer has no code")
        lines.append(Line(int(found[1]), found[3]))
        if found[2] == " ":
            return tuple(lines)
