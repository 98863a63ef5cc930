"""The tree of errors, and what each error means for the caller.

FairleadError
├── Refused       the user must change something: an Event; no retry until an object changes
├── Unavailable   the other side did not answer or could not act: retry with back-off
└── Conflict      the object has changed meanwhile: read it again and retry at once

Any other exception is a bug: it propagates and ends the process, and the next process starts from
the state that it reads. A message names the attempted operation, its object, and the answer of the
other side; `fix` tells the user what to do. `plain` words the answer, if it is an exception of
Python or of a library."""

import os
import re


class FairleadError(Exception):
    """Base of the errors that callers handle."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}; {self.fix}" if self.fix else self.message


class Refused(FairleadError):
    """The request cannot be fulfilled until a user changes an object or the configuration."""


class Unavailable(FairleadError):
    """The other side is not reachable, slow or overloaded. The request itself is valid: retry it
    later, but not before `retry_after_s` if the other side specified that time."""

    def __init__(self, message: str, *, fix: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, fix=fix)
        self.retry_after_s = retry_after_s


class Conflict(FairleadError):
    """Another client has changed the object since it was read."""


_ERRNO = re.compile(r"\[Errno (\d+)\]")
_RAW = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>|^\[SSL[^\]]*\]|\(_ssl\.c:\d+\)")
"""Parts of texts that are for programmers: representations of objects, and places in a source."""
_POOL = re.compile(r"^(.*?):? ?HTTPS?ConnectionPool\((.*)", re.DOTALL)
_NUMBERED = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")
_CERTIFICATE = re.compile(r"(certificate verify failed: [^'\"(]+)")


def plain(problem: BaseException) -> str:
    """Return what an exception says, in one line for users: without names of classes, numbers of
    errors, and representations of objects. The caller adds what was tried, and on what."""
    if isinstance(problem, FairleadError):
        return str(problem)
    # The exceptions of libraries are recognized by their attributes, because an import of these
    # libraries would make every command slower.
    for inner in ("certificate_error", "os_error", "reason"):  # of aiohttp and urllib
        if isinstance(cause := getattr(problem, inner, None), BaseException):
            return plain(cause)
    if verdict := getattr(problem, "verify_message", ""):  # ssl.SSLCertVerificationError
        return f"the certificate is not trusted: {_sentence(verdict)}"
    if (mark := getattr(problem, "problem_mark", None)) is not None:  # yaml.MarkedYAMLError
        return f"line {mark.line + 1}, column {mark.column + 1}: {of_yaml(problem)}"
    if isinstance(problem, UnicodeDecodeError):
        return f"it is not text in {problem.encoding.upper()}, at byte {problem.start + 1}"
    if isinstance(problem, OSError) and "ConnectionPool(" not in str(problem):
        return _of_system(problem)
    # aiohttp.ClientResponseError has a message, yaml.reader.ReaderError a reason and a position.
    said = getattr(problem, "message", "") or getattr(problem, "reason", "") or str(problem)
    if pool := _POOL.search(str(said)):
        said = ": ".join(filter(None, (pool[1], _of_pool(pool[2]))))
    if isinstance(position := getattr(problem, "position", None), int):
        said = f"character {position + 1}: {said}"
    return _sentence(str(said)) or "it failed without a message"


def of_yaml(problem: BaseException) -> str:
    """Return what a yaml.MarkedYAMLError says, without its place."""
    parts = (getattr(problem, name, "") for name in ("context", "problem"))
    said = ", ".join(filter(None, parts))
    if said.endswith("that cannot start any token"):
        said += " (indent with spaces instead of tabs; put texts that begin with @ in quotes)"
    return said


def _of_pool(text: str) -> str:
    """Return why urllib3 could not send a request. Its text is the representation of an error
    inside another."""
    for known in (_NUMBERED, _CERTIFICATE):
        if found := known.search(text):
            return found[1].strip()
    return "there was no answer in time" if "timed out" in text else "no connection"


def _of_system(problem: OSError) -> str:
    if reason := str(getattr(problem, "reason", None) or ""):
        if hasattr(problem, "library"):  # ssl.SSLError
            return f"TLS failed: {reason.replace('_', ' ').lower()}"
        # urllib's HTTPError, which is an answer, and its URLError
        code = getattr(problem, "code", None)
        return f"the answer is {code} {reason}" if code else _sentence(reason)
    # asyncio's own texts contain the representation of a socket address, after the number.
    numbers = _ERRNO.findall(str(problem))
    if numbers:
        return ", ".join(dict.fromkeys(os.strerror(int(each)) for each in numbers))
    if problem.strerror:  # of the resolver, whose numbers are negative, and of ssl
        return _sentence(problem.strerror)
    silent = "there was no answer in time"
    return _sentence(str(problem)) or (silent if isinstance(problem, TimeoutError) else "it failed")


def _sentence(text: str) -> str:
    """Return a text in one line, without the parts for programmers and without a final dot."""
    return " ".join(_RAW.sub("", text).split()).removesuffix(".")
