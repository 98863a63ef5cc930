"""The driver of announcements, with real packets: which addresses a gateway answers and announces,
what it reports, and what its successor takes over."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
from tests.background import running
from tests.drivers.announce import test_ndp_packets as ndp_packets
from tests.drivers.announce.test_packets import (  # noqa: F401
    FOREIGN_MAC,
    HOST,
    MAC,
    NAME,
    OTHERS,
    PINS,
    ROUTER_MAC,
    VIP,
    Router,
    cleaned,
    ip,
    made_router,
    made_site,
)

from fairlead.drivers.announce import AnnounceDriver, NoAnnouncement, conflicts, schedule
from fairlead.drivers.announce import driver as driver_module
from fairlead.drivers.announce.maps import Entry
from fairlead.drivers.announce.responder import directory_of
from fairlead.errors import Unavailable
from fairlead.kube.presence import Claimed, OnLink, Presence
from fairlead.model import Announcement, LoadBalancer, ServiceKey
from fairlead.net import arp, ndp
from fairlead.plan.announce import SilentLinks
from fairlead.plan.gateways import Gateways
from fairlead.role_state import AnnounceState
from fairlead.roles.neighbor_process import command
from fairlead.sections import L2Config

pytestmark = pytest.mark.root

HOST6, VIP6 = ndp_packets.HOST, ndp_packets.VIP
WEB, SHOP = ServiceKey("default", "web"), ServiceKey("default", "shop")
GATEWAYS = Gateways(
    frozenset(("gw1", "gw2")),
    announcers={"gw2": (OnLink("eth0", "192.0.2.0/24", "02:00:00:00:00:98"),)},
)


def balancer(key: ServiceKey, *, heir: str = "", lost: str = "", **owners: str) -> LoadBalancer:
    """Return a load balancer. `owners`: the gateways of the addresses VIP and OTHERS."""
    addresses = {"vip": VIP, "others": OTHERS}
    announced = tuple(
        Announcement(addresses[name], owner, "eth0", heir, lost) for name, owner in owners.items()
    )
    return LoadBalancer(key, "uid", "fairlead.io/direct", (), (), announcements=announced)


def driver(
    *selectors: str,
    networks: tuple[str, ...] = (),
    gateways: Callable[[], Gateways | None] = lambda: GATEWAYS,
    forbidden: Callable[[], bool] = lambda: False,
    lease_s: float = 30.0,
    watch: Callable[[SilentLinks], None] | None = None,
) -> AnnounceDriver:
    return AnnounceDriver(
        "gw1",
        L2Config(networks=networks),
        selectors or ("eth*",),
        pin_path=PINS,
        lease_s=lease_s,
        gateways=gateways,
        forbidden=forbidden,
        watch_command=command() if watch is not None else (),
        observe_silent=watch or (lambda _: None),
    )


async def serve(made: AnnounceDriver, *balancers: LoadBalancer) -> Mapping[ServiceKey, list[str]]:
    """Pass these Services through the driver. Return the notes about each."""
    intents = {each.service: each for each in balancers}
    changes = made.diff(made.render(intents), await made.read(None))
    outcomes = await made.apply(changes) if changes else {}
    return {key: [str(note) for note in each.notes] for key, each in outcomes.items()}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def table(made: AnnounceDriver) -> list[tuple[str, str, str, bool]]:
    state = made.status()
    assert isinstance(state, AnnounceState)
    return [
        (each.address, each.owner, each.interface, each.since_s_ago is not None)
        for each in state.addresses
    ]


def test_a_gateway_announces_what_it_owns(run: Any, router: Router) -> None:
    async def scenario() -> None:
        made = driver()
        await made.open()
        assert made.on_link == (OnLink("eth0", "192.0.2.0/24", MAC.hex(":")),)
        async with running(made.run()):
            gained = f"{VIP} is announced by gateway gw1, on its interface eth0"
            assert await serve(made, balancer(WEB, vip="gw1", others="gw2")) == {WEB: [gained]}
            assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [])
            announced: list[arp.Arp] = []

            def all_announced() -> bool:
                announced.extend(router.received())
                return len(announced) >= 4

            await until(all_announced)
            assert {(each.sender, each.sender_mac) for each in announced} == {(VIP, MAC)}
            assert table(made) == [(VIP, "gw1", "eth0", True), (OTHERS, "gw2", "eth0", False)]
            shared = balancer(SHOP, vip="gw1")
            assert await serve(made, balancer(WEB, vip="gw1", others="gw2"), shared) == {}, (
                "the address is not new"
            )
            await serve(made, shared)
            assert router.answers(VIP) == [MAC], "another Service still has the address"
            assert router.answers(OTHERS) == [MAC], "the host's own stack answers again"
        await made.close()

    run(scenario)


@pytest.mark.parametrize("leaves", [False, True])
def test_an_address_that_moves_is_answered_until_its_new_owner_is_heard(
    leaves: bool, run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the new owner is not heard, a gateway that leaves on purpose goes on. Another one has lost
    the address by a decision of all, and ends."""
    monkeypatch.setattr(driver_module, "LINGER_S", 0.0)
    monkeypatch.setattr(driver_module, "LINGER_LOOK_S", 0.01)
    monkeypatch.setattr(driver_module, "UNHEARD_S", 0.0 if leaves else 60.0)
    gateways = msgspec.structs.replace(GATEWAYS, leaving={"gw1": "now"} if leaves else {})

    async def scenario() -> None:
        made = driver(gateways=lambda: gateways)
        await made.open()
        await serve(made, balancer(WEB, vip="gw1", others="gw1"))
        async with running(made.run()):
            await serve(made, balancer(WEB, vip="gw2", others="gw2"))
            router.send(*arp.announcement(FOREIGN_MAC, VIP))
            assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [MAC])
            await asyncio.sleep(0.1)
            assert made.answered.keys() == {VIP, OTHERS}
            assert made.owned == {}
            assert [each for *_, each in table(made)] == [False, False], "they have other owners"
            assert [each.code for each in made._problems()] == ["GatewayLeaves"] * leaves
            router.send(*arp.announcement(b"\2\0\0\0\0\x98", VIP))
            await until(lambda: made.answered.keys() == {OTHERS})
            assert (router.answers(VIP), router.answers(OTHERS)) == ([], [MAC])
            await serve(made, balancer(WEB, vip="gw2", others="gw1"))
            assert made.owned.keys() == made.answered.keys() == {OTHERS}
            await serve(made, balancer(WEB, vip="gw2", others="gw2"))
            if not leaves:
                monkeypatch.setattr(driver_module, "UNHEARD_S", 0.0)
                await until(lambda: not made.answered)
            else:
                await serve(made, balancer(WEB, vip="gw2"))
                assert made.answered == {}, "no Service has the address any more"
        await made.close()

    run(scenario)


