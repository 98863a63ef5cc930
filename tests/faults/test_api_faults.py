"""The API server fails in every known way while users create, change and delete Services. In the
end every Service is correct.

Each failure has its own real controller and its own server; all run concurrently. While the server
fails, the controller's requests are counted: a loop without a wait would send thousands. Afterwards
all changes by users have taken effect, no address or grant has leaked, and the controller is idle.
The pool has two addresses: the new Service gets the address of the deleted one."""

import ast
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from tests.faults.trial import Trial, trial

import fairlead
from fairlead.kube.objects import ENDPOINT_SLICES, SERVICE_NAME_LABEL, SERVICES, ObjectKey, Service
from fairlead.lab.apiserver.faults import Fault
from fairlead.lab.apiserver.kinds import SERVICES as KIND
from fairlead.lab.apiserver.registry import MERGE_PATCH, Registry
from fairlead.lab.apiserver.writes import Deletion, Write

FAILS_S = 3.0
CALM_S = 1.0
AT_ONCE = 4
MOST = 150
"""The maximum number of requests while the server fails, without those for the Lease. Back-off
begins at 0.2 s and doubles, so that in 3 s each of nine reflectors, and each Service, makes about
eight attempts; a few of these make two requests."""
MAX_ANNOTATION_BYTES = 256 << 10
"""The limit of a real server for all annotations of an object."""
ENDPOINTS = 1000


async def do_nothing(one: Trial) -> None:
    """Do nothing in addition to the faults."""


async def refuse(one: Trial) -> None:
    await one.server.refuse()


async def accept(one: Trial) -> None:
    await one.server.accept()


async def compact(one: Trial) -> None:
    one.server.store.compact()


async def truncate_answers(one: Trial) -> None:
    one.forwarder.truncate_answers = True


async def send_whole_answers(one: Trial) -> None:
    one.forwarder.truncate_answers = False


class Failure(NamedTuple):
    """A failure of the API server: faults, and actions at its begin and end."""

    faults: tuple[Fault, ...] = ()
    begin: Callable[[Trial], Awaitable[None]] = do_nothing
    end: Callable[[Trial], Awaitable[None]] = do_nothing


STALL = "watches stall"
WATCHES, WRITES, ALL = "[?&]watch=", "/services/|/addressgrants|/events", "^/api"
FAILURES = {
    "410 for the version of each watch": Failure((Fault("expire", "GET", WATCHES, 0),), compact),
    "410 to each list and watch": Failure((Fault("status", "GET", "watch=|limit=", 0, code=410),)),
    "409 to each write": Failure(
        tuple(Fault("status", method, WRITES, 0, code=409) for method in ("PATCH", "POST", "PUT"))
    ),
    "429 with Retry-After of two seconds": Failure(
        (Fault("status", "", ALL, 0, code=429, retry_after_s=2),)
    ),
    "500": Failure((Fault("status", "", ALL, 0, code=500),)),
    "503": Failure((Fault("status", "", ALL, 0, code=503),)),
    STALL: Failure((Fault("stall", "GET", WATCHES, 0, stall_s=FAILS_S),)),
    "truncated lines of watches": Failure(
        (Fault("cut", "GET", WATCHES, 0, after_events=1), Fault("reset", "GET", "limit=", 3))
    ),
    "executed writes without an answer": Failure(
        (Fault("lose", "PATCH", WRITES, 6), Fault("lose", "POST", WRITES, 6))
    ),
    "truncated answers": Failure((), truncate_answers, send_whole_answers),
    "unreachable server": Failure((), refuse, accept),
}


def service(name: str, *ports: int, **annotations: str) -> dict[str, Any]:
    spec = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "ports": [port(number) for number in ports],
    }
    return {"metadata": {"name": name, "annotations": annotations}, "spec": spec}


def port(number: int) -> dict[str, object]:
    return {"name": f"p{number}", "port": number}


async def read(one: Trial) -> dict[str, Service]:
    return {
        each.metadata.name: each for each in await one.client.list(SERVICES, namespace="default")
    }


