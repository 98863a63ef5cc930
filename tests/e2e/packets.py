"""Packets that are sent through a lab, and the comparison of their results with the oracle.

In: a running lab, sources, targets. Out: nothing if all results agree in the end; else a
`Disagreement` with the packet, the expected and the observed result. A mismatch counts when it
lasts past the deadline, because the system is asynchronous and only its final state is specified.
Objects are read from the API server, and packets are sent from real hosts."""

import asyncio
import itertools
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from tests import sctp
from tests.e2e.oracle import (
    Answer,
    Cluster,
    Expected,
    Observed,
    Source,
    Target,
    expect,
    expect_kept,
    objection,
)

from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.kube.client import Client
from fairlead.kube.objects import NODES, PODS, SERVICES
from fairlead.lab import namespace
from fairlead.lab.site import Site

FIRST_ANSWER_S, LAST_ANSWER_S = 0.3, 1.5
"""The first and the last timeout for an answer. After a timeout a new packet is sent."""
SILENCE_S = 0.2
CHECK_INTERVAL_S = 0.05
AT_ONCE = 48
_sctp_ports = itertools.cycle(range(20_000, 60_000))


class Probe(NamedTuple):
    """Packets from one source to one target. `all_pods`: every pod that may answer must answer in
    the end. `source_port`: for datagrams, a fixed port; 0: a new one each time."""

    source: Source
    target: Target
    packets: int = 2
    all_pods: bool = False
    source_port: int = 0

    def expected(self, cluster: Cluster) -> Expected:
        """Return the result that the oracle expects."""
        return (expect_kept if self.source_port else expect)(cluster, self.source, self.target)


class Disagreement(AssertionError):
    """The results of packets permanently differ from the rules."""


async def read_cluster(client: Client) -> Cluster:
    """Return the present objects of the API."""
    paths = (SERVICES.path(), PODS.path(), NODES.path())
    answers = await asyncio.gather(*(client.request("GET", path) for path in paths))
    services, pods, nodes = (json.loads(answer)["items"] for answer in answers)
    return Cluster(services, pods, nodes)


def sources_of(site: Site, cluster: Cluster) -> tuple[Source, ...]:
    """Return all possible senders: clients, nodes, and running pods that are not terminating."""
    hosts = [Source(host.name, "client", "", host.addresses) for host in site.topology.of("client")]
    hosts += [
        Source(host.name, "node", host.name, host.addresses) for host in site.topology.of("node")
    ]
    for pod in cluster.pods:
        addresses = tuple(entry["ip"] for entry in pod.get("status", {}).get("podIPs", ()))
        if addresses and not pod["metadata"].get("deletionTimestamp"):
            name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            hosts.append(Source(name, "pod", pod["spec"]["nodeName"], addresses))
    return tuple(hosts)