def test_a_restarted_gateway_answers_until_the_new_owner_is_heard(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves on purpose, and its addresses may have moved while it restarted."""
    monkeypatch.setattr(driver_module, "LINGER_S", 0.0)
    monkeypatch.setattr(driver_module, "LINGER_LOOK_S", 0.01)
    monkeypatch.setattr(driver_module, "UNHEARD_S", 0.0)
    leaving = msgspec.structs.replace(GATEWAYS, leaving={"gw1": "now"})

    async def scenario() -> None:
        first = driver()
        await first.open()
        await serve(first, balancer(WEB, vip="gw1"))
        await first.close()
        second = driver(gateways=lambda: leaving)
        await second.open()
        async with running(second.run()):
            await serve(second, balancer(WEB, vip="gw2"))
            await asyncio.sleep(0.1)
            assert router.answers(VIP) == [MAC]
            router.send(*arp.announcement(b"\2\0\0\0\0\x98", VIP))
            await until(lambda: not second.answered)
        await second.close()

    run(scenario)


def test_the_heir_of_a_silent_owner_answers_until_it_hears_the_new_heir(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that has started since then cannot know that the owner is silent."""
    monkeypatch.setattr(driver_module, "LINGER_LOOK_S", 0.01)
    monkeypatch.setattr(driver_module, "UNHEARD_S", 0.0)

    def owned_by(owner: str, heir: str, lost: str) -> LoadBalancer:
        found = (Announcement(VIP, owner, "eth0", heir, lost),)
        return msgspec.structs.replace(balancer(WEB), announcements=found)

    async def scenario() -> None:
        made = driver()
        await made.open()
        async with running(made.run()):
            await serve(made, owned_by("gw1", "", "gw3"))
            await serve(made, owned_by("gw2", "gw1", "gw3"))
            await asyncio.sleep(0.1)
            assert router.answers(VIP) == [MAC]
            await serve(made, owned_by("gw3", "gw2", ""))
            await until(lambda: not made.answered)
        await made.close()

    run(scenario)


def test_a_restart_changes_nothing(run: Any, router: Router) -> None:
    async def scenario() -> None:
        first = driver()
        await first.open()
        assert await serve(first, balancer(WEB, vip="gw1", others="gw2"))
        await first.close()
        assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [])
        second = driver()
        await second.open()
        assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [])
        assert await serve(second, balancer(WEB, vip="gw1", others="gw2")) == {}, (
            "an Event reports only an address that is gained"
        )
        assert await serve(second, balancer(WEB, vip="gw2", others="gw1")) == {
            WEB: [f"{OTHERS} is announced by gateway gw1, on its interface eth0"]
        }
        assert (second.owned, router.answers(OTHERS)) == ({OTHERS: "eth0"}, [MAC])
        await second.close()
        assert directory_of(PINS).exists()
        await NoAnnouncement(PINS).open()
        assert not directory_of(PINS).exists(), "a gateway that announces nothing leaves nothing"
        assert router.answers(VIP) == [MAC]

    run(scenario)


