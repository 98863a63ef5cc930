"""Examine a cluster: read facts, apply the rules, and confirm what they found by a second look.

In: a client and a `Request`. Out: a `Report`. Raises Refused or Unavailable if the Services cannot
be read. Invariant: a finding of the report was found twice, in facts that were read one after the
other, so that a state that lasts for a moment, as during a rollout, is not reported."""

from collections.abc import Callable, Iterable

from fairlead.doctor.facts import cases
from fairlead.doctor.finding import Report, RootCause
from fairlead.doctor.gather import Request, gather
from fairlead.doctor.rules import diagnose
from fairlead.kube.client import Client

Progress = Callable[[str], None]


async def examine(client: Client, request: Request, progress: Progress = lambda _: None) -> Report:
    """Return the findings about the requested Services."""
    progress("reading the cluster ...")
    facts = await gather(client, request)
    found = diagnose(facts)
    if found:
        number = f"{len(found)} finding{'s' if len(found) > 1 else ''}"
        progress(f"{number}; reading the cluster again, to confirm ...")
        facts = await gather(client, request)
        found = confirmed(found, diagnose(facts))
    return Report(tuple(str(each.service.key) for each in cases(facts)), found, facts.not_examined)


def confirmed(before: Iterable[RootCause], now: Iterable[RootCause]) -> tuple[RootCause, ...]:
    """Return the findings of the second look that the first look had too."""
    known = {each.key for each in before}
    return tuple(each for each in now if each.key in known)
