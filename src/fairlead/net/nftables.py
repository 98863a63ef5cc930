"""Change and read the kernel's nftables through libnftables, in this process.

In: commands in nft's language. Out: nft's output, or an error that contains nft's message.
Invariant: one `run` is one netlink transaction: all its commands take effect or none.

A context is kept open: a change then costs 0.1 ms, against 10 to 190 ms for an `nft` process that
first reads the whole ruleset. The context belongs to the network namespace in which it was created.
Follows libnftables(3) and libnftables-json(5)."""

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

from fairlead.errors import Conflict, FairleadError, Refused, Unavailable, plain

LIBRARY = "libnftables.so.1"

_OUTPUT_JSON = 1 << 4
_OUTPUT_NUMERIC_PROTO = 1 << 7
_OUTPUT_NUMERIC_SYMBOL = 1 << 9
_MAX_MESSAGE_LENGTH = 600
_MAX_DESCRIPTORS = 1024

# libnftables caches interfaces and names in global variables, shared by all contexts, and frees
# them at the end of each run: two concurrent threads would crash the process.
_lock = threading.Lock()

Record = Mapping[str, object]
"""One object in a listing, as in libnftables-json(5): `{"map": {"family": "inet", "name": …}}`."""


class _Listing(msgspec.Struct):
    nftables: list[dict[str, object]]


_decode_listing = msgspec.json.Decoder(_Listing).decode


class Nftables:
    """A libnftables context. Calls block (milliseconds; seconds for 100,000 elements), and threads
    take turns, also with different contexts."""

    def __init__(self) -> None:
        """Raise Refused if the library is not installed, Unavailable if this process already has
        too many open files. Therefore create contexts early."""
        self._library = _load()
        with _lock:
            _check_descriptors()
            self._context: int | None = self._library.nft_ctx_new(0)
        if not self._context:
            raise Unavailable("opening a libnftables context failed: out of memory")
        self._library.nft_ctx_buffer_output(self._context)
        self._library.nft_ctx_buffer_error(self._context)

    def run(self, commands: str) -> str:
        """Apply the commands in one transaction and return nft's output.

        Raise Conflict if an object that they name is missing or already exists, Refused if this
        user or this kernel cannot apply them, Unavailable if the kernel lacked memory or was
        busy."""
        return self._run(commands, _OUTPUT_NUMERIC_PROTO | _OUTPUT_NUMERIC_SYMBOL, dry=False)

    def check(self, commands: str) -> None:
        """Check the commands without applying them: raise what `run` would raise."""
        self._run(commands, _OUTPUT_NUMERIC_PROTO | _OUTPUT_NUMERIC_SYMBOL, dry=True)

    def listing(self, command: str) -> Sequence[Record]:
        """Return the objects that a `list …` command shows, with protocols and symbols as numbers.
        Raise the same errors as `run`."""
        text = self._run(
            command, _OUTPUT_JSON | _OUTPUT_NUMERIC_PROTO | _OUTPUT_NUMERIC_SYMBOL, dry=False
        )
        records = _decode_listing(text).nftables
        return [record for record in records if "metainfo" not in record]

    def close(self) -> None:
        """Free the context. May be called repeatedly."""
        with _lock:
            if self._context:
                self._library.nft_ctx_free(self._context)
            self._context = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, commands: str, flags: int, *, dry: bool) -> str:
        with _lock:
            if not self._context:
                raise RuntimeError("the nftables context is closed")
            self._library.nft_ctx_set_dry_run(self._context, dry)
            self._library.nft_ctx_output_set_flags(self._context, flags)
            status = self._library.nft_run_cmd_from_buffer(self._context, commands.encode())
            output: bytes = self._library.nft_ctx_get_output_buffer(self._context) or b""
            errors: bytes = self._library.nft_ctx_get_error_buffer(self._context) or b""
        if status != 0:
            raise failure(commands, errors.decode(errors="replace"))
        return output.decode()


def failure(commands: str, errors: str) -> FairleadError:
    """Return the error for nft's message. Pure.

    nft quotes the offending line, which may hold thousands of elements: only its `Error:` lines are
    used."""
    complaints = [
        line[line.index("Error:") + 7 :] for line in errors.splitlines() if "Error:" in line
    ]
    reason = "; ".join(dict.fromkeys(complaints)) or errors.strip() or "nothing"
    first = commands.strip().partition("\n")[0]
    message = f"nft {_shortened(first, 120)}: {_shortened(reason, _MAX_MESSAGE_LENGTH)}"
    if "Operation not permitted" in reason:
        return Refused(message, fix="run as root or with CAP_NET_ADMIN in this network namespace")
    if "Operation not supported" in reason or "Protocol not supported" in reason:
        return Refused(message, fix="use a kernel with CONFIG_NF_TABLES_INET and CONFIG_NFT_NAT")
    if (
        "No such file or directory" in reason
        or "File exists" in reason
        or "Device or resource busy" in reason
    ):
        return Conflict(message)
    if "syntax error" in reason:
        return Refused(message, fix="use libnftables 1.0.6 or newer")
    return Unavailable(message)


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _check_descriptors() -> None:
    """Raise Unavailable if a new descriptor would be too high for select(2).

    libnftables waits with select(2), and aborts the process if the number of its socket exceeds
    FD_SETSIZE."""
    lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.close(lowest)
    if lowest >= _MAX_DESCRIPTORS:
        raise Unavailable(
            f"opening a libnftables context failed: {lowest} files are open, the limit is "
            f"{_MAX_DESCRIPTORS}"
        )


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise Refused(
            f"loading {LIBRARY} failed: {plain(error)}",
            fix="install it: apt-get install libnftables1",
        ) from error
    context = ctypes.c_void_p
    for name, result, arguments in (
        ("nft_ctx_new", context, [ctypes.c_uint32]),
        ("nft_ctx_free", None, [context]),
        ("nft_ctx_buffer_output", ctypes.c_int, [context]),
        ("nft_ctx_buffer_error", ctypes.c_int, [context]),
        ("nft_ctx_set_dry_run", None, [context, ctypes.c_bool]),
        ("nft_ctx_output_set_flags", None, [context, ctypes.c_uint]),
        ("nft_run_cmd_from_buffer", ctypes.c_int, [context, ctypes.c_char_p]),
        ("nft_ctx_get_output_buffer", ctypes.c_char_p, [context]),
        ("nft_ctx_get_error_buffer", ctypes.c_char_p, [context]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