def test_a_restarted_gateway_answers_until_the_owner_is_proved_to_be_alive(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Lease of a gateway that is gone stays for an hour."""
    monkeypatch.setattr(driver_module, "UNHEARD_S", 0.0)
    monkeypatch.setattr(driver_module, "KEEP_S", 0.01)
    unproved = msgspec.structs.replace(GATEWAYS, unproved=frozenset(("gw2",)))
    known = [unproved]

    async def scenario() -> None:
        first = driver()
        await first.open()
        await serve(first, balancer(WEB, vip="gw1", others="gw2"))
        await first.close()
        second = driver(gateways=lambda: known[0])
        await second.open()
        await serve(second, balancer(WEB, vip="gw2", others="gw2"))
        assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [])
        async with running(second.run()):
            known[0] = GATEWAYS
            await until(lambda: VIP not in second.owned and VIP not in second.answered)
            assert (router.answers(VIP), router.answers(OTHERS)) == ([], [])
        await second.close()

    run(scenario)


def test_an_isolated_gateway_stops_answering_when_it_hears_another_one(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot know from the API server that its Lease has expired. If the API server is away for
    all gateways, none of them takes an address over, and all go on."""
    monkeypatch.setattr(driver_module, "KEEP_S", 0.01)
    lease_s, contact_s = 1.0, [float("inf")]

    async def scenario() -> None:
        made = driver(lease_s=lease_s)
        made.silent_s = lambda: max(0.0, time.monotonic() - contact_s[0])
        await made.open()
        await serve(made, balancer(WEB, vip="gw1"), balancer(SHOP, others="gw1"))
        other = arp.announcement(b"\2\0\0\0\0\x98", VIP)
        async with running(made._keep()):
            router.send(*other)
            router.answers(VIP)
            contact_s[0] = time.monotonic()
            await until(lambda: made.silent_s() > lease_s + 0.1)
            assert VIP in made.owned, "nothing was announced since the last contact"
            router.send(*arp.announcement(FOREIGN_MAC, OTHERS))
            router.send(*other)
            await until(lambda: VIP not in made.owned)
            await asyncio.sleep(0.05)
            assert (router.answers(VIP), router.answers(OTHERS)) == ([], [MAC])
            assert table(made) == [(VIP, "gw2", "eth0", False), (OTHERS, "gw1", "eth0", True)]
            contact_s[0] = float("inf")
            await until(lambda: VIP in made.owned)
            assert router.answers(VIP) == [MAC], "the plan decides again"
        await made.close()

    run(scenario)


def test_while_the_gateways_are_not_known_the_former_announcements_go_on(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "KEEP_S", 0.01)
    known: list[Gateways | None] = [None]

    async def scenario() -> None:
        first = driver()
        await first.open()
        await serve(first, balancer(WEB, vip="gw1", others="gw2"))
        await first.close()
        second = driver(gateways=lambda: known[0])
        await second.open()

        def deadlines() -> list[int]:
            return [each.deadline_ns for each in second._responder._opened.entries().values()]

        before = deadlines()
        async with running(second._keep()):
            await until(lambda: min(deadlines()) > max(before))
            assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [])
            known[0] = GATEWAYS
            await asyncio.sleep(0)
            moved = deadlines()
            await asyncio.sleep(0.1)
            assert deadlines() == moved, "they may have other owners now"
        await second.close()

    run(scenario)


