"""/readyz of a gateway in a lab means that this gateway forwards now."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.load import GATEWAY, Web, fetch, output, until

from fairlead.lab.site import ROLE_PORTS, Site

pytestmark = pytest.mark.root

PROGRAM = str(Path(sys.executable).with_name("fairlead"))


async def answers(site: Site, code: str, text: str) -> bool:
    """Return whether this is what /readyz of the gateway answers."""
    where = f"http://127.0.0.1:{ROLE_PORTS['gateway']}/readyz"
    answer = await output(site, GATEWAY, "curl", "-s", "-w", "%{http_code}", where)
    return answer.splitlines() == [text, code]


async def test_a_gateway_is_ready_while_it_forwards() -> None:
    async with Site.create(f"green{os.getpid()}", nodes=1, gateways=1, clients=1) as site:
        web = Web(site)
        await web.create()
        await web.place(("node1",))
        (interface,) = (await fetch(site, GATEWAY, "/state"))["traffic"]["interfaces"]
        name = interface["name"]

        for state, code, text in (
            ("down", "503", f"interface {name} is down"),
            ("up", "200", "ok"),
        ):
            await output(site, GATEWAY, "ip", "link", "set", name, state)
            await until(partial(answers, site, code, text), f"/readyz to answer {code} {text}")
            shown = await output(site, GATEWAY, PROGRAM, "status")
            assert (f"does not work: interface {name} is down" in shown) == (state == "down")

        # A removed program is attached again, and an operator can see that.
        await output(site, GATEWAY, "tc", "qdisc", "del", "dev", name, "clsact")

        async def is_restored() -> bool:
            found = (await fetch(site, GATEWAY, "/state"))["host"]
            return "ProgramRemoved" in [each["code"] for each in found]

        await until(is_restored, "the program at the interface")
        assert await answers(site, "200", "ok")
        assert f"host: another process removed the gateway's program from interface {name}" in (
            await output(site, GATEWAY, PROGRAM, "status")
        )
