"""What the API server thinks of our credentials, as far as it has said.

In: what came of showing them. Out: whether to show them now. Several parts of a process share one
connection, and each goes on trying: a wrong token must not make each of them ask, and each of them
complain. Invariants: refused credentials are told of once, until the server takes some again; they
are not shown again before a wait that grows, and then by one caller; others than those that were
refused are shown at once."""

import asyncio

import structlog

from fairlead.backoff import Backoff
from fairlead.kube.access import Credentials
from fairlead.kube.answers import Unauthenticated

log = structlog.get_logger()

FLOOR_S, CEILING_S = 1.0, 30.0


class Standing:
    """With one server, as one identity. `source` says where the identity comes from."""

    def __init__(
        self, source: str, *, floor_s: float = FLOOR_S, ceiling_s: float = CEILING_S
    ) -> None:
        self._source = source
        self._retry = Backoff(floor_s, ceiling_s)
        self._refusal: Unauthenticated | None = None
        self._refused: Credentials | None = None
        self._again_at_s = 0.0
        self._told = False

    def is_refused(self, credentials: Credentials | None) -> bool:
        """Whether these are the ones that were refused last; None: that there are none to show."""
        return self._refusal is not None and credentials == self._refused

    def check(self, credentials: Credentials | None) -> None:
        """Raise what the server said of them, unless they are others, or it is time to ask
        again."""
        if self._refusal is None or credentials != self._refused:
            return
        self._tell()
        now_s = asyncio.get_running_loop().time()
        if now_s < self._again_at_s:
            raise Unauthenticated(
                self._refusal.message, status=self._refusal.status, fix=self._refusal.fix
            )
        # Whoever comes next waits for what this one learns.
        self._again_at_s = now_s + self._retry.next_s()

    def refused(self, credentials: Credentials | None, refusal: Unauthenticated) -> None:
        """They were shown, and not taken; or there are none, and the refusal says why."""
        if self._refusal is not None:
            self._tell()
        if self._refusal is None or credentials != self._refused:
            self._retry.reset()
            self._again_at_s = asyncio.get_running_loop().time() + self._retry.next_s()
        self._refusal, self._refused = refusal, credentials

    def accepted(self) -> None:
        """The server knows us, whatever else it said."""
        if self._told:
            log.info("let in by the API server again", identity=self._source)
        self._refusal = self._refused = None
        self._told = False

    def _tell(self) -> None:
        """Once, and only when somebody tries again: who gives up, as a command does, says why by
        himself."""
        if not self._told:
            self._told = True
            log.error(
                "not let in by the API server, trying again",
                identity=self._source,
                problem=str(self._refusal),
            )