def is_served(found: Service | None, *ports: int) -> bool:
    shown = (
        [[each.port for each in entry.ports] for entry in found.status.load_balancer.ingress]
        if found
        else []
    )
    return shown == [list(ports)]


async def until_served(one: Trial, when: str, **wanted: tuple[int, ...]) -> None:
    """Wait until exactly these Services exist, with these ports, each with an address that is
    granted to it alone."""

    async def served() -> bool:
        there = await read(one)
        granted = sorted(
            each["spec"]["address"] for each in one.objects() if each["kind"] == "AddressGrant"
        )
        shown = sorted(
            entry.ip for each in there.values() for entry in each.status.load_balancer.ingress
        )
        right = all(is_served(there.get(name), *ports) for name, ports in wanted.items())
        return (
            right
            and there.keys() == wanted.keys()
            and shown == granted
            and len(set(shown)) == len(wanted)
        )

    await one.until(served, when)


def requests_made(one: Trial) -> list[str]:
    """Return the controller's requests without those for the Lease. They are counted at the
    controller, because an unreachable server counts nothing."""
    return [each for each in one.forwarder.requests if "/leases" not in each]


def act(registry: Registry) -> None:
    """Change Services like users. The changes bypass the server's HTTP, which fails for all
    clients."""
    user = Write("a-user")
    registry.create(KIND, "default", service("new", 80), user)
    ports = {"spec": {"ports": [port(80), port(443)]}}
    registry.patch(KIND, "default", "changed", MERGE_PATCH, ports, user)
    registry.delete(KIND, "default", "gone", Deletion())


async def fail(one: Trial, name: str, failure: Failure) -> None:
    """Change Services while the server fails; then let the server recover."""
    await one.make_endpoints("changed", "gone", "new")
    for each in ("changed", "gone"):
        await one.client.create(SERVICES, service(each, 80), namespace="default")
    one.start()
    await until_served(one, f"{name}: before", changed=(80,), gone=(80,))
    one.forwarder.requests.clear()
    watches = one.server.store.watcher_count
    faults = [
        msgspec.structs.replace(fault)
        for fault in failure.faults
        # The server removes each fault after its last occurrence, so it gets copies.
    ]
    for fault in faults:
        one.server.faults.add(fault)
    await failure.begin(one)
    act(one.server.registry)
    await asyncio.sleep(FAILS_S)
    requests = requests_made(one)

    async def failed() -> bool:
        met = all(
            not before.count or fault.count < before.count
            for before, fault in zip(failure.faults, faults, strict=True)
        )
        # Only stalled watches require no requests.
        return met and bool(requests_made(one) or name == STALL)

    # On a busy machine, the controller may learn of the changes late.
    await one.until(failed, f"{name}: a request of the controller that failed, for each fault")
    one.server.faults.clear()
    await failure.end(one)
    print(f"{name}: {len(requests)} requests")
    assert len(requests) <= MOST, (
        f"{name}: {len(requests)} requests in {FAILS_S} s, the last ones {requests[-20:]}"
    )
    await until_served(one, f"{name}: after", changed=(80, 443), new=(80,))

    async def watching() -> bool:
        return one.server.store.watcher_count >= watches

    await one.until(watching, f"{name}: some watches were not opened again")
    await asyncio.sleep(CALM_S)
    one.forwarder.requests.clear()
    await asyncio.sleep(CALM_S)
    assert len(requests_made(one)) <= 3, f"{name}: still active afterwards: {requests_made(one)}"


@pytest.mark.long
async def test_every_service_is_correct_after_each_failure_of_the_api_server(
    tmp_path: Path,
) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one_failure(number: int, name: str, failure: Failure) -> None:
        async with turns, trial(tmp_path / str(number)) as one:
            await fail(one, name, failure)

    async with asyncio.TaskGroup() as group:
        for number, (name, failure) in enumerate(FAILURES.items()):
            group.create_task(one_failure(number, name, failure))


