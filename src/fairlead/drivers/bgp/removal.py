"""Removal of everything that was announced by BGP.

In: the section of the configuration, the role. Out: the host without announcements of this role.
Needs nothing but the files of BIRD and the protocol number of the kernel routes, so it also removes
what an earlier configuration left. Follows RFC 8326 (graceful shutdown)."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from fairlead.announce_sections import BgpConfig
from fairlead.drivers import Component
from fairlead.drivers.bgp import process, render, spec
from fairlead.drivers.bgp.process import BirdProcess
from fairlead.drivers.bgp.spec import Contributions
from fairlead.errors import FairleadError
from fairlead.model import ServiceKey
from fairlead.net.tableroutes import TableRoutes

GRACE_S = 1.0
"""How long a route has the community graceful-shutdown before it is withdrawn."""
PROTOCOLS = {"gateway": 174, "node": 175}
"""The routing protocol numbers of the kernel routes for announced addresses, by role."""


class NoBgp(Component):
    """Takes the place of the driver in a role that announces nothing by BGP, and removes what an
    earlier configuration of this role left."""

    name = "bgp"

    def __init__(self, section: BgpConfig, *, role: str = "gateway") -> None:
        self._section = section
        self._role = role

    async def open(self) -> None:
        await self.remove()

    async def remove(self) -> Sequence[str]:
        return (
            *await remove_bird(self._section, self._role),
            *await remove_routes(self._role),
        )


async def remove_routes(role: str) -> Sequence[str]:
    """Delete the kernel routes of this role from all tables. Return a description of them."""
    with TableRoutes(PROTOCOLS[role]) as kernel:
        found = await asyncio.to_thread(kernel.routes)
        await asyncio.to_thread(kernel.delete, found)
    return ("the kernel routes of announced addresses",) if found else ()


async def remove_bird(section: BgpConfig, role: str) -> Sequence[str]:
    """Withdraw all routes of the BIRD of this section and role, stop it, and delete its files.
    Neighbors get GRACE_S to move to other routes. A BIRD that another program started keeps
    running, with an empty configuration. Return descriptions of what was removed."""
    bird = BirdProcess(Path(section.directory))
    configuration = process.read(bird.configuration)
    if render.owner_of(configuration) != role:
        return ()
    text = process.read(bird.routes)
    services = {key: record.contributions for key, record in render.records_of(text).items()}
    running = await bird.answers()
    if running and services:
        leaving = {
            key: tuple(msgspec.structs.replace(each, leaving=True) for each in contributions)
            for key, contributions in services.items()
        }
        await _announce(bird, section, leaving)
        await asyncio.sleep(GRACE_S)
    if section.start_daemon or bird.pid() is not None:
        await bird.stop()
        return ("the BGP announcements, and BIRD",)
    empty = render.configuration(
        section,
        (),
        role=role,
        router_id=render.router_id_of(configuration),
        routes_file=str(bird.routes),
        log_file="",
    )
    if configuration == empty and not services:
        return ()
    process.write(bird.configuration, empty)
    await _announce(bird, section, {})
    return ("the BGP announcements",)


async def _announce(
    bird: BirdProcess, section: BgpConfig, services: Mapping[ServiceKey, Contributions]
) -> None:
    """Announce exactly these routes."""
    routes = spec.routes_of(services)
    process.write(bird.routes, render.routes_text(routes, services, {}, asn=section.asn or 0))
    with suppress(FairleadError):
        await bird.client.configure()
