"""A controller dies at every call that it makes for a Service, and its successor brings everything to the right end.

One life of a Service, step by step: create, change, hand away, take back, delete. A run that nobody disturbs tells which calls
the controller makes in each step; then there is one run for the first call of every step, one for the second, and so on,
twice: dead before the call reaches the server, dead after it was done and before its answer came back. After each death a
new controller starts, and the server must come to show what it shows in the run without deaths: claims, status, grants;
nothing is said twice. Each step has a controller of its own, so that none knows what was said in the step before. The pool
has two addresses, and the last two Services need both: one that leaked would be missed.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.faults.forwarder import Call, Moment
from tests.faults.trial import DEADLINE_S, LOOK_S, Trial, trial

from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.lease import LEASES
from fairlead.kube.objects import CLEANUP_FINALIZER, SERVICES, ObjectKey, Service

QUIET_S = 0.4
"""A step is over when the controller has written nothing for so long."""
AT_ONCE = 4
FIRST, SECOND = "192.0.2.1", "192.0.2.2"
WEB = ObjectKey("default", "web")


class Step(NamedTuple):
    """What a user does, and what must have come of it."""

    name: str
    act: Callable[[Client], Awaitable[object]]
    service: str
    address: str
    """The address that the Service shows then; empty: it shows none, and nothing of ours is left on it."""
    there: bool = True
    in_peace: bool = False
    """Nobody dies in this step."""


class Seen(NamedTuple):
    """What a step came to, without a death."""

    calls: list[str]
    shown: list[str]


def create(name: str) -> Callable[[Client], Awaitable[object]]:
    spec = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": [{"name": "http", "port": 80}]}
    return lambda client: client.create(SERVICES, {"metadata": {"name": name}, "spec": spec}, namespace="default")


def change(**fields: Any) -> Callable[[Client], Awaitable[object]]:
    return lambda client: client.patch(SERVICES, WEB, fields)


TWO_PORTS = [{"name": "http", "port": 80}, {"name": "dns", "port": 53, "protocol": "UDP"}]
LIFE = (
    Step("create", create("web"), "web", FIRST),
    Step("add a port", change(spec={"ports": TWO_PORTS}), "web", FIRST),
    Step("ask for another address", change(metadata={"annotations": {"fairlead.io/addresses": SECOND}}), "web", SECOND),
    Step("change the policy", change(spec={"externalTrafficPolicy": "Cluster"}), "web", SECOND),
    Step("hand away", change(spec={"type": "ClusterIP"}), "web", ""),
    Step("take back", change(spec={"type": "LoadBalancer"}), "web", SECOND),
    Step("delete", lambda client: client.delete(SERVICES, WEB), "web", "", there=False),
    Step("the next one", create("next"), "next", FIRST, in_peace=True),
    Step("the last one", create("last"), "last", SECOND, in_peace=True),
)
SERVED = ("web", "next", "last")


def of_services(call: Call) -> bool:
    return not call.about_the_lease


def calls_of(trial: Trial) -> list[str]:
    return [str(call) for call in trial.forwarder.calls if of_services(call)]


async def quiet(trial: Trial) -> None:
    """Return when the controller has stopped writing."""
    async with asyncio.timeout(DEADLINE_S):
        before = -1
        while len(calls_of(trial)) != before:
            before = len(calls_of(trial))
            await asyncio.sleep(QUIET_S)


def is_right(step: Step, service: Service | None) -> bool:
    if service is None or not step.there:
        return service is None and not step.there
    ours = CLEANUP_FINALIZER in service.metadata.finalizers
    return [each.ip for each in service.status.load_balancer.ingress] == ([step.address] if step.address else []) and (
        ours == bool(step.address)
    )


async def until_right(trial: Trial, step: Step) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                service: Service | None = await trial.client.get(SERVICES, ObjectKey("default", step.service))
            except NotFound:
                service = None
            if is_right(step, service):
                return
            await asyncio.sleep(LOOK_S)


async def undisturbed(folder: Path) -> tuple[list[Seen], Counter[tuple[str, str, str]]]:
    """The life without a death: each step's calls and end, and what was said."""
    async with trial(folder) as one:
        await one.make_endpoints(*SERVED)
        course = []
        for step in LIFE:
            one.start()
            begun = len(calls_of(one))
            await step.act(one.client)
            await until_right(one, step)
            await quiet(one)
            course.append(Seen(calls_of(one)[begun:] if not step.in_peace else [], one.shown()))
            await one.stop()
        return course, one.events()


