"""At every write to a real Octavia the connection breaks or the writer dies: before Octavia
receives the request, and after it was carried out.

One Service is created, changed and deleted. Each write is cut when it is made first, before Octavia
receives it, and again when it is repeated, after Octavia has carried it out. Thus every state that
can exist between two writes is the start of a pass. In one test the driver survives and knows what
failed; in the other it dies with the connection, and its successor has no memory."""

import asyncio
from collections.abc import Callable

import pytest
from tests.drivers.octavia.site import WEB, Site, listener, member, service, settings, told
from tests.openstack.front import Call, Cut, Fate

from fairlead.model import LoadBalancer, OctaviaChecks

DNS = listener(53, protocol="UDP")
LIFE: list[tuple[str, list[LoadBalancer], list[str]]] = [
    ("create", [service(listener(80), DNS)], ["POST loadbalancers"]),
    (
        "a header, a port less and one more",
        [service(listener(80), listener(443), octavia=settings(header="v2"))],
        [
            *("POST pools", "PUT pools/_/members", "POST healthmonitors", "PUT listeners/_"),
            *("POST pools", "PUT pools/_/members", "POST healthmonitors", "POST listeners"),
            *("DELETE listeners/_", "DELETE pools/_", "DELETE pools/_"),
        ],
    ),
    (
        "settings, nodes, checks",
        [
            service(
                listener(80, member(3)),
                listener(443),
                octavia=settings(
                    header="v2",
                    connection_limit=9,
                    method="LEAST_CONNECTIONS",
                    checks=OctaviaChecks(fall=5),
                ),
                affinity_timeout_s=600,
            )
        ],
        [
            *("PUT pools/_", "PUT pools/_/members", "PUT healthmonitors/_", "PUT listeners/_"),
            *("PUT pools/_", "PUT healthmonitors/_", "PUT listeners/_"),
        ],
    ),
    (
        "a node more, a node less",
        [
            service(
                listener(80, member(3), member(4)),
                listener(443, member(1)),
                octavia=settings(
                    header="v2",
                    connection_limit=9,
                    method="LEAST_CONNECTIONS",
                    checks=OctaviaChecks(fall=5),
                ),
                affinity_timeout_s=600,
            )
        ],
        ["POST pools/_/members", "DELETE pools/_/members/_"],
    ),
    ("delete", [], ["DELETE loadbalancers/_"]),
]


class Cuts:
    """The fate of every write: lost when it is made first, and lost again after it was carried out.
    `lost`: the writes, each once."""

    def __init__(self, die: Callable[[], None] = lambda: None) -> None:
        self.lost: list[str] = []
        self._die = die
        self._unheard: tuple[str, str, bytes] | None = None

    def __call__(self, call: Call) -> Fate:
        if not call.writes:
            return None
        this = (call.method, call.path, call.body)
        if this != self._unheard:
            self._unheard = this
            return Cut(after=False, first=self._die)
        self._unheard = None
        self.lost.append(told(call))
        return Cut(after=True, first=self._die)


@pytest.mark.parametrize("dies", [False, True], ids=["the line breaks", "the driver dies"])
async def test_every_write_is_lost_before_and_after(site: Site, dies: bool) -> None:
    for name, wanted, writes in LIFE:
        cuts = await _bring_dying(site, wanted) if dies else await _bring(site, wanted)
        assert (name, cuts.lost) == (name, writes)
        assert await site.is_whole(*wanted), name


async def _bring(site: Site, wanted: list[LoadBalancer]) -> Cuts:
    site.front.fate = cuts = Cuts()
    await site.bring(*wanted)
    site.front.pass_on()
    return cuts


async def _bring_dying(site: Site, wanted: list[LoadBalancer]) -> Cuts:
    """Make passes with a new driver after each death; check that there is never more than one load
    balancer."""
    loop = asyncio.get_running_loop()

    def die() -> None:
        loop.call_soon_threadsafe(one.cancel)

    site.front.fate = cuts = Cuts(die)
    while True:
        one = asyncio.create_task(site.bring(*wanted))
        try:
            await one
        except asyncio.CancelledError:
            assert len(site.everything()) <= 1
            site.anew()
            assert set(await site.driver.read(None)) <= {WEB}
        else:
            site.front.pass_on()
            return cuts
