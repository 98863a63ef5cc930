"""What the answers of Neutron mean that are no success.

In: a request, the answer to it. Out: an error of ours that says what was tried, on what, and what
was answered. Pure."""

from typing import NamedTuple

import msgspec

from fairlead.errors import Conflict, FairleadError, Refused, Unavailable


class Answer(NamedTuple):
    """`region`: where it came from, if that is known."""

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


class NoAddressLeft(Unavailable):
    """There is no address left where one was asked for."""


class RuleExists(Unavailable):
    """There is one like it."""


class _Problem(msgspec.Struct):
    type: str = ""
    message: str = ""


class _ErrorBody(msgspec.Struct):
    problem: _Problem = msgspec.field(name="NeutronError", default_factory=_Problem)


def neutron_error(method: str, path: str, answer: Answer) -> FairleadError:
    """409 is for quotas and for what is used up or in use, 412 for what has changed since it was
    looked at."""
    try:
        problem = msgspec.json.decode(answer.body, type=_ErrorBody).problem
    except msgspec.DecodeError:
        problem = _Problem("", answer.body.decode(errors="replace").strip()[:200])
    message = (
        f"{method} /{path}: Neutron{answer.where} answered {answer.status}: "
        f"{problem.message or 'nothing'}"
    )
    match answer.status:
        case 412:
            return Conflict(message)
        case 409 if problem.type == "OverQuota":
            return Unavailable(
                message, fix="raise the project's quota, or delete what nobody needs"
            )
        case 409 if problem.type in ("IpAddressGenerationFailure", "ExternalIpAddressExhausted"):
            return NoAddressLeft(
                message,
                fix="give back addresses that nobody needs, or choose another subnet or network",
            )
        case 409 if problem.type == "SecurityGroupRuleExists":
            return RuleExists(message)
        case 404 if problem.type == "ExternalGatewayForFloatingIPNotFound":
            return Unavailable(
                message, fix="connect the load balancer's subnet to that network by a router"
            )
        case 404:
            return Conflict(message)
        case 400 | 403:
            return Refused(message)
    seconds = float(answer.retry_after) if answer.retry_after.isdecimal() else 0.0
    return Unavailable(message, retry_after_s=seconds)
