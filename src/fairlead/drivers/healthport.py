"""The driver of health check node ports: one HTTP port for each Service with policy Local, which
reports the number of ready endpoints on this node to load balancers.

In: NodeService values with a `health_check`. Out: listening ports that answer any path and method,
see `health_answers`; and the health of the node proxy on port 10256 (`/healthz`, `/livez`;
KEP-3836).

A separate process answers (`roles/health_check_server`), so that no health check waits for a plan,
and no flood of health checks delays a plan. The role sends the process every change, and every
STATE_INTERVAL_S whether the node proxy is in step with the plan. A process that ends is started
again.

Invariants: the loop applies this driver after the node proxy, and `apply` returns once the process
has carried out the change. The process ends with the role, however the role ends. The next process
opens the ports again.

A 200 proves that the packet rules are in force, for the endpoints that the role last saw as ready
in EndpointSlices. It does not prove that these pods exist. After a boot the slices are those of
before the boot, until the kubelet has reported the pods as unready, and nothing orders that report
before the start of this role. The host can tell in part: an endpoint to whose address it has no
route does not count (`awaited_pods`). Where a network plugin has a route to all pods of the node
from its start, such as that of a bridge, a 200 in this window may lead connections to addresses
that nobody has."""

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import structlog

from fairlead.backoff import Backoff
from fairlead.drivers import Component, Requeue, no_requeue
from fairlead.drivers.awaited_pods import AwaitedPods
from fairlead.drivers.health_answers import Done, Opened, Update
from fairlead.errors import Refused, Unavailable
from fairlead.model import HealthCheck, NodeService, Outcome, ServiceKey, Value
from fairlead.net.frames import read, write
from fairlead.net.listening import EVERYWHERE

log = structlog.get_logger()

PROXY_HEALTH_PORT = 10256
STATE_INTERVAL_S = 0.25
"""How often the role sends its state to the health check server."""
RESTART_S = (0.02, 5.0)
"""The first and the longest wait before a new health check server replaces one that ended."""
REPLY_TIMEOUT_S = 5.0
"""Time-out for the reply of the health check server. A process that exceeds it is replaced."""
END_TIMEOUT_S = 2.0
"""A health check server that does not end by itself within this time is killed."""
OPEN_TIMEOUT_S = 1.0
"""How long `open` tries again to open the proxy's own port. The health check server of a previous
role that was killed ends a moment after that role, and holds the port until then."""
OPEN_RETRY_S = 0.02
"""Wait between two of these attempts."""
PORTS_PER_UPDATE = 200
"""Maximum number of ports in one Update: opening that many delays answers by some milliseconds."""
REASON = "FailedToStartServiceHealthcheck"
"""The reason of kube-proxy's Event about a port that cannot be opened. The Outcome repeats
kube-proxy's message too."""


class Change(Value, frozen=True):
    """Change the port of one Service from `before` to `after`. None stands for a closed port."""

    service: ServiceKey
    before: HealthCheck | None
    after: HealthCheck | None

    def __str__(self) -> str:
        match self.before, self.after:
            case HealthCheck(port=port), None:
                return f"close :{port} # {self.service}"
            case HealthCheck(port=old), HealthCheck(port=new, local_endpoints=count) if old == new:
                return f"answer on :{new} with {count} # {self.service}"
            case HealthCheck(port=old), HealthCheck(port=new, local_endpoints=count):
                return f"close :{old}; listen on :{new}, answer with {count} # {self.service}"
            case _, HealthCheck(port=new, local_endpoints=count):
                return f"listen on :{new}, answer with {count} # {self.service}"
        return f"nothing # {self.service}"


class _Process:
    """A health check server, and the connection to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(Done)
        self._ending = asyncio.ensure_future(process.wait())
        self._sent = 0

    @classmethod
    async def start(cls, command: Sequence[str]) -> "_Process":
        """Start the process. Raise Unavailable if that fails, for instance because the host's limit
        of processes is reached."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(*command, stdin=theirs.fileno())
            except OSError as problem:
                ours.close()
                what = f"starting the health check server failed: {problem.strerror}"
                raise Unavailable(
                    what, fix="check the limits of processes and memory of this host or pod"
                ) from problem
        return cls(process, *await asyncio.open_connection(sock=ours))

    async def send(self, update: Update) -> Done:
        """Have the process carry out an Update, and return its reply. Raise Unavailable if the
        process has ended or does not reply."""
        write(self._writer, update)
        self._sent += 1
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                # An earlier caller may have been cancelled before its reply came. Skip that reply.
                while (
                    done := await read(self._reader, self._decoder)
                ) is not None and done.updates < self._sent:
                    pass
        except TimeoutError:
            raise Unavailable(
                f"the health check server did not reply for {REPLY_TIMEOUT_S:g} s"
            ) from None
        if done is None:
            raise Unavailable("the health check server has ended")
        return done

    async def ended_within(self, wait_s: float) -> bool:
        """Whether the process ends within this time."""
        await asyncio.wait({self._ending}, timeout=wait_s)
        return self._ending.done()

    async def end(self) -> None:
        """Let the process close its ports and end."""
        self._writer.close()  # the process ends when its input ends
        if not await self.ended_within(END_TIMEOUT_S):
            self._process.kill()
            await self._ending


