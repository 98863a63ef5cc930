"""Share the API server's rejection of credentials among all callers of one connection.

In: whether the server accepted or rejected the credentials of a request. Out: whether they may be
sent now. Several parts of a process share one connection, and each retries. With a wrong token they
must not all send requests and log errors. Invariants: rejected credentials are logged once, until
the server accepts some again; they are sent again only after a back-off, and then by one caller;
credentials other than the rejected ones are sent at once."""

import asyncio

import structlog

from fairlead.backoff import Backoff
from fairlead.kube.access import Credentials
from fairlead.kube.answers import Unauthenticated

log = structlog.get_logger()

FLOOR_S, CEILING_S = 1.0, 30.0


class CredentialGate:
    """Hold back rejected credentials of one identity at one server. `source` names the origin of
    the identity."""

    def __init__(
        self, source: str, *, floor_s: float = FLOOR_S, ceiling_s: float = CEILING_S
    ) -> None:
        self._source = source
        self._retry = Backoff(floor_s, ceiling_s)
        self._rejection: Unauthenticated | None = None
        self._rejected: Credentials | None = None
        self._retry_at_s = 0.0
        self._logged = False

    def is_rejected(self, credentials: Credentials | None) -> bool:
        """Return whether these credentials were rejected last. None stands for credentials that
        could not be obtained."""
        return self._rejection is not None and credentials == self._rejected

    def check(self, credentials: Credentials | None) -> None:
        """Raise the last rejection again if it concerns these credentials and their back-off is not
        over."""
        if self._rejection is None or credentials != self._rejected:
            return
        self._log_once()
        now_s = asyncio.get_running_loop().time()
        if now_s < self._retry_at_s:
            raise Unauthenticated(
                self._rejection.message, status=self._rejection.status, fix=self._rejection.fix
            )
        # This caller sends the credentials again; the callers that follow wait for its result.
        self._retry_at_s = now_s + self._retry.next_s()

    def reject(self, credentials: Credentials | None, rejection: Unauthenticated) -> None:
        """Record that the server rejected the credentials, or (None) that there were none to
        send."""
        if self._rejection is not None:
            self._log_once()
        if self._rejection is None or credentials != self._rejected:
            self._retry.reset()
            self._retry_at_s = asyncio.get_running_loop().time() + self._retry.next_s()
        self._rejection, self._rejected = rejection, credentials

    def accept(self) -> None:
        """Record that the server accepted the credentials, whatever the status of its response."""
        if self._logged:
            log.info("API server accepts the credentials again", identity=self._source)
        self._rejection = self._rejected = None
        self._logged = False

    def _log_once(self) -> None:
        """Log the rejection once, and only when a caller retries.

        A caller that gives up, such as a command, reports the error itself."""
        if not self._logged:
            self._logged = True
            log.error(
                "API server rejects the credentials, retrying",
                identity=self._source,
                problem=str(self._rejection),
            )