def test_a_restart_while_the_api_server_is_away_keeps_what_was_announced(
    run: Any, router: Router
) -> None:
    """As long as the other gateways cannot become known, nobody can have taken the addresses
    over."""
    known: list[Gateways | None] = [None]
    looks = 0

    def gateways() -> Gateways | None:
        nonlocal looks
        looks += 1
        return known[0]

    async def scenario() -> None:
        first = driver()
        await first.open()
        await serve(first, balancer(WEB, vip="gw1", others="gw2"))
        await first.close()
        second = driver(gateways=gateways, lease_s=0.1)
        await second.open()
        second._responder._lifetime_ns = 600 * 10**9
        maps = second._responder._opened

        def deadline_ns() -> int:
            return min(each.deadline_ns for each in maps.entries().values())

        left_ns = deadline_ns()
        async with running(second.run()):
            await until(lambda: deadline_ns() > left_ns)
            assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [])
            # Once they are known, the first plan decides.
            known[0] = GATEWAYS
            known_at = looks
            await until(lambda: looks > known_at + 2)
            left_ns = deadline_ns()
            known_at = looks
            await until(lambda: looks > known_at + 4)
            assert deadline_ns() == left_ns
        maps.set_entries({VIP: Entry(1, 1)})
        second._responder.prolong()
        assert second._responder.answered() == {}, "what has ended stays so"
        await second.close()

    run(scenario)


def test_if_all_services_are_withheld_they_are_announced_after_a_restart(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "KEEP_S", 0.01)

    async def scenario() -> None:
        made = driver()
        await made.open()
        withheld = {WEB: balancer(WEB, vip="gw1").announcements}
        made.withheld = lambda: withheld
        async with running(made._keep()):
            await until(lambda: VIP in made.owned)
            assert router.answers(VIP) == [MAC]
            withheld = {}  # the Service is deleted
            await until(lambda: made.owned == {})
        await made.close()

    run(scenario)


