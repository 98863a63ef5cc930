"""Announcing hosts on a real link: who answers a neighbor before, during and after each failure."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from operator import eq
from pathlib import Path

import pytest
from tests.drivers.l2.site import DEADLINE_S, PORT, VIP, Announcer, Site, wait_for
from tests.faults.test_clock import JUMPS, Clock

from fairlead.announce_sections import L2Config
from fairlead.drivers.l2.maps import Maps
from fairlead.drivers.l2.ownership import weight
from fairlead.drivers.l2.records import ETHERTYPE, group_of, parse_hello
from fairlead.lab import namespace
from fairlead.net import arp, ndp

pytestmark = pytest.mark.root

WEB = {"default/web": list(VIP.values())}
BOTH = set(VIP.values())
STEADY_INTERVAL_S = 0.005
_ETH_P_ALL = 0x0003
LATE_S = 1.0
"""How long a caller waits for answers at its end."""


def helpers(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in children for child in each.read_text().split()]


@contextmanager
def pair(name: str, **arguments: object) -> Iterator[tuple[Site, Announcer, Announcer]]:
    """Provide a site with two announcers, of which the first owns the addresses."""
    with Site(name) as site:
        made = [site.start(host, **arguments) for host in site.hosts]
        for host in site.hosts:
            site.serve(host)
        for each in made:
            wait_for(each.members, bool)
        # One after the other, because the two addresses may have different ranks.
        owner, other = made
        owner.announce(WEB)
        wait_for(owner.owned, lambda found: found == BOTH)
        other.announce(WEB)
        wait_for(lambda: [owner.members(), other.members()], known)
        yield site, owner, other


def known(members: list[dict[str, str]]) -> bool:
    return all(list(each.values()) == ["ready"] for each in members)


class Steady:
    """A steady caller of one address: it sends numbered datagrams, and knows which were not
    answered and who answered."""

    def __init__(self, site: Site, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = namespace.make_socket(site.namespace("neighbor"), family, socket.SOCK_DGRAM)
        self._socket.connect((address, PORT))
        self._socket.setblocking(False)
        self._stop = threading.Event()
        self.sent = 0
        self.answered: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(STEADY_INTERVAL_S):
            self._receive()
            try:
                self._socket.send(b"?")
                self.sent += 1
            except OSError:
                self.sent += 1  # no neighbor answers
        late_s = time.monotonic() + LATE_S
        while len(self.answered) < self.sent and time.monotonic() < late_s:
            time.sleep(STEADY_INTERVAL_S)
            self._receive()

    def _receive(self) -> None:
        try:
            while True:
                self.answered.append((time.monotonic(), self._socket.recv(64).decode()))
        except OSError:
            return

    def end(self) -> int:
        """Return the number of datagrams that were not answered."""
        self._stop.set()
        self._thread.join()
        self._socket.close()
        return self.sent - len(self.answered)

    def last(self) -> str:
        """Return the name of the host that answered last."""
        return self.answered[-1][1]

    @property
    def longest_gap_s(self) -> float:
        times = [each[0] for each in self.answered]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)

    def wait(self, count: int) -> None:
        """Wait for this number of further answers."""
        target = len(self.answered) + count
        wait_for(lambda: len(self.answered), lambda found: found >= target, "answers")


def test_only_the_owner_answers_although_both_hosts_have_the_addresses() -> None:
    with pair("answers") as (site, owner, other):
        for address in VIP.values():
            for _ in range(5):
                assert site.resolves_to(address) == site.mac(owner.host)
            assert site.call(address) == owner.host
            # The owner's stack also knows who asks, and so does the other host's.
            assert site.call(address, host="neighbor") == owner.host
        notes = owner.ask(outcomes=1)["notes"]
        assert sum("announces 192.0.2.200 on eth0" in each for each in notes) == 1
        assert owner.ask(outcomes=1)["outcomes"]["default/web"]["state"] == "done"
        assert other.ask(outcomes=1)["outcomes"]["default/web"]["state"] == "done"


def test_a_killed_process_moves_nothing_and_its_successor_keeps_the_addresses() -> None:
    with pair("killed") as (site, owner, other):
        steady = [Steady(site, address) for address in VIP.values()]
        (helper,) = helpers(owner.process.pid)
        os.kill(helper, signal.SIGSTOP)  # so that it cannot do anything on its way out
        owner.kill()
        os.kill(helper, signal.SIGKILL)
        for each in steady:
            each.wait(100)
        for address in VIP.values():
            assert site.resolves_to(address) == site.mac(owner.host), "new neighbors reach it too"
        assert other.owned() == set()
        again = site.start(owner.host)
        again.announce(WEB)
        wait_for(again.owned, lambda found: found == BOTH)
        for each in steady:
            each.wait(50)
            assert each.end() == 0
            assert {name for _, name in each.answered} == {owner.host}
        assert other.state()["moves"] == again.state()["moves"] == 0


@pytest.mark.parametrize("silent", [False, True], ids=["link down", "link stays up"])
def test_when_the_cable_is_pulled_the_other_host_takes_over_at_once(silent: bool) -> None:
    with pair("cable") as (site, owner, other):
        steady = [Steady(site, address) for address in VIP.values()]
        for each in steady:
            each.wait(20)
        site.unplug(owner.host, silent=silent)
        wait_for(other.owned, lambda found: found == BOTH)
        for each in steady:
            wait_for(each.last, lambda name: name == other.host)
        for address in VIP.values():
            assert site.neighbor_mac(address) == site.mac(other.host)
        (first, *_) = other.state()["addresses"]
        assert first["cause"] == f"because {owner.host} does not answer"
        for each in steady:
            each.end()
            print("gap", round(1000 * each.longest_gap_s), "ms")
        # The return of the first host moves nothing.
        moves = other.state()["moves"]
        site.plug(owner.host, silent=silent)
        wait_for(lambda: [owner.members(), other.members()], known)
        if not silent:
            # The first host knew that its link was down, and did not claim anything meanwhile.
            assert other.owned() == BOTH
            assert owner.owned() == set()
            assert other.state()["moves"] == moves


def test_a_host_that_leaves_hands_over_without_a_lost_packet() -> None:
    with pair("leaves") as (site, owner, other):
        steady = [Steady(site, address) for address in VIP.values()]
        for each in steady:
            each.wait(20)
        owner.ask(leave=1)
        assert other.owned() == BOTH
        assert owner.owned() == set()
        for each in steady:
            each.wait(50)
            assert each.end() == 0
            assert each.answered[-1][1] == other.host
        owner.ask(stay=1)
        assert other.owned() == BOTH, "nothing moves back"


def test_removal_hands_over_and_leaves_nothing_behind() -> None:
    with pair("removal") as (site, owner, other):
        steady = [Steady(site, address) for address in VIP.values()]
        for each in steady:
            each.wait(20)
        before = site.ip(owner.host, "-6", "address", "show", "dev", "eth0")
        assert "ff02::1:ff00:200" in before
        owner.close()
        removed = site.remove(owner.host)
        assert len(removed) == 2
        for each in steady:
            each.wait(50)
            assert each.end() == 0
            assert each.answered[-1][1] == other.host
        assert (
            "fairlead"
            not in site.run(owner.host, "tc", "filter", "show", "dev", "eth0", "ingress").stdout
        )
        assert "ff02::1:ff00:200" not in site.ip(owner.host, "-6", "address", "show", "dev", "eth0")
        assert not list((site.pins / "gateway").glob(f"{owner.host}*"))


def test_after_a_split_neighbors_of_both_sides_reach_one_owner_again() -> None:
    with pair("split") as (site, owner, other):
        site.add("neighbor2", 2)
        # Split the switch: the owner and a neighbor on one side, the others on the other side.
        site.ip("switch", "link", "add", "br1", "type", "bridge", "mcast_snooping", "0")
        site.ip("switch", "link", "set", "br1", "up")
        for address in VIP.values():
            for host in ("neighbor", "neighbor2"):
                assert site.call(address, host) == owner.host
        for host in (other.host, "neighbor2"):
            site.ip("switch", "link", "set", f"{host}-eth0", "master", "br1")
        wait_for(other.owned, lambda found: found == BOTH)
        for address in VIP.values():
            assert site.call(address) == owner.host
            wait_for(partial(site.call, address, "neighbor2"), lambda name: name == other.host)
        for host in (other.host, "neighbor2"):
            site.ip("switch", "link", "set", f"{host}-eth0", "master", "br0")

        def owners() -> dict[str, list[str]]:
            return {
                address: [each.host for each in (owner, other) if address in each.owned()]
                for address in VIP.values()
            }

        found = wait_for(owners, lambda each: all(len(hosts) == 1 for hosts in each.values()))
        for address, (host,) in found.items():
            for neighbor in ("neighbor", "neighbor2"):
                wait_for(
                    partial(site.neighbor_mac, address, neighbor),
                    partial(eq, site.mac(host)),
                    f"{neighbor} reaches {host}",
                )


def test_thirty_flaps_of_the_link_of_the_owner_move_its_addresses_once() -> None:
    with pair("flaps") as (site, owner, other):
        site.unplug(owner.host)
        wait_for(other.owned, lambda found: found == BOTH)
        site.plug(owner.host)
        for _ in range(29):
            site.unplug(owner.host)
            site.plug(owner.host)
        wait_for(lambda: [owner.members(), other.members()], known)
        assert owner.owned() == set()
        assert other.state()["moves"] == 2
        for address in VIP.values():
            assert site.resolves_to(address) == site.mac(other.host)


def test_clusters_on_one_link_do_not_take_over_from_each_other() -> None:
    with Site("clusters") as site:
        # The stack of a foreign host with the address would answer for it.
        site.ip("h2", "address", "del", f"{VIP[4]}/32", "dev", "lo")
        one = site.start("h1", cluster="one")
        two = site.start("h2", cluster="two")
        one.announce(WEB)
        wait_for(one.owned, lambda found: found == BOTH)
        # The same pool by mistake: the second cluster finds that the addresses are in use.
        two.announce({**WEB, "default/own": ["192.0.2.210"]})
        found = wait_for(
            lambda: two.ask(outcomes=1)["outcomes"],
            lambda each: each["default/web"]["reason"] == "AddressConflict",
        )
        assert site.mac("h1") in found["default/web"]["message"]
        wait_for(two.owned, lambda owned: owned == {"192.0.2.210"})
        assert one.members() == two.members() == {}
        one.close()
        site.unplug("h1", silent=True)
        # A dead host of another cluster leaves an address that is free after a while.
        wait_for(two.owned, lambda owned: owned == BOTH | {"192.0.2.210"})


def test_an_address_that_a_foreign_host_had_first_is_not_announced_until_it_is_free() -> None:
    with Site("foreign", hosts=1) as site:
        site.add("stranger", 99)
        site.assign("stranger", f"{VIP[4]}/24", "eth0")
        host = site.start("h1")
        host.announce({**WEB, "default/free": ["192.0.2.211"]})
        found = wait_for(
            lambda: host.ask(outcomes=1)["outcomes"],
            lambda each: each["default/web"]["state"] == "unavailable",
        )
        message = found["default/web"]["message"]
        for part in (VIP[4], "eth0", site.mac("stranger")):
            assert part in message
        wait_for(host.owned, lambda owned: owned == {VIP[6], "192.0.2.211"})
        assert site.resolves_to(VIP[4]) == site.mac("stranger")
        (conflict,) = host.state()["conflicts"]
        assert conflict["mac"] == site.mac("stranger")
        site.ip("stranger", "address", "del", f"{VIP[4]}/24", "dev", "eth0")
        wait_for(host.owned, lambda owned: owned == BOTH | {"192.0.2.211"})


def test_of_two_hosts_with_one_name_the_owner_stays_and_both_name_the_other() -> None:
    # Unlike BOTH, no host has these addresses on an interface.
    free = ["192.0.2.210", "2001:db8:1::210"]
    with Site("namesake") as site:
        first = site.start("h1")
        first.announce({"default/web": free})
        wait_for(first.owned, lambda found: found == set(free))
        second = site.start("h2", name="h1")
        second.announce({"default/web": free})

        def conflicts(host: Announcer) -> list[tuple[str, str]]:
            return [(each["address"], each["mac"]) for each in host.state()["conflicts"]]

        there = sorted((address, site.mac("h1")) for address in free)
        wait_for(partial(conflicts, second), partial(eq, there))
        assert second.owned() == set()
        assert first.owned() == set(free)
        for address in free:
            assert site.resolves_to(address) == site.mac("h1")
        # While they do not hear each other, both own the addresses. The one that is connected again
        # announces them, because its MAC address changes: no other host loses them.
        site.unplug("h2", silent=True)
        wait_for(second.owned, lambda found: found == set(free))
        site.plug("h2", silent=True)
        site.ip("h2", "link", "set", "eth0", "address", "02:00:00:00:00:77")
        here = sorted((address, "02:00:00:00:00:77") for address in free)
        wait_for(partial(conflicts, first), partial(eq, here))
        wait_for(partial(conflicts, second), partial(eq, there))
        assert first.owned() == second.owned() == set(free)
        for address in free:
            assert site.resolves_to(address)


def test_an_address_that_a_foreign_host_uses_later_is_defended_and_reported() -> None:
    with Site("later", hosts=1) as site:
        site.serve("h1")
        site.add("stranger", 99)
        host = site.start("h1")
        host.announce(WEB)
        wait_for(host.owned, lambda found: found == BOTH)
        for address in VIP.values():
            assert site.call(address) == "h1"
        with sender(site, "stranger") as stranger:
            mac = bytes.fromhex(site.mac("stranger").replace(":", ""))
            stranger.send(arp.announcement_reply(mac, VIP[4]))
            stranger.send(ndp.announcement(mac, VIP[6]))
        wait_for(host.state, lambda state: len(state["conflicts"]) == 2)
        for address in VIP.values():
            wait_for(partial(site.neighbor_mac, address), lambda found: found == site.mac("h1"))
        notes = wait_for(
            lambda: host.ask(outcomes=1)["notes"],
            lambda found: sum(site.mac("stranger") in each for each in found) == 2,
        )
        assert any("goes on announcing" in each for each in notes)
        assert host.owned() == BOTH


@contextmanager
def receiver(site: Site, host: str) -> Iterator[socket.socket]:
    """Provide a socket that receives all frames of a host, before a program can take them."""
    made = namespace.make_socket(site.namespace(host), socket.AF_PACKET, socket.SOCK_RAW)
    with made, namespace.inside(site.namespace(host)):
        made.bind(("eth0", _ETH_P_ALL))
        made.settimeout(DEADLINE_S)
        yield made


@contextmanager
def sender(site: Site, host: str) -> Iterator[socket.socket]:
    """Provide a socket that sends frames from a host."""
    made = namespace.make_socket(site.namespace(host), socket.AF_PACKET, socket.SOCK_RAW)
    with made, namespace.inside(site.namespace(host)):
        made.bind(("eth0", 0))
        yield made


def test_after_a_change_of_the_mac_address_neighbors_learn_the_new_one() -> None:
    with pair("mac") as (site, owner, other):
        for address in VIP.values():
            assert site.call(address) == owner.host
        site.ip(owner.host, "link", "set", "eth0", "address", "02:00:00:00:77:77")
        for address in VIP.values():
            wait_for(partial(site.neighbor_mac, address), lambda mac: mac == "02:00:00:00:77:77")
            assert site.resolves_to(address) == "02:00:00:00:77:77"
        assert other.owned() == set()


def test_a_member_whose_process_is_dead_is_passed_over() -> None:
    with Site("passed", hosts=3) as site:
        made = [site.start(host) for host in site.hosts]
        for each in made:
            each.announce(WEB)
        (owner,) = wait_for(
            lambda: [each for each in made if VIP[4] in each.owned()], lambda found: len(found) == 1
        )
        others = [each for each in made if each is not owner]
        first, second = sorted(others, key=lambda each: weight(VIP[4], each.host), reverse=True)
        wait_for(lambda: [len(each.members()) for each in made], lambda found: found == [2, 2, 2])
        first.kill()
        site.unplug(owner.host, silent=True)
        wait_for(second.owned, lambda found: VIP[4] in found)
        assert site.resolves_to(VIP[4]) == site.mac(second.host)


def test_a_host_whose_process_is_away_for_long_yields() -> None:
    with pair("stale", section={"staleS": 1}) as (site, owner, other):
        owner.kill()
        wait_for(other.owned, lambda found: found == BOTH)
        (first, *_) = other.state()["addresses"]
        assert first["cause"] == f"because the process of {owner.host} is away"
        for address in VIP.values():
            for _ in range(5):
                assert site.resolves_to(address) == site.mac(other.host)


def test_without_another_candidate_a_process_that_is_away_for_long_is_answered_for() -> None:
    """The second host announces nothing: it only sees that the process of the first one is away."""
    with Site("alone") as site:
        for host in site.hosts:
            # The stack of a host with the address would answer for it.
            site.ip(host, "address", "del", f"{VIP[4]}/32", "dev", "lo")
        owner, observer = (site.start(host, section={"staleS": 1}) for host in site.hosts)
        owner.announce(WEB)
        wait_for(owner.owned, lambda found: found == BOTH)
        owner.kill()
        wait_for(observer.members, lambda found: found == {owner.host: "stale"})
        for address in VIP.values():
            assert site.resolves_to(address) == site.mac(owner.host)


def test_an_address_outside_of_all_networks_is_refused_in_words() -> None:
    with Site("outside", hosts=1) as site:
        host = site.start("h1")
        found = host.announce({"default/far": ["198.51.100.7"], **WEB})
        assert (found["default/far"]["state"], found["default/far"]["reason"]) == (
            "refused",
            "NotOnInterface",
        )
        for part in ("198.51.100.7", "eth0", "192.0.2.0/24", "announce.l2.interfaces"):
            assert part in found["default/far"]["message"]
        wait_for(host.owned, lambda owned: owned == BOTH)
        # A pool that names an interface knows better.
        host.announce({"default/far": ["198.51.100.7"]}, interfaces=["eth*"])
        wait_for(host.owned, lambda owned: owned == {"198.51.100.7"})
        found = host.announce({"default/far": ["198.51.100.7"]}, interfaces=["eth7"])
        assert "eth7" in found["default/far"]["message"]


def test_an_interface_that_appears_later_is_used_and_one_that_vanishes_is_not() -> None:
    with Site("later-interface", hosts=1) as site:
        host = site.start("h1", selectors=["eth*"])
        host.announce({"default/second": ["192.0.2.220"]}, interfaces=["eth1"])
        assert host.owned() == set()
        site.add("h1", 21, "eth1")
        wait_for(host.owned, lambda found: found == {"192.0.2.220"})
        assert site.resolves_to("192.0.2.220") == site.mac("h1", "eth1")
        site.ip("switch", "link", "del", "h1-eth1")
        wait_for(host.owned, lambda found: found == set())
        site.add("h1", 21, "eth1")
        wait_for(host.owned, lambda found: found == {"192.0.2.220"})
        assert site.resolves_to("192.0.2.220") == site.mac("h1", "eth1")


def test_the_address_of_an_interface_that_loses_its_network_is_taken_over() -> None:
    with pair("network-lost") as (site, owner, other):
        site.ip(owner.host, "address", "del", "192.0.2.11/24", "dev", "eth0")
        wait_for(other.owned, lambda found: found == {VIP[4]})
        assert owner.owned() == {VIP[6]}
        wait_for(lambda: site.resolves_to(VIP[4]), partial(eq, site.mac(other.host)))


def test_the_interface_of_a_default_route_is_used_soon_and_kept_without_the_route() -> None:
    with Site("default-route", hosts=1) as site:
        one = site.start("h1", selectors=["default-route"])
        assert "NotOnInterface" in str(one.announce(WEB))
        site.ip("h1", "route", "add", "default", "via", "192.0.2.1")
        wait_for(one.owned, lambda found: found == BOTH)
        site.ip("h1", "route", "del", "default")
        one.ask(audit=[])
        assert one.owned() == BOTH
        assert site.resolves_to(VIP[4]) == site.mac("h1")


def groups(site: Site, host: str) -> list[str]:
    """Return the interfaces that are members of the group of the IPv6 address."""
    found = json.loads(site.ip(host, "-j", "maddress", "show"))
    return [
        each["ifname"]
        for each in found
        if any(one.get("address") == ndp.solicited_node(VIP[6]) for one in each["maddr"])
    ]


def test_groups_are_left_on_interfaces_that_are_not_used_any_more_and_after_a_restart() -> None:
    with Site("groups", hosts=1) as site:
        site.add("h1", 21, "eth1")
        one = site.start("h1", selectors=["eth0"])
        one.announce(WEB, interfaces=["eth1"])
        wait_for(lambda: groups(site, "h1"), partial(eq, ["eth1"]))
        one.announce(WEB, interfaces=["eth0"])
        wait_for(lambda: groups(site, "h1"), partial(eq, ["eth0"]))
        one.kill()
        one = site.start("h1", selectors=["eth1"])
        one.announce({})
        one.ask(audit=[])
        wait_for(lambda: groups(site, "h1"), partial(eq, []))


def test_an_interface_with_a_new_name_is_answered_on_again() -> None:
    with Site("renamed", hosts=1) as site:
        host = site.start("h1", selectors=["eth*", "lan*"])
        host.announce({"default/web": ["192.0.2.220"]})
        wait_for(host.owned, lambda owned: owned == {"192.0.2.220"})
        site.ip("h1", "link", "set", "eth0", "down")
        wait_for(host.owned, lambda owned: owned == set())
        site.ip("h1", "link", "set", "eth0", "name", "lan0", "up")
        wait_for(host.owned, lambda owned: owned == {"192.0.2.220"})
        assert host.state()["interfaces"] == ["lan0"]
        mac = site.mac("h1", "lan0")
        wait_for(lambda: site.resolves_to("192.0.2.220"), lambda found: found == mac)


def test_a_thousand_addresses_are_owned_once_each_and_move_together() -> None:
    addresses = [f"192.0.{2 + number // 250}.{1 + number % 250}" for number in range(250, 1250)]
    with Site("thousand") as site:
        made = [site.start(host) for host in site.hosts]
        for each in made:
            wait_for(each.members, bool)
        for each in made:
            each.announce({"default/many": addresses}, interfaces=["eth0"])
        wait_for(
            lambda: [each.owned() for each in made],
            lambda owned: owned[0] | owned[1] == set(addresses) and not owned[0] & owned[1],
        )
        site.unplug("h1", silent=True)
        wait_for(made[1].owned, lambda found: found == set(addresses))


def test_a_withdrawn_address_is_not_answered_and_another_service_keeps_a_shared_one() -> None:
    with Site("withdrawn", hosts=1) as site:
        site.ip("h1", "address", "del", f"{VIP[4]}/32", "dev", "lo")
        host = site.start("h1")
        host.announce({"default/web": [VIP[4]], "default/mail": [VIP[4]]})
        wait_for(host.owned, lambda found: found == {VIP[4]})
        host.announce({"default/mail": [VIP[4]]})
        assert host.owned() == {VIP[4]}
        assert site.resolves_to(VIP[4]) == site.mac("h1")
        host.announce({})
        assert host.owned() == set()
        assert site.resolves_to(VIP[4]) == ""


def test_a_role_that_starts_again_withdraws_what_no_service_requests() -> None:
    """But not before it knows: an audit may fail after this driver was read, and is repeated then;
    and the plan may refuse a Service, whose addresses stay."""
    with Site("leftover", hosts=1) as site:
        site.ip("h1", "address", "del", f"{VIP[4]}/32", "dev", "lo")
        host = site.start("h1")
        host.announce({"default/web": [VIP[4]], "default/gone": ["192.0.2.222"]})
        wait_for(host.owned, lambda found: found == {VIP[4], "192.0.2.222"})
        host.close()
        again = site.start("h1")
        for _ in range(3):
            again.ask(audit=None)
        for address in (VIP[4], "192.0.2.222"):
            assert site.resolves_to(address) == site.mac("h1")
        again.ask(audit=[VIP[4]])
        wait_for(lambda: site.resolves_to("192.0.2.222"), lambda mac: mac == "")
        assert site.resolves_to(VIP[4]) == site.mac("h1")
        again.ask(audit=[])
        wait_for(lambda: site.resolves_to(VIP[4]), lambda mac: mac == "")


def test_without_a_right_or_the_id_of_the_cluster_the_role_continues_and_says_so() -> None:
    """Two clusters whose hosts may not read their ids would take each other for one."""
    with Site("unusable") as site:
        # The stack of a foreign host with the address would answer for it.
        site.ip("h2", "address", "del", f"{VIP[4]}/32", "dev", "lo")
        without_right = site.start("h2", under=("setpriv", "--bounding-set", "-net_raw"))
        without_id = site.start("h1", cluster="")
        for host, words in ((without_right, "CAP_NET_RAW"), (without_id, "ClusterRole")):
            host.announce(WEB)
            found = host.ask(outcomes=1)["outcomes"]["default/web"]
            assert (found["state"], found["reason"]) == ("unavailable", "Layer2Unavailable")
            assert words in found["message"]
            (finding,) = host.state()["findings"]
            assert words in finding["message"]
            assert host.ask(audit=[]) == []
            assert host.owned() == set()
        # The right is granted: the role begins without a restart.
        without_id.ask(cluster="one")
        wait_for(without_id.owned, lambda found: found == BOTH)
        assert without_id.state()["findings"] == []
        without_id.close()
        # A process that starts without the right knows the id by what its predecessor left.
        again = site.start("h1", cluster="")
        again.announce(WEB)
        wait_for(again.owned, lambda found: found == BOTH)


def test_a_host_that_withdraws_hands_over_and_ceases_to_answer_until_it_stays() -> None:
    with pair("withdraws") as (_, owner, other):
        owner.ask(withdraw=1)
        assert owner.owned() == set()
        wait_for(other.owned, lambda found: found == BOTH)
        # Also without another one that takes over.
        other.ask(withdraw=1)
        assert other.owned() == set()
        owner.ask(stay=1)
        wait_for(owner.owned, lambda found: found == BOTH)
        assert other.owned() == set()


def test_an_upgrade_with_other_maps_keeps_addresses_and_answers_other_announcers() -> None:
    """The maps of a former version are found in another directory. The process of the new version
    does not present the host again before it has been asked to."""
    with Site("upgrade", hosts=1) as site:
        host = site.start("h1")
        host.announce(WEB)
        wait_for(host.owned, lambda found: found == BOTH)
        host.close()
        pins = site.pins / "gateway" / "h1"
        (present,) = pins.glob("layout-*")
        present.rename(former := pins / "layout-former")
        with closing(Maps.open_pinned(former)) as maps:
            states, presentations = maps.states(), maps.presentations()
        assert set(states.values()) == {True}
        assert presentations
        with closing(Maps.open(pins)) as maps:
            assert maps.states() == states
            assert maps.presentations() == presentations
        # A removal also deletes maps whose records it cannot read.
        (former / "claims").unlink()
        again = site.start("h1")
        assert again.ask(remove=1)
        assert not pins.exists()


def test_a_second_process_with_the_same_pins_is_refused() -> None:
    with Site("second", hosts=1) as site:
        site.start("h1")
        second = Announcer(site, "h1")
        assert "another process" in second.started["error"]
        second.process.wait()


def test_members_are_not_declared_dead_by_a_process_that_was_stopped() -> None:
    """While the process is stopped, its kernel answers many more requests than a member may leave
    unanswered. The process is observed for as long after it continues."""
    rounds = 4 * L2Config().hello_multiplier
    with pair("stopped") as (site, owner, other):
        (helper,) = helpers(other.process.pid)
        for _ in range(3):
            os.kill(helper, signal.SIGSTOP)
            await_requests(site, owner, other, rounds)
            os.kill(helper, signal.SIGCONT)
            await_requests(site, other, owner, rounds)
            assert other.owned() == set()
        assert other.members() == {owner.host: "ready"}
        assert other.state()["moves"] == 0


def await_requests(site: Site, asker: Announcer, asked: Announcer, count: int) -> None:
    """Wait until one host has sent this number of further hello requests to another one."""
    answers = group_of("cluster", "gateway")
    source = bytes.fromhex(site.mac(asker.host).replace(":", ""))
    head = source + ETHERTYPE.to_bytes(2)
    with receiver(site, asked.host) as frames:
        while count:
            frame = frames.recv(2000)
            count -= frame[6:14] == head and parse_hello(frame, answers) is None


def test_a_jump_of_the_wall_clock_moves_nothing(tmp_path: Path) -> None:
    """The clock of the processes of both hosts jumps. The program in the kernel uses the monotonic
    clock, which does not."""
    clock = Clock(tmp_path / "clock")
    rounds = 4 * L2Config().hello_multiplier
    with pair("clock", under=clock.command) as (site, owner, other):
        for each in (owner, other):
            (helper,) = helpers(each.process.pid)
            assert "libfaketime" in Path(f"/proc/{helper}/maps").read_text()
        steady = [Steady(site, address) for address in VIP.values()]
        for off in JUMPS:
            clock.jump(off)
            shown = datetime.fromisoformat(owner.ask(clock=1))
            assert abs(shown - datetime.now(UTC) - off) < timedelta(hours=1), "it did not jump"
            await_requests(site, owner, other, rounds)
            await_requests(site, other, owner, rounds)
        assert owner.owned() == BOTH
        assert other.owned() == set()
        assert other.members() == {owner.host: "ready"}
        assert other.state()["moves"] == owner.state()["moves"] == 0
        for caller in steady:
            assert caller.end() == 0
            assert caller.last() == owner.host
