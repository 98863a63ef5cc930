"""The API server's error responses: Status objects and their messages.

In: the facts of an error. Out: an ApiFailure, which carries the HTTP code and renders as a
`Status`. Invariant: messages are those of k8s.io/apimachinery (api/errors, util/validation/field),
because clients match them and kubectl prints them unchanged.
"""

from collections.abc import Iterable, Mapping

from fairlead.errors import FairleadError
from fairlead.kube.rules.causes import Cause, Object, joined
from fairlead.lab.apiserver.kinds import Kind


class ApiFailure(FairleadError):
    """A request that is answered with a Status of `code` (HTTP) and `reason` (the API's CamelCase
    reason, or empty). `continues` is a token with which the client may continue a list in spite of
    the error."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Mapping[str, object] | None = None,
        continues: str = "",
    ) -> None:
        super().__init__(message)
        self.continues = continues
        self.code = code
        self.reason = reason
        self.details = None if details is None else dict(details)

    def status(self) -> Object:
        """Return the Status object: the body of the response, or the object of an ERROR event in a
        watch."""
        answer: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }
        if self.details is None:
            del answer["details"]
        if not self.reason:
            del answer["reason"]
        if self.continues:
            answer["metadata"] = {"continue": self.continues}
        return answer


def _details(kind: Kind, name: str) -> dict[str, object]:
    details: dict[str, object] = {"name": name, "kind": kind.plural}
    if kind.group:
        details["group"] = kind.group
    return details


def not_found(kind: Kind, name: str) -> ApiFailure:
    return ApiFailure(404, "NotFound", f'{kind.resource} "{name}" not found', _details(kind, name))


def path_not_found() -> ApiFailure:
    return ApiFailure(404, "NotFound", "the server could not find the requested resource", {})


def subresource_not_found(kind: Kind, subresource: str) -> ApiFailure:
    """404 with an explanation, because `kubectl logs` and `kubectl exec` print the message."""
    message = (
        f"the server does not have {kind.plural}/{subresource}: it stores objects, and runs no "
        "containers"
    )
    return ApiFailure(404, "NotFound", message, {"kind": f"{kind.plural}/{subresource}"})


def already_exists(kind: Kind, name: str, *, terminating: bool) -> ApiFailure:
    """409. `terminating`: the existing object is being deleted, so a retry may succeed."""
    deleted = "object is being deleted: " if terminating else ""
    message = f'{deleted}{kind.resource} "{name}" already exists'
    return ApiFailure(409, "AlreadyExists", message, _details(kind, name))


def conflict(kind: Kind, name: str, why: str) -> ApiFailure:
    message = f'Operation cannot be fulfilled on {kind.resource} "{name}": {why}'
    return ApiFailure(409, "Conflict", message, _details(kind, name))


MODIFIED = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


def other_uid(kind: Kind, namespace: str, name: str, requested: str, uid: str) -> ApiFailure:
    """409 with the storage's message: the object's UID is not the one in the request."""
    place = "services/specs" if kind.plural == "services" else kind.plural
    key = "/registry/" + "/".join(filter(None, (place, namespace, name)))
    why = f"Precondition failed: UID in precondition: {requested}, UID in object meta: {uid}"
    message = (
        f"StorageError: invalid object, Code: 4, Key: {key}, ResourceVersion: 0, "
        f"AdditionalErrorMsg: {why}"
    )
    return conflict(kind, name, message)


def precondition_failed(
    kind: Kind, name: str, field: str, requested: str, found: str, hint: str
) -> ApiFailure:
    """409: the object's UID or version is not the one in the precondition of a deletion."""
    why = (
        f"the {field} in the precondition ({requested}) does not match the {field} in record "
        f"({found}). {hint}"
    )
    message = f'Operation cannot be fulfilled on {kind.kind} "{name}": {why}'
    return ApiFailure(409, "Conflict", message, _details(kind, name) | {"kind": kind.kind})


def namespace_terminating(kind: Kind, namespace: str, name: str) -> ApiFailure:
    why = f"unable to create new content in namespace {namespace} because it is being terminated"
    cause = {
        "reason": "NamespaceTerminating",
        "message": f"namespace {namespace} is being terminated",
        "field": "metadata.namespace",
    }
    details = _details(kind, name) | {"causes": [cause]}
    return ApiFailure(403, "Forbidden", f'{kind.resource} "{name}" is forbidden: {why}', details)


def not_bound(pod: str, why: str) -> ApiFailure:
    message = f'Operation cannot be fulfilled on pods/binding "{pod}": {why}'
    return ApiFailure(409, "Conflict", message, {"name": pod, "kind": "pods/binding"})


def storage_error(code: int, message: str) -> ApiFailure:
    """A storage error that the API server passes on unchanged, without a reason."""
    return ApiFailure(code, "", message)


def rejected(kind_name: str, group: str, name: str, causes: list[Cause]) -> ApiFailure:
    """422 Invalid: the object is well-formed, but not allowed. kubectl prints each cause."""
    qualified = f"{kind_name}.{group}" if group else kind_name
    details: dict[str, object] = {
        "name": name,
        "kind": kind_name,
        "causes": [
            {"reason": cause.reason, "message": cause.message, "field": cause.field}
            for cause in causes
        ],
    }
    if group:
        details["group"] = group
    if not name:
        del details["name"]
    return ApiFailure(422, "Invalid", f'{qualified} "{name}" is invalid: {joined(causes)}', details)


def bad_request(message: str) -> ApiFailure:
    return ApiFailure(400, "BadRequest", message)


def expired(message: str, continues: str = "") -> ApiFailure:
    """410: the requested history is compacted. The client must list again."""
    return ApiFailure(410, "Expired", message, continues=continues)


def too_old(requested: int, oldest: int) -> ApiFailure:
    return expired(f"too old resource version: {requested} ({oldest})")


def too_large(requested: int, current: int) -> ApiFailure:
    """504: the requested version is in the future, as from a client that still remembers the
    versions of another server."""
    details = {
        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
        "retryAfterSeconds": 1,
    }
    return ApiFailure(
        504,
        "Timeout",
        f"Timeout: Too large resource version: {requested}, current: {current}",
        details,
    )


def unsupported_media_type(accepted: Iterable[str]) -> ApiFailure:
    choices = ", ".join(accepted)
    message = (
        "the body of the request was in an unknown format - accepted media types include: "
        f"{choices}"
    )
    return ApiFailure(415, "UnsupportedMediaType", message)


def unsupported_patch(accepted: Iterable[str]) -> ApiFailure:
    """415 for the type of a patch. The supported types are in a header of the response."""
    return ApiFailure(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})


def method_not_allowed() -> ApiFailure:
    return ApiFailure(
        405,
        "MethodNotAllowed",
        "the server does not allow this method on the requested resource",
        {},
    )


def internal_error(message: str) -> ApiFailure:
    return ApiFailure(
        500,
        "InternalError",
        f"Internal error occurred: {message}",
        {"causes": [{"message": message}]},
    )
