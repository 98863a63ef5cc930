"""A controller is killed at every call that it makes for a Service, and the next controller
completes the work.

A Service is created, changed, gets the type ClusterIP, gets the type LoadBalancer again, and is
deleted. A run without kills records the result and the calls of each step. Then the sequence is
repeated with a kill in each step at one of its calls, until the controller has been killed at every
call, twice: before the call reaches the server, and after the server has executed it but before its
answer arrives. (Calls are identified by their content, because some of them are concurrent and have
no fixed order.) After each kill a new controller starts, and the server must show the same as in
the run without kills: claims, grants, status, conditions; no Event is written twice. The pool has
two addresses, and the last two Services need both: a leaked address would be missing."""

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.faults.forwarder import Call, Moment
from tests.faults.trial import CHECK_INTERVAL_S, DEADLINE_S, Trial, trial

from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import CLEANUP_FINALIZER, SERVICES, ObjectKey, Service

QUIET_S, SURELY_QUIET_S = 0.4, 1.5
"""A step is over when the controller has written nothing for this time; the longer value is for the
runs that attribute calls to steps."""
AT_ONCE = 2
EVENT = "an Event"
FIRST, SECOND = "192.0.2.1", "192.0.2.2"
WEB = ObjectKey("default", "web")


class Step(NamedTuple):
    """A user's action, and its required result."""

    name: str
    act: Callable[[Client], Awaitable[object]]
    service: str
    address: str
    """The address that the Service shows afterwards. If it is empty, the Service shows no address
    and has no field of Fairlead."""
    there: bool = True
    never_killed: bool = False
    """The controller is not killed in this step."""


class Seen(NamedTuple):
    """The result of a step without a kill."""

    calls: list[str]
    shown: list[str]


def create(name: str) -> Callable[[Client], Awaitable[object]]:
    spec = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "ports": [{"name": "http", "port": 80}],
    }
    return lambda client: client.create(
        SERVICES, {"metadata": {"name": name}, "spec": spec}, namespace="default"
    )


def change(**fields: Any) -> Callable[[Client], Awaitable[object]]:
    return lambda client: client.patch(SERVICES, WEB, fields)


TWO_PORTS = [{"name": "http", "port": 80}, {"name": "dns", "port": 53, "protocol": "UDP"}]
LIFE = (
    Step("create", create("web"), "web", FIRST),
    Step("add a port", change(spec={"ports": TWO_PORTS}), "web", FIRST),
    Step(
        "request another address",
        change(metadata={"annotations": {"fairlead.io/addresses": SECOND}}),
        "web",
        SECOND,
    ),
    Step("change the policy", change(spec={"externalTrafficPolicy": "Cluster"}), "web", SECOND),
    Step("hand away", change(spec={"type": "ClusterIP"}), "web", ""),
    Step("take back", change(spec={"type": "LoadBalancer"}), "web", SECOND),
    Step("delete", lambda client: client.delete(SERVICES, WEB), "web", "", there=False),
    Step("create the next Service", create("next"), "next", FIRST, never_killed=True),
    Step("create the last Service", create("last"), "last", SECOND, never_killed=True),
)
SERVED = ("web", "next", "last")


def of_services(call: Call) -> bool:
    return not call.writes_lease


def calls_of(trial: Trial) -> list[str]:
    return [str(call) for call in trial.forwarder.calls if of_services(call)]


async def quiet(trial: Trial, for_s: float = QUIET_S) -> None:
    """Wait until the controller has written nothing for `for_s` seconds."""
    async with asyncio.timeout(DEADLINE_S):
        before = -1
        while len(calls_of(trial)) != before:
            before = len(calls_of(trial))
            await asyncio.sleep(for_s)


def is_correct(step: Step, service: Service | None) -> bool:
    if service is None or not step.there:
        return service is None and not step.there
    wanted = {
        (step.address, port.port, port.protocol) for port in service.spec.ports if step.address
    }
    shown = {
        (each.ip, port.port, port.protocol)
        for each in service.status.load_balancer.ingress
        for port in each.ports
    }
    return shown == wanted and (CLEANUP_FINALIZER in service.metadata.finalizers) == bool(
        step.address
    )


async def until_correct(trial: Trial, step: Step) -> None:
    async def right() -> bool:
        try:
            return is_correct(
                step, await trial.client.get(SERVICES, ObjectKey("default", step.service))
            )
        except NotFound:
            return is_correct(step, None)

    await trial.until(right, step.name)


async def run_without_kills(folder: Path) -> tuple[list[Seen], Counter[tuple[str, str, str]]]:
    """Run the steps without a kill. Return each step's calls and result, and the Events."""
    async with trial(folder) as one:
        await one.make_endpoints(*SERVED)
        course = []
        for step in LIFE:
            one.start()
            await one.leading()
            await quiet(one, SURELY_QUIET_S)
            begun = len(calls_of(one))
            await step.act(one.client)
            await until_correct(one, step)
            await quiet(one, SURELY_QUIET_S)
            course.append(Seen(calls_of(one)[begun:] if not step.never_killed else [], one.shown()))
            await one.stop()
        return course, one.events()


