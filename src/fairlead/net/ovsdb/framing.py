"""Divide a stream of bytes into JSON objects.

Pure. In: chunks of the stream, in order. Out: the bytes of each complete JSON object. RFC 7047
(section 4) sends JSON-RPC objects one after the other, without a length or a separator. Each byte
is scanned once, in regular expressions: the scan only follows strings and braces, and the decoder
of the object checks everything else. Invariants: the result does not depend on the division into
chunks; at most `limit_bytes` of an incomplete object are kept."""

import re

from fairlead.errors import Refused, Unavailable

_NEXT = re.compile(rb'(?:[^"{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+(?:([{}])|(")|\Z)', re.DOTALL)
"""Everything up to the next brace outside of a string. The second group matches the start of a
string that does not end in this chunk."""
_BLANK = b" \t\r\n"


class Framer:
    """Collects chunks until they contain a complete object."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self._depth = 0
        self._open_string = b""
        """The end of the previous chunk that the scan of the next one needs: a quote, and a
        backslash after it if the next character is escaped. Empty outside of a string."""

    @property
    def pending_bytes(self) -> int:
        """The size of the incomplete object."""
        return self._size_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the objects that end in this chunk. Raise Unavailable for bytes that cannot belong
        to an object, and Refused if an object exceeds the limit."""
        scanned = self._open_string + chunk
        skip = len(self._open_string)
        self._open_string = b""
        objects: list[bytes] = []
        start = at = 0
        while at < len(scanned):
            found = _NEXT.match(scanned, at)
            assert found is not None  # the expression matches every text
            brace, quote = found[1], found[2]
            if self._depth == 0 and (between := found[0].rstrip(b"{").strip(_BLANK)):
                raise Unavailable(f"a JSON object was expected, but received '{_text(between)}'")
            at = found.end()
            if brace == b"{":
                self._depth += 1
            elif brace == b"}":
                self._depth -= 1
                if self._depth == 0:
                    objects.append(self._complete(scanned[max(start, skip) : at]))
                    start = at
            elif quote:
                self._open_string = _unfinished(scanned[found.start(2) :])
                break
        self._keep(scanned[max(start, skip) :])
        return objects

    def _keep(self, piece: bytes) -> None:
        if self._depth:
            self._pieces.append(piece)
            self._grow(len(piece))

    def _complete(self, piece: bytes) -> bytes:
        self._grow(len(piece))
        whole = b"".join((*self._pieces, piece))
        self._pieces.clear()
        self._size_bytes = 0
        return whole.strip(_BLANK)

    def _grow(self, added_bytes: int) -> None:
        self._size_bytes += added_bytes
        if self._size_bytes > self._limit_bytes:
            raise Refused(
                f"a message is larger than the limit of {self._limit_bytes} bytes",
                fix="monitor fewer rows or columns, or raise the limit",
            )


def _unfinished(text: bytes) -> bytes:
    """Return what the scan of the next chunk needs of a string that this chunk leaves open."""
    backslashes = len(text) - len(text.rstrip(b"\\"))
    return b'"\\' if backslashes % 2 else b'"'


def _text(data: bytes) -> str:
    return data[:60].decode(errors="replace")
