"""At every write to a real Octavia the connection breaks or the driver dies.

One Service is created, changed and deleted. At each write the connection breaks before Octavia
receives the request; when the write is repeated, the connection breaks after Octavia has carried it
out. Thus a pass starts in every state that can exist between two writes. In task test the driver
survives and knows which write failed; in the other it dies with the connection, and its successor
has no memory."""

import asyncio
from collections.abc import Callable

import pytest
from tests.drivers.octavia.site import WEB, Site, listener, member, service, settings, summary
from tests.openstack.fault_proxy import Call, Disconnect, Fault

from fairlead.model import LoadBalancer, OctaviaChecks

pytestmark = pytest.mark.soak

DNS = listener(53, protocol="UDP")
STEPS: list[tuple[str, list[LoadBalancer], list[str]]] = [
    ("create", [service(listener(80), DNS)], ["POST loadbalancers"]),
    (
        "another header, task port removed and task added",
        [service(listener(80), listener(443), octavia=settings(header="v2"))],
        [
            *("POST pools", "PUT pools/_/members", "POST healthmonitors", "PUT listeners/_"),
            *("POST pools", "PUT pools/_/members", "POST healthmonitors", "POST listeners"),
            *("DELETE listeners/_", "DELETE pools/_", "DELETE pools/_"),
        ],
    ),
    (
        "other settings, nodes and health monitors",
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
        "task node added, task removed",
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


class Disconnects:
    """The fault of every write: the connection breaks before the first attempt is received, and
    after the second attempt is carried out. `lost`: the writes, each once."""

    def __init__(self, die: Callable[[], None] = lambda: None) -> None:
        self.lost: list[str] = []
        self._die = die
        self._first_attempt: tuple[str, str, bytes] | None = None

    def __call__(self, call: Call) -> Fault:
        if not call.writes:
            return None
        this = (call.method, call.path, call.body)
        if this != self._first_attempt:
            self._first_attempt = this
            return Disconnect(after=False, first=self._die)
        self._first_attempt = None
        self.lost.append(summary(call))
        return Disconnect(after=True, first=self._die)


@pytest.mark.parametrize("dies", [False, True], ids=["the connection breaks", "the driver dies"])
async def test_every_state_between_two_writes_leads_to_the_desired_state(
    site: Site, dies: bool
) -> None:
    for name, wanted, writes in STEPS:
        disconnects = (
            await _reconcile_dying(site, wanted) if dies else await _reconcile(site, wanted)
        )
        assert (name, disconnects.lost) == (name, writes)
        assert await site.is_complete(*wanted), name


async def _reconcile(site: Site, wanted: list[LoadBalancer]) -> Disconnects:
    site.proxy.fault = disconnects = Disconnects()
    await site.reconcile(*wanted)
    site.proxy.forward_all()
    return disconnects


async def _reconcile_dying(site: Site, wanted: list[LoadBalancer]) -> Disconnects:
    """Make passes with a new driver after each death; check that there is never more than task load
    balancer."""
    loop = asyncio.get_running_loop()

    def die() -> None:
        loop.call_soon_threadsafe(task.cancel)

    site.proxy.fault = disconnects = Disconnects(die)
    while True:
        task = asyncio.create_task(site.reconcile(*wanted))
        try:
            await task
        except asyncio.CancelledError:
            assert len(site.balancer_ids()) <= 1
            site.restart()
            assert set(await site.driver.read(None)) <= {WEB}
        else:
            site.proxy.forward_all()
            return disconnects