def test_an_address_is_left_to_a_gateway_that_takes_it_over_and_comes_back(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "KEEP_S", 0.01)
    other = b"\2\0\0\0\0\x98"
    links = {"gw1": (OnLink("eth0", "192.0.2.0/24", MAC.hex(":")),), **GATEWAYS.announcers}
    known = Gateways(frozenset(links), announcers=links)

    async def scenario() -> None:
        made = driver(gateways=lambda: known, watch=lambda _: None)
        await made.open()
        await serve(made, balancer(WEB, vip="gw1", others="gw2"))
        async with running(made.run()):

            def left() -> bool:
                router.send(*arp.announcement(FOREIGN_MAC, VIP), *arp.announcement(other, VIP))
                return VIP not in made.owned

            await until(left)
            assert router.answers(VIP) == []
            assert table(made) == [(VIP, "gw2", "eth0", False), (OTHERS, "gw2", "eth0", False)]
            await until(lambda: VIP in made.owned)
            assert router.answers(VIP) == [MAC], "the heir has announced it, and does not answer"
        await made.close()

    run(scenario)


def test_the_heir_observes_that_the_owner_is_silent(run: Any, router: Router) -> None:
    macs = {"gw1": MAC, "gw2": ROUTER_MAC}
    links = {name: (OnLink("eth0", "192.0.2.0/24", mac.hex(":")),) for name, mac in macs.items()}
    known = Gateways(frozenset(links), announcers=links)
    found = list[SilentLinks]()

    async def scenario() -> None:
        made = driver(gateways=lambda: known, watch=found.append)
        await made.open()
        async with running(made.run()):
            await serve(made, balancer(WEB, others="gw2", heir="gw1"))
            for _ in range(3):
                await until(lambda: router.answer_watch(ROUTER_MAC, OTHERS))
            assert {*found} == {frozenset()}
            await until(lambda: found[-1] == {("gw2", "eth0")})
            assert "GatewayNotAnswering" in [each.code for each in made._problems()]
            taken = balancer(WEB, others="gw1", lost="gw2")
            assert await serve(made, taken) == {
                WEB: [f"{OTHERS} is announced by gateway gw1, on its interface eth0"]
            }
            assert router.answers(OTHERS) == [MAC]
            assert made._succession.counts().takeovers == 1
        await made.close()

    run(scenario)


def test_an_address_is_defended_once_against_a_stranger(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conflicts, "SETTLE_S", 0.0)

    async def scenario() -> None:
        made = driver()
        await made.open()
        await serve(made, balancer(WEB, vip="gw1"))
        heard: list[arp.Arp] = []
        for _ in range(3):
            router.send(*arp.announcement(FOREIGN_MAC, VIP))
            assert router.answers(VIP) == [MAC], "it goes on answering"
            made._look_for_conflicts()
            heard += router.received()
        assert made.claimed == (Claimed(VIP, "eth0", FOREIGN_MAC.hex(":")),)
        defended = [(each.operation, each.sender_mac) for each in heard]
        assert defended == [(arp.REQUEST, MAC), (arp.REPLY, MAC)]
        await made.close()

    run(scenario)


