"""What a gateway announces, from the announcements of all Services."""

from collections.abc import Mapping

import msgspec

from fairlead.drivers.announce.spec import Change, Held, Spec, by_address, carried_out, diff, render
from fairlead.drivers.announce.spec import held as held_of
from fairlead.model import Announcement, LoadBalancer, ServiceKey

WEB, SHOP = ServiceKey("default", "web"), ServiceKey("default", "shop")
MINE, OTHERS = (
    Announcement("192.0.2.224", "gw1", "eth0"),
    Announcement("192.0.2.225", "gw2", "eth0"),
)


def balancer(*announcements: Announcement) -> LoadBalancer:
    return LoadBalancer(WEB, "uid", "fairlead.io/direct", (), (), announcements=announcements)


def held(known: Mapping[ServiceKey, Spec], gateway: str) -> Held:
    return held_of(by_address(known), gateway)


def test_services_without_announcements_are_left_out() -> None:
    assert render({WEB: balancer(MINE), SHOP: balancer()}) == {WEB: (MINE,)}


def test_changes_lead_from_the_present_to_the_desired_announcements() -> None:
    present, wanted = {WEB: (MINE,)}, {WEB: (OTHERS,), SHOP: (MINE,)}
    changes = diff(wanted, present)
    assert carried_out(present, changes) == wanted
    assert diff(wanted, wanted) == []
    assert carried_out(wanted, diff({}, wanted)) == {}
    assert [str(each) for each in changes] == [
        "announce 192.0.2.225 at gateway gw2 on eth0, withdraw 192.0.2.224 for default/web",
        "announce 192.0.2.224 at gateway gw1 on eth0 for default/shop",
    ]


def test_another_heir_is_no_other_owner() -> None:
    (change,) = diff({WEB: (msgspec.structs.replace(MINE, heir="gw3"),)}, {WEB: (MINE,)})
    assert str(change) == "change the heir of 192.0.2.224 to gw3 for default/web"


def test_an_address_is_held_until_its_last_service_is_removed() -> None:
    both = {WEB: (MINE, OTHERS), SHOP: (MINE,)}
    assert held(both, "gw1") == ({MINE.address: "eth0"}, {OTHERS.address: OTHERS})
    assert held(both, "gw2") == ({OTHERS.address: "eth0"}, {MINE.address: MINE})
    left = carried_out(both, [Change(WEB, (), both[WEB])])
    assert held(left, "gw1") == ({MINE.address: "eth0"}, {})
    assert held(carried_out(left, [Change(SHOP, (), left[SHOP])]), "gw1") == ({}, {})