class HealthPortDriver(Component):
    """Driver of the health ports of this node. After `open`, `run` must run beside the loop."""

    name = "healthport"

    def __init__(
        self,
        *,
        node_name: str,
        healthy: Callable[[], bool],
        command: Sequence[str],
        node_eligible: Callable[[], bool] = lambda: True,
        proxy_port: int = PROXY_HEALTH_PORT,
        addresses: Collection[str] = EVERYWHERE,
        requeue: Requeue = no_requeue,
        awaited: AwaitedPods | None = None,
    ) -> None:
        """Set up a driver without ports.

        - `healthy`: whether the node proxy is in step with the plan.
        - `command`: starts the health check server, see `roles/health_check_server`.
        - `node_eligible`: whether the node may get new traffic, because it is neither being deleted
          nor tainted by the autoscaler.
        - `proxy_port`: the port for the health of the node proxy; 0 for none. It is open at every
          address.
        - `addresses`: where the ports of Services are open.
        - `requeue`: called with the Services whose ports could not be opened again.
        - `awaited`: the endpoints that do not count yet."""
        self._node_name = node_name
        self._addresses = addresses
        self._turn = asyncio.Lock()
        self._healthy = healthy
        self._command = command
        self._node_eligible = node_eligible
        self.proxy_port = proxy_port
        self._requeue = requeue
        self._process: _Process | None = None
        self._served: dict[ServiceKey, HealthCheck] = {}
        self._awaited = AwaitedPods() if awaited is None else awaited

    async def open(self) -> None:
        """Start the health check server, and open the proxy's own health port. Raise Refused if
        another process has the port, and Unavailable if the health check server does not start."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + OPEN_TIMEOUT_S
        while True:
            try:
                async with self._turn:
                    return await self._start()
            except Refused:
                if loop.time() >= until_s:
                    raise
            await asyncio.sleep(OPEN_RETRY_S)

    async def close(self) -> None:
        """Close all ports and the connections to them."""
        async with self._turn:
            self._served.clear()
            await self._end()

    async def run(self) -> None:
        """Send the state of the node to the health check server every STATE_INTERVAL_S, and replace
        the process if it ends, until cancelled."""
        retry = Backoff(*RESTART_S)
        while True:
            process = self._process
            ended = process is None or await process.ended_within(STATE_INTERVAL_S)
            if ended:
                log.warning("the health check server has ended: starting a new one")
                await asyncio.sleep(retry.next_s())
            else:
                retry.reset()
            try:
                async with self._turn:
                    # A change may have started a new process in the meantime.
                    if ended and self._process is process:
                        await self._end()
                    await self._start()
                    await self._count_arrived()
                    await self._send(self._update())
            except (Unavailable, Refused) as problem:
                log.warning("health ports do not answer", problem=str(problem))

    async def _count_arrived(self) -> None:
        """Count the endpoints that are no longer awaited."""
        if not self._awaited:
            return
        used = {each for check in self._served.values() for each in check.addresses}
        arrived = await self._awaited.look_again(used)
        counts = {
            check.port: self._awaited.count(check)
            for check in self._served.values()
            if not arrived.isdisjoint(check.addresses)
        }
        if counts:
            await self._send(self._update(endpoints=counts))

    def render(self, intents: Mapping[ServiceKey, NodeService]) -> Mapping[ServiceKey, HealthCheck]:
        """Return the port and the number of ready endpoints of each Service that has a health
        check. Pure."""
        return {
            key: intent.health_check
            for key, intent in intents.items()
            if intent.health_check is not None
        }

    def diff(
        self, desired: Mapping[ServiceKey, HealthCheck], actual: Mapping[ServiceKey, HealthCheck]
    ) -> Sequence[Change]:
        """Return a Change for each Service that differs. Pure."""
        return tuple(
            Change(key, actual.get(key), desired.get(key))
            for key in sorted(desired.keys() | actual.keys())
            if desired.get(key) != actual.get(key)
        )

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, HealthCheck]:
        """Return what the ports of this node currently answer."""
        return (
            dict(self._served)
            if keys is None
            else {key: self._served[key] for key in keys if key in self._served}
        )

    async def move(self, addresses: Collection[str]) -> None:
        """Open the ports of the Services at these addresses instead. A port that cannot be opened
        there stays closed; it then differs from the plan, and the next audit tries it again."""
        async with self._turn:
            await self._start()
            self._addresses = addresses
            served = dict(self._served)
            for key, problem in (await self._change(close=served, serve=served)).items():
                log.warning(
                    "a health port could not be opened at the host's new addresses",
                    service=str(key),
                    problem=problem,
                )

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Close ports, then open ports, so that a port can move from one Service to another. A
        Service whose port is in use becomes unavailable, with kube-proxy's message, and is tried
        again because the other process may close the port. The other Services are served. Raise
        Unavailable if the health check server does not carry out the changes."""
        async with self._turn:
            await self._start()
            close = [
                each.service
                for each in changes
                if (before := self._served.get(each.service))
                and (each.after is None or each.after.port != before.port)
            ]
            problems = await self._change(
                close, {each.service: each.after for each in changes if each.after is not None}
            )
        return {
            key: Outcome("unavailable", problem, reason=REASON) for key, problem in problems.items()
        }

    async def _change(
        self, close: Collection[ServiceKey], serve: Mapping[ServiceKey, HealthCheck]
    ) -> dict[ServiceKey, str]:
        """Close the ports of the Services in `close`, then open or update the ports in `serve`.
        Return the problems by Service."""
        if close:
            numbers = tuple(self._served[key].port for key in close)
            await self._send(self._update(closed=numbers))
            for key in close:
                del self._served[key]
        await self._awaited.look(each for check in serve.values() for each in check.addresses)
        if counted := {key: check for key, check in serve.items() if key in self._served}:
            endpoints = {check.port: self._awaited.count(check) for check in counted.values()}
            await self._send(self._update(endpoints=endpoints))
            self._served |= counted
        return await self._open({key: check for key, check in serve.items() if key not in counted})

    async def _open(self, wanted: Mapping[ServiceKey, HealthCheck]) -> dict[ServiceKey, str]:
        """Open these ports. Return the problems by Service."""
        problems: dict[ServiceKey, str] = {}
        keys = tuple(wanted)
        for batch in (
            keys[at : at + PORTS_PER_UPDATE] for at in range(0, len(keys), PORTS_PER_UPDATE)
        ):
            opened = (
                Opened(
                    wanted[key].port,
                    tuple(self._addresses),
                    key,
                    self._awaited.count(wanted[key]),
                )
                for key in batch
            )
            done = await self._send(self._update(opened=tuple(opened)))
            for index, key in enumerate(batch):
                if (number := done.problems.get(index)) is None:
                    self._served[key] = wanted[key]
                else:
                    self._served.pop(key, None)
                    problems[key] = (
                        f'node {self._node_name} failed to start healthcheck "{key}" on port '
                        f"{wanted[key].port}: "
                        f"{os.strerror(number)}"
                    )
        return problems

    def _update(
        self,
        *,
        closed: tuple[int, ...] = (),
        opened: tuple[Opened, ...] = (),
        endpoints: Mapping[int, int] | None = None,
    ) -> Update:
        """Return an Update that includes the state of the node."""
        return Update(self._healthy(), self._node_eligible(), closed, opened, dict(endpoints or {}))

    async def _send(self, update: Update) -> Done:
        """Have the health check server carry out an Update. If it fails to, end the process and
        raise Unavailable."""
        if self._process is None:
            raise Unavailable("the health check server is not running")
        try:
            return await self._process.send(update)
        except Unavailable:
            await self._end()
            raise

    async def _start(self) -> None:
        """Start the health check server with the present ports, unless it runs. A port that cannot
        be opened is no longer served, and its Service is reconciled again. Raise Unavailable, or
        Refused if another process has the proxy's own port."""
        if self._process is not None:
            return
        self._process = await _Process.start(self._command)
        if self.proxy_port:
            own = Opened(self.proxy_port, EVERYWHERE, None)
            done = await self._send(self._update(opened=(own,)))
            if number := done.problems.get(0):
                await self._end()
                raise Refused(
                    f"listening on port {self.proxy_port} for the node proxy's health failed: "
                    f"{os.strerror(number)}",
                    fix="stop the other service proxy of this node",
                )
        if problems := await self._open(dict(self._served)):
            log.warning("health ports could not be opened again", problems=list(problems.values()))
            self._requeue(problems)

    async def _end(self) -> None:
        """End the health check server if it runs."""
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()
