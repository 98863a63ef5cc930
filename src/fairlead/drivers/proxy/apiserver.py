"""The balancer of the Kubernetes API: a HAProxy that needs nothing but the configuration file.

In: `gateway.apiServer`. Out: a HAProxy that passes connections to the API servers whose /readyz
answers 200. The balancer never talks to the API itself: it runs before there is an API, and like
the HAProxy of Services it continues when this process ends. It is a process of its own, so that
a failure of the HAProxy of Services does not affect the API, and so that watches, which are long
connections, do not keep old workers of the Services' HAProxy alive.

An API server that reports that it is not ready gets no new connections and keeps the open ones,
which it closes itself when it shuts down. An API server that does not answer loses its connections,
because their clients would wait in vain. The health checks do not verify certificates: the clients
verify whom their connections reach. Follows HAProxy's configuration manual, `http-check expect` and
`on-marked-down`; "Kubernetes API health endpoints"."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import structlog

from fairlead.config import ApiServerConfig
from fairlead.drivers import Component
from fairlead.drivers.proxy import removal, runtime, shield
from fairlead.drivers.proxy.metrics import ApiServersCollector
from fairlead.drivers.proxy.process import Haproxy
from fairlead.drivers.proxy.render import Paths, bind_options, with_global
from fairlead.drivers.proxy.spec import ProxyKey
from fairlead.errors import FairleadError, Unavailable
from fairlead.net import localroutes
from fairlead.role_state import ApiServersState, ApiServerState

log = structlog.get_logger()

SECTION = "apiserver"
CHECK_INTERVAL_S = 2.0
"""Interval at which the balancer is compared with the configuration."""
_RANGES_PER_LINE = 40
"""Maximum number of source ranges on a line. HAProxy takes 64 words and 2,048 characters."""
_STATES = {"UP": "ready", "NOLB": "not ready", "DOWN": "down"}


def render(config: ApiServerConfig, paths: Paths) -> str:
    """Return HAProxy's whole configuration. Pure."""
    lines = [f"bind {key} {bind_options(key)}" for key in _keys(config)]
    if config.source_ranges:
        # A connection of the host to one of its own addresses has that address as its source.
        within = [*(key.address for key in _keys(config)), *config.source_ranges]
        lines += [
            f"acl within src {' '.join(within[at : at + _RANGES_PER_LINE])}"
            for at in range(0, len(within), _RANGES_PER_LINE)
        ]
        lines += ["tcp-request connection reject unless within"]
    lines += [
        "mode tcp",
        "balance leastconn",
        "retries 3",
        "option redispatch 1",
        "option dontlognull",
        "option clitcpka",
        "option srvtcpka",
        "timeout connect 1s",
        # When etcd does not answer, /readyz reports it after 4 s: two of its checks wait for 2 s
        # each.
        "timeout check 5s",
        # A watch is idle for a minute at most, but an open shell (`kubectl exec`) for longer.
        "timeout client 1h",
        "timeout server 1h",
        "load-server-state-from-file global",
        "option httpchk",
        "http-check send meth GET uri /readyz",
        # A status other than 200 means "not ready"; no answer, or no connection, is a failure.
        "http-check expect error-status L7OKC status 200",
        "default-server check check-ssl verify none inter 1s fastinter 250ms fall 2 rise 1 "
        "on-marked-down shutdown-sessions tcp-ut 10s",
    ]
    lines += [f"server {_name(server)} {server}" for server in config.servers]
    return with_global("\n    ".join([f"listen {SECTION}", *lines]) + "\n", paths)