class Prober:
    """Sends packets from the hosts of one lab, and compares the results with the oracle."""

    def __init__(
        self, site: Site, read: Callable[[], Awaitable[Cluster]], *, silence_s: float = SILENCE_S
    ) -> None:
        """Create the prober. `read` returns the objects for the oracle. `silence_s`: the time
        during which no answer may arrive if none is expected."""
        self._site = site
        self._read = read
        self._silence_s = silence_s
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.sent = 0
        self._last_results: dict[Probe, tuple[Expected, Sequence[Observed]]] = {}

    def last_results(self) -> str:
        """Return the results of the last packets of each probe in the last call of `agree`, as
        text."""
        return "\n\n".join(
            _described(probe, *results) for probe, results in self._last_results.items()
        )

    async def agree(self, probes: Sequence[Probe], *, deadline_s: float) -> None:
        """Return when the results of every probe have agreed with the oracle. Raise Disagreement
        with the other probes at the deadline."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + deadline_s
        seen: dict[Probe, set[str]] = {probe: set() for probe in probes}
        waiting = list(probes)
        patience_s = FIRST_ANSWER_S
        self._last_results.clear()
        while True:
            before = await self._read()
            waiting = [probe for probe in waiting if _can_send(self._site, before, probe.source)]
            observed = await asyncio.gather(
                *(self._observe(probe, probe.expected(before), patience_s) for probe in waiting)
            )
            after = await self._read()
            left = []
            problems = []
            for probe, found in zip(waiting, observed, strict=True):
                seen[probe] |= {one.pod for one in found if isinstance(one, Answer)}
                self._last_results[probe] = probe.expected(after), found
                # Pods start and end independently of the packets: a result is correct if it agrees
                # with the objects before or after the packets.
                results = [
                    _problem_text(probe, probe.expected(cluster), found, seen[probe])
                    for cluster in (before, after)
                ]
                if all(results):
                    left.append(probe)
                    problems.append(results[1])
            waiting = left
            if not waiting:
                return
            if loop.time() > end_s:
                raise Disagreement(
                    "\n\n".join(problems[:5]) + f"\n\n({len(problems)} disagreements in total)"
                )
            patience_s = min(2 * patience_s, LAST_ANSWER_S)
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _observe(self, probe: Probe, expected: Expected, patience_s: float) -> list[Observed]:
        expects_answer = (
            expected.answers and expected.must_answer
        ) or expected.otherwise == "refused"
        timeout_s = patience_s if expects_answer else self._silence_s
        if not (expected.one_pod and expected.answers):
            return list(
                await asyncio.gather(*(self._call(probe, timeout_s) for _ in range(probe.packets)))
            )
        # With session affinity the calls are sequential: concurrent calls may be distributed over
        # several pods before the first client is recorded.
        return [await self._call(probe, timeout_s) for _ in range(probe.packets)]

    async def _call(self, probe: Probe, timeout_s: float) -> Observed:
        async with self._turns:
            self.sent += 1
            found = await call(
                self._site,
                probe.source,
                probe.target,
                timeout_s=timeout_s,
                source_port=probe.source_port,
            )
        return found._replace(seen="") if isinstance(found, Answer) and probe.source_port else found


async def call(
    site: Site, source: Source, target: Target, *, timeout_s: float, source_port: int = 0
) -> Observed:
    """Make one new connection, or send one datagram (from a new port by default), and return the
    result."""
    kind = socket.SOCK_STREAM if target.protocol == "TCP" else socket.SOCK_DGRAM
    loop = asyncio.get_running_loop()
    try:
        sock = site.socket(
            source.name, socket.AF_INET6 if ":" in target.address else socket.AF_INET, kind
        )
    # The pod that should send is gone.
    except (Refused, Conflict):
        return "broken"
    connected = False
    try:
        sock.setblocking(False)
        if source_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", source_port))
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sock, (target.address, target.port))
            connected = target.protocol == "TCP"
            # A datagram that a rule of the sending node refuses or drops fails at once with EPERM.
            # If it is refused, an ICMP error follows.
            with suppress(PermissionError):
                await loop.sock_sendall(sock, b"who\n")
            answer = b""
            while not answer.endswith(b"\n"):
                part = await loop.sock_recv(sock, 4096)
                if not part:
                    return "broken"
                answer += part
    except TimeoutError:
        return "broken" if connected else "silence"
    except ConnectionRefusedError:
        return "refused"
    # An ICMP error of a router, or a reset of an open connection.
    except OSError:
        return "broken" if connected else "unreachable"
    finally:
        sock.close()
    reply: Mapping[str, Any] = json.loads(answer)
    return Answer(f"default/{reply['pod']}", reply["peer"])


async def associate(site: Site, source: Source, target: Target, *, timeout_s: float) -> Observed:
    """Send one SCTP INIT from a new port and return the result. A source must send only one at a
    time to an address, because all raw sockets receive every error."""
    port, loop = next(_sctp_ports), asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    with namespace.make_socket(
        site.namespace(source.name), family, socket.SOCK_RAW, sctp.PROTOCOL
    ) as sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                with sctp.unsupported_as_refused():
                    # A refused INIT also fails with EPERM; the ICMP error follows.
                    with suppress(PermissionError):
                        sctp.start(sock, target.address, target.port, source_port=port)
                    while (
                        reply := sctp.read(await loop.sock_recv(sock, 4096), family, port)
                    ) is None:
                        pass
        except TimeoutError:
            return "silence"
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "unreachable"
    return Answer(f"default/{reply.pod}", reply.peer)


async def get_health(site: Site, host: str, address: str, port: int) -> tuple[int, int] | None:
    """Return (status, X-Load-Balancing-Endpoint-Weight) of a health port; None without an
    answer."""
    with suppress(Unavailable, TimeoutError, ConnectionError):
        reader, writer = await site.connect(host, address, port, timeout_s=1)
        async with asyncio.timeout(1):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            writer.close()
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        return int(head[0].split()[1]), int(fields["x-load-balancing-endpoint-weight"])
    return None


def _problem_text(
    probe: Probe, expected: Expected, observed: Sequence[Observed], seen: set[str]
) -> str:
    problem = objection(expected, observed)
    if not problem and probe.all_pods and not expected.one_pod:
        missing = {answer.pod for answer in expected.answers} - seen
        problem = f"{', '.join(sorted(missing))} never answered" if missing else ""
    return _described(probe, expected, observed, problem) if problem else ""


def _described(
    probe: Probe,
    expected: Expected,
    observed: Sequence[Observed],
    problem: str = "observed",
) -> str:
    wanted = sorted(f"{answer.pod} seeing {answer.seen}" for answer in expected.answers) or [
        expected.otherwise
    ]
    return (
        f"from {probe.source.name} ({', '.join(probe.source.addresses)}; node "
        f"{probe.source.node or 'none'}) "
        f"to {probe.target.address} port {probe.target.port}/{probe.target.protocol}: {problem}\n"
        f"  expected: {'; '.join(wanted)}{' (always the same pod)' if expected.one_pod else ''}\n"
        f"  observed: {'; '.join(map(str, observed))}"
    )


def _can_send(site: Site, cluster: Cluster, source: Source) -> bool:
    return source.kind != "pod" or source in sources_of(site, cluster)
