"""What a gateway tells a Service's owner, and when."""

import asyncio

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.model import LoadBalancer, Note, ServiceKey
from fairlead.plan.balancer import HEALTH_CHECKS_FAILING
from fairlead.roles.gateway import FailingHealthChecks

KEY = ServiceKey("default", "web")
FAILING = (Note(HEALTH_CHECKS_FAILING, "no health port answers 200"),)


def balancer(notes: tuple[Note, ...]) -> dict[ServiceKey, LoadBalancer]:
    return {KEY: LoadBalancer(KEY, "uid", "fairlead.io/direct", (), notes=notes)}


async def told_after(*seen: dict[ServiceKey, LoadBalancer]) -> bool:
    """Whether an Event waits to be written, well after the patience is over. Nothing is sent: nobody runs the recorder."""
    recorder = EventRecorder(Client(Access("http://192.0.2.1")), "test")
    checks = FailingHealthChecks(recorder, patience_s=0.05)
    for intents in seen:
        checks.see(intents, [KEY])
    running = asyncio.ensure_future(checks.run())
    await asyncio.sleep(0.3)
    running.cancel()
    return recorder.waiting == 1


async def test_failing_health_checks_are_told_when_they_last() -> None:
    assert await told_after(balancer(FAILING))
    assert await told_after(balancer(()), balancer(FAILING), balancer(FAILING))


async def test_health_checks_that_have_come_to_succeed_are_no_news() -> None:
    assert not await told_after(balancer(FAILING), balancer(()))
    assert not await told_after(balancer(FAILING), {})
