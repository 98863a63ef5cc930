"""Map a failed response of the API server to an error.

In: a description of the request, the HTTP status, the body (a `Status` object, or the answer of a
proxy in between), the Retry-After header. Out: an error of `fairlead.errors`, with the status
attached, so that a caller can distinguish "not found" from "forbidden". Pure. Follows the API
conventions, section "Error codes", and RFC 9110 for Retry-After (only the form in seconds is used).
"""

import msgspec

from fairlead.errors import Conflict, FairleadError, Refused, Unavailable

EXPIRED = 410
MAX_MESSAGE_LENGTH = 500
TERMINATING = "NamespaceTerminating"
"""The cause in a 403 for a namespace that is being deleted (k8s.io/api/core/v1,
NamespaceTerminatingCause)."""


class Cause(msgspec.Struct, frozen=True, gc=False):
    reason: str = ""


class StatusDetails(msgspec.Struct, frozen=True, gc=False):
    causes: tuple[Cause, ...] = ()


class Status(msgspec.Struct, frozen=True, gc=False):
    """The fields of a `Status` object that are read."""

    code: int = 0
    message: str = ""
    reason: str = ""
    details: StatusDetails = StatusDetails()


class RefusedByServer(Refused):
    """The API server rejects the request: for this user, or for this object. `status` is the HTTP
    status."""

    def __init__(self, message: str, *, status: int, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.status = status


class NotFound(RefusedByServer):
    """The object, its namespace or its kind does not exist (404)."""


class NamespaceTerminating(NotFound):
    """The namespace is being deleted, and the API server creates nothing new in it (a 403 that has
    nothing to do with RBAC). Callers that create objects treat such a namespace as deleted."""


class ServerUnavailable(Unavailable):
    """The API server is unreachable, slow or overloaded.

    `status` is the HTTP status, or 0 without a response. `retry_after_s` is the delay that the
    server requested."""

    def __init__(
        self, message: str, *, status: int = 0, retry_after_s: float = 0.0, fix: str = ""
    ) -> None:
        super().__init__(message, fix=fix, retry_after_s=retry_after_s)
        self.status = status


class NoConnection(ServerUnavailable):
    """No server accepted the connection, or the connection broke before the response was complete.

    A timeout is not a NoConnection: a server that does not respond in time may be running and
    overloaded."""


class Unauthenticated(ServerUnavailable):
    """The API server does not accept the credentials (401), or there are none (`status` 0).

    The request itself may be correct, and credentials are replaced while a process runs, so the
    request may be repeated. The connection logs the failure once for all callers, and holds back
    callers that retry too soon."""


class Expired(ServerUnavailable):
    """The resourceVersion to continue from is too old for the server (410). A new list is
    needed."""


STATUS = msgspec.json.Decoder(Status)

REMEDIES = {
    400: "",
    401: "renew the credentials: the token or certificate is missing, wrong or expired",
    403: (
        "grant it by RBAC: apply deploy/manifests, or the chart, whose roles have all permissions "
        "that Fairlead needs"
    ),
    404: "",
    405: "the server does not offer this operation: is its version at least 1.29?",
    413: "make the object smaller",
    415: "the server does not support this type of patch: is its version at least 1.29?",
    422: "correct the named field",
}


def read_status(body: bytes) -> Status:
    """Return the `Status` in a body. A body that is not a `Status` becomes the message."""
    try:
        return STATUS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = " ".join(body[: 4 * MAX_MESSAGE_LENGTH].decode(errors="replace").split())
        if text.startswith("<"):
            return Status(message="a page in HTML, which no API server sends")
        return Status(message=text[:MAX_MESSAGE_LENGTH])


def failure(
    attempt: str, status: int, body: bytes, retry_after: str | None = None
) -> FairleadError:
    """Return the error for a response with `status` and `body`.

    `attempt` describes the request, for instance "GET https://…/nodes"."""
    details = read_status(body)
    message = f"{attempt} was answered {status}" + (
        f": {details.message}" if details.message else ""
    )
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
    if status == 403 and any(cause.reason == TERMINATING for cause in details.details.causes):
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
    """Return Retry-After in seconds; 0 if the header is missing or a date."""
    return float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
