"""Look at a cluster: read facts, apply the rules, and confirm what they found by a second look.

In: a client and a `Request`. Out: a `Report`. Raises Refused or Unavailable if the Services cannot
be read. Invariant: a finding of the report was found twice, in facts that were read one after the
other, so that a state that lasts for a moment, as during a rollout, is not reported."""

from collections.abc import Iterable

from fairlead.doctor.facts import cases
from fairlead.doctor.finding import RootCause
from fairlead.doctor.gather import Progress, Request, gather
from fairlead.doctor.report import BEYOND_THE_API, LookedAt, Report
from fairlead.doctor.rules import diagnose
from fairlead.kube.client import Client


async def examine(client: Client, request: Request, progress: Progress = lambda _: None) -> Report:
    """Return the findings about the requested Services."""
    facts = await gather(client, request, progress)
    found = diagnose(facts)
    if found:
        facts = await gather(client, request, lambda text: progress(f"looking again: {text}"))
        found = confirmed(found, diagnose(facts))
    return Report(
        tuple(LookedAt(str(each.service.key), each.owner) for each in cases(facts)),
        found,
        (*facts.not_looked_at, BEYOND_THE_API),
    )


def confirmed(before: Iterable[RootCause], now: Iterable[RootCause]) -> tuple[RootCause, ...]:
    """Return the findings of the second look that the first look had too."""
    known = {each.key for each in before}
    return tuple(each for each in now if each.key in known)