class ApiServerBalancer(Component):
    """The component that runs the balancer.

    - `config`: None if there should be no balancer.
    - `folder`: for HAProxy's configuration and sockets; no other instance may use it. Its path has
      at most 80 characters."""

    name = "API server balancer"

    def __init__(self, config: ApiServerConfig | None, folder: Path) -> None:
        self._config = config
        self.haproxy = Haproxy(folder)
        self.servers: Mapping[str, ApiServerState] = {}
        """Each API server as last seen, by `address:port` as configured."""
        self._problem = ""
        self._shield: tuple[list[ProxyKey], str] | None = None
        """The listeners of the installed nftables table, and the table as the kernel listed it
        then. The table is replaced only when one of the two has changed."""

    async def open(self) -> None:
        """Start the balancer. A failure is only logged, see `ensure`, and does not hold up the
        role."""
        await self.ensure()

    async def ensure(self) -> None:
        """Make the balancer equal to the configuration. A failure is logged, and the next call
        tries again."""
        try:
            await (self._apply(self._config) if self._config is not None else self.remove())
            self._problem = ""
        except FairleadError as error:
            if str(error) != self._problem:
                log.error("configuring the API server balancer failed", problem=str(error))
            self._problem = str(error)

    async def run(self) -> None:
        """Keep the balancer equal to the configuration until cancelled. A HAProxy that dies is
        restarted at once."""
        while self._config is not None:
            await self.ensure()
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await (
                        self.haproxy.exited()
                        if self.haproxy.alive()
                        else asyncio.sleep(CHECK_INTERVAL_S)
                    )

    async def remove(self) -> Sequence[str]:
        """Remove the balancer with its connections, routes and nftables rules."""
        gone = await removal.remove(self.haproxy, localroutes.API_PROTOCOL, shield.API_TABLE)
        return ("the API server balancer",) if gone else ()

    def collectors(self) -> tuple[ApiServersCollector]:
        return (ApiServersCollector(lambda: self.servers),)

    async def _apply(self, config: ApiServerConfig) -> None:
        keys = _keys(config)
        routed = await localroutes.present(localroutes.API_PROTOCOL)
        # An address that the host has anyway needs no route, and its other ports stay reachable.
        unassigned = [key for key in keys if not await localroutes.is_assigned(key.address)]
        wanted = {key.address for key in unassigned}
        if (unassigned, shield.listing(shield.API_TABLE)) != self._shield:
            shield.install(unassigned, shield.API_TABLE)
            self._shield = (unassigned, shield.listing(shield.API_TABLE))
        await localroutes.add(wanted - routed, localroutes.API_PROTOCOL)
        text = render(config, self.haproxy.paths)
        if not (await self.haproxy.running() and await self.haproxy.runs(text)):
            await self.haproxy.run(text)
            log.info(
                "the API server balancer is running",
                addresses=[str(key) for key in keys],
                servers=len(config.servers),
            )
        await localroutes.delete(routed - wanted, localroutes.API_PROTOCOL)
        await self._poll(config)

    async def _poll(self, config: ApiServerConfig) -> None:
        """Read the states of the API servers from HAProxy, and log those that changed."""
        with suppress(Unavailable):
            names = {_name(server): server for server in config.servers}
            found = {
                names[row["svname"]]: _found(row)
                for row in await runtime.statistics(self.haproxy.worker)
                if row.get("pxname") == SECTION and row["svname"] in names
            }
            for server, now in found.items():
                if server not in self.servers or now.state != self.servers[server].state:
                    log.info("API server", server=server, state=now.state)
            self.servers = found

    def status(self) -> ApiServersState:
        """Return the addresses and servers for `/state`; empty without a balancer."""
        if self._config is None:
            return ApiServersState()
        return ApiServersState(tuple(map(str, _keys(self._config))), self.servers)


def _found(row: Mapping[str, str]) -> ApiServerState:
    state = row["status"].partition(" ")[0]
    return ApiServerState(_STATES.get(state, state), int(row["scur"] or 0), int(row["stot"] or 0))


def _name(server: str) -> str:
    """Return the server's name in HAProxy, where names have no brackets."""
    return server.replace("[", "").replace("]", "")


def _keys(config: ApiServerConfig) -> list[ProxyKey]:
    return [ProxyKey(str(ip_address(address)), config.port) for address in config.addresses]
