"""Turn an answer of the API server that is not a success into the failure that it means.

In: what was tried, the HTTP status, the body (a `Status` object, or anything a proxy on the way may
have put there), the Retry-After header. Out: one of the failures of `fairlead.errors`, with the
status kept, so that a caller can tell "is not there" from "may not". Pure. Follows the API
conventions, section "Error codes", and RFC 9110 for Retry-After (only the form in seconds is used).
"""

import msgspec

from fairlead.errors import Conflict, FairleadError, Refused, Unavailable

EXPIRED = 410
LONGEST_MESSAGE = 500
TERMINATING = "NamespaceTerminating"
"""The API's name for this cause of a 403 (k8s.io/api/core/v1, NamespaceTerminatingCause)."""


class Cause(msgspec.Struct, frozen=True, gc=False):
    reason: str = ""


class StatusDetails(msgspec.Struct, frozen=True, gc=False):
    causes: tuple[Cause, ...] = ()


class Status(msgspec.Struct, frozen=True, gc=False):
    """The part of a `Status` object that is read."""

    code: int = 0
    message: str = ""
    reason: str = ""
    details: StatusDetails = StatusDetails()


class RefusedByServer(Refused):
    """The API server will not do it: not as this user, or not with this object. `status` is the
    HTTP status."""

    def __init__(self, message: str, *, status: int, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.status = status


class NotFound(RefusedByServer):
    """The object, its namespace or its kind is not there (404)."""


class NamespaceTerminating(NotFound):
    """The namespace is being deleted, and the API server creates nothing new in it (a 403 that has
    nothing to do with RBAC). Callers that create objects treat such a namespace as deleted."""


class ServerUnavailable(Unavailable):
    """The API server is away, slow or overloaded. `status` is 0 if there was no answer;
    `retry_after_s` is its own wish."""

    def __init__(
        self, message: str, *, status: int = 0, retry_after_s: float = 0.0, fix: str = ""
    ) -> None:
        super().__init__(message, fix=fix, retry_after_s=retry_after_s)
        self.status = status


class NoConnection(ServerUnavailable):
    """Nobody took the request, or the line broke before the answer was whole. Slowness is none of
    that: a server that does not answer in time may be there and have too much to do."""


class Unauthenticated(ServerUnavailable):
    """The API server does not know who we are (401), or we have nothing to show it (`status` 0).
    Nothing is wrong with the request, and credentials are replaced while a process runs, so it may
    be repeated. The connection logs it once, for all, and holds back whoever tries again too
    soon."""


class Expired(ServerUnavailable):
    """The version to go on from is too old for the server (410): list anew."""


STATUS = msgspec.json.Decoder(Status)

REMEDIES = {
    400: "",
    401: "renew the credentials: the token or certificate is missing, wrong or expired",
    403: (
        "grant it by RBAC: apply deploy/manifests, or the chart, whose roles hold all that "
        "Fairlead needs"
    ),
    404: "",
    405: "the server does not offer this operation: is its version at least 1.29?",
    413: "make the object smaller",
    415: "the server does not know this kind of patch: is its version at least 1.29?",
    422: "correct the named field",
}


def read_status(body: bytes) -> Status:
    """The `Status` in a body; a body that is none is taken as the message itself."""
    try:
        return STATUS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Status(message=body.decode(errors="replace").strip()[:LONGEST_MESSAGE])


def failure(
    attempt: str, status: int, body: bytes, retry_after: str | None = None
) -> FairleadError:
    """What it means that `attempt` (for instance "GET https://…/nodes") was answered with `status`
    and `body`."""
    told = read_status(body)
    message = f"{attempt} was answered {status}" + (f": {told.message}" if told.message else "")
    if status == 409:
        return Conflict(message, fix="read the object again")
    if status == EXPIRED:
        return Expired(message, status=status, fix="list again")
    if status == 429 or status >= 500:
        return ServerUnavailable(message, status=status, retry_after_s=seconds(retry_after))
    if status == 401:
        return Unauthenticated(message, status=status, fix=REMEDIES[401])
    if status == 404:
        return NotFound(message, status=status)
    if status == 403 and any(cause.reason == TERMINATING for cause in told.details.causes):
        return NamespaceTerminating(
            message, status=status, fix="nothing needs to be done: the namespace is being deleted"
        )
    if 300 <= status < 400:
        return RefusedByServer(
            message,
            status=status,
            fix="name the server's own address: redirections are not followed",
        )
    return RefusedByServer(message, status=status, fix=REMEDIES.get(status, ""))


def seconds(retry_after: str | None) -> float:
    """Retry-After in seconds; 0 if it is missing or a date."""
    return float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