class Target(NamedTuple):
    """The call at which the controller is to be killed: the `number`th call of its type in its
    step."""

    kind: str
    number: int

    def is_of_kind(self, call: Call) -> bool:
        return kind_of(str(call)) == self.kind


def kind_of(call: str) -> str:
    """Return the type of a call. All Events have one type, because it depends on earlier Events
    which Events are written, and how."""
    return EVENT if "/events" in call else call


def targets_of(seen: Seen) -> list[Target]:
    kinds = Counter(map(kind_of, seen.calls))
    return [
        Target(kind, number)
        for kind, count in sorted(kinds.items())
        for number in range(1, count + 1)
    ]


async def live(
    one: Trial, course: list[Seen], turn: int, moment: Moment
) -> set[tuple[str, Target]]:
    """Run the steps with a kill at one call of each step that has enough calls. Return the calls at
    which the controller was killed."""
    await one.make_endpoints(*SERVED)
    one.start()
    died = set()
    for step, seen in zip(LIFE, course, strict=True):
        target = next(iter(targets_of(seen)[turn : turn + 1]), None)
        if target is not None:
            one.forwarder.arm(target.number, moment, target.is_of_kind)
        await step.act(one.client)

        async def over(wanted: list[str] = seen.shown) -> bool:
            return one.forwarder.struck is not None or one.shown() == wanted

        await one.until(over, f"{step.name}: neither complete nor killed")
        if one.forwarder.struck is None:
            await quiet(one)
        if target is not None and one.forwarder.struck is not None:
            await one.until_killed()
            died.add((step.name, target))
            one.start()
            await one.leading()
        await one.until_shown(seen.shown, f"{step.name}, killed {moment} {target}")
        await quiet(one)
        one.forwarder.resume()
    return died


def is_condition_at_the_end(step: str, target: Target) -> bool:
    return step == "delete" and "(fairlead-conditions)" in target.kind


@pytest.mark.soak
async def test_the_next_controller_completes_the_work_after_a_kill_at_any_call_for_a_service(
    tmp_path: Path,
) -> None:
    course, said = await run_without_kills(tmp_path / "undisturbed")
    places = {
        (step.name, target)
        for step, seen in zip(LIFE, course, strict=True)
        for target in targets_of(seen)
    }
    turns = asyncio.Semaphore(AT_ONCE)
    deaths: dict[Moment, set[tuple[str, Target]]] = {"before": set(), "after": set()}

    async def one_life(turn: int, moment: Moment) -> None:
        async with turns, trial(tmp_path / f"{moment}-{turn}") as one:
            deaths[moment] |= await live(one, course, turn, moment)
            more = one.events() - said
        assert not more, f"turn {turn}, killed {moment}: unexpected or repeated Events: {more}"

    async with asyncio.TaskGroup() as group:
        for moment in deaths:
            for turn in range(max(len(targets_of(seen)) for seen in course)):
                group.create_task(one_life(turn, moment))
    for moment, died in deaths.items():
        print(f"killed {moment} {len(died)} calls of {len(places)}")
        # An Event may be lost with the kill, so the number of Events may be lower. A condition of a
        # deleted Service may be missing, too, because the Service may be gone before the condition
        # is written.
        missed = {
            place
            for place in places - died
            if place[1].kind != EVENT and not is_condition_at_the_end(*place)
        }
        assert not missed, f"no controller was killed {moment} {missed}"
        assert any(target.kind == EVENT for _, target in died)
    assert len(places) >= 15


async def next_serves(one: Trial, name: str) -> None:
    """Check that a new controller gets the Lease and serves a new Service."""
    one.start()
    await create(name)(one.client)
    await until_correct(one, Step("create", create(name), name, FIRST))
    await one.client.delete(SERVICES, ObjectKey("default", name))
    await until_correct(one, Step("delete", create(name), name, "", there=False))


async def test_the_next_controller_leads_after_a_kill_at_any_call_for_the_lease(
    tmp_path: Path,
) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(one_lease(tmp_path / "before", "before"))
        group.create_task(one_lease(tmp_path / "after", "after"))


async def one_lease(folder: Path, moment: Moment) -> None:
    """The controller creates the Lease, renews it, takes it over after a kill, and releases it;
    after a kill at any of these calls the next controller leads."""
    async with trial(folder) as one:
        for number, wanted in enumerate(("POST", "PUT", "PUT")):
            one.start()
            one.forwarder.arm(2 if number == 1 else 1, moment, lambda call: call.writes_lease)
            call = await one.until_killed()
            assert call.method == wanted or (number, moment) == (1, "after")
            await next_serves(one, f"after-{number}")
            await one.kill()
        one.start()
        lease = ObjectKey("kube-system", "fairlead-controller")
        before = (await one.client.get(LEASES, lease)).spec.holder_identity
        async with asyncio.timeout(DEADLINE_S):
            while (await one.client.get(LEASES, lease)).spec.holder_identity == before:
                await asyncio.sleep(CHECK_INTERVAL_S)
        assert one.controller is not None
        one.controller.send(signal.SIGTERM)
        one.forwarder.arm(1, moment, lambda call: call.writes_lease)
        await one.until_killed()
        await next_serves(one, "after-release")
