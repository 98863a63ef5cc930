"""The BIRD of one role, with its configuration files.

In: the peers of the host, the text of the routes. Out: a BIRD that runs with both. Invariants:
bird.conf is a text that BIRD accepted; a peer that BIRD does not accept is left out alone. A BIRD
that ends is started again, if this process has to start it. A BIRD that starts at any time finds
the newest files."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from fairlead.announce_sections import BgpConfig
from fairlead.drivers.bgp import facts, process, render
from fairlead.drivers.bgp.peers import (
    CheckedPeers,
    HostFacts,
    Peer,
    check,
    local_asn,
    refusal,
    with_next_hops,
)
from fairlead.drivers.bgp.process import BirdProcess
from fairlead.errors import Refused, Unavailable

log = structlog.get_logger()

_START_S = 0.5
"""The shortest time between two starts of a BIRD that ends at once."""


class Speaker:
    """The BIRD in the directory of this section, which belongs to this role. `host`: the name of
    the host."""

    def __init__(self, section: BgpConfig, role: str, host: str) -> None:
        self._section, self._role, self._host = section, role, host
        self.bird = BirdProcess(Path(section.directory), required=section.start_daemon)
        self.checked = CheckedPeers()
        self.pending = False
        """Whether BIRD has not read its present files yet."""
        self.restarts = 0
        """How often BIRD ended unexpectedly and was started again."""
        self._started_s = float("-inf")
        """When this process started BIRD last."""
        self._ran = False
        """Whether BIRD has answered this process."""
        self._given: tuple[tuple[Peer, ...], HostFacts] | None = None
        """The peers and the facts about the host that were checked last."""
        self._configuration = ""

    @property
    def asn(self) -> int:
        """The AS number of this host in communities."""
        return local_asn(self._section, self.checked.accepted)

    @property
    def needed(self) -> bool:
        """Whether BIRD needs files. Without any peer it does not, unless another program starts it,
        or it runs already."""
        return bool(self.checked.accepted or self._configuration or not self._section.start_daemon)

    def adopt(self) -> str:
        """Take over the files of an earlier process. Return the text of the routes. Raise Refused
        if the directory belongs to another role."""
        configuration = process.read(self.bird.configuration)
        owner = render.owner_of(configuration)
        if owner not in (None, self._role):
            raise Refused(
                f"directory {self.bird.folder} of BIRD belongs to role {owner} of this host",
                fix="set another announce.bgp.directory",
            )
        self._configuration = configuration
        return process.read(self.bird.routes)

    async def configure_peers(self, peers: Sequence[Peer]) -> bool:
        """Check the peers if they or the host have changed, and write bird.conf if its text
        changes. Without any peer, write nothing before the first one exists. Return whether the
        accepted or refused peers have changed: the interfaces of a host change with its pods."""
        host = await asyncio.to_thread(facts.read)
        given = (tuple(with_next_hops(each, host) for each in peers), host)
        if self._given == given and (self.bird.configuration.exists() or not self.needed):
            return False
        configured = [
            each.name
            for each in given[0]
            if render.protocol(self._section, each) in self._configuration
        ]
        checked = check(self._section, *given, configured)
        if not (checked.accepted or self.needed):
            changed = self._given is None or checked != self.checked
            self._given, self.checked = given, checked
            return changed
        router_id = self._router_id()
        text = self._text(checked.accepted, router_id)
        if text != self._configuration:
            checked, text = await self._accepted_by_bird(checked, router_id)
        for finding in checked.refused:
            if finding not in self.checked.refused:
                log.warning("BGP peer is not used", problem=str(finding))
        if text != self._configuration or not self.bird.configuration.exists():
            self.bird.make_folder()
            process.write(self.bird.configuration, text)
            self._configuration = text
            self.pending = True
        changed = self._given is None or checked != self.checked
        self._given, self.checked = given, checked
        return changed

    async def ensure_running(self) -> bool:
        """Start BIRD if it has to run and does not. Return whether it was started. Raise
        Unavailable if another program has to start it, or if it ended right after its start."""
        if not self.checked.accepted and self.bird.pid() is None:
            return False
        if await self.bird.answers():
            self._ran = True
            return False
        self.pending = True
        if not self._section.start_daemon:
            raise Unavailable(
                f"no BIRD answers at {self.bird.client.path}",
                fix="start the container or unit that runs BIRD",
            )
        loop = asyncio.get_running_loop()
        if loop.time() - self._started_s < _START_S:
            raise Unavailable(
                "BIRD ended right after its start", fix=f"read {self.bird.log} on this host"
            )
        if self._ran:
            self.restarts += 1
            log.error("BIRD ended unexpectedly and is started again")
        self._started_s = loop.time()
        await self.bird.start()
        self._ran, self.pending = True, False
        return True

    def write_routes(self, text: str) -> None:
        """Write the file of routes if it differs."""
        if text != process.read(self.bird.routes):
            self.bird.make_folder()
            process.write(self.bird.routes, text)
            self.pending = True

    @property
    def held_back(self) -> bool:
        """Whether the routes in the present file are held back."""
        return render.is_held_back(process.read(self.bird.routes))

    def hold_back(self, *, held: bool) -> None:
        """Hold back the routes in the present file, or have them announced again."""
        text = process.read(self.bird.routes)
        self.write_routes(render.hold_back(text) if held else render.release(text))

    async def configure(self) -> None:
        """Have BIRD read its files if they have changed."""
        if self.pending and (self.checked.accepted or self.bird.pid() is not None):
            await self.bird.client.configure()
        self.pending = False

    def restore(self) -> None:
        """Restore bird.conf if another program has changed it."""
        if self._configuration and process.read(self.bird.configuration) != self._configuration:
            log.warning("another program changed BIRD's configuration; it is restored")
            process.write(self.bird.configuration, self._configuration)
            self.pending = True

    async def prefixes(self) -> set[str]:
        """Return the prefixes of the routes that BIRD announces. Raise Unavailable or Refused."""
        return {
            route.prefix
            for protocol in render.STATIC_PROTOCOLS
            for route in await self.bird.client.routes(protocol)
        }

    async def _accepted_by_bird(
        self, checked: CheckedPeers, router_id: str
    ) -> tuple[CheckedPeers, str]:
        """Return the peers that BIRD accepts, and the configuration. If it does not accept all,
        each peer is checked alone."""
        if not self.bird.routes.exists():  # bird.conf includes the file
            self.write_routes(render.routes_text({}, {}, {}, asn=0))
        text = self._text(checked.accepted, router_id)
        try:
            await self.bird.check(text)
        except Refused as error:
            log.warning("BIRD rejected the configuration", problem=str(error))
        else:
            return checked, text
        await self.bird.check(self._text((), router_id))
        accepted: list[Peer] = []
        refused = list(checked.refused)
        for peer in checked.accepted:
            try:
                await self.bird.check(self._text([*accepted, peer], router_id))
            except Refused as error:
                refused.append(refusal(peer, error.message, "correct the peer"))
            else:
                accepted.append(peer)
        checked = CheckedPeers(tuple(accepted), tuple(refused))
        return checked, self._text(checked.accepted, router_id)

    def _text(self, peers: Sequence[Peer], router_id: str) -> str:
        return render.configuration(
            self._section,
            peers,
            role=self._role,
            router_id=router_id,
            routes_file=str(self.bird.routes),
            log_file=str(self.bird.log) if self._section.start_daemon else "",
        )

    def _router_id(self) -> str:
        """Return the router id. It does not change while BIRD's configuration exists, because
        another id would reset all sessions."""
        return (
            self._section.router_id
            or render.router_id_of(self._configuration)
            or facts.router_id(self._host)
        )
