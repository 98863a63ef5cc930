"""The routes that a host announces, holds back and restores."""

from tests.drivers.bgp.site import API, VIP, WEB, intent, peer

from fairlead.drivers.bgp import render, spec
from fairlead.drivers.bgp.desired import RESTORE_S, Desired
from fairlead.drivers.bgp.spec import SetRoutes
from fairlead.model import ServiceKey

ROUTE, API_ROUTE = f"{VIP}/32", "203.0.113.9/32"
NOW = "2026-01-01T00:00:00Z"


def test_a_service_that_is_not_applied_again_is_restored_after_a_while() -> None:
    desired = adopted(with_both().text(64513, []))
    desired.hold_back()
    assert not desired.routes()
    desired.release(100.0)
    desired.apply([set_routes(WEB, VIP)], 100.1, NOW)
    assert desired.routes().keys() == {ROUTE}
    assert not desired.restore(100 + RESTORE_S - 0.1)
    assert desired.restore(100 + RESTORE_S)
    assert desired.routes().keys() == {ROUTE, API_ROUTE}
    assert not desired.restore(200.0)


def test_a_process_that_starts_after_the_release_announces_everything() -> None:
    desired = with_both()
    desired.hold_back()
    assert adopted(desired.text(64513, [])).held_back
    desired.release(100.0)
    after = adopted(desired.text(64513, []))
    assert not after.held_back
    assert after.routes().keys() == {ROUTE, API_ROUTE}


def test_the_file_that_is_held_back_contains_the_routes_as_they_were() -> None:
    desired = with_both()
    peers = [peer(), peer("tor2", "192.0.2.2", next_hops=("192.0.2.0/24",))]
    text = desired.text(64513, peers)
    assert text.count("\n  route ") == 2
    held = render.hold_back(text)
    assert "\n  route " not in held
    assert render.hold_back(held) == held
    assert render.release(held) == render.release(text) == text
    desired.hold_back()
    assert desired.text(64513, peers) == held


def with_both() -> Desired:
    desired = Desired()
    desired.apply([set_routes(WEB, VIP), set_routes(API, "203.0.113.9")], 0.0, NOW)
    return desired


def set_routes(key: ServiceKey, address: str) -> SetRoutes:
    return SetRoutes(key, spec.specs_of({key: intent(address, weight=2)})[key].contributions)


def adopted(text: str) -> Desired:
    desired = Desired()
    desired.adopt(text, 0.0)
    return desired
