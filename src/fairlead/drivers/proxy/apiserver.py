"""The balancer of the Kubernetes API itself: a HAProxy that needs nothing but the configuration
file.

In: `gateway.apiServer`. Out: a HAProxy that passes connections on to API servers that say on
/readyz that they are ready. Nobody asks the API here: this is up before there is one, and goes on
without us, as the HAProxy of Services does. It is a process of its own, so that whatever Services
have made of theirs costs the API nothing, and so that watches, which last, keep no old worker of
theirs. An API server that answers that it is not ready gets nothing new and keeps what it has,
which it ends itself when it goes. One that does not answer loses its connections: whoever has one
would wait for nothing. Certificates are not checked when /readyz is asked: whose the connections
are, clients see for themselves. Follows HAProxy's configuration manual, `http-check expect` and
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
from fairlead.drivers.proxy.render import Paths, bind_words, with_global
from fairlead.drivers.proxy.spec import ProxyKey
from fairlead.errors import FairleadError, Unavailable
from fairlead.net import localroutes
from fairlead.role_state import ApiServersState, ApiServerState

log = structlog.get_logger()

SECTION = "apiserver"
LOOK_S = 2.0
"""So often it is seen to that all is as it should be."""
_ON_A_LINE = 40
"""HAProxy takes 64 words, and 2,048 characters."""
_STATES = {"UP": "ready", "NOLB": "not ready", "DOWN": "away"}


def render(config: ApiServerConfig, paths: Paths) -> str:
    """The whole text. Pure."""
    lines = [f"bind {key} {bind_words(key)}" for key in _keys(config)]
    if config.source_ranges:
        # A host that calls an address of its own does so from that address.
        within = [*(key.address for key in _keys(config)), *config.source_ranges]
        lines += [
            f"acl within src {' '.join(within[at : at + _ON_A_LINE])}"
            for at in range(0, len(within), _ON_A_LINE)
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
        # Where etcd does not answer, /readyz says so after 4 s: two checks of it wait for 2 s each.
        "timeout check 5s",
        # Watches are quiet for a minute at most, an open shell for longer.
        "timeout client 1h",
        "timeout server 1h",
        "load-server-state-from-file global",
        "option httpchk",
        "http-check send meth GET uri /readyz",
        # An answer is a sign of life; no answer, or no connection, is a failure.
        "http-check expect error-status L7OKC status 200",
        "default-server check check-ssl verify none inter 1s fastinter 250ms fall 2 rise 1 "
        "on-marked-down shutdown-sessions tcp-ut 10s",
    ]
    lines += [f"server {_name(server)} {server}" for server in config.servers]
    return with_global("\n    ".join([f"listen {SECTION}", *lines]) + "\n", paths)


class ApiServerBalancer(Component):
    """config: None where there is to be no balancer. folder: of this instance alone, for HAProxy's
    configuration and sockets; its path has 80 characters at most."""

    name = "API server's balancer"

    def __init__(self, config: ApiServerConfig | None, folder: Path) -> None:
        self._config = config
        self.haproxy = Haproxy(folder)
        self.servers: Mapping[str, ApiServerState] = {}
        """What was last seen of each API server, by `address:port` as it is configured."""
        self._problem = ""
        self._shield: tuple[list[ProxyKey], str] | None = None
        """For whom it was put, and how the kernel showed it then: it is put again only when that
        differs."""

    async def open(self) -> None:
        """See `keep`: a balancer that fails holds nothing else up."""
        await self.keep()

    async def keep(self) -> None:
        """Have it as the configuration says. What fails is logged, and tried again by the next
        call."""
        try:
            await (self._bring(self._config) if self._config is not None else self.remove())
            self._problem = ""
        except FairleadError as error:
            if str(error) != self._problem:
                log.error("the API server's balancer is not as it should be", problem=str(error))
            self._problem = str(error)

    async def run(self) -> None:
        """Keep it so until cancelled: a HAProxy that dies is started anew at once."""
        while self._config is not None:
            await self.keep()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await (self.haproxy.died() if self.haproxy.alive() else asyncio.sleep(LOOK_S))

    async def remove(self) -> Sequence[str]:
        """Take everything away, connections too."""
        gone = await removal.remove(self.haproxy, localroutes.API_PROTOCOL, shield.API_TABLE)
        return ("the API server's balancer",) if gone else ()

    def collectors(self) -> tuple[ApiServersCollector]:
        return (ApiServersCollector(lambda: self.servers),)

    async def _bring(self, config: ApiServerConfig) -> None:
        keys = _keys(config)
        routed = await localroutes.present(localroutes.API_PROTOCOL)
        # Of an address that the host has for other purposes too, nothing else is to be kept away.
        brought = [key for key in keys if not await localroutes.is_assigned(key.address)]
        wanted = {key.address for key in brought}
        if (brought, shield.shown(shield.API_TABLE)) != self._shield:
            shield.put(brought, shield.API_TABLE)
            self._shield = (brought, shield.shown(shield.API_TABLE))
        await localroutes.add(wanted - routed, localroutes.API_PROTOCOL)
        text = render(config, self.haproxy.paths)
        if not (await self.haproxy.running() and await self.haproxy.runs(text)):
            await self.haproxy.run(text)
            log.info(
                "the API server's balancer serves",
                addresses=[str(key) for key in keys],
                servers=len(config.servers),
            )
        await localroutes.delete(routed - wanted, localroutes.API_PROTOCOL)
        await self._look(config)

    async def _look(self, config: ApiServerConfig) -> None:
        """What HAProxy finds of the API servers."""
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
        """For `/state`; nothing where there is no balancer."""
        if self._config is None:
            return ApiServersState()
        return ApiServersState(tuple(map(str, _keys(self._config))), self.servers)


def _found(row: Mapping[str, str]) -> ApiServerState:
    state = row["status"].partition(" ")[0]
    return ApiServerState(_STATES.get(state, state), int(row["scur"] or 0), int(row["stot"] or 0))


def _name(server: str) -> str:
    """What HAProxy calls it, which takes no brackets."""
    return server.replace("[", "").replace("]", "")


def _keys(config: ApiServerConfig) -> list[ProxyKey]:
    return [ProxyKey(str(ip_address(address)), config.port) for address in config.addresses]
