"""An object that was just written counts until the watch shows it, in whatever order answers and
events arrive."""

import pytest

from fairlead.drivers.grant_cache import GrantCache
from fairlead.drivers.mutation_cache import MutationCache, ServiceCache
from fairlead.kube.crds import AddressGrant, AddressGrantSpec, Holder
from fairlead.kube.objects import ObjectKey, ObjectMeta, Service, ServiceMeta
from fairlead.model import ServiceKey
from fairlead.state import State

KEY = ServiceKey("default", "web")
NAME = "203.0.113.1"


def service(version: str, uid: str = "u-1") -> Service:
    return Service(ServiceMeta("web", "default", uid, version))


def grant(version: str, *holders: str, uid: str = "g-1") -> AddressGrant:
    spec = AddressGrantSpec(
        NAME, holders=tuple(Holder("default", name, "u-1", ("TCP/80",)) for name in holders)
    )
    return AddressGrant(ObjectMeta(NAME, uid=uid, resource_version=version), spec)


def test_the_newer_version_counts_and_the_older_one_is_forgotten() -> None:
    newest = MutationCache[ServiceKey, Service]()
    newest.note(KEY, service("10"))
    newest.note(KEY, service("9"))
    assert newest.of(KEY, service("8")) == service("10")
    assert newest.of(KEY, service("10", "watched")) == service("10", "watched")
    assert not newest.answered


def test_versions_are_compared_as_numbers_and_invalid_ones_raise_nothing() -> None:
    newest = MutationCache[ServiceKey, Service]()
    for strange in ("", "²", "-1", "v7", "0x10"):
        newest.note(KEY, service(strange))
        assert newest.of(KEY, service("1")) == service("1")
        newest.note(KEY, service("10"))
        assert newest.of(KEY, service(strange)) == service("10")
        assert newest.of(KEY, service("9")) == service("10")
        newest.forget_all()


def test_a_service_that_the_watch_no_longer_shows_is_deleted() -> None:
    state = State(())
    newest = ServiceCache(state)
    newest.note(service("10"))
    assert newest.of([KEY]) == {}
    state.update_services({ObjectKey(*KEY): service("11", "u-2")})
    assert newest.of([KEY]) == {KEY: service("11", "u-2")}


@pytest.mark.parametrize("shown", [None, "3"])
def test_a_grant_counts_before_the_watch_shows_it(shown: str | None) -> None:
    state = State(())
    newest = GrantCache(state)
    if shown is not None:
        state.update_grants({ObjectKey("", NAME): grant(shown)})
    newest.note(grant("5", "web"))
    assert newest.named(NAME) == grant("5", "web")
    assert newest.of(KEY) == (grant("5", "web"),)
    assert newest.holders() == {KEY}


def test_answers_that_arrive_late_do_not_count() -> None:
    """Two passes write the grant of a shared address, one after the other. The answer to the first
    write arrives last."""
    newest = GrantCache(State(()))
    newest.note(grant("6", "web", "api"))
    newest.note(grant("5", "web"))
    assert newest.named(NAME) == grant("6", "web", "api")
    assert newest.holders() == {KEY, ServiceKey("default", "api")}


def test_a_grant_that_the_watch_shows_in_a_newer_version_is_not_cached() -> None:
    state = State(())
    newest = GrantCache(state)
    newest.note(grant("5", "web"))
    state.update_grants({ObjectKey("", NAME): grant("6")})
    assert newest.of(KEY) == ()
    assert newest.holders() == set()


def test_a_deleted_grant_is_absent_until_the_watch_shows_another() -> None:
    state = State(())
    newest = GrantCache(state)
    state.update_grants({ObjectKey("", NAME): grant("5", "web")})
    newest.note_deletion(grant("5", "web"))
    assert newest.named(NAME) is None
    assert newest.of(KEY) == ()
    newest.note(grant("8", "web", uid="g-2"))
    assert newest.named(NAME) == grant("8", "web", uid="g-2"), "the watch still shows the old one"
    state.update_grants({ObjectKey("", NAME): grant("9", uid="g-3")})
    assert newest.named(NAME) == grant("9", uid="g-3")
