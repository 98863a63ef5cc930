"""A gateway without an API server: `python announcing.py NAMESPACE PIN_PATH NAME LINKS ADDRESS...`.

It knows the gateways and their MAC addresses from LINKS (JSON), announces its share of the
addresses on eth0, and goes on until it is killed."""

import asyncio
import json
import sys
from pathlib import Path

from fairlead.drivers.announce import AnnounceDriver
from fairlead.kube.presence import OnLink
from fairlead.lab import namespace
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.announce import SilentLinks, announcements_at, announcers_of
from fairlead.plan.gateways import Gateways
from fairlead.roles.neighbor_process import command
from fairlead.sections import L2Config

WEB = ServiceKey("default", "web")
NETWORKS = ("192.0.2.0/24", "2001:db8:1::/64")


async def main(name: str, pin_path: str, own: str, links: str, *addresses: str) -> None:
    namespace.enter(name)
    announcers = {
        each: tuple(OnLink("eth0", network, mac) for network in NETWORKS)
        for each, mac in json.loads(links).items()
    }
    known = Gateways(frozenset(announcers), announcers=announcers)
    silent: list[SilentLinks] = [frozenset()]
    changed = asyncio.Event()

    def observe(found: SilentLinks) -> None:
        silent[0] = found
        changed.set()

    driver = AnnounceDriver(
        own,
        L2Config(),
        ("eth0",),
        pin_path=Path(pin_path),
        lease_s=30.0,
        gateways=lambda: known,
        watch_command=command(),
        observe_silent=observe,
    )
    await driver.open()
    running = asyncio.ensure_future(driver.run())
    while not running.done():
        changed.clear()
        found = announcements_at(addresses, announcers_of(known, {}, silent[0]))
        balancer = LoadBalancer(WEB, "uid", "fairlead.io/direct", (), (), announcements=found)
        if changes := driver.diff(driver.render({WEB: balancer}), await driver.read(None)):
            await driver.apply(changes)
            print("applied", flush=True)
        await changed.wait()


asyncio.run(main(*sys.argv[1:]))
