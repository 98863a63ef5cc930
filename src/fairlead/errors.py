"""The tree of errors, and what each error means for the caller.

FairleadError
├── Refused       the user must change something: an Event; no retry until an object changes
├── Unavailable   the other side did not answer or could not act: retry with back-off
└── Conflict      the object has changed meanwhile: read it again and retry at once

Any other exception is a bug: it propagates and ends the process, and the next process starts from
the state that it reads. A message names the attempted operation, its object, and the answer of the
other side; `fix` tells the user what to do."""


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