async def die_in_each_step(folder: Path, course: list[Seen], number: int, moment: Moment) -> tuple[list[str], Trial]:
    """The life with a death at the same call of each step that has so many; answers at which ones."""
    struck = []
    async with trial(folder) as one:
        await one.make_endpoints(*SERVED)
        for step, seen in zip(LIFE, course, strict=True):
            one.start()
            if number > len(seen.calls):
                await step.act(one.client)
            else:
                struck.append(f"{step.name}: {await die(one, step, number, moment)}")
                one.start()
            await one.until_shown(seen.shown, f"{step.name}, dead {moment} call {number}, {struck[-1:]}")
            await quiet(one)
            await one.stop()
        return struck, one


async def die(one: Trial, step: Step, number: int, moment: Moment) -> Call:
    one.forwarder.arm(number, moment, of_services)
    await step.act(one.client)
    try:
        return await one.until_struck()
    except TimeoutError:
        raise AssertionError(f"{step.name}: there was no call {number}; calls so far: {calls_of(one)}") from None


async def test_a_controller_dies_at_every_call_of_a_service_life(tmp_path: Path) -> None:
    course, said = await undisturbed(tmp_path / "undisturbed")
    most = max(len(seen.calls) for seen in course)
    turns = asyncio.Semaphore(AT_ONCE)

    async def one_run(number: int, moment: Moment) -> list[str]:
        async with turns:
            struck, one = await die_in_each_step(tmp_path / f"{moment}-{number}", course, number, moment)
        words = one.events()
        more = words - said
        assert not more, f"dead {moment} call {number}: said too often, or wrongly: {more}"
        return struck

    moments: tuple[Moment, ...] = ("before", "after")
    async with asyncio.TaskGroup() as group:
        runs = {
            (number, moment): group.create_task(one_run(number, moment)) for moment in moments for number in range(1, most + 1)
        }
    every_call = sorted(f"{step.name}: {call}" for step, seen in zip(LIFE, course, strict=True) for call in seen.calls)
    for moment in moments:
        died_at = sorted(call for (_, when), run in runs.items() if when == moment for call in run.result())
        assert died_at == every_call, f"dead {moment} these calls, and not every one"
    assert len(every_call) >= 10


async def next_serves(one: Trial, name: str) -> None:
    """A new controller takes the Lease and serves a new Service."""
    one.start()
    await create(name)(one.client)
    await until_right(one, Step("create", create(name), name, FIRST))
    await one.client.delete(SERVICES, ObjectKey("default", name))
    await until_right(one, Step("delete", create(name), name, "", there=False))


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_controller_dies_at_every_call_for_its_lease(moment: Moment, tmp_path: Path) -> None:
    """It makes the Lease, renews it, takes it from one who died, gives it back: the next one leads all the same."""
    async with trial(tmp_path) as one:
        for number, wanted in enumerate(("POST", "PUT", "PUT")):
            one.start()
            one.forwarder.arm(2 if number == 1 else 1, moment, lambda call: call.about_the_lease)
            call = await one.until_struck()
            assert call.method == wanted or (number, moment) == (1, "after")
            await next_serves(one, f"after-{number}")
            await one.kill()
        one.start()
        lease = ObjectKey("kube-system", "fairlead-controller")
        before = (await one.client.get(LEASES, lease)).spec.holder_identity
        async with asyncio.timeout(DEADLINE_S):
            while (await one.client.get(LEASES, lease)).spec.holder_identity == before:
                await asyncio.sleep(LOOK_S)
        assert one.controller is not None
        one.controller.send(signal.SIGTERM)
        one.forwarder.arm(1, moment, lambda call: call.about_the_lease)
        await one.until_struck()
        await next_serves(one, "after-release")
