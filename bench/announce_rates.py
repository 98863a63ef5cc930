"""Requests and connections per second through class announce, relative to class direct and to the
pod itself. A part of `bench.announce`.

In: the lab of class announce, where one gateway serves class direct. Out: rates, round by round.
The server is nginx in one pod, and each class has a Service with this pod only.

  path      hops
  pod       client - router - node1 - pod; the pod's own address
  announce  client - router - node1 - pod; kube-proxy translates the address
  direct    client - router - gw1 - node1 - pod, back from node1; kube-proxy translates the address
"""

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from bench.announcers import OWN_ADDRESS, FairleadSubject, answers, pod, service
from bench.callers import CLIENT
from bench.lab import CLOSE, LOADS, rate_of
from bench.options import progress
from bench.paths import NGINX, NGINX_SYSCTLS, PLAIN, WITHOUT_LIMITS

from fairlead.errors import Unavailable
from fairlead.kube.objects import SERVICES
from fairlead.lab import namespace
from fairlead.plan.classes import ANNOUNCE, DIRECT

POD, ANNOUNCED, DIRECTLY = "pod", "announce", "direct"
KINDS: Mapping[str, tuple[str, ...]] = {"requests": (), "connections": CLOSE}
ADDRESSES = {ANNOUNCED: "203.0.113.180", DIRECTLY: "203.0.113.181"}
CLASSES = {ANNOUNCED: ANNOUNCE.name, DIRECTLY: DIRECT.name}
PORTS = ({"name": "http", "port": 80, "targetPort": PLAIN},)

Rates = Mapping[str, Mapping[str, float]]


async def rates(subject: FairleadSubject, rounds: int, seconds: int) -> tuple[Rates, ...]:
    """Return the rates by type and path, one mapping per round. Every second round measures the
    paths in reverse order."""
    done = []
    async with _server(subject) as ends:
        for number in range(rounds):
            progress(f"rates: round {number + 1} of {rounds}")
            found: dict[str, dict[str, float]] = {}
            for kind, more in KINDS.items():
                for path in list(ends)[:: -1 if number % 2 else 1]:
                    argv = ["wrk", *LOADS["saturated"].split(), f"-d{seconds}s", *more, ends[path]]
                    code, output, errors = await subject.site.exec(
                        CLIENT, argv, timeout_s=seconds + 30
                    )
                    if code:
                        raise Unavailable(f"wrk to {ends[path]} ended with {code}: {errors}")
                    found.setdefault(kind, {})[path] = rate_of(path, output)
            done.append(found)
    return tuple(done)


@asynccontextmanager
async def _server(subject: FairleadSubject) -> AsyncIterator[Mapping[str, str]]:
    """Run nginx in a pod of its own. Yield the URL of each path."""
    site = subject.site
    for node in site.topology.of("node"):
        namespace.set_sysctls(site.namespace(node.name), WITHOUT_LIMITS)
    single = pod(0, "node1", app="single")
    name = f"default/{single['metadata']['name']}"
    await site.apply([single])
    await site.await_pods()
    for host in (CLIENT, name):
        namespace.set_sysctls(site.namespace(host), NGINX_SYSCTLS)
    services = [
        service(
            f"single-{path}",
            class_name=CLASSES[path],
            annotations={OWN_ADDRESS: address},
            ports=PORTS,
            app="single",
        )
        for path, address in ADDRESSES.items()
    ]
    with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
        path = Path(folder) / "nginx.conf"
        path.write_text(NGINX)
        nginx = site.spawn(name, ["nginx", "-p", folder, "-c", str(path)], label="bench/nginx")
        try:
            await site.apply(services)
            await answers(site, list(ADDRESSES.values()))
            _, output, _ = await site.exec(name, ["ip", "-4", "-brief", "address", "show", "eth0"])
            own = output.split()[2].partition("/")[0]
            yield {POD: f"http://{own}:{PLAIN}/"} | {
                path: f"http://{address}/" for path, address in ADDRESSES.items()
            }
        finally:
            await nginx.stop(grace_s=5)
            async with site.client() as client:
                for each in services:
                    await client.delete(SERVICES, ("default", each["metadata"]["name"]))