async def test_objects_of_the_maximum_size_and_with_unknown_fields_are_handled(
    tmp_path: Path,
) -> None:
    """A Service of the maximum size, and a slice of a thousand endpoints with many fields beside
    their addresses."""
    async with trial(tmp_path) as one:
        one.start()
        await one.make_endpoints()
        history = "x" * (MAX_ANNOTATION_BYTES - 1024)
        big = service("big", 80, **{"example.com/history": history})
        await one.client.create(SERVICES, big, namespace="default")
        pods = [
            {
                "addresses": [f"10.244.{n // 250}.{n % 250 + 1}"],
                "nodeName": "node1",
                "deprecatedTopology": {"rack": "x" * 850},
            }
            for n in range(ENDPOINTS)
        ]
        slice_ = {
            "metadata": {"name": "big-1", "labels": {SERVICE_NAME_LABEL: "big"}},
            "addressType": "IPv4",
        }
        rest = {"endpoints": pods, "ports": [{"name": "p80", "port": 80}]}
        await one.client.create(ENDPOINT_SLICES, slice_ | rest, namespace="default")
        await until_served(one, "a large Service", big=(80,))
        (kept,) = (each for each in one.objects() if each["kind"] == "Service")
        assert kept["metadata"]["annotations"]["example.com/history"] == history
        # A later version of the API server sends unknown fields at any place. The controller must
        # still notice changes.
        spec = kept["spec"] | {
            "ports": [*kept["spec"]["ports"], port(443) | {"protocol": "TCP", "pace": 3}],
            "shape": [{"deep": None}],
        }
        one.server.store.put(
            KIND,
            kept | {"spec": spec, "outlook": {}, "metadata": kept["metadata"] | {"mood": "fine"}},
        )
        await until_served(one, "with fields of the future", big=(80, 443))
        await one.client.delete(SERVICES, ObjectKey("default", "big"))
        await until_served(one, "deleted")


WALL_CLOCK = {"time", "time_ns", "now", "utcnow", "today", "fromtimestamp"}
SHOWS_THE_TIME = {
    "drivers/conditions.py": "lastTransitionTime",
    "drivers/kept_addresses.py": "keptSince, and whether a kept address has expired",
    "drivers/direct/driver.py": "whether the removal of a program is still shown",
    "drivers/direct/host_network/networks.py": "when a program was last removed",
    "drivers/health_answers.py": "the times in the answer of the health port, as in kube-proxy",
    "kube/access.py": (
        "the expiry of a credential of an exec plug-in, which is converted to a duration at once"
    ),
    "kube/events.py": (
        "firstTimestamp and lastTimestamp; whether an existing Event is old, once per process"
    ),
    "kube/instances.py": "for how long a process is silent, which `fairlead status` shows",
    "kube/lease.py": "acquireTime and renewTime, on which no decision depends",
    "net/httpport.py": "the header Date",
    "drivers/pools.py": "lastTransitionTime",
    "roles/leaving.py": (
        "since when a gateway leaves; only if all of them leave, the last one by these times keeps "
        "addresses"
    ),
    "roles/presence.py": (
        "renewTime, and when the process started: only `fairlead status` compares them with its "
        "clock, to show a duration"
    ),
    "roles/returned.py": "the time for which packets were returned",
    "roles/report.py": (
        "the duration of a Warning; and the age of a Service whose pods may be "
        "starting, a minute at most"
    ),
}


def wall_clock_readings(path: Path) -> list[str]:
    """Return the calls of `time.time()`, `datetime.now()` and similar functions."""
    calls = (
        node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    )
    named = (each for each in calls if isinstance(each, ast.Attribute) and each.attr in WALL_CLOCK)
    return [
        ast.unparse(each)
        for each in named
        if ast.unparse(each.value) in ("time", "datetime", "date", "datetime.datetime")
    ]


def test_only_listed_modules_read_the_wall_clock() -> None:
    """The time of day is only shown to users; all waits and deadlines use the event loop's
    monotonic clock."""
    root = Path(fairlead.__file__).parent
    parts = ("net", "kube", "plan", "drivers", "roles", "web")
    files = [path for part in parts for path in (root / part).rglob("*.py")] + [
        root / "reconcile.py",
        root / "state.py",
    ]
    assert len(files) > 50
    assert {
        str(path.relative_to(root)) for path in files if wall_clock_readings(path)
    } == SHOWS_THE_TIME.keys()