def test_a_service_that_is_withheld_stays_announced(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan is refused: it does not pass the driver, and its owner may change nevertheless."""
    monkeypatch.setattr(driver_module, "KEEP_S", 0.01)

    async def scenario() -> None:
        made = driver()
        await made.open()
        await serve(made, balancer(WEB, vip="gw1"), balancer(SHOP, others="gw2"))
        withheld = {SHOP: balancer(SHOP, others="gw2").announcements}
        made.withheld = lambda: withheld
        async with running(made._keep()):
            await made.apply([])
            assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [])
            withheld[SHOP] = balancer(SHOP, others="gw1").announcements
            await until(lambda: OTHERS in made.owned)
            assert (router.answers(VIP), router.answers(OTHERS)) == ([MAC], [MAC])
            withheld.clear()
            await until(lambda: OTHERS not in made.owned)
        await made.close()

    run(scenario)


def test_what_the_gateway_sees_on_the_link_is_reported(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "REQUEST_S", 0.0)
    monkeypatch.setattr(conflicts, "SETTLE_S", 0.0)
    known: list[Gateways | None] = [None]

    async def scenario() -> None:
        forbidden = [True]
        made = driver(gateways=lambda: known[0], forbidden=lambda: forbidden[0])
        await made.open()

        def codes() -> list[str]:
            made._look_for_conflicts()
            return [each.code for each in made._problems()]

        assert codes() == ["GatewaysUnknown"]
        assert made.on_link == (), "no gateway chooses it as an owner"
        forbidden[0] = False
        assert codes() == [], "the API server has not answered yet"
        assert made.on_link
        known[0] = GATEWAYS
        assert codes() == []
        await serve(made, balancer(WEB, vip="gw1"))
        assert codes() == ["NoNeighborRequests"]
        router.answers(VIP)
        assert codes() == []
        for mac, who in (
            (FOREIGN_MAC, "a station that is no gateway"),
            (b"\2\0\0\0\0\x98", "gateway gw2"),
        ):
            router.send(*arp.announcement(mac, VIP))
            router.answers(VIP)
            assert (codes() == []) == (mac != FOREIGN_MAC), "gateways agree by announcements"
            router.send(*arp.announcement(mac, VIP))
            router.answers(VIP)
            assert codes() == ["AddressConflict"]
            assert made.claimed == (Claimed(VIP, "eth0", mac.hex(":")),)
            (conflict,) = made._problems()
            assert str(conflict).startswith(
                f"{VIP} is announced by gateway gw1 on eth0, and {who} also uses it "
                f"({mac.hex(':')}); "
            )
        await serve(made, balancer(WEB, vip="gw2"))
        assert codes() == []
        await made.close()

    run(scenario)


def test_an_interface_that_changes_announces_its_addresses_again(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbors would send to the former MAC address until they ask again, and switches would send
    to the former port."""
    monkeypatch.setattr(schedule, "DELAYS_S", (0.0,))

    async def scenario() -> None:
        made = driver()
        await made.open()
        async with running(made.run()):
            await serve(made, balancer(WEB, vip="gw1", others="gw2"))

            async def announced_from(mac: bytes) -> None:
                await until(
                    lambda: any(
                        (each.sender, each.sender_mac) == (VIP, mac) for each in router.received()
                    )
                )

            await announced_from(MAC)
            for mac in (b"\2\0\0\0\7\7", MAC):
                ip(NAME, "link", "set", "eth0", "address", mac.hex(":"))
                await announced_from(mac)
            for state in ("down", "up"):
                ip(NAME, "link", "set", "eth0", state)
                await until(lambda: bool(made.on_link) == (state == "up"))  # noqa: B023
            await announced_from(MAC)
        await made.close()

    run(scenario)


def test_a_host_that_was_missed_does_not_take_its_addresses_back_at_once(
    run: Any, router: Router
) -> None:
    """Otherwise a host that boots again and again would take them each time."""
    before = Presence("gateway", "gw1", "1", "", announced_count=1)

    async def scenario() -> None:
        made = driver()
        await made.open()
        made.follow(msgspec.structs.replace(before, announced_count=0))
        assert [each.settles for each in made.on_link] == [False], "it had no addresses"
        made.follow(before)
        assert [each.settles for each in made.on_link] == [True]
        await serve(made, balancer(WEB, vip="gw1"))
        await made.close()
        restarted = driver()
        await restarted.open()
        restarted.follow(before)
        assert [each.settles for each in restarted.on_link] == [False], "the kernel has answered"
        await restarted.close()

    run(scenario)


@pytest.fixture(name="dual")
def made_dual(site: None) -> Iterator[ndp_packets.Router]:
    """Give the host an IPv6 address. It has a link-local one too."""
    ip(NAME, "address", "add", f"{HOST6}/64", "dev", "eth0", "nodad")
    made = ndp_packets.Router()
    yield made
    made.close()
    ip(NAME, "address", "delete", f"{HOST6}/64", "dev", "eth0")


def test_network_and_broadcast_addresses_are_no_addresses_of_services(
    run: Any, dual: ndp_packets.Router
) -> None:
    """The first address of an IPv6 network belongs to all routers."""

    async def scenario() -> None:
        made = driver(networks=("203.0.113.0/24", "2001:db8:f::/64"))
        await made.open()
        assert made.reserved == ("192.0.2.0", "192.0.2.255", "2001:db8:1::")
        await made.close()

    run(scenario)


def test_networks_of_two_hosts_have_no_addresses_that_services_cannot_use(
    run: Any, dual: ndp_packets.Router
) -> None:
    async def scenario() -> None:
        for each in ("198.51.100.0/31", "2001:db8:2::/127"):
            ip(NAME, "address", "add", each, "dev", "eth0")
        made = driver()
        await made.open()
        assert made.reserved == ("192.0.2.0", "192.0.2.255", "2001:db8:1::")
        await made.close()
        for each in ("198.51.100.0/31", "2001:db8:2::/127"):
            ip(NAME, "address", "delete", each, "dev", "eth0")

    run(scenario)


def test_ipv6_addresses_are_announced_too(
    run: Any, dual: ndp_packets.Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (Announcement(VIP, "gw1", "eth0"), Announcement(VIP6, "gw1", "eth0"))
    owned = msgspec.structs.replace(balancer(WEB), announcements=both)

    async def scenario() -> None:
        made = driver(networks=("2001:db8:f::/64",))
        await made.open()
        assert [each.network for each in made.on_link] == [
            "192.0.2.0/24",
            "2001:db8:1::/64",
            "2001:db8:f::/64",
        ]
        async with running(made.run()):
            notes = await serve(made, owned)
            assert notes == {
                WEB: [
                    f"{each.address} is announced by gateway gw1, on its interface eth0"
                    for each in both
                ]
            }
            assert dual.answers(VIP6) == [MAC]
            announced: list[ndp.Message] = []

            def is_announced() -> bool:
                announced.extend(dual.received())
                return bool(announced)

            await serve(made)
            await serve(made, owned)
            await until(is_announced)
            assert {(each.target, each.mac) for each in announced} == {(VIP6, MAC)}
            assert [row[0] for row in table(made)] == [VIP, VIP6]
            dual.ask(ndp.announcement(FOREIGN_MAC, VIP6))
            claims = made._responder.claims()
            assert [(each.address, each.mac) for each in claims] == [(VIP6, FOREIGN_MAC.hex(":"))]
        await made.close()

    run(scenario)


def test_only_interfaces_with_a_link_announce(
    run: Any, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "KEEP_S", 0.01)
    known = [GATEWAYS]

    async def scenario() -> None:
        made = driver(networks=("203.0.113.0/24",), gateways=lambda: known[0])
        await made.open()
        on_lan, configured = (
            OnLink("eth0", network, MAC.hex(":")) for network in ("192.0.2.0/24", "203.0.113.0/24")
        )
        assert made.on_link == (on_lan, configured)
        async with running(made.run()):
            await serve(made, balancer(WEB, vip="gw1"))
            ip(NAME, "link", "set", "eth0", "down")
            await until(lambda: made.on_link == ())
            ip(NAME, "link", "set", "eth0", "up")
            returned = tuple(
                msgspec.structs.replace(each, settles=True) for each in (on_lan, configured)
            )
            await until(lambda: made.on_link == returned)
            own = {**GATEWAYS.announcers, "gw1": returned}
            known[0] = msgspec.structs.replace(GATEWAYS, announcers=own)
            await until(lambda: made.on_link == (on_lan, configured))
            assert VIP in made.owned, "no other gateway can have it, so the link need not settle"
        await made.close()
        with pytest.raises(Unavailable, match=r"no interface eth9; .*eth0 \(.*" + HOST):
            await driver("eth9").open()

    run(scenario)
