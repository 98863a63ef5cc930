"""`python -m bench.tenant`: what one tenant can do to the Services of another.

In: a lab with a real API server, two gateways and two nodes. Out: for each attack, what a bystander
notices while it lasts. The attacks are objects that any user with the right to write Services of a
namespace may create, and connections that any client may open:

- `value`: an annotation with a value of 60,000 digits and a letter
- `names`: 5,000 unknown annotations
- `external`: an external IP that is the address of a node, with the health ports of the bystander
- `reloads`: changes of class proxy that need a reload of HAProxy, by one namespace
- `together`: the same by 25 namespaces in turn
- `connections`: more idle connections to a Service of class proxy than HAProxy may have"""

import asyncio
import os
import resource
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from bench.options import options, progress, run_benchmark
from tests.e2e.load import Load, Web, addresses_of, until
from tests.e2e.proxied import PROXY, EchoConnection

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.errors import Unavailable
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab import process
from fairlead.lab.rundir import ApiServerKind
from fairlead.lab.site import Site

FILES = 4096
"""The limit of open files of all processes of the lab, and so of HAProxy's connections."""
HEALTH_PORT = 10256
NAMESPACES = tuple(f"noisy{number}" for number in range(25))
NOISY = NAMESPACES[0]
CHANGE_S = 1.25
WATCH_S = 20.0


class Report(msgspec.Struct):
    """What the bystander noticed, by attack."""

    attacks: dict[str, dict[str, str]]


class Stage(msgspec.Struct):
    """The lab, and the bystander's Services of class direct and proxy."""

    site: Site
    web: Web
    proxied: str


def service(
    name: str, namespace: str, annotations: Mapping[str, str] = {}, **spec: Any
) -> dict[str, Any]:
    fields = {"type": "LoadBalancer", "ports": [{"name": "web", "port": 80, "targetPort": 8080}]}
    metadata = {"name": name, "namespace": namespace, "annotations": dict(annotations)}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": fields | spec}


async def delete(site: Site, name: str, namespace: str) -> None:
    async with site.client() as client:
        await client.delete(SERVICES, ObjectKey(namespace, name))


async def served_s(site: Site) -> str:
    """Return how long a new Service of the bystander waits for its address."""
    begun_s = asyncio.get_running_loop().time()
    await site.apply([service("fresh", "default", selector={"app": "web"})])
    try:
        await addresses_of(site, "fresh")
        return f"{asyncio.get_running_loop().time() - begun_s:.1f} s"
    except AssertionError:
        return "more than 60 s"
    finally:
        await delete(site, "fresh", "default")


def cpu_s(site: Site, label: str) -> float:
    """Return the CPU time of all processes of a role."""
    ticks = 0
    for each in process.find(site.name, label):
        with suppress(OSError):
            words = Path(f"/proc/{each.pid}/stat").read_text().rpartition(") ")[2].split()
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def bystander(stage: Stage) -> dict[str, str]:
    """Return what the bystander notices: a new Service, a pod that moves, its clients."""
    site, clock = stage.site, asyncio.get_running_loop().time
    roles = ("control/controller", "gw1/gateway", "gw2/gateway")
    before = {role: cpu_s(site, role) for role in roles}
    begun_s = clock()
    async with Load(site, stage.web.address) as load:
        await load.take()
        address = await served_s(site)
        move_s = clock()
        try:
            await stage.web.place(("node2", "node2"))
            moved = f"{clock() - move_s:.1f} s"
        except AssertionError:
            moved = "more than 60 s"
        await asyncio.sleep(max(0.0, WATCH_S - (clock() - begun_s)))
        period = await load.take()
    await stage.web.place(("node1", "node2"))
    used = [f"{cpu_s(site, role) - before[role]:.1f}" for role in roles]
    return {
        "address of a new Service after": address,
        "a pod moved to another node after": moved,
        "new connections that failed": f"{period.failed} of {period.requests}",
        f"CPU seconds of controller and gateways in {clock() - begun_s:.0f} s": ", ".join(used),
    }


async def nothing(stage: Stage) -> dict[str, str]:
    return await bystander(stage)


async def value(stage: Stage) -> dict[str, str]:
    return await _annotated(stage, {"fairlead.io/drain-timeout": "9" * 60_000 + "x"})


async def names(stage: Stage) -> dict[str, str]:
    return await _annotated(
        stage, {f"fairlead.io/drain-timeou{number}": "1" for number in range(5_000)}
    )


async def _annotated(stage: Stage, annotations: Mapping[str, str]) -> dict[str, str]:
    """Annotate a Service that is served, so that gateways plan it too."""
    await stage.site.apply([service("hostile", "default", selector=WEB)])
    await addresses_of(stage.site, "hostile")
    await stage.site.apply([service("hostile", "default", annotations, selector=WEB)])
    return await bystander(stage)


