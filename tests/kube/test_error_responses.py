"""The errors that the client raises for responses of the API server."""

import json

import pytest

from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.kube.answers import (
    Expired,
    NamespaceTerminating,
    NotFound,
    RefusedByServer,
    ServerUnavailable,
    Unauthenticated,
    failure,
)

STATUS = json.dumps(
    {"kind": "Status", "message": "the server says so", "reason": "Because", "code": 999}
).encode()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (301, RefusedByServer),
        (400, RefusedByServer),
        (401, Unauthenticated),
        (403, RefusedByServer),
        (404, NotFound),
        (405, RefusedByServer),
        (409, Conflict),
        (410, Expired),
        (415, RefusedByServer),
        (422, RefusedByServer),
        (429, ServerUnavailable),
        (500, ServerUnavailable),
        (503, ServerUnavailable),
        (504, ServerUnavailable),
    ],
)
def test_each_status_has_its_error(status: int, error: type[FairleadError]) -> None:
    problem = failure("GET http://server/api", status, STATUS)
    assert type(problem) is error
    assert f"GET http://server/api was answered {status}: the server says so" in str(problem)
    if isinstance(problem, RefusedByServer | ServerUnavailable):
        assert problem.status == status


def test_errors_of_the_server_are_refused_or_unavailable() -> None:
    assert issubclass(RefusedByServer, Refused)
    assert issubclass(ServerUnavailable, Unavailable)
    assert issubclass(Expired, Unavailable)


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [("7", 7.0), (None, 0.0), ("", 0.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0)],
)
def test_the_retry_after_header_is_read(header: str | None, wait_s: float) -> None:
    problem = failure("GET", 429, b"", header)
    assert isinstance(problem, ServerUnavailable)
    assert problem.retry_after_s == wait_s


@pytest.mark.parametrize("body", [b"<html>502 Bad Gateway</html>", b"\xff\xfe", b"", b"[1]"])
def test_a_body_that_is_not_a_status_is_the_message(body: bytes) -> None:
    assert str(failure("GET x", 502, body)).startswith("GET x was answered 502")


def test_the_error_for_a_forbidden_request_names_rbac() -> None:
    assert "RBAC" in str(failure("GET x", 403, STATUS))


def test_the_error_for_a_namespace_in_deletion_does_not_name_rbac() -> None:
    details = {
        "causes": [
            {"reason": "NamespaceTerminating", "message": "...", "field": "metadata.namespace"}
        ]
    }
    status = {
        "kind": "Status",
        "reason": "Forbidden",
        "message": "it is being terminated",
        "code": 403,
        "details": details,
    }
    problem = failure("POST x", 403, json.dumps(status).encode())
    assert isinstance(problem, NamespaceTerminating)
    assert "RBAC" not in str(problem)
    assert "RBAC" in str(
        failure("POST x", 403, json.dumps(status | {"details": {"name": "web"}}).encode())
    )
