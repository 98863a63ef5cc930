"""The tree of failures, and what each one means for the caller.

    FairleadError
    ├── Refused       the user must change something: becomes an Event, is not retried until an object changes
    ├── Unavailable   the other side did not answer or could not: try again with back-off
    └── Conflict      the world moved on: read again now

Anything else that is raised is a bug: it propagates and ends the process, whose successor reads the
world afresh. A message says what was tried, on what, what was answered; `fix` says what to do about
it."""


class FairleadError(Exception):
    """A failure that Fairlead knows how to go on from."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}; {self.fix}" if self.fix else self.message


class Refused(FairleadError):
    """What was asked for cannot be had; somebody has to change an object or the configuration."""


class Unavailable(FairleadError):
    """The other side is away, slow or full. Nothing is wrong with the request: repeat it later, and
    not before `retry_after_s` where the other side said so."""

    def __init__(self, message: str, *, fix: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, fix=fix)
        self.retry_after_s = retry_after_s


class Conflict(FairleadError):
    """The object was changed by somebody else since it was read."""
