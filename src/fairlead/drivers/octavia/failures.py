"""The meaning of Neutron's error answers.

In: a request and the answer to it. Out: a FairleadError with the request, its object and the
answer. Pure."""

from typing import NamedTuple

import msgspec

from fairlead.errors import Conflict, FairleadError, Refused, Unavailable


class Answer(NamedTuple):
    """An HTTP answer. `region`: the region that answered, if it is known."""

    status: int
    body: bytes
    retry_after: str = ""
    region: str = ""

    @property
    def where(self) -> str:
        """` of region R`."""
        return of_region(self.region)


def of_region(name: str) -> str:
    return f" of region {name}" if name else ""


UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for a body that is no JSON, such as the HTML page of an HTTP proxy, or that
does not have the expected form: strings that are not UTF-8, and lists that are nested too deep, are
not DecodeErrors."""


class NoAddressLeft(Unavailable):
    """The subnet or network has no free address."""


class RuleExists(Unavailable):
    """An equal rule exists already."""


class _Problem(msgspec.Struct):
    type: str = ""
    message: str = ""


class _ErrorBody(msgspec.Struct):
    problem: _Problem = msgspec.field(name="NeutronError", default_factory=_Problem)


def neutron_error(method: str, path: str, answer: Answer) -> FairleadError:
    """Return the error for an answer of Neutron. Neutron answers 409 for quotas, exhausted pools
    and objects in use, and 412 if the object has changed since the given revision."""
    try:
        problem = msgspec.json.decode(answer.body, type=_ErrorBody).problem
    except UNDECODABLE:
        problem = _Problem("", answer.body.decode(errors="replace").strip()[:200])
    message = (
        f"{method} /{path}: Neutron{answer.where} answered {answer.status}: "
        f"{problem.message or 'nothing'}"
    )
    match answer.status:
        case 412:
            return Conflict(message)
        case 409 if problem.type == "OverQuota":
            return Unavailable(message, fix="raise the project's quota, or delete unused objects")
        case 409 if problem.type in ("IpAddressGenerationFailure", "ExternalIpAddressExhausted"):
            return NoAddressLeft(
                message,
                fix="release unused addresses, or choose another subnet or network",
            )
        case 409 if problem.type == "SecurityGroupRuleExists":
            return RuleExists(message)
        case 404 if problem.type == "ExternalGatewayForFloatingIPNotFound":
            return Unavailable(
                message, fix="connect the load balancer's subnet to that network with a router"
            )
        case 404:
            return Conflict(message)
        case 400 | 403:
            return Refused(message)
    seconds = float(answer.retry_after) if answer.retry_after.isdecimal() else 0.0
    return Unavailable(message, retry_after_s=seconds)