async def external(stage: Stage) -> dict[str, str]:
    site = stage.site
    address = site.topology.host("node1").addresses[0]
    async with site.client() as client:
        victim = await client.get(SERVICES, ObjectKey("default", "web"))
    health = victim.spec.health_check_node_port
    ports = [
        {"name": f"p{port}", "port": port, "targetPort": 8080} for port in (HEALTH_PORT, health)
    ]
    # The Service has no endpoint, so the service proxy of each node refuses connections to it. If a
    # node served these external IPs, it would refuse the probes of the gateways too.
    attack = service("evil", NOISY, selector={"app": "nobody"})
    attack["spec"] |= {"type": "ClusterIP", "ports": ports, "externalIPs": [address]}
    await site.apply([attack])
    out = 0
    for _ in range(55):
        _, state = (await stage.web.members()).get("node1", (0, "absent"))
        out += state != "active"
        await asyncio.sleep(0.2)
    await delete(site, "evil", NOISY)
    return {"node1 was out of the bystander's Service in": f"{out} of 55 samples"}


async def reloads(stage: Stage) -> dict[str, str]:
    return await _change(stage, [NOISY], 22)


async def together(stage: Stage) -> dict[str, str]:
    return await _change(stage, NAMESPACES, 60)


async def _change(stage: Stage, namespaces: Any, changes: int) -> dict[str, str]:
    """Let these namespaces in turn change a Service, while the bystander has idle connections."""
    site = stage.site
    await site.route_vips(["gw1"])
    idle = [await EchoConnection.open(site, "client1", stage.proxied) for _ in range(10)]
    for each in idle:
        await each.request()
    for number in range(changes):
        timeout = {"fairlead.io/timeout-client-data": str(3_600_000 + number)}
        namespace = namespaces[number % len(namespaces)]
        await site.apply([service("hostile", namespace, timeout, loadBalancerClass=PROXY)])
        await asyncio.sleep(CHANGE_S)
        # Further clients of the bystander: only workers with connections stay.
        with suppress(OSError, TimeoutError, Unavailable):
            idle.append(await EchoConnection.open(site, "client1", stage.proxied))
            await idle[-1].request()
    await asyncio.sleep(6)
    alive = 0
    for each in idle:
        with suppress(OSError, TimeoutError, ValueError):
            alive += bool(await each.request())
        each.close()
    await site.route_vips(["gw1", "gw2"])
    for namespace in set(namespaces):
        with suppress(Exception):
            await delete(site, "hostile", namespace)
    return {"idle connections that were closed": f"{len(idle) - alive} of {len(idle)}"}


async def connections(stage: Stage) -> dict[str, str]:
    site = stage.site
    await site.route_vips(["gw1"])
    await site.apply([service("hostile", "default", loadBalancerClass=PROXY, selector=WEB)])
    (address,) = await addresses_of(site, "hostile")
    await asyncio.sleep(3)
    held: list[EchoConnection] = []
    attempts = FILES // 2 + 100
    for _ in range(attempts):
        with suppress(Unavailable, OSError):
            held.append(await EchoConnection.open(site, "client1", address))
    served = 0
    for _ in range(40):
        with suppress(Unavailable, OSError, TimeoutError, ValueError):
            each = await EchoConnection.open(site, "client1", stage.proxied)
            served += bool(await each.request())
            held.append(each)
    for each in held:
        each.close()
    await site.route_vips(["gw1", "gw2"])
    await delete(site, "hostile", "default")
    return {
        f"connections of the bystander that were served, beside {attempts:,}": f"{served} of 40"
    }


WEB = {"app": "web"}
ATTACKS: Mapping[str, Callable[[Stage], Awaitable[dict[str, str]]]] = {
    "none": nothing,
    "value": value,
    "names": names,
    "external": external,
    "reloads": reloads,
    "together": together,
    "connections": connections,
}


async def measure(chosen: list[str], real: bool) -> Report:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    found: dict[str, dict[str, str]] = {}
    name = f"tenant{os.getpid()}"
    kind: ApiServerKind = "real" if real else "embedded"
    async with Site.create(name, nodes=2, gateways=2, clients=1, apiserver=kind) as site:
        await site.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": each}}
            for each in NAMESPACES
        )
        web = Web(site)
        web.gateways = ("gw1", "gw2")
        await web.create()
        await web.place(("node1", "node2"))
        await site.apply([service("proxied", "default", loadBalancerClass=PROXY, selector=WEB)])
        (proxied,) = await addresses_of(site, "proxied")
        stage = Stage(site, web, proxied)

        async def answers() -> bool:
            with suppress(Unavailable, OSError, TimeoutError, ValueError):
                each = await EchoConnection.open(site, "client1", proxied)
                return bool(await each.request())
            return False

        await until(answers, "an answer through class proxy")
        for attack in chosen:
            progress(attack)
            try:
                found[attack] = await ATTACKS[attack](stage)
            except (AssertionError, Unavailable, TimeoutError) as error:
                found[attack] = {"failed": str(error)[:200]}
            progress(f"{attack}: {found[attack]}")
            for namespace in ("default", NOISY):
                with suppress(Exception):
                    await delete(site, "hostile", namespace)
    return Report(found)


def show(report: Report) -> None:
    rows = [
        (attack, what, figure)
        for attack, found in report.attacks.items()
        for what, figure in found.items()
    ]
    draw(("attack", "what the bystander notices", "figure"), rows)


def main() -> None:
    parser = options(
        "bench.tenant", __doc__, rounds=1, quick="with the embedded API server", plots=False
    )
    parser.add_argument("--attacks", nargs="+", choices=tuple(ATTACKS), default=list(ATTACKS))
    arguments = parser.parse_args()
    run_benchmark(arguments, lambda: run(measure(arguments.attacks, not arguments.quick)), show)


if __name__ == "__main__":
    main()
